"""Two things at once on streams of their own: who waits for whom, and whose memory is used again when. No device."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from stream_double import Memory, Module

from eplb_runtime.moe.dispatch.channels import MicroBatchChannel, MicroBatchChannels, TwoStreams

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
