"""Migration during training: the cost of every expert's change of ranks, between two steps and during them."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eplb_runtime.config import BalancerConfig
from eplb_runtime.events import RebalanceAborted, RebalanceCommitted, RebalancePlanned
from eplb_runtime.hosts import attach
from eplb_runtime.tools.bench import slowest
from eplb_runtime.tools.bench.train import MoEStack, Workload, choices
from tests.support.shuffle import plan_by, plan_shuffle, wait_until_compiled

from .harness import command

INTERVAL = 16
"""Steps of a block; in each, every expert moves once."""
WORK = Workload(layers=8, experts=8, hidden=256, width=512, tokens=256)
ELSEWHERE_SECONDS = 0.015
"""Of a layer's forward on a device, as it were."""


class _Elsewhere(torch.autograd.Function):
    """Computing that is done on a device, as the processor sees it: the thread waits, twice in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class _Stack(nn.Module):
    """As much dense computing ahead of each MoE layer as attention would be, and the layer.

    Args:
        elsewhere: seconds of each layer's forward that are computed on a device, as it were.
    """

    def __init__(self, work: Workload, elsewhere: float) -> None:
        super().__init__()
        self._elsewhere = elsewhere
        self.experts = MoEStack(work).layers
        self.dense = nn.ModuleList(nn.Linear(work.hidden, work.hidden, bias=False) for _ in range(4 * work.layers))

    def forward(self, hidden_TD: Tensor, topk_ids_LTK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        for layer, (experts, ids_TK) in enumerate(zip(self.experts, topk_ids_LTK, strict=True)):
            for dense in self.dense[4 * layer : 4 * layer + 4]:
                hidden_TD = hidden_TD + dense(hidden_TD)
            if self._elsewhere:
                hidden_TD = _Elsewhere.apply(hidden_TD, self._elsewhere)
            hidden_TD = nn.functional.rms_norm(hidden_TD, hidden_TD.shape[-1:])
            hidden_TD = hidden_TD + experts(hidden_TD, ids_TK, topk_weights_TK)
        return hidden_TD.square().mean()


class _OverlapVariant:
    def __init__(self, name: str, elsewhere: float, **options: Any) -> None:
        torch.manual_seed(0)
        self.name = name
        self._model = _Stack(WORK, elsewhere)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        config = BalancerConfig(interval=INTERVAL, window=INTERVAL, dense_gradients="allreduce", **options)
        self.balancer = attach(self._model, self._optimizer, config=config)
        wait_until_compiled(self.balancer)
        plan_by(self.balancer, plan_shuffle)
        self._model.train()
        self._step = 0
        self._weights_TK = torch.full((WORK.tokens, WORK.top_k), 1 / WORK.top_k)
        self.block_seconds: list[float] = []

    def warm_up(self) -> None:
        """One migration that does not count: of memory that nobody has touched, at a pace that nobody knows yet. Half a
        block more: decisions fall into the middle of blocks."""
        self.steps(INTERVAL + INTERVAL // 2)
        self._warm_events = len(list(self.balancer.events))
        self._warm_late_bytes = self.balancer.rebalancer.overlapped.late_bytes

    def steps(self, count: int) -> float:
        """Seconds that this rank took; batches are made before the clock starts."""
        batches = [self._batch(self._step + index) for index in range(count)]
        self._step += count
        dist.barrier()
        began = time.perf_counter()
        for hidden_TD, ids_LTK in batches:
            self._model(hidden_TD, ids_LTK, self._weights_TK).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        dist.barrier()
        return time.perf_counter() - began

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step * 1009 + dist.get_rank())
        ids = [choices(WORK, 1.0, generator) for _ in range(WORK.layers)]
        return torch.randn(WORK.tokens, WORK.hidden, generator=generator), torch.stack(ids)

    def row(self, still: list[float], pause: float | None) -> dict[str, Any]:
        """Of a migration on average, on the slowest rank.

        Args:
            still: seconds of the blocks in which nothing moves.
            pause: seconds that training stands still for a migration between steps; None: this is that.
        """
        counted = list(self.balancer.events)[self._warm_events :]
        committed = [e for e in counted if isinstance(e, RebalanceCommitted)]
        planned = [e for e in counted if isinstance(e, RebalancePlanned) and e.moves]
        aborted = self.balancer.events.of_type(RebalanceAborted)
        if aborted or not planned:
            raise RuntimeError(f"a migration was dropped: {aborted}")
        mine = [sum(e.pause_seconds for e in committed), sum(e.received_bytes for e in committed)]
        late = self.balancer.rebalancer.overlapped.late_bytes - self._warm_late_bytes
        pauses, received, late_bytes, *blocks = slowest([*mine, float(late), *self.block_seconds]).tolist()
        pauses /= len(planned)
        extra = [block - other for block, other in zip(blocks, still, strict=True)]
        return {
            "migration": self.name,
            "pause_ms": pauses * 1e3,
            "share_of_pause": 1.0 if pause is None else pauses / pause,
            "extra_ms": median(extra) * 1e3,
            "step_ms": median(still) / INTERVAL * 1e3,
            "steps": len(committed) / len(planned),
            "received_mib": received / len(planned) / 2**20,
            "late_mib": late_bytes / len(planned) / 2**20,
        }


def run(
    device: torch.device, repeats: int = 6, *, on_progress: Callable[[str], None] = lambda said: None
) -> dict[str, Any]:
    """Every expert of 8 layers changes its rank in each block of 16 steps, one thread a rank, on the CPU; ``repeats``
    blocks of each variant count. Collective.

    JSON-able. ``"migrations"``: a row for migrations ``between steps`` and ``during steps``, and both again where most
    of a step is waiting for a device, as it were (``"computing": "elsewhere"``; steps are longer then than all that a
    migration carries). Of one migration on average: ``pause_ms`` that training stands still, at the end of steps and
    ahead of layers, and ``share_of_pause``; ``extra_ms`` that a block takes longer than one in which nothing moves (the
    median), which has the processor's share in carrying and hashing; ``step_ms`` of such a block; ``steps`` in which
    experts were committed; ``received_mib`` and, sent again, ``late_mib``."""
    if device.type != "cpu":
        raise ValueError("it measures on CPUs")
    torch.set_num_threads(1)
    rows = _measured("here", 0.0, repeats, on_progress)
    rows += _measured("elsewhere", ELSEWHERE_SECONDS, repeats, on_progress)
    return {"ranks": dist.get_world_size(), "layers": WORK.layers, "migrations": rows}


def _measured(
    computing: str, elsewhere: float, repeats: int, on_progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    still = _OverlapVariant("none", elsewhere, policy="static")
    variants = [_OverlapVariant("between steps", elsewhere), _OverlapVariant("during steps", elsewhere, overlap=True)]
    for variant in (still, *variants):
        on_progress(f"computing {computing}, experts move {variant.name}: warming up")
        variant.warm_up()
    for block in range(repeats):
        on_progress(f"computing {computing}: block {block + 1}/{repeats} of each variant")
        for variant in (still, *variants) if block % 2 == 0 else (*reversed(variants), still):
            variant.block_seconds.append(variant.steps(INTERVAL))
    blocks = slowest(still.block_seconds).tolist()
    between = variants[0].row(blocks, None)
    rows = [between, variants[1].row(blocks, between["pause_ms"] / 1e3)]
    for variant in (still, *variants):
        variant.balancer.close()
    return [{"computing": computing, **row} for row in rows]


if __name__ == "__main__":
    command(run, ranks=2)
