"""How many operations a layer takes, and how often it makes the host wait for the device: on a GPU each operation is a
launch or more, and each wait stops what could be queued meanwhile."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import eplb_runtime as eplb
from eplb_runtime.tools.bench.train import MoEStack, Workload

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
