"""A loop of your own with a Transformers model: torchrun --nproc-per-node 2 launch/examples/transformers_loop.py"""

import logging

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import eplb_runtime as eplb

logging.basicConfig(level=logging.INFO, format="%(message)s")
dist.init_process_group("gloo")  # on GPUs: "cpu:gloo,cuda:nccl"

torch.manual_seed(0)  # the same model on every rank; as a rule AutoModelForCausalLM.from_pretrained(...)
sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
tokens = {"num_experts": 16, "num_experts_per_tok": 2, "vocab_size": 512, "eos_token_id": 0}
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("olmoe", **sizes, **tokens))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
config = eplb.BalancerConfig(interval=5, dense_gradients="allreduce")
balancer = eplb.attach(model, optimizer, config=config)

model.train()  # from_pretrained leaves it in evaluation mode: no token is counted
torch.manual_seed(dist.get_rank())  # each rank has batches of its own
zipf = 1 / torch.arange(1, 513)  # token frequencies of text
for _ in range(60):
    ids = torch.multinomial(zipf, 8 * 64, replacement=True).view(8, 64)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    balancer.clip_grad_norm_(1.0)  # instead of torch's: the norm over all ranks' experts
    optimizer.step()  # hooks: gradients are reduced before the step, experts migrate after it
    optimizer.zero_grad()

print(f"rank {dist.get_rank()}: loss {loss.item():.6f}")
balancer.close()  # before destroy_process_group
dist.destroy_process_group()
