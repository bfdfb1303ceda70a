"""The transport over memory of a node's GPUs, with a double of it: what every transport must do."""

from __future__ import annotations

from functools import partial

import pytest
import symmetric_memory_double as double
import torch
from ranks import run_ranks
from transport_contract import CASES, RANKS, Case, large_messages, many_small_messages, run_cases, soon

from eplb_runtime.distributed.node import node_of_this_rank
from eplb_runtime.distributed.transports import TRANSPORTS, windows
from eplb_runtime.distributed.transports.automatic import why_not
from eplb_runtime.distributed.transports.base import TransportError
from eplb_runtime.distributed.transports.cuda_ipc import CudaIpc

CPU = torch.device("cpu")
CHEAP = [case for case in CASES if case not in (large_messages, many_small_messages)]


def over_the_double(rank: int) -> dict[str, str]:
    windows.MOST_PIECE_BYTES = 64 << 10  # a message of a megabyte goes in many pieces
    TRANSPORTS["cuda_ipc"] = partial(CudaIpc, package=double)
    said = run_cases(rank, "cuda_ipc", "gloo", lambda rank: CPU, CHEAP)
    from eplb_runtime.distributed import node_memory

    node_memory.node_of_this_rank = lambda: f"{node_of_this_rank()} {rank}"
    transport = TRANSPORTS["cuda_ipc"](torch.distributed.group.WORLD, "gloo", CPU, 30.0)
    with pytest.raises(TransportError) as refused:
        transport.warm_up(soon())
    return {**said, "other nodes": str(refused.value)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, str]]:
    return run_ranks(RANKS, over_the_double)


@pytest.mark.parametrize("case", CHEAP, ids=lambda case: case.__name__)
def test_contract(ranks: list[dict[str, str]], case: Case) -> None:
    wrong = "".join(said[case.__name__] for said in ranks)
    assert not wrong, wrong


def test_ranks_of_several_nodes_are_refused(ranks: list[dict[str, str]]) -> None:
    assert all("cannot be opened" in said["other nodes"] and "different ones" in said["other nodes"] for said in ranks)


def test_a_model_on_a_cpu_is_refused() -> None:
    assert "GPU" in why_not("cuda_ipc", CPU)
