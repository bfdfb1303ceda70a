"""Shows TRL's SFTTrainer in Transformers' own expert parallelism move experts.

A small Qwen3-MoE, EP 2 x FSDP 2. With --static experts stay, and the loss is the same to the bit.

torchrun --nproc-per-node 4 launch/examples/transformers_ep.py
"""

import argparse
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig
from transformers.distributed import DistributedConfig
from trl import SFTConfig, SFTTrainer

import eplb_runtime as eplb
from eplb_runtime.hosts.trainer import BalancedTrainerMixin

WORDS, LENGTH, STEPS = 512, 64, 30
SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


class BalancedSFTTrainer(BalancedTrainerMixin, SFTTrainer):
    """Attaches when the optimizer is made, and clips by the norm over all experts; else TRL's."""


def make(folder: str) -> torch.nn.Module:
    """Return a model spread over the ranks; as a rule the folder, or the name on the hub, is a trained one's."""
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        config = Qwen3MoeConfig(vocab_size=WORDS + 2, num_experts=16, num_experts_per_tok=4, **SIZES, **heads)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()
    spread = DistributedConfig(fsdp_size=dist.get_world_size(), ep_size=2, ep_implementation="eplb")
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=spread, dtype=torch.float32)


def texts(count: int) -> Dataset:
    """Tokens with the frequencies of text, whose most frequent ones change."""
    generator, zipf = torch.Generator().manual_seed(1), 1 / torch.arange(1, WORDS + 1)
    drawn = torch.multinomial(zipf, count * LENGTH, replacement=True, generator=generator).view(count, LENGTH)
    topics = 40 * (torch.arange(count) // 64).unsqueeze(1)
    return Dataset.from_dict({"input_ids": ((drawn + topics) % WORDS).tolist()})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--static", action="store_true", help="experts stay")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    names = {**{str(word): word for word in range(WORDS)}, "<pad>": WORDS, "<eos>": WORDS + 1}
    policy = "static" if arguments.static else "incremental"
    words = Tokenizer(models.WordLevel(names, unk_token="<pad>"))
    with TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        trainer = BalancedSFTTrainer(
            model=make(str(Path(shared[0]) / "model")),
            args=SFTConfig(
                str(Path(shared[0]) / "output"),
                max_steps=arguments.steps,
                per_device_train_batch_size=8,
                learning_rate=1e-3,
                logging_steps=10,
                max_grad_norm=1.0,
                max_length=LENGTH,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                disable_tqdm=True,
                seed=7,
            ),
            train_dataset=texts(2048),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
            balancer_config=eplb.BalancerConfig(interval=5, gate="always", policy=policy),
        )
        loss = trainer.train().training_loss
        trainer.save_model()  # on every rank: all experts, in logical order
        if dist.get_rank() == 0:
            moved = sum(getattr(event, "moved_experts", 0) for event in trainer.balancer.events)
            print(f"loss {loss:.17g}, {moved} experts moved; saved {sorted(os.listdir(trainer.args.output_dir))}")
        dist.barrier()
    trainer.end()  # the process group, too


if __name__ == "__main__":
    main()
