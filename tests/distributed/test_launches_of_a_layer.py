"""With kernels a layer takes no more launches than one that does nothing but carry tokens and compute; a call crosses
few files."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_models import batch_of, make_model
from ranks import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import eplb_runtime as eplb
from eplb_runtime.tools.bench.train import MoEStack, Workload

TOTAL = 51
"""As counted with torch 2.13, forward and backward, the experts' own among them (18). A plain layer: 52."""
WORK = Workload(hidden=32, width=64, tokens=48, top_k=4)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.splits = received, sent
        there = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(there, rows, received, sent)
        return there

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Exchange.apply(grad.contiguous(), *ctx.splits), None, None


def plain_layer(hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Expert e on rank ``e // S``; nothing is counted, and nothing moves."""
    ranks, here = dist.get_world_size(), gate_up.shape[0]
    order_N = torch.argsort(ids_TK.reshape(-1), stable=True)
    token_N = order_N // ids_TK.shape[1]
    counts_E = torch.zeros(ranks * here, dtype=torch.int64).scatter_add_(
        0, ids_TK.reshape(-1), torch.ones_like(order_N)
    )
    received_E = torch.empty_like(counts_E)
    dist.all_to_all_single(received_E, counts_E)
    sent, received = torch.stack([counts_E, received_E]).cpu().view(2, ranks, here).sum(dim=2).tolist()
    there = _Exchange.apply(hidden_TD[token_N], sent, received)
    slot_E = torch.arange(here).repeat(ranks)
    by_slot_M = torch.argsort(torch.repeat_interleave(slot_E, received_E, output_size=sum(received)), stable=True)
    ends_S = received_E.view(ranks, here).sum(dim=0).cumsum(0).int()
    gate, up = torch._grouped_mm(there[by_slot_M], gate_up.transpose(1, 2), ends_S).chunk(2, dim=1)
    out_MD = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down.transpose(1, 2), ends_S)
    back = _Exchange.apply(torch.empty_like(out_MD).index_copy(0, by_slot_M, out_MD), received, sent)
    weighted = back * weights_TK.reshape(-1)[order_N].unsqueeze(1)
    return torch.zeros_like(hidden_TD).index_add(0, token_N, weighted)


def _batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randperm(WORK.experts, generator=generator)[: WORK.top_k] for _ in range(WORK.tokens)]
    hidden_TD = torch.randn(WORK.tokens, WORK.hidden, generator=generator, requires_grad=True)
    return hidden_TD, torch.stack(ids), torch.full((WORK.tokens, WORK.top_k), 0.5, requires_grad=True)


