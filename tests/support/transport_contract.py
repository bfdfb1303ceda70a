"""What every transport must do: cases that three ranks run one after another, each on connections of its own.

A case is a function ``(rank, transport)`` that asserts; ranks tell each other where they are through the store, never
by sleeping. ``run_cases`` gives back, for each case, what went wrong on this rank.
"""

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from support.seen import said_by

from eplb_runtime.distributed.process_groups import forget_group, make_group
from eplb_runtime.distributed.transports import TRANSPORTS
from eplb_runtime.distributed.transports.base import Message, Transport, TransportError

RANKS = 3
TIMEOUT = 60.0
Case = Callable[[int, Transport], None]


def run_cases(rank: int, name: str, backend: str, device_of: Callable[[int], torch.device], cases: list[Case]) -> dict:
    """``{case: traceback or ""}`` of a transport, between all ranks."""
    device = device_of(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    said = {}
    for case in cases:
        group = group_of_all(rank, backend, case.__name__)
        transport = TRANSPORTS[name](group, backend, device, TIMEOUT)
        try:
            transport.warm_up(soon())
            arrived(rank, case.__name__)
            case(rank, transport)
            said[case.__name__] = ""
        except BaseException:
            said[case.__name__] = f"rank {rank}:\n{traceback.format_exc()}"
        dist.barrier()
        transport.close()
        release(group)
    return said


def arrived(rank: int, case: str) -> None:
    """Wait for the other ranks: a case may abort, of which one that is still warming up would hear."""
    tell(f"{case} {rank}")
    for other in others(rank):
        hear(f"{case} {other}")


def group_of_all(rank: int, backend: str, name: str) -> dist.ProcessGroup:
    """A group in which messages may fail. NCCL's watchdog would end the process after one of them."""
    timeout = timedelta(seconds=TIMEOUT)
    if backend != "nccl":
        return dist.new_group(backend=backend, timeout=timeout)
    ranks, store = list(range(RANKS)), dist.distributed_c10d._get_default_store()
    return make_group(store, name, ranks, rank, backend, timeout, "a test's")


def release(group: dist.ProcessGroup) -> None:
    if group.name() != "nccl":
        dist.destroy_process_group(group)
        return
    group.abort()
    forget_group(group)


def soon(seconds: float = TIMEOUT) -> float:
    return time.monotonic() + seconds


def others(rank: int) -> list[int]:
    return [peer for peer in range(RANKS) if peer != rank]


def random_bytes(seed: int, nbytes: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (-(-nbytes // 8),), generator=generator)
    return words.view(torch.uint8)[:nbytes].to(device)


def tell(what: str) -> None:
    dist.distributed_c10d._get_default_store().set(what, "1")


def hear(what: str) -> None:
    dist.distributed_c10d._get_default_store().wait([what], timedelta(seconds=TIMEOUT))


def seed_of(source: int, destination: int, number: int) -> int:
    return (source * RANKS + destination) * 100_000 + number


def exchange_with_all(rank: int, transport: Transport, peers: Sequence[int], sizes: Sequence[int]) -> None:
    """Messages of these sizes to and from each of these ranks, all at once; each has to bring its own bytes."""
    sends = [
        Message(peer, random_bytes(seed_of(rank, peer, number), size, transport.device))
        for peer in peers
        for number, size in enumerate(sizes)
    ]
    receives = [Message(peer, transport.empty(size).fill_(7)) for peer in peers for size in sizes]
    transport.post(sends, receives).wait(soon())
    for index, message in enumerate(receives):
        number = index % len(sizes)
        expected = random_bytes(seed_of(message.peer, rank, number), sizes[number], transport.device)
        assert torch.equal(message.data, expected), f"message {number} from rank {message.peer}"


def messages_of_a_pair_arrive_in_order(rank: int, transport: Transport) -> None:
    exchange_with_all(rank, transport, others(rank), [17] * 40)


def messages_of_any_size(rank: int, transport: Transport) -> None:
    exchange_with_all(rank, transport, others(rank), [1, 2, 63, 64, 65, 4095, 4096, (1 << 20) + 1])


def large_messages(rank: int, transport: Transport) -> None:
    exchange_with_all(rank, transport, others(rank), [24 << 20])


def empty_messages_between_others(rank: int, transport: Transport) -> None:
    exchange_with_all(rank, transport, others(rank), [0, 5, 0, 0, 9, 0])
    exchange_with_all(rank, transport, others(rank), [0])
    transport.post([], []).wait(soon())


def many_small_messages(rank: int, transport: Transport) -> None:
    exchange_with_all(rank, transport, others(rank), [48] * 300)


def messages_to_itself(rank: int, transport: Transport) -> None:
    exchange_with_all(rank, transport, [rank], [1, 0, 4096, 3])
    exchange_with_all(rank, transport, range(RANKS), [100, 200])


def several_posts_at_once_in_any_order_of_waiting(rank: int, transport: Transport) -> None:
    to, source = (rank + 1) % RANKS, (rank - 1) % RANKS
    arrived = [transport.empty(1000) for _ in range(5)]
    posted = [
        transport.post([Message(to, random_bytes(number, 1000, transport.device))], [Message(source, into)])
        for number, into in enumerate(arrived)
    ]
    for pending in reversed(posted):
        pending.wait(soon())
    for number, into in enumerate(arrived):
        assert torch.equal(into, random_bytes(number, 1000, transport.device)), number


def a_thread_waits_while_the_first_asks(rank: int, transport: Transport) -> None:
    """Nothing is done before the peer has sent; asking does not wait, and both see the end."""
    if rank == 1:
        hear("asked in vain")
        transport.post([Message(0, random_bytes(1, 999, transport.device))], []).wait(soon())
    if rank == 0:
        into = transport.empty(999)
        pending = transport.post([], [Message(1, into)])
        assert not pending.poll()
        waiter = threading.Thread(target=pending.wait, args=(soon(),))
        waiter.start()
        assert not pending.poll()
        tell("asked in vain")
        waiter.join(TIMEOUT)
        assert not waiter.is_alive() and pending.poll()
        pending.wait(soon())  # once more is allowed
        assert torch.equal(into, random_bytes(1, 999, transport.device))


def a_peer_that_is_later_than_the_deadline(rank: int, transport: Transport) -> None:
    """Who waited gets an error of the deadline; who comes late gets one or is through, but does not wait for ever; and
    what was given up is not written any more."""
    if rank == 1:
        hear("gave up")
        with contextlib.suppress(TransportError):
            transport.post([Message(0, random_bytes(3, 5000, transport.device))], []).wait(soon(5.0))
        tell("came late")
    if rank == 0:
        into = transport.empty(5000).fill_(7)
        assert "in time" in said_by(lambda: transport.post([], [Message(1, into)]).wait(soon(0.5)))
        tell("gave up")
        hear("came late")
        assert (into == 7).all()


def what_is_cancelled_is_not_written(rank: int, transport: Transport) -> None:
    """Cancelled while another thread waits for it: that one hears of it; a message that comes later is lost."""
    if rank == 1:
        hear("cancelled")
        with contextlib.suppress(TransportError):
            transport.post([Message(0, random_bytes(4, 5000, transport.device))], []).wait(soon(5.0))
        tell("sent in vain")
    if rank == 0:
        into = transport.empty(5000).fill_(7)
        pending = transport.post([], [Message(1, into)])
        heard = list[str]()
        waiter = threading.Thread(target=lambda: heard.append(said_by(lambda: pending.wait(soon()))))
        waiter.start()
        pending.abort()
        waiter.join(TIMEOUT / 2)
        assert heard and heard[0]
        tell("cancelled")
        hear("sent in vain")
        assert (into == 7).all()


def what_is_done_stays_done_after_an_abort(rank: int, transport: Transport) -> None:
    to, source = (rank + 1) % RANKS, (rank - 1) % RANKS
    into = transport.empty(700)
    pending = transport.post([Message(to, random_bytes(rank, 700, transport.device))], [Message(source, into)])
    pending.wait(soon())
    pending.abort()
    assert torch.equal(into, random_bytes(source, 700, transport.device))
    exchange_with_all(rank, transport, others(rank), [10])


CASES: list[Case] = [
    messages_of_a_pair_arrive_in_order,
    messages_of_any_size,
    large_messages,
    empty_messages_between_others,
    many_small_messages,
    messages_to_itself,
    several_posts_at_once_in_any_order_of_waiting,
    a_thread_waits_while_the_first_asks,
    a_peer_that_is_later_than_the_deadline,
    what_is_cancelled_is_not_written,
    what_is_done_stays_done_after_an_abort,
]
