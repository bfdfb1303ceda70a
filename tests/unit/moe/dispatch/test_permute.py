"""Orders of rows and sums over choices, each against what it stands for, written as loops."""

import contextlib
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.host_waits import HostWaitsError, no_waits
from support.stream_double import Memory, Module
from torch import Tensor

from eplb_runtime.moe.dispatch import permute
from eplb_runtime.moe.dispatch.channels import CollectiveOrder, MicroBatchChannel, MicroBatchChannels, TwoStreams
from eplb_runtime.moe.dispatch.permute import RowMemory

DTYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
]
"""(rows, router weights)."""


def choices(tokens: int, top_k: int, slots: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(slots, (tokens, top_k), generator=torch.Generator().manual_seed(seed))


def rows_and_places(
    tokens: int, top_k: int, width: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows in some order, where each choice lies, and the same rows as ``[T, K, D]``."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens * top_k, width, generator=generator).to(dtype)
    place = torch.randperm(tokens * top_k, generator=generator)
    return rows, place.view(tokens, top_k), rows[place].view(tokens, top_k, width)


def in_order(terms_TKD: torch.Tensor) -> torch.Tensor:
    """One after another, in float32 at least, rounded once at the end."""
    total = terms_TKD[:, 0].to(torch.promote_types(terms_TKD.dtype, torch.float32))
    for choice in range(1, terms_TKD.shape[1]):
        total = total + terms_TKD[:, choice]
    return total.to(terms_TKD.dtype)


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_rows_that_arrive_by_rank_are_regrouped_by_slot(first: int, seed: int) -> None:
    counts = np.random.default_rng(seed).integers(0, 4, (3, 5)) * np.random.default_rng(seed + 9).integers(0, 2, (3, 5))
    arriving = [
        (rank, slot, row)
        for rank in [first, *(rank for rank in range(3) if rank != first)]
        for slot in range(5)
        for row in range(counts[rank, slot])
    ]
    by_slot = sorted(arriving, key=lambda key: (key[1], key[0], key[2]))
    found = permute.arriving(counts, first, 5, torch.device("cpu"))
    assert [arriving[index] for index in found.arrived_M.tolist()] == by_slot
    assert [by_slot[index] for index in found.slot_place_M.tolist()] == arriving
    assert found.ends_S.tolist() == counts.sum(axis=0).cumsum().tolist() and found.row_M is found.arrived_M


@pytest.mark.parametrize("me", [0, 1, 2])
@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_what_leaves_names_for_each_choice_the_token_that_its_rank_is_sent(me: int, tokens: int) -> None:
    slots = choices(tokens, 4, 6)
    found = permute.leaving(slots, me, 3, 2, dedup=True, tag=7)
    counts, order = found.counts_2RW[0].tolist(), [me, *(rank for rank in range(3) if rank != me)]
    slot_of = slots.view(-1).tolist()
    by_slot = sorted(range(4 * tokens), key=lambda choice: (slot_of[choice] // 2 != me, slot_of[choice], choice))
    assert found.choice_N.tolist() == by_slot, "those of this rank first"
    begin, sent = {}, []
    for rank in order:
        begin[rank] = len(sent)
        sent += [token for token in range(tokens) if (slots[token] // 2 == rank).any()]
        assert counts[rank] == [*[int((slots == 2 * rank + s).sum()) for s in range(2)], len(sent) - begin[rank], 7]
    assert found.token_N[: len(sent)].tolist() == sent
    for choice, source_row in zip(found.choice_N.tolist(), found.source_row_N1.view(-1).tolist(), strict=True):
        rank = int(slots.view(-1)[choice]) // 2
        assert sent[begin[rank] + source_row] == choice // 4
    alone = permute.leaving(slots, me, 3, 2, dedup=False)
    assert torch.equal(alone.token_N, alone.choice_N // 4) and alone.source_row_N1 is None
    assert torch.equal(alone.counts_2RW[0], found.counts_2RW[0, :, :2])
    assert torch.equal(alone.place_TK.view(-1)[alone.choice_N], torch.arange(4 * tokens))


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_a_weighted_sum_adds_rounded_products_in_the_routers_order(
    dtype: torch.dtype, weight_dtype: torch.dtype, top_k: int
) -> None:
    rows, place, stacked = rows_and_places(19, top_k, 48, dtype)
    weights = torch.rand(19, top_k, generator=torch.Generator().manual_seed(1)).to(weight_dtype)
    found = permute.sum_choices(rows, place, RowMemory(), weights)
    products = stacked * weights.unsqueeze(-1)
    assert found.dtype == products.dtype
    if weight_dtype == torch.float32 == dtype:  # products need not be rounded
        torch.testing.assert_close(found, in_order(products), rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(found, in_order(products))
    torch.testing.assert_close(found, products.sum(dim=1))
    assert torch.equal(permute.sum_choices(rows, place, RowMemory()), in_order(stacked))


# -- Buffers are used again when nobody holds them, and never before


WIDTH = 512
EXAMPLE = torch.empty(0, WIDTH)


def test_a_buffer_that_nobody_holds_is_used_again() -> None:
    memory = RowMemory()
    first = memory.like(EXAMPLE, 1000)
    address = first.data_ptr()
    del first
    assert memory.like(EXAMPLE, 990).data_ptr() == address


def test_a_graph_keeps_its_buffer_until_its_backward() -> None:
    memory = RowMemory()
    weight = torch.ones(WIDTH, requires_grad=True)
    rows = memory.like(EXAMPLE, 1000).fill_(3.0)
    address = rows.data_ptr()
    total = (rows * weight).sum()
    del rows
    other = memory.like(EXAMPLE, 1000).fill_(0.0)
    assert other.data_ptr() != address
    total.backward()
    assert (weight.grad == 3000.0).all()
    assert memory.like(EXAMPLE, 1000).data_ptr() == address


def test_what_is_computed_in_place_on_a_buffer_is_not_a_view_for_autograd() -> None:
    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(ctx, source: torch.Tensor) -> torch.Tensor:
            return memory.like(source, len(source)).copy_(source)

        @staticmethod
        def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
            return grad

    memory = RowMemory()
    source = torch.ones(1000, WIDTH, requires_grad=True)
    Rows.apply(source).mul_(2.0).sum().backward()
    assert (source.grad == 2.0).all()


# -- `host_waits` notices what reads values on the host, and lets pass what does not


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "boolean index": lambda x: x[x > 0],
    "repeat_interleave": lambda x: x.repeat_interleave(x),
    "bincount": lambda x: x.bincount(),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_reads_values_is_refused(name: str) -> None:
    x = torch.tensor([0, 1, 2, 3])
    WAITS[name](x)
    with pytest.raises(HostWaitsError), no_waits():
        WAITS[name](x)


# -- Exchanges of two batches are launched in one order, however fast either comes to its own


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
    assert asked.wait(60)
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
    assert over.wait(60)
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
        assert dropped.wait(60)
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