def _operations(layer: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> tuple[Counter[str], Tensor]:
    """Of a forward and a backward pass; and what the layer gives."""
    with Operations() as forward:
        out_TD = layer(*batch)
    gradient_TD = torch.ones_like(out_TD)
    with Operations() as backward:
        out_TD.backward(gradient_TD)
    return forward.by_name + backward.by_name, out_TD.detach()


def _interpreted(launched: Counter[str]) -> eplb.moe.kernel_selection.Kernels:  # type: ignore[name-defined]
    """All kernels, in Triton's interpreter, whose own operations do not count."""
    from triton.runtime import interpreter

    from eplb_runtime.moe.dispatch import kernels as moves
    from eplb_runtime.moe.kernel_selection import Kernels
    from eplb_runtime.moe.routing import kernels as routing

    launch = interpreter.GridExecutor.__call__

    def counted(executor: Any, *args: Any, **kwargs: Any) -> None:
        launched[executor.fn.__name__] += 1
        with _disable_current_modes():
            launch(executor, *args, **kwargs)

    interpreter.GridExecutor.__call__ = counted
    dealing = routing.count_by_blocks, routing.deal_by_kernels
    return Kernels(*dealing, moves.MOVES, routing.count_and_map)


def _with_kernels(rank: int) -> tuple[Counter[str], Counter[str], Counter[str], bool]:
    from eplb_runtime.hosts.attaching import attach as attaching
    from eplb_runtime.moe.kernel_selection import Kernels

    launched: Counter[str] = Counter()
    kernels = _interpreted(launched)
    found = {}
    for chosen in (Kernels(), kernels):
        torch.manual_seed(0)
        model = MoEStack(WORK)
        gate_up, down = (part[rank * 4 : rank * 4 + 4].clone() for part in model.layers[0].parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        attaching.kernels_for = lambda *sizes, chosen=chosen: chosen
        config = eplb.BalancerConfig(interval=1000, dispatch=eplb.DispatchConfig(kernels=True))
        balancer = eplb.attach(model, optimizer, config=config)
        model.train()
        for _ in range(3):  # memory is there, and hooks have run, by the last
            launched.clear()
            hidden_TD, ids_TK, weights_TK = _batch(rank)
            operations, out_TD = _operations(model.layers[0], (hidden_TD, ids_TK, weights_TK))
            optimizer.step()
            optimizer.zero_grad()
        found[chosen is kernels] = (out_TD, hidden_TD.grad, weights_TK.grad)
        balancer.close()
    parts = [part.requires_grad_() for part in (gate_up, down)]
    hidden_TD, ids_TK, weights_TK = _batch(rank)
    plain, out_TD = _operations(lambda *batch: plain_layer(*batch, *parts), (hidden_TD, ids_TK, weights_TK))
    for ours, others, plains in zip(found[True], found[False], (out_TD, hidden_TD.grad, weights_TK.grad), strict=True):
        torch.testing.assert_close(ours, others)
        torch.testing.assert_close(ours, plains)
    return operations - ONCE, launched, plain


@pytest.mark.long
@pytest.mark.skipif(util.find_spec("triton") is None, reason="no triton: pip install triton")
def test_a_layer_with_kernels_takes_as_few_launches_as_a_plain_one() -> None:
    for operations, launched, plain in run_ranks(2, _with_kernels, TRITON_INTERPRET="1"):
        assert 40 <= plain.total() <= 52, plain
        assert launched["_sum"] == 2 and launched["_count_and_map"] == 1, launched
        assert operations.total() + launched.total() <= min(TOTAL, plain.total() + 6), operations + launched


# -- How many operations a layer takes, and how often it makes the host wait for the device: on a GPU each operation i


FORWARD, BACKWARD = 61, 31
"""As counted with torch 2.13, the experts' own among them (4 and 14). More is a regression; less is welcome here."""
ONCE = Counter({"aten._foreach_copy_": 1, "c10d._allgather_base_": 1})
"""A sample of gradients, once a backward pass; and, over gloo alone, which layer each rank has come to, exchanged."""
WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.unique_dim", "aten._unique2")
NO_KERNEL = (
    *("view", "_unsafe_view", "detach", "alias", "slice", "select", "split", "split_with_sizes", "unbind", "expand"),
    *("as_strided", "t", "transpose", "permute", "squeeze", "unsqueeze", "reshape", "lift_fresh", "promote_types"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
)


class Operations(TorchDispatchMode):
    """Inside, operations are counted by name; those that only look at memory, or take some, are none."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).rsplit(".", 1)[0]
        if name.removeprefix("aten.") not in NO_KERNEL:
            self.by_name[name] += 1
        return func(*args, **(kwargs or {}))


def _counted(rank: int) -> tuple[Counter[str], Counter[str], int]:
    work = Workload(hidden=32, width=64, tokens=64)
    model = MoEStack(work)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balancer = eplb.attach(model, optimizer, config=eplb.BalancerConfig(interval=1000))
    model.train()
    hidden_TD = torch.randn(work.tokens, work.hidden, requires_grad=True)
    ids_TK = torch.stack([torch.randperm(work.experts)[: work.top_k] for _ in range(work.tokens)])
    weights_TK = torch.full(ids_TK.shape, 0.5, requires_grad=True)
    copied: list[Tensor] = []
    to_host = Tensor.cpu

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copied.append(tensor)
        return to_host(tensor, *args, **kwargs)

    for _ in range(3):  # memory is there, and hooks have run, by the last
        copied.clear()
        forward, backward = Operations(), Operations()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "cpu", counted)
            with forward:
                out_TD = model.layers[0](hidden_TD, ids_TK, weights_TK)
            loss = out_TD.sum()
            with backward:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    balancer.close()
    return forward.by_name, backward.by_name - ONCE, len(copied)


def test_a_layer_takes_so_many_operations_and_one_wait_for_the_host() -> None:
    for forward, backward, copies_to_host in run_ranks(2, _counted):
        assert forward.total() <= FORWARD, forward
        assert backward.total() <= BACKWARD, backward
        assert copies_to_host == 1
        assert not any(operations[name] for operations in (forward, backward) for name in WAITS)


# -- files that a call crosses -----------------------------------------------------------------------------------------


PACKAGE = str(Path(eplb.__file__).parent)
MOST = {"attach": (82, 89), "forward": (26, 29), "rebalance": (42, 46)}
"""Files of the package that a call runs through, on the thread that calls: without and with replica slots."""


def crossed(rank: int, replica_slots: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}

    def trace(name: str, call: Callable[[], Any]) -> Any:
        files: set[str] = set()
        sys.setprofile(lambda frame, event, _: files.add(frame.f_code.co_filename) if event == "call" else None)
        try:
            return call()
        finally:
            sys.setprofile(None)
            found[name] = sorted(file.removeprefix(PACKAGE) for file in files if file.startswith(PACKAGE))

    model = make_model("mixtral")
    optimizer = torch.optim.AdamW(model.parameters())
    config = eplb.BalancerConfig(
        interval=None, gate="always", replica_slots=replica_slots, dense_gradients="allreduce", timeout_seconds=60.0
    )
    balancer = trace("attach", lambda: eplb.attach(model, optimizer, config=config))
    for step in range(5):  # the guard is done with the first ones
        inputs = batch_of(rank, step)
        trace("forward", lambda inputs=inputs: model(input_ids=inputs, labels=inputs).loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert trace("rebalance", balancer.rebalance)
    balancer.close()
    return found


@pytest.mark.parametrize("replica_slots", [0, 1])
def test_a_call_crosses_few_files(replica_slots: int) -> None:
    found = run_ranks(2, crossed, replica_slots)[0]
    for name, files in found.items():
        print(name, len(files), *files)
        assert len(files) <= MOST[name][replica_slots], files
