"""A layer takes few launches, fewer with kernels, and makes the host wait once: a call crosses few files."""

import sys
from collections import Counter
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from support import training
from support.moe_models import batch_of, make_model
from support.ranks import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import eplb_runtime as eplb
from eplb_runtime.migration.engine import MigrationEngine
from eplb_runtime.tools.bench.train import MoEStack, Workload

WORK = Workload(hidden=32, width=64, tokens=48, top_k=4)
FORWARD, BACKWARD = 61, 29
"""As counted with torch 2.13, the experts' own among them (4 and 14). More is a regression; less is welcome here."""
WITH_KERNELS = 51
"""Forward and backward."""
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


def _interpreted(launched: Counter[str]) -> eplb.moe.kernel_selection.Kernels:  # type: ignore[name-defined]
    """All kernels, in Triton's interpreter, whose own operations do not count."""
    from triton.runtime import interpreter

    from eplb_runtime.moe import kernels
    from eplb_runtime.moe.kernel_selection import Kernels

    launch = interpreter.GridExecutor.__call__

    def counted(executor: Any, *args: Any, **kwargs: Any) -> None:
        launched[executor.fn.__name__] += 1
        with _disable_current_modes():
            launch(executor, *args, **kwargs)

    interpreter.GridExecutor.__call__ = counted
    moved = kernels.leaving, kernels.arriving, kernels.sum_choices, kernels.sum_local_choices
    return Kernels(kernels.count_by_blocks, kernels.deal_by_kernels, *moved, kernels.count_and_map)


def _counted(rank: int, with_kernels: bool) -> tuple[Counter[str], Counter[str], Counter[str], int]:
    """Operations of a forward and of a backward pass, kernels, and copies to the host."""
    from eplb_runtime.hosts.attaching import attach as attaching

    launched: Counter[str] = Counter()
    if with_kernels:
        kernels = _interpreted(launched)
        attaching.kernels_for = lambda *sizes: kernels
    model = MoEStack(WORK)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = eplb.BalancerConfig(interval=1000, dispatch=eplb.DispatchConfig(kernels=with_kernels))
    balancer = eplb.attach(model, optimizer, config=config)
    model.train()
    hidden_TD = torch.randn(WORK.tokens, WORK.hidden, requires_grad=True)
    ids_TK = torch.stack([torch.randperm(WORK.experts)[: WORK.top_k] for _ in range(WORK.tokens)])
    weights_TK = torch.full(ids_TK.shape, 0.5, requires_grad=True)
    copied: list[Tensor] = []
    to_host = Tensor.cpu

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copied.append(tensor)
        return to_host(tensor, *args, **kwargs)

    for _ in range(3):  # memory is there, and hooks have run, by the last
        copied.clear()
        launched.clear()
        hidden_TD.grad = weights_TK.grad = None
        forward, backward = Operations(), Operations()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "cpu", counted)
            with forward:
                out_TD = model.layers[0](hidden_TD, ids_TK, weights_TK)
            gradient_TD = torch.ones_like(out_TD)
            with backward:
                out_TD.backward(gradient_TD)
        optimizer.step()
        optimizer.zero_grad()
    balancer.close()
    return forward.by_name, backward.by_name - ONCE, launched, len(copied)


def test_a_layer_takes_so_many_operations_and_one_wait_for_the_host() -> None:
    for forward, backward, _, copies_to_host in run_ranks(2, _counted, False):
        assert forward.total() <= FORWARD, forward
        assert backward.total() <= BACKWARD, backward
        assert copies_to_host == 1
        assert not any(operations[name] for operations in (forward, backward) for name in WAITS)


@pytest.mark.long
@pytest.mark.skipif(util.find_spec("triton") is None, reason="no triton: pip install triton")
def test_a_layer_with_kernels_takes_few_launches() -> None:
    """What they give is compared with torch's by `tests/unit/moe/kernels`."""
    for forward, backward, launched, _ in run_ranks(2, _counted, True, TRITON_INTERPRET="1"):
        assert launched["_sum"] == 2 and launched["_count_and_map"] == 1, launched
        assert (forward + backward + launched).total() <= WITH_KERNELS, forward + backward + launched


# -- files that a call crosses -----------------------------------------------------------------------------------------


PACKAGE = str(Path(eplb.__file__).parent)
MOST = {"attach": (58, 64), "batch": (13, 16), "decision": (20, 23), "migration": (18, 20)}
"""Files of the package that a call runs through, on the thread that calls, without and with replica slots: a batch is a
forward of one MoE layer, a decision ends before experts move, and is counted without the planner's files."""


class Crossed:
    """The files that calls run through, by the name of the call; a call inside another counts for itself alone."""

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = {}

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, of which the last run is noted under this name."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            files, outer = self.files.setdefault(name, set()), sys.getprofile()
            files.clear()
            sys.setprofile(lambda frame, event, _: files.add(frame.f_code.co_filename) if event == "call" else None)
            try:
                return call(*args, **kwargs)
            finally:
                sys.setprofile(outer)

        return noted

    def of_package(self, name: str) -> list[str]:
        return sorted(file[len(PACKAGE) + 1 :] for file in self.files[name] if file.startswith(PACKAGE))


def crossed(rank: int, replica_slots: int) -> dict[str, list[str]]:
    model, found = make_model("mixtral"), Crossed()
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {"interval": None, "gate": "always", "replica_slots": replica_slots, "timeout_seconds": 60.0}
    balancer = found.around("attach", training.attach)(model, optimizer, **settings)
    experts = model.model.layers[0].mlp.experts
    experts.forward = found.around("batch", experts.forward)
    for step in range(5):  # the guard is done with the first ones
        inputs = batch_of(rank, step)
        model(input_ids=inputs, labels=inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MigrationEngine, "migrate", found.around("migration", MigrationEngine.migrate))
        assert found.around("decision", balancer.rebalance)()
    balancer.close()
    return {name: found.of_package(name) for name in MOST}


@pytest.mark.parametrize("replica_slots", [0, 1])
def test_a_call_crosses_few_files(replica_slots: int) -> None:
    for name, files in run_ranks(2, crossed, replica_slots)[0].items():
        files = [file for file in files if name != "decision" or not file.startswith("planner/")]
        print(name, len(files), *files)
        assert len(files) <= MOST[name][replica_slots], (name, files)
