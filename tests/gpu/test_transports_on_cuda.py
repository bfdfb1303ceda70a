"""Every transport keeps its contract with the memory of a GPU; see `transport_contract` for the cases."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from device import device_of, on_gpu, ranks_on_gpu, why_not
from support.transport_contract import CASES, RANKS, Case, run_cases, soon

from eplb_runtime.distributed.transports import TRANSPORTS, measure
from eplb_runtime.topology import Topology

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


ON_ONE_GPU = [("torch", "nccl"), ("cuda_ipc", "gloo"), ("nvshmem", "gloo"), ("torch", "gloo")]
"""Enough where the ranks share a GPU, and most of what is there would be starting them."""
WAYS = [(name, backend) for name in TRANSPORTS if name != "deepep" for backend in ("gloo", "nccl")]
"""DeepEP does not carry between three ranks: test_deepep_on_cuda.py."""


@pytest.fixture(scope="module", params=WAYS if torch.cuda.device_count() >= RANKS else ON_ONE_GPU, ids="-".join)
def said(request: pytest.FixtureRequest) -> list[dict]:
    name, backend = request.param
    if why := why_not(name):
        pytest.skip(why)
    asked = {item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")}
    return ranks_on_gpu(RANKS, run_cases, name, backend, device_of, [case for case in CASES if case in asked])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_contract(said: list[dict], case: Case) -> None:
    wrong = "".join(of_rank[case.__name__] for of_rank in said)
    assert not wrong, wrong


def probe_behind_queued_work(rank: int) -> tuple[float, float]:
    """Bandwidth measured with an idle device, and again while kernels are queued on it."""
    device = on_gpu(rank)
    group, control = dist.new_group([0, 1], backend="nccl"), dist.new_group([0, 1], backend="gloo")
    transport = TRANSPORTS["torch"](group, "nccl", device, 60.0)
    transport.warm_up(soon())
    measured = []
    for queued in (0, 400):
        a = torch.randn(4096, 4096, device=device)
        for _ in range(queued):
            a = a @ a.T / 4096
        measured.append(measure(Topology(2), transport, rank, control, 60.0).intra_node_bandwidth)
    torch.cuda.synchronize(device)
    return measured[0], measured[1]


def test_bandwidth_is_measured_apart_from_what_the_device_still_has_to_do() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("two ranks on one GPU tell nothing about a link")
    for idle, busy in ranks_on_gpu(2, probe_behind_queued_work):
        assert busy > 0.5 * idle
