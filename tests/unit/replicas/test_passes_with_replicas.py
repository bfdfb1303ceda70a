"""Replicas that are gathered for each pass: what the backward pass computes again is what the forward computed."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import symmetric_memory_double as double
import torch
from torch import Tensor, nn
from torch.distributed import _symmetric_memory
from torch.nn import functional

from eplb_runtime.moe.dispatch.channels import MicroBatchChannels
from eplb_runtime.moe.experts.compute import SlotCounts
from eplb_runtime.replicas.compute import ReplicaGather, ShardedReplicas
from eplb_runtime.replicas.plan import ReplicaPlan, RowStage
from eplb_runtime.replicas.sync import ReplicaSync


def test_dropout_and_what_a_compute_closes_over_get_the_gradients_of_the_forward() -> None:
    home, closed_over = nn.Parameter(torch.full((1, 8), 2.0)), nn.Parameter(torch.tensor(3.0))
    replicas, rows, weights = torch.full((1, 8), 5.0), torch.rand(6, 8, requires_grad=True), torch.rand(6)
    collected: list[Any] = []
    sync = SimpleNamespace(
        check_homes=lambda layer: None,
        has_copies=lambda layer: True,
        wait=lambda layer: None,
        takes=lambda layer, edges: True,
        collect=lambda layer, gradients, edges: collected.append(gradients),
    )
    bank = SimpleNamespace(homes_per_rank=1, replicas=[replicas], parameters=[home])

    def compute(rows_MD: Tensor, counts_S: SlotCounts, parameters: list[Tensor]) -> Tensor:
        return functional.dropout(rows_MD * parameters[0][0] * closed_over, 0.5)

    layer = ShardedReplicas(
        compute,
        lambda: [home],
        1.0,
        0,
        bank,
        sync,
        gather=ReplicaGather(None, None),
    )
    out = layer(rows, SlotCounts.of([2, 4], torch.device("cpu")), weights.requires_grad_())
    torch.rand(100)  # others draw, too
    out.sum().backward()
    kept = (out.detach() != 0) * 2.0
    assert 0 < kept[2:].count_nonzero() < kept[2:].numel(), "control: it drops some"
    weight = torch.cat([home.detach().expand(2, 8), replicas.expand(4, 8)])
    by_row = weights.detach().unsqueeze(1) * kept
    torch.testing.assert_close(rows.grad, by_row * weight * 3)
    torch.testing.assert_close(closed_over.grad, (by_row * weight * rows.detach()).sum())
    torch.testing.assert_close(collected[0][0], (by_row * rows.detach() * 3)[2:].sum(0, keepdim=True))
    torch.testing.assert_close(home.grad, (by_row * rows.detach() * 3)[:2].sum(0, keepdim=True))
    torch.testing.assert_close(weights.grad, out.detach().sum(1))


# -- Two batches at once wait for the same copies: neither goes on before what is handed on has come


class Rows(RowStage):
    """``posted`` is called when they are posted, ``arrive`` when they are waited for."""

    def __init__(self, posted: Callable[[], None], arrive: Callable[[], None]) -> None:
        self._posted, self._arrive = posted, arrive

    def post(self) -> list[Any]:
        self._posted()
        return [SimpleNamespace(wait=self._arrive)]


def made(*weights: RowStage) -> ReplicaSync:
    """Of one layer without tensors, whose weights travel so."""
    bank: Any = SimpleNamespace(parameters=[])
    carrier: Any = SimpleNamespace(post=lambda stages: [stage.post() for stage in stages])
    channels: Any = MicroBatchChannels(None)  # type: ignore[arg-type]
    sync = ReplicaSync({0: bank}, carrier, 0, 1, 1, 1, channels)
    sync._plans[0] = ReplicaPlan(list(weights))
    return sync


def test_both_of_two_batches_wait_for_copies_that_are_handed_on() -> None:
    seen: list[str] = []
    gone_on = threading.Event()

    def other_waits() -> None:
        sync.wait(0)
        seen.append("the other goes on")
        gone_on.set()

    def arrive() -> None:
        gone_on.wait(0.2)  # in vain, but for one that does not wait for the rows
        seen.append("arrived")

    other = threading.Thread(target=other_waits)
    sync = made(Rows(lambda: None, lambda: None), Rows(other.start, arrive))
    sync.refresh()
    sync.wait(0)
    other.join()
    assert seen == ["arrived", "the other goes on"], "and they are posted once"


# -- The double of torch's symmetric memory goes by the signatures of the torch that is installed


@pytest.mark.parametrize("name", ["empty", "rendezvous", "get_backend", "get_signal_pad_size"])
def test_the_double_has_the_functions_of_torch(name: str) -> None:
    theirs, ours = (inspect.signature(getattr(module, name)).parameters for module in (_symmetric_memory, double))
    assert list(theirs) == list(ours)
    assert [p.kind for p in theirs.values()] == [p.kind for p in ours.values()]


@pytest.mark.parametrize("name", ["get_buffer", "get_remote_tensor", "put_signal", "wait_signal"])
def test_the_double_has_the_methods_of_torchs_handle(name: str) -> None:
    """Those of torch are bound to C++, and their signatures stand in the docstrings."""
    theirs = getattr(torch._C._distributed_c10d._SymmetricMemory, name).__doc__
    parameters = [one.split(":")[0].strip() for one in theirs[theirs.index("(") + 1 : theirs.index(" ->")].split(", ")]
    ours = list(inspect.signature(getattr(double.SymmetricMemory, name)).parameters)
    assert [one for one in parameters if one in ours] == ours, theirs


def test_torch_has_what_else_is_used_of_it() -> None:
    for name in ("_register_process_group", "_resolve_process_group"):
        assert callable(getattr(torch._C._distributed_c10d, name))
    for name in ("rank", "world_size", "signal_pad_size", "buffer_size"):
        assert hasattr(torch._C._distributed_c10d._SymmetricMemory, name)
