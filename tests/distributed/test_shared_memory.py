"""Shared memory between ranks has no name, is gone with its ranks however they end, and is cut off from a writer that
was left in the middle of it."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import run_ranks
from transport_contract import hear, soon, tell

from eplb_runtime.distributed.transports import neighbours, shm
from eplb_runtime.distributed.transports.base import Message, TransportError
from eplb_runtime.distributed.transports.segments import Segment, open_segment
from eplb_runtime.distributed.transports.shm import SharedMemory

NBYTES = 4 << 20


def ours() -> list[str]:
    """What of this process's memory and descriptors comes from the room of segments."""
    mapped = [line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line]
    return [name for name in (*mapped, *names()) if "eplb_runtime" in name and not name.endswith(".so")]


def names() -> list[str]:
    """What this process's descriptors stand for."""
    links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if link.is_symlink()]


def connected() -> SharedMemory:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    dist.barrier(group)
    dist.barrier()  # who is left waits for who is gone at the end: that has to fail at once
    transport = SharedMemory(group, "gloo", torch.device("cpu"), 60.0)
    transport.warm_up(soon())
    return transport


def use_and_leave(rank: int) -> dict[str, object]:
    """Rank 2 is killed with memory of the others mapped, and its own offered to them."""
    names_before = set(os.listdir("/dev/shm"))
    transport = connected()
    inboxes = [transport._inbox.reading, *(neighbour.inbox for neighbour in transport._neighbours.values())]
    kinds = ("/memfd:eplb_runtime", "anon_inode:[pidfd]", *(os.readlink(f"/proc/self/fd/{n}") for n in inboxes))
    peers = [peer for peer in range(3) if peer != rank]
    out, arrived = transport.empty(NBYTES).fill_(rank), {peer: transport.empty(NBYTES) for peer in peers}
    for _ in range(2):
        transport.post(
            [Message(peer, out) for peer in peers], [Message(peer, into) for peer, into in arrived.items()]
        ).wait(soon())
    said: dict[str, object] = {"right": all(bool((into == peer).all()) for peer, into in arrived.items())}
    said["unnamed"] = bool(ours()) and all(name == "/memfd:eplb_runtime (deleted)" for name in ours())
    if rank == 2:
        transport.post([], [Message(0, arrived[0])])
        tell("about to be killed")
        os.kill(os.getpid(), signal.SIGKILL)
    hear("about to be killed")
    try:
        transport.post([], [Message(2, arrived[2])]).wait(soon())
    except TransportError as error:
        said["error"] = str(error)
    transport.close()
    del transport, out, arrived
    said["left"] = ours()
    said["descriptors"] = [name for name in names() if name.startswith(kinds)]
    said["names"] = {name for name in set(os.listdir("/dev/shm")) - names_before if not name.startswith("sem.")}
    return said


def test_nothing_of_it_has_a_name_and_nothing_is_left_after_a_kill() -> None:
    results = run_ranks(3, use_and_leave, expect_exit=(2,))
    for said in results[:2]:
        assert said["right"] and said["unnamed"]
        assert "its process has ended" in str(said["error"]) or "given up" in str(said["error"])
        assert said["left"] == [] and said["names"] == set() and said["descriptors"] == []


def leave_a_writer_in_the_middle(rank: int) -> dict[str, object]:
    """Rank 1 says that it writes, and does so again and again, while rank 0 gives up."""
    shm.FENCE_SECONDS = 0.05
    transport, said = connected(), {}
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        transport._card.write_to(0, True)
        segment = store.get("segment").decode().split()
        mapped = open_segment(transport._neighbours[0].process, *map(int, segment))
        mapped.fill_(1)
        tell("writes")
        hear("gave up")
        mapped.fill_(2)
        transport._card.write_to(0, False)
        tell("wrote on")
    if rank == 0:
        into = transport.empty(NBYTES).fill_(7)
        segment = transport._segments[-1]
        pending = transport.post([], [Message(1, into)])
        store.set("segment", f"{segment.descriptor} {segment.identity} {segment.nbytes}")
        hear("writes")
        said["control"] = bool((into == 1).all())
        pending.abort()
        tell("gave up")
        hear("wrote on")
        said["cut off"] = bool((into == 1).all())
    transport.close()
    return said


def test_a_writer_in_the_middle_is_cut_off_when_its_receiver_gives_up() -> None:
    said, _ = run_ranks(2, leave_a_writer_in_the_middle)
    assert said == {"control": True, "cut off": True}


def disagree_on_a_size(rank: int) -> str:
    transport = connected()
    messages = [Message(1, torch.zeros(10, dtype=torch.uint8))], [Message(0, torch.zeros(11, dtype=torch.uint8))]
    try:
        transport.post(messages[0] if rank == 0 else [], messages[1] if rank == 1 else []).wait(soon())
    except TransportError as error:
        return str(error)
    finally:
        transport.close()
    return ""


def test_messages_of_other_sizes_are_an_error_and_not_the_end() -> None:
    sender, receiver = run_ranks(2, disagree_on_a_size)
    assert "expects 11 bytes and is sent 10" in sender
    assert "given up" in receiver


def on_two_nodes(rank: int) -> str:
    os.environ["GROUP_RANK"] = str(rank)
    try:
        connected()
    except TransportError as error:
        return str(error)
    return ""


def test_ranks_of_two_nodes_are_refused_on_both() -> None:
    said = run_ranks(2, on_two_nodes)
    assert all("is on another node" in text for text in said)


def test_a_segment_lives_as_long_as_its_tensors() -> None:
    gone: list[int] = []
    segment = Segment(NBYTES, gone.append)
    part = segment.hand_out()[10:20].fill_(3)
    other = open_segment(os.getpid(), segment.descriptor, segment.identity, NBYTES)
    assert (other[10:20] == 3).all() and segment.alive
    del part
    assert not segment.alive and gone == [segment.identity]


def test_notes_are_whole_however_many_there_are() -> None:
    inbox = neighbours.Mailbox()
    peer = neighbours.Neighbour(0, 0, -1, inbox.writing, torch.zeros(4, dtype=torch.int64).numpy())
    written: list[int] = []
    for number in range(4000):  # more than a pipe holds
        note = neighbours.Notification(neighbours.Kind.OFFER, 3, number)
        peer.outbox.append((note.encode(), lambda number=number: written.append(number)))
    peer.send()
    assert 0 < len(written) < 4000
    heard = inbox.read()
    while peer.outbox:
        peer.send()
        heard += inbox.read()
    assert [note.identity for note in heard] == list(range(4000)) == written
    assert {(note.kind, note.source) for note in heard} == {(neighbours.Kind.OFFER, 3)}
    inbox.close()
