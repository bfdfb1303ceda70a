"""The transport over CUDA IPC, with a double of it: what every transport must do, and who reads what when. CUDA IPC
itself: `tests/gpu`."""

from __future__ import annotations

import ast
import inspect
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from cuda_ipc_double import Double, OfAnyMemory
from ranks import run_ranks
from torch.multiprocessing import reductions
from transport_contract import CASES, RANKS, Case, hear, large_messages, run_cases, soon, tell

from eplb_runtime.distributed.transports import TRANSPORTS, cuda_memory
from eplb_runtime.distributed.transports.base import Message, TransportError
from eplb_runtime.distributed.transports.cuda_ipc import CudaIpc
from eplb_runtime.distributed.transports.cuda_memory import Export, IpcHandle

CPU = torch.device("cpu")
CHEAP = [case for case in CASES if case is not large_messages]


def over_the_double() -> tuple[CudaIpc, Double]:
    group, double = dist.new_group(backend="gloo", timeout=timedelta(seconds=60)), Double()
    transport = CudaIpc(group, "gloo", CPU, 60.0, memory=double)
    transport.warm_up(soon())
    return transport, double


def all_that_is_asked(rank: int) -> dict:
    TRANSPORTS["cuda_ipc"] = lambda *arguments: CudaIpc(*arguments, memory=Double())
    said = run_cases(rank, "cuda_ipc", "gloo", lambda rank: CPU, CHEAP)
    return {
        "contract": said,
        "copies": what_is_copied(rank),
        "freed": memory_that_was_freed(rank),
        "gave up": a_sender_that_gives_up_while_it_is_read(rank),
        "died": a_peer_that_dies(rank),
    }


def what_is_copied(rank: int) -> list[tuple[int, bool]]:
    """Rank 0 sends registered memory twice and other memory once to rank 1."""
    transport, double = over_the_double()
    transport.register([registered := transport.empty(5000).fill_(3)])
    double.copies.clear()
    into = [transport.empty(size) for size in (5000, 100, 70)]
    if rank == 0:
        nobody_keeps = [Message(1, torch.full((70,), 9, dtype=torch.uint8))]
        pending = transport.post([Message(1, registered), Message(1, registered[200:300]), nobody_keeps.pop()], [])
        pending.wait(soon())
    if rank == 1:
        transport.post([], [Message(0, data) for data in into]).wait(soon())
        assert [set(data.tolist()) for data in into] == [{3}, {3}, {9}]
    transport.close()
    return double.copies


def memory_that_was_freed(rank: int) -> int:
    """What was registered and freed is exported no longer, and new memory is found again; says how many words."""
    transport, double = over_the_double()
    before = double.exports
    for number in range(3):
        memory = transport.empty(4096).fill_(number)
        transport.register([memory])
        if rank == 0:
            transport.post([Message(1, memory)], []).wait(soon())
            assert len(transport._exports) == 1, "older ones are forgotten"
        if rank == 1:
            into = torch.empty(4096, dtype=torch.uint8)
            transport.post([], [Message(0, into)]).wait(soon())
            assert (into == number).all()
            assert len(transport._traffic[0].opened) <= 3, "and closed where they were opened"
        del memory
    exports = double.exports - before
    transport.close()
    return exports


def a_sender_that_gives_up_while_it_is_read(rank: int) -> str:
    """It may write its memory at once: what was read meanwhile counts for nothing."""
    transport, double = over_the_double()
    error = ""
    if rank == 0:
        transport.register([data := transport.empty(1000).fill_(1)])
        pending = transport.post([Message(1, data)], [])
        hear("a copy is under way")
        pending.abort()
        data.fill_(2)
        tell("given up and written")
    if rank == 1:
        under_way, go_on = threading.Event(), threading.Event()
        double.late.before_done = lambda: (under_way.set(), go_on.wait(30))
        pending = transport.post([], [Message(0, transport.empty(1000))])
        assert under_way.wait(30)
        tell("a copy is under way")
        hear("given up and written")
        go_on.set()
        try:
            pending.wait(soon())
        except TransportError as said:
            error = str(said)
    transport.close()
    return error


def a_peer_that_dies(rank: int) -> str:
    transport, _ = over_the_double()
    if rank == 2:
        for peer in (0, 1):
            hear(f"{peer} has posted")
        os.kill(os.getpid(), signal.SIGKILL)
    pending = transport.post([], [Message(2, transport.empty(1 << 20))])
    tell(f"{rank} has posted")
    began = time.monotonic()
    try:
        pending.wait(soon())
    except TransportError as error:
        return str(error) if time.monotonic() - began < 20 else "late"
    return ""


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run_ranks(RANKS, all_that_is_asked, expect_exit=(0, 1, 2))


@pytest.mark.parametrize("case", CHEAP, ids=lambda case: case.__name__)
def test_contract(ranks: list[dict], case: Case) -> None:
    wrong = "".join(said["contract"][case.__name__] for said in ranks[:2])
    assert not wrong, wrong


def test_registered_memory_is_read_where_it_is_and_other_memory_is_packed_once(ranks: list[dict]) -> None:
    sender, receiver = (said["copies"] for said in ranks[:2])
    assert sender == [(70, False)]
    assert receiver == [(5000, True), (100, True), (70, True)]


def test_memory_that_was_freed_is_exported_no_longer(ranks: list[dict]) -> None:
    assert ranks[0]["freed"] == 3


def test_what_is_read_while_its_owner_gives_up_is_not_taken_for_good(ranks: list[dict]) -> None:
    assert "it has given up" in ranks[1]["gave up"]


def test_a_peer_that_dies_is_an_error_at_once(ranks: list[dict]) -> None:
    assert all("process has ended" in said["died"] or "has given up" in said["died"] for said in ranks[:2])


def test_memory_that_is_resized_is_exported_anew() -> None:
    kept = torch.zeros(64, dtype=torch.uint8)
    export = Export.of(kept, OfAnyMemory())
    assert export.holds(kept[8:])
    kept.untyped_storage().resize_(1 << 20)
    assert export.gone and not export.holds(kept[8:])


def names_of(node: ast.expr) -> list[str]:
    assert isinstance(node, ast.Tuple)
    return [element.id for element in node.elts if isinstance(element, ast.Name)]


def test_a_handle_has_the_fields_that_torch_gives_and_takes() -> None:
    tree = ast.parse(inspect.getsource(reductions))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    given = next(c for c in calls if getattr(c.value.func, "attr", "") == "_share_cuda_")
    taken = next(c for c in calls if getattr(c.value.func, "attr", "") == "_new_shared_cuda")
    assert names_of(given.targets[0]) == list(IpcHandle._fields)
    assert [argument.id.removeprefix("storage_") for argument in taken.value.args] == [
        field.removeprefix("storage_") for field in IpcHandle._fields
    ]
    released = inspect.getsource(reductions.rebuild_cuda_tensor)
    assert "_release_ipc_counter(\n                ref_counter_handle, ref_counter_offset, device=" in released
    for name in ("_share_cuda_", "_new_shared_cuda", "_release_ipc_counter_cuda"):
        assert hasattr(torch.UntypedStorage, name)


def test_a_model_on_a_cpu_is_refused() -> None:
    assert "GPU" in cuda_memory.why_not(CPU)
