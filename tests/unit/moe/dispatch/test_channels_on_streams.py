"""Two things at once on streams of their own: who waits for whom, and whose memory is used again when. No device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stream_double import Memory, Module, Stream

from eplb_runtime.hosts.pipelining import OverlappedForwardBackward
from eplb_runtime.moe.dispatch.channels import MicroBatchChannel, MicroBatchChannels, TwoStreams
from eplb_runtime.replicas.broadcast_plan import NONE
from eplb_runtime.replicas.sync import ReplicaSync

DEVICE = torch.device("meta")


def lanes_of() -> tuple[MicroBatchChannels, Module, Memory]:
    module = Module()
    first, second = MicroBatchChannel(None, None), MicroBatchChannel(None, None)
    channels = MicroBatchChannels(first, in_order=True, streams=TwoStreams(DEVICE, module))
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


def test_one_stream_waits_for_no_event_of_its_own() -> None:
    class Talking(Stream):
        waited = 0

        def wait_event(self, event: Any) -> None:
            self.waited += 1

    module = Module()
    module.default = stream = Talking()
    order = TwoStreams(DEVICE, module).one_after_another()
    for _ in range(3):
        with order():
            pass
    assert stream.waited == 0


def test_both_threads_have_the_device_and_neither_has_the_callers_stream() -> None:
    channels, module, _ = lanes_of()

    def look() -> tuple[int, Stream]:
        return threading.get_ident(), module.current_stream()

    (here, left), (beside, right) = channels.both(look, look)
    (_, turned_left), (_, turned_right) = channels.both(look, look, swapped=True)
    assert here == threading.get_ident() != beside
    assert module.devices == {here: DEVICE, beside: DEVICE}
    assert len({left, right, module.default}) == 3 and (turned_left, turned_right) == (right, left)
    assert channels.alone(module.current_stream) is left and channels.alone(module.current_stream, True) is right
    assert module.current_stream() is module.default


@pytest.mark.parametrize("fails", ["here", "beside", "both"])
def test_after_a_failure_the_callers_stream_waits_all_the_same(fails: str) -> None:
    channels, module, memory = lanes_of()
    begun = threading.Event()
    blocks = []

    def work(name: str) -> None:
        if name == "here":
            assert begun.wait(10)  # both have queued something
        blocks.append(memory.make(name))
        begun.set()
        if fails in (name, "both"):
            raise ValueError(name)

    with pytest.raises(ValueError, match=r"here|beside"):
        channels.both(lambda: work("here"), lambda: work("beside"))
    for block in blocks:
        memory.use(block, "after")
    assert not memory.races and not channels.busy
    results_cross(channels, memory)
    assert not memory.races and module.current_stream() is module.default


def test_autocast_of_the_device_is_that_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)  # as with a GPU
    channels = MicroBatchChannels(
        MicroBatchChannel(None, None), torch.device("cuda"), streams=TwoStreams(DEVICE, Module())
    )
    channels.open(MicroBatchChannel(None, None))

    def modes() -> tuple[Any, ...]:
        kinds = ("cpu", "cuda")
        return *map(torch.is_autocast_enabled, kinds), *map(torch.get_autocast_dtype, kinds), torch.is_grad_enabled()

    with torch.autocast("cpu"), torch.autocast("cuda", dtype=torch.float16), torch.no_grad():
        here, beside = channels.both(modes, modes)
    assert here == beside == (True, True, torch.bfloat16, torch.float16, False)
    assert channels.both(modes, modes)[1][:2] == (False, False)


def test_what_comes_after_the_other_comes_after_all_that_it_computes_before_its_next_launch() -> None:
    channels, _, memory = lanes_of()
    computed, begun = [], threading.Event()

    def here() -> None:
        with channels.launching():
            begun.set()
            channels.after_the_other()
            for block in computed:
                memory.use(block, "received")
            assert len(computed) == 3

    def beside() -> None:
        assert begun.wait(10)
        computed.extend(memory.make("computed") for _ in range(3))
        with channels.launching():
            assert computed

    channels.both(here, beside)
    channels.both(lambda: None, lambda: None)  # one that has ended is not waited for
    assert not memory.races


class Stage:
    """Of a pipeline, as `overlap` finds it."""

    stage_index = 0

    def __init__(self) -> None:
        self.submod = torch.nn.Linear(1, 1)

    def forward_one_chunk(self, micro_batch: int) -> None:
        pass


@pytest.mark.parametrize("in_order", [True, False])
def test_copies_gradients_are_added_after_the_homes_are_there_and_before_more_is_added(in_order: bool) -> None:
    """The engine adds up parameters' gradients on the caller's stream, and a layer's backward runs on another."""
    channels, module, memory = lanes_of()
    replicas = ReplicaSync({}, None, 0, 1, 1, 1)  # type: ignore[arg-type]
    schedule = SimpleNamespace(_stages=[Stage()], _maybe_compute_loss=lambda *_: None)
    balancer = SimpleNamespace(_runtime=SimpleNamespace(maps=SimpleNamespace(replicas=replicas)))
    OverlappedForwardBackward(schedule, channels, balancer).take_forwards()  # type: ignore[arg-type]
    if not in_order:
        replicas.adding = contextlib.nullcontext
    gradient = memory.make("gradient")

    def engine() -> None:
        module.default.wait_stream(module.current_stream())  # as it waits for what it adds
        with module.stream(module.default):
            memory.use(gradient, "accumulated")

    def backward() -> None:
        for _ in range(2):
            engine()
            replicas._sent = 0, NONE, []
            replicas._finish()

    replicas._banks = {0: SimpleNamespace(trained=list)}  # type: ignore[dict-item]
    replicas._add_to_homes = lambda *_: memory.use(gradient, "copies' gradients added")  # type: ignore[method-assign]
    channels.both(lambda: None, backward)
    assert bool(memory.races) != in_order
    memory.races.clear()
    backward()  # on the caller's stream: there is nothing to wait for
    assert not memory.races
