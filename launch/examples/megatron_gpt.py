"""Shows Megatron-Core's GPT move experts: torchrun --nproc-per-node 2 launch/examples/megatron_gpt.py [--static]

Its DistributedDataParallel and distributed optimizer stay; `megatron_on_cpu.py` has what a CPU takes. With --static
nothing moves: the losses are the same to the bit.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterable
from typing import Any

import megatron_on_cpu
import torch
import torch.distributed as dist

import eplb_runtime as eplb

megatron_on_cpu.prepare()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

EXPERTS, LAYERS, HIDDEN, VOCABULARY, LENGTH = 8, 2, 64, 64, 16


def model_of(*, bf16: bool = True, spec: Any = None, **options: Any) -> torch.nn.Module:
    """Each rank makes its own experts, as Megatron does it.

    Args:
        spec: of the layers; None: those without TransformerEngine.
        options: of Megatron's TransformerConfig.
    """
    settings: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "ffn_hidden_size": HIDDEN,
        "moe_ffn_hidden_size": HIDDEN,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "params_dtype": torch.bfloat16 if bf16 else torch.float32,
        "bf16": bf16,
        **options,
    }
    config = TransformerConfig(**settings)
    torch.manual_seed(0)
    layers = spec or get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False, normalization="LayerNorm")
    model = GPTModel(config, layers, vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    torch.manual_seed(1 + parallel_state.get_expert_model_parallel_rank())  # on CUDA Megatron draws them so itself
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return Float16Module(config, model) if bf16 else model


def wrapped(model: torch.nn.Module, *, distributed: bool = True, overlap: bool = False) -> tuple[Any, Any]:
    """The model as Megatron's training loop has it, and the optimizer; only then attach."""
    config = model.config
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=distributed, overlap_param_gather=overlap)
    ddp_config.overlap_grad_reduce = overlap
    ddp = DistributedDataParallel(config, ddp_config, model)
    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        clip_grad=1.0,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=distributed,
        overlap_param_gather=overlap,
    )
    return ddp, get_megatron_optimizer(options, [ddp])


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    """Of this rank's batch, in which small numbers come often."""
    generator, device = torch.Generator().manual_seed(step * 1009 + dist.get_rank()), next(model.parameters()).device
    ids = (VOCABULARY * torch.rand(2, LENGTH, generator=generator) ** 3).long().to(device)
    positions = torch.arange(LENGTH, device=device).expand_as(ids)
    causal = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)
    return model(input_ids=ids, position_ids=positions, attention_mask=causal, labels=ids).float().mean()


def train(model: Any, optimizer: Any, steps: Iterable[int]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    seen = []
    for step in steps:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        finalize_model_grads([model])
        _, norm, _ = optimizer.step()
        seen.append((loss.item(), norm))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--static", action="store_true", help="measure, and move nothing")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("eplb_runtime").setLevel(logging.INFO)
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    bare = model_of()
    model, optimizer = wrapped(bare.cuda() if torch.cuda.is_available() else bare)
    policy = "static" if arguments.static else "incremental"
    balancer = eplb.attach([model], optimizer, config=eplb.BalancerConfig(policy=policy, interval=5, gate="always"))
    seen = train(model, optimizer, range(arguments.steps))
    moved = sum(event.moved_experts for event in balancer.events if type(event).__name__ == "RebalanceCommitted")
    print(f"rank {dist.get_rank()}: loss {seen[-1][0]:.17g} after {len(seen)} steps, {moved} experts moved")
    balancer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
