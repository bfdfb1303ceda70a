"""Measure training steps on this machine: experts fixed, homes moved, homes moved with a replica slot, and the ideal.

The model is MoE layers and nothing else, so experts dominate the step; its router is a table, so the skew is what it is
said to be. All variants train in one run and take turns in blocks of steps, so that drift of the machine cancels out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...balancer.balancer import Balancer
from ...config import BalancerConfig, MigrationConfig
from ...events import LoadMeasured, RebalanceCommitted
from ...hosts import attach
from ...observe.profiling import Profiler
from ..assess import Given, assess, recorded
from ..formats.loads import read_load


@dataclass(frozen=True)
class Workload:
    """The model, its batches and how long it trains.

    Args:
        layers, experts, hidden, width, top_k: of the model; ``experts`` is a multiple of twice the ranks.
        tokens: of each rank's batch, a multiple of ``experts``.
        skew: share of an expert's load to that of the one before it, so 1 is balanced.
        interval: steps between decisions, and of a block.
        settle_blocks: of each variant before timing, in which experts find their places.
        blocks: timed, of each variant.
    """

    layers: int = 2
    experts: int = 8
    hidden: int = 256
    width: int = 1024
    top_k: int = 2
    tokens: int = 1024
    skew: float = 0.6
    interval: int = 10
    settle_blocks: int = 4
    blocks: int = 8


class MoEStack(nn.Module):
    """Residual MoE layers of the Transformers library's experts; who gets which token is given.

    Args:
        implementation: a name of the library's, of how experts compute.
    """

    def __init__(self, work: Workload, implementation: str = "grouped_mm") -> None:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        super().__init__()
        config = MixtralConfig(
            hidden_size=work.hidden, intermediate_size=work.width, num_local_experts=work.experts, hidden_act="silu"
        )
        config._experts_implementation = implementation
        self.layers = nn.ModuleList(MixtralExperts(config) for _ in range(work.layers))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, hidden_TD: Tensor, topk_ids_LTK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        for layer, ids_TK in zip(self.layers, topk_ids_LTK, strict=True):
            hidden_TD = hidden_TD + layer(hidden_TD, ids_TK, topk_weights_TK)
        return hidden_TD.square().mean()


class _TrainVariant:
    """One model in training with its balancer, and the seconds of its blocks."""

    def __init__(self, name: str, work: Workload, skew: float, config: BalancerConfig) -> None:
        torch.manual_seed(0)
        self.name = name
        self.work = work
        self._skew = skew
        self._model = MoEStack(work)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self.balancer: Balancer = attach(self._model, self._optimizer, config=config)
        self._model.train()
        self._step = 0
        self._weights_TK = torch.full((work.tokens, work.top_k), 1 / work.top_k)
        self.block_seconds: list[float] = []

    def steps(self, count: int, after_step: Callable[[], None] = lambda: None) -> float:
        """Seconds that this rank took; batches are made before the clock starts."""
        batches = [self._batch(self._step + index) for index in range(count)]
        self._step += count
        dist.barrier()
        began = time.perf_counter()
        for hidden_TD, ids_LTK in batches:
            self._model(hidden_TD, ids_LTK, self._weights_TK).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            after_step()
        dist.barrier()
        return time.perf_counter() - began

    def profiled(self, folder: Path) -> None:
        """Train a block more, and write what each rank did."""
        with Profiler(folder, self.work.interval - 1, skip=0) as profiler:
            self.steps(self.work.interval, profiler.step)

    def block(self) -> None:
        self.block_seconds.append(self.steps(self.work.interval))

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        work = self.work
        generator = torch.Generator().manual_seed(step * 1009 + dist.get_rank())
        hidden_TD = torch.randn(work.tokens, work.hidden, generator=generator)
        ids = [choices(work, self._skew, generator) for _ in range(work.layers)]
        return hidden_TD, torch.stack(ids)


def choices(work: Workload, skew: float, generator: torch.Generator) -> Tensor:
    """int64 ``[T, K]``: expert ids of a batch, different ones for each token.

    Skewed ones are drawn by shares ``skew ** expert``; balanced ones give every expert the same number of tokens.
    """
    if skew < 1:
        shares = skew ** torch.arange(work.experts, dtype=torch.float64)
        return torch.multinomial(shares.expand(work.tokens, -1), work.top_k, generator=generator)
    first = torch.arange(work.tokens) % work.experts
    first = first[torch.randperm(work.tokens, generator=generator)]
    apart = work.experts // work.top_k
    return (first[:, None] + apart * torch.arange(work.top_k)) % work.experts


def run(
    device: torch.device,
    blocks: int = 8,
    work: Workload | None = None,
    *,
    width: int = Workload.width,
    profile: Path | None = None,
    on_progress: Callable[[str], None] = lambda said: None,
) -> dict[str, Any]:
    """Train the variants on the ranks of the process group, one thread each. Collective.

    Args:
        device: of this rank; the CPU.
        blocks: of ten steps, timed, of each variant.
        work: None: the usual one, of ``blocks`` and ``width``.
        profile: folder for traces of a block of each variant, after those that are timed: ``static/rank0.json.gz`` and
            so on.
        on_progress: told what is trained next.

    Returns:
        JSON-able. ``"train"``: a row for each variant of skewed load (``static``, ``homes``, ``replicas``) and for
        ``even``, the same model with fixed experts and as many tokens for each. ``step_ms``; ``imbalance`` (max / mean
        rank load by the placement and split used, in the timed steps); ``guard_ms`` (of a step's training thread, spent
        in the guard, averaged over all steps but the first three); ``homes_moved`` and ``copies`` (that stand at
        the end); steps in the time of a static one: ``over_static``, and in that of one with even load:
        ``of_even_throughput``; of what static loses against even load, measured: ``share_of_even_gain``; against its
        own step x mean / max: ``share_of_ideal_gain`` (supposes that a step is nothing but the busiest rank's load).
        ``"ideal_step_ms"``, ``"static_imbalance"``. ``"overhead"``: ``static_step_ms`` (``even``'s),
        ``attached_step_ms`` (even load, and a balancer that decides every interval), ``overhead``, ``homes_moved``.
        ``"assess"``: a row for homes and one for replicas of what `tools.assess` says from the record of the static
        variant, which has no other figures: ``predicted_step_ms`` beside ``step_ms``, and ``difference`` of the two.
        Times are medians over blocks; shares and overhead are medians over blocks that stood side by side.
    """
    work = work or Workload(blocks=blocks, width=width)
    if device.type != "cpu":
        raise ValueError("bench train measures on CPUs")
    torch.set_num_threads(1)
    record = TemporaryDirectory(prefix="eplb-bench-")  # the first rank writes into its own
    variants = [
        *_pair(work, {"run": record.name, "moe_share": None}),
        _TrainVariant("replicas", work, work.skew, _config(work, policy="incremental", replica_slots=1)),
        _TrainVariant("even", work, 1.0, BalancerConfig(policy="static", interval=None)),
        _TrainVariant("attached", work, 1.0, _config(work, policy="incremental")),
    ]
    _alternate(variants, on_progress)
    static, _, _, even, attached = (_over_ranks(variant.block_seconds) for variant in variants)
    imbalance = _imbalance(variants[0])
    ideal = [block / imbalance for block in static]
    result: dict[str, Any] = {
        "ranks": dist.get_world_size(),
        "train": [_row(variant, static, even, ideal) for variant in variants[:-1]],
        "ideal_step_ms": _step_ms(ideal, work),
        "static_imbalance": imbalance,
        "overhead": [
            {
                "static_step_ms": _step_ms(even, work),
                "attached_step_ms": _step_ms(attached, work),
                "guard_ms": _guard_ms(variants[-1]),
                "overhead": _median([b / a - 1 for a, b in zip(even, attached, strict=True)]),
                "homes_moved": _moved(variants[-1]),
            }
        ],
    }
    for variant in variants:
        if profile is not None:
            variant.profiled(profile / variant.name)
        variant.balancer.close()
    result["assess"] = _assessed(Path(record.name), result["train"], work)
    record.cleanup()
    return result


def run_brief(
    device: torch.device,
    blocks: int = 3,
    work: Workload | None = None,
    *,
    width: int = Workload.width,
    on_progress: Callable[[str], None] = lambda said: None,
) -> dict[str, Any]:
    """Train experts fixed and homes moved alone, and say how much faster a step has become. Collective.

    Args:
        device, on_progress: as of `run`.
        blocks: of ten steps, timed, of each variant.
        work: None: the usual one, of ``blocks`` and ``width``.

    Returns:
        JSON-able: ``ranks``; ``"train"``, a row for ``static`` and ``homes`` with ``step_ms``, ``imbalance`` and
        ``homes_moved`` as in `run`, and ``slowest_over_fastest`` of its blocks, near 1 where nobody else computes;
        ``speed_up``, steps in the time of a static one, the median over blocks that stood side by side.
    """
    work = work or Workload(blocks=blocks, width=width, settle_blocks=3)
    if device.type != "cpu":
        raise ValueError("bench train measures on CPUs")
    torch.set_num_threads(1)
    variants = _pair(work)
    _alternate(variants, on_progress)
    static, homes = (_over_ranks(variant.block_seconds) for variant in variants)
    result = {
        "ranks": dist.get_world_size(),
        "train": [
            {
                "variant": variant.name,
                "step_ms": _step_ms(seconds, work),
                "slowest_over_fastest": max(seconds) / min(seconds),
                "imbalance": _imbalance(variant),
                "homes_moved": _moved(variant),
            }
            for variant, seconds in zip(variants, (static, homes), strict=True)
        ],
        "speed_up": _median([a / b for a, b in zip(static, homes, strict=True)]),
    }
    for variant in variants:
        variant.balancer.close()
    return result


def _pair(work: Workload, recorded_by: Mapping[str, Any] | None = None) -> list[_TrainVariant]:
    return [
        _TrainVariant("static", work, work.skew, _config(work, policy="static", **(recorded_by or {}))),
        _TrainVariant("homes", work, work.skew, _config(work, policy="incremental")),
    ]


def _assessed(folder: Path, train: Sequence[Mapping[str, Any]], work: Workload) -> list[dict[str, Any]]:
    """What `assess` makes of the static variant's record, beside what was measured; empty but on the first rank."""
    if dist.get_rank():
        return []
    found = assess(recorded(folder, read_load(folder)), Given(every=work.interval, replica_slots=1))
    step_ms = {row["variant"]: row["step_ms"] for row in train}
    rows = []
    for name, way in (("homes", found.homes), ("replicas", found.replicas)):
        if way is not None and found.shares is not None:
            predicted = step_ms["static"] * (1 - way.step_saved)
            rows.append(
                {
                    "variant": name,
                    "expert_share": found.shares[0],
                    "imbalance": way.imbalance,
                    "predicted_step_ms": predicted,
                    "step_ms": step_ms[name],
                    "difference": predicted / step_ms[name] - 1,
                }
            )
    return rows


def _row(variant: _TrainVariant, static: list[float], even: list[float], ideal: list[float]) -> dict[str, Any]:
    blocks = _over_ranks(variant.block_seconds)
    return {
        "variant": variant.name,
        "step_ms": _step_ms(blocks, variant.work),
        "imbalance": _imbalance(variant),
        "guard_ms": _guard_ms(variant),
        "over_static": _median([before / now for before, now in zip(static, blocks, strict=True)]),
        "of_even_throughput": _median([best / now for best, now in zip(even, blocks, strict=True)]),
        "share_of_even_gain": _share(static, blocks, even),
        "share_of_ideal_gain": _share(static, blocks, ideal),
        "homes_moved": _moved(variant),
        "copies": int((variant.balancer.placement.copy_count - 1).sum()),
    }


def _share(static: list[float], blocks: list[float], best: list[float]) -> float:
    """Of the time between ``static`` and ``best``, how much is won."""
    return _median([(s - b) / (s - i) if s > i else 0.0 for s, b, i in zip(static, blocks, best, strict=True)])


def _config(work: Workload, **options: Any) -> BalancerConfig:
    migration = MigrationConfig(moe_share=1.0)
    return BalancerConfig(interval=work.interval, window=2 * work.interval, migration=migration, **options)


def _alternate(variants: Sequence[_TrainVariant], on_progress: Callable[[str], None]) -> None:
    work = variants[0].work
    for variant in variants:
        on_progress(f"{variant.name}: experts find their places")
        # Half a block more: decisions fall into the middle of blocks, and with them what they do in the background.
        variant.steps(work.settle_blocks * work.interval + work.interval // 2)
    for block in range(work.blocks):
        on_progress(f"block {block + 1}/{work.blocks} of each variant")
        for variant in variants if block % 2 == 0 else reversed(variants):
            variant.block()


def _imbalance(variant: _TrainVariant) -> float:
    """Mean over layers and steps of the timed part, as far as decisions have measured it."""
    measured = [e for e in variant.balancer.events if isinstance(e, LoadMeasured)][-variant.work.blocks :]
    values = [value for event in measured for row in event.imbalance for value in row]
    return sum(values) / len(values) if values else 1.0


def _moved(variant: _TrainVariant) -> int:
    return sum(e.moved_experts for e in variant.balancer.events if isinstance(e, RebalanceCommitted))


def _guard_ms(variant: _TrainVariant) -> float:
    """Of the slowest rank, a step, without the first ones."""
    guard = variant.balancer._guard
    return _over_ranks([guard.seconds / max(1, guard.clocked_steps) * 1e3])[0]


def _over_ranks(seconds: Sequence[float]) -> list[float]:
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [float(value) for value in slowest]


def _median(values: Sequence[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(0.5))


def _step_ms(block_seconds: Sequence[float], work: Workload) -> float:
    return _median(block_seconds) / work.interval * 1e3
