"""Exchanges of two batches are launched in one order, however fast either comes to its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest
import torch
from stream_double import Memory, Module

from eplb_runtime.moe.dispatch.channels import CollectiveOrder, MicroBatchChannel, MicroBatchChannels, TwoStreams

Turn = Callable[[int], contextlib.AbstractContextManager[None]]


def launched(
    launching: Turn, lengths: tuple[int, int], ahead: int, end: Callable[[int], None]
) -> list[tuple[int, int]]:
    """What was launched, where the way ``ahead`` asks first."""
    seen: list[tuple[int, int]] = []
    asked = threading.Event()

    def run(way: int) -> None:
        for number in range(lengths[way]):
            asked.set()
            with launching(way):
                seen.append((way, number))
        end(way)
        asked.set()

    thread = threading.Thread(target=run, args=(ahead,))
    thread.start()
    assert asked.wait(10)
    run(1 - ahead)
    thread.join()
    return seen


LENGTHS = [(3, 3), (4, 2), (1, 4), (0, 2), (2, 0)]


def in_turns(lengths: tuple[int, int]) -> list[tuple[int, int]]:
    return [(way, number) for number in range(max(lengths)) for way in (0, 1) if number < lengths[way]]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_order_follows_from_how_many_there_are(lengths: tuple[int, int], ahead: int) -> None:
    order = CollectiveOrder(10.0)
    assert launched(order.launching, lengths, ahead, order.end) == in_turns(lengths)


def channels() -> MicroBatchChannels:
    made = MicroBatchChannels(MicroBatchChannel(None, None))
    made.open(MicroBatchChannel(None, None))
    return made


@pytest.mark.parametrize("fails", ["here", "beside", "a launch"])
def test_who_fails_is_not_waited_for(fails: str) -> None:
    both, seen = channels(), []

    def launch(name: str, times: int) -> None:
        for _ in range(times):
            with both.launching():
                seen.append(name)
                if fails == "a launch" and name == "here":
                    raise ValueError(name)
        if fails == name:
            raise ValueError(name)

    over = threading.Event()

    def beside() -> None:
        try:
            launch("beside", 1 if fails == "beside" else 4)
        finally:
            over.set()

    with pytest.raises(ValueError, match=r"here|beside"):
        both.both(lambda: launch("here", 4 if fails == "beside" else 1), beside)
    assert over.wait(10)
    assert seen.count("here") == (4 if fails == "beside" else 1)
    assert seen.count("beside") == (1 if fails == "beside" else 4)
    assert both.both(lambda: 1, lambda: 2) == (1, 2)


def test_a_way_that_does_not_come_is_waited_for_until_the_deadline_and_said() -> None:
    order = CollectiveOrder(0.05)
    with (
        pytest.raises(RuntimeError, match=r"the first did not reach its exchange 1 within 0[.]05 s"),
        order.launching(1),
    ):
        pass
    with order.launching(0):
        pass
    with order.launching(1):  # the first has launched by now, and nothing of what failed counts
        pass
    with pytest.raises(RuntimeError, match="exchange 2 of the second waited") as late, order.launching(1):
        pass
    assert "\n" not in str(late.value)


# -- Two things at once on streams of their own: who waits for whom, and whose memory is used again when. No device


DEVICE = torch.device("meta")


def lanes_of() -> tuple[MicroBatchChannels, Module, Memory]:
    module = Module()
    first, second = MicroBatchChannel(None, None), MicroBatchChannel(None, None)
    channels = MicroBatchChannels(first, streams=TwoStreams(DEVICE, module))
    channels.open(second)
    return channels, module, Memory(module)


def results_cross(channels: MicroBatchChannels, memory: Memory) -> None:
    """Both read what the caller wrote; it reads what they give."""
    given = memory.make("given")
    both = channels.both(lambda: (memory.use(given, "here"), memory.make("a"))[1], lambda: memory.make("b"))
    for block in both:
        memory.use(block, "result")
    memory.use(given, "written again")


def freed_inside(channels: MicroBatchChannels, memory: Memory) -> None:
    """What the caller made is dropped beside, after its last use there is queued; who gets its memory, and when?"""
    given, dropped = memory.make("given"), threading.Event()

    def here() -> None:
        assert dropped.wait(10)
        memory.make("here")

    def beside() -> None:
        memory.use(given, "beside")
        memory.free(given)
        dropped.set()

    channels.both(here, beside)
    memory.make("the caller, afterwards")


def freed_outside(channels: MicroBatchChannels, memory: Memory) -> None:
    """What was made inside is used by the caller and dropped; the next two may have its memory."""
    for _ in range(2):
        both = channels.both(lambda: memory.make("here"), lambda: memory.make("beside"))
        for block in both:
            memory.use(block, "outside")
            memory.free(block)


SCENES = [results_cross, freed_inside, freed_outside]


@pytest.mark.parametrize("scene", SCENES)
def test_what_is_used_on_two_streams_has_been_waited_for(scene: Callable[[MicroBatchChannels, Memory], None]) -> None:
    channels, _, memory = lanes_of()
    scene(channels, memory)
    scene(channels, memory)
    assert not memory.races


@pytest.mark.parametrize("shared", [True, False])
def test_what_both_write_is_written_one_after_the_other(shared: bool) -> None:
    channels, _, memory = lanes_of()
    block = memory.make("counts")

    def count() -> None:
        for _ in range(3):
            if shared:
                with channels.shared("counts"):
                    memory.use(block, "counts")
            else:
                memory.use(block, "counts")

    channels.both(count, count)
    assert bool(memory.races) != shared
