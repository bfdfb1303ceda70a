"""The job behind ``eplb-runtime verify`` without a command: a model from a configuration, random batches, AdamW."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ...config import BalancerConfig, DispatchConfig
from ..launch import process_group, repeat_every_bit
from .report import Report
from .runs import verify


def run(
    family: str = "olmoe",
    model_config: str | Path | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    steps: int = 12,
    replica_slots: int = 0,
    batch: int = 4,
    length: int = 32,
    *,
    on_step: Callable[[], None] = lambda: None,
) -> Report:
    """Verify on the ranks that torchrun started, or on this process alone; arguments as those of the command."""
    from ...hosts.transformers.models import make_model, read_config, small_config

    with process_group(device) as here:
        if here.type == "cuda":
            repeat_every_bit()
        experts = max(8, 4 * dist.get_world_size())
        model = small_config(family, experts) if model_config is None else read_config(model_config)

        def make_batch(step: int) -> dict[str, object]:
            generator = torch.Generator().manual_seed(step * 100_003 + dist.get_rank())
            ids = torch.randint(model.get_text_config().vocab_size, (batch, length), generator=generator).to(here)
            return {"input_ids": ids, "labels": ids, "use_cache": False}

        dispatch = DispatchConfig(split_least_tokens=0) if replica_slots else DispatchConfig()
        return verify(
            lambda: make_model(model, here, getattr(torch, dtype)),
            lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1),
            make_batch,
            steps=steps,
            config=BalancerConfig(replica_slots=replica_slots, dispatch=dispatch),
            on_step=on_step,
        )
