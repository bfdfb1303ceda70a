"""Shows torchtitan's Trainer move experts: torchrun --nproc-per-node 4 launch/examples/torchtitan_moe.py [--static]

Some tokens come often, so some experts get many. With --static nothing moves: the losses are the same to the bit. The
model is torchtitan's own small one (--family qwen3, deepseek_v3 or gpt_oss); experts are spread over --ep ranks, and
torchtitan's FSDP divides them over the ranks that are left.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    from torchtitan_on_cpu import on_cpu

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

import eplb_runtime as eplb
from eplb_runtime.hosts.torchtitan import balance

DEBUG_MODELS = {"qwen3": "qwen3_moe_debug", "deepseek_v3": "deepseek_v3_debugmodel", "gpt_oss": "gpt_oss_debugmodel"}
VOCABULARY = 64


class NoTokenizer(BaseTokenizer):
    """The texts are numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, *text: Any, **options: Any) -> list[int]:
        return []

    def decode(self, *tokens: Any, **options: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Texts(BaseDataLoader):
    """Random, other ones for each rank; small numbers come often."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True  # torchtitan's validator sets it

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **options: Any) -> None:
        self._rank, self._shape, self._batch = dp_rank, (local_batch_size, seq_len + 1), 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self._batch + self._rank)
            self._batch += 1
            tokens = (VOCABULARY * torch.rand(self._shape, generator=generator) ** 3).long()
            positions = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1).contiguous()
            yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self._batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batch = state["batch"]


def training(family: str, ep: int, steps: int, output: Path) -> Trainer.Config:
    """A config as torchtitan's own ``config_registry`` has it, of a model made smaller still."""
    registry = importlib.import_module(f"torchtitan.models.{family}.config_registry")
    config: Trainer.Config = getattr(registry, DEBUG_MODELS[family])()
    model = config.model_spec.model
    model.layers = model.layers[:3]
    for layer in model.layers:
        if getattr(layer, "moe", None) is not None:
            _make_small(layer.moe, num_experts=16, top_k=2, hidden_dim=64)
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Texts.Config()
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 64, steps
    config.training.max_norm = 0.3
    config.parallelism.expert_parallel_degree = ep
    config.checkpoint.interval = max(1, steps // 2)
    config.checkpoint.last_save_model_only = False
    config.debug.seed = 1
    config.dump_folder = str(output)
    if not torch.cuda.is_available():
        on_cpu(config)
    return config


def _make_small(moe: Any, num_experts: int, top_k: int, hidden_dim: int) -> None:
    routed, router = moe.routed_experts, moe.router
    for part in (moe, router, routed.inner_experts, routed.token_dispatcher):
        part.num_experts = num_experts
    router.gate.out_features = num_experts
    router.top_k = routed.token_dispatcher.top_k = top_k
    routed.inner_experts.hidden_dim = hidden_dim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=DEBUG_MODELS, default="qwen3")
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--static", action="store_true", help="measure, and move nothing")
    parser.add_argument("--checkpoint", action="store_true", help="save, and go on from what is there")
    parser.add_argument("--output", type=Path, default=Path(gettempdir()) / "eplb_runtime_torchtitan")
    chosen = parser.parse_args()
    init_logger()
    config = training(chosen.family, chosen.ep, chosen.steps, chosen.output)
    config.checkpoint.enable = chosen.checkpoint

    policy = "static" if chosen.static else "incremental"
    balance(config, eplb.BalancerConfig(policy=policy, interval=5, gate="always"))

    trainer = config.build()
    losses: list[float] = []
    log = trainer.metrics_processor.log
    trainer.metrics_processor.log = lambda step, loss, *rest, **more: (
        losses.append(loss),
        log(step, loss, *rest, **more),
    )
    trainer.train()
    balancer = trainer.model_parts[0]._eplb_runtime_balancer
    moved = sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts"))
    print(f"rank {dist.get_rank()}: loss {losses[-1]:.17g} after {trainer.step} steps, {moved} experts moved")
    balancer.close()
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
