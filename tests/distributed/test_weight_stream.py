"""Weights leave an attached model of Transformers in logical order, wherever its experts are: 3 ranks.

The reference is the library's own conversion of the whole model. The control is what frameworks do: each rank walks its
modules and takes expert ``i`` for ``ep_rank * E/R + i``.
"""

import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import training
from support.job import Job, Run
from support.live_memory import LiveMemory
from support.moe_models import batch_of
from support.ranks import run_ranks
from support.seen import differing, heard, said_by
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

import eplb_runtime as eplb
from eplb_runtime.placement import EMPTY

EXPERTS, RANKS, BUCKET = 6, 3, 20_000
LARGER_BUCKET = 50_000
"""Where memory is counted: much larger than a tensor, much smaller than the model."""
CASES = {"one tensor for each expert": ("qwen3_moe", 0), "experts stacked, with replicas": ("gpt_oss", 1)}
Named = dict[str, Tensor]


def shuffled(like: eplb.Placement) -> eplb.Placement:
    """Every home on another rank, in another row; each replica slot with an expert of the next rank."""
    layers, home_rows = like.num_layers, like.homes_per_rank
    slots = np.full((layers, RANKS, like.slots_per_rank), EMPTY, dtype=np.int32)
    home = np.empty((layers, EXPERTS), dtype=np.int32)
    for layer in range(layers):
        order = np.roll(np.arange(EXPERTS), 2 * layer + 3).reshape(RANKS, home_rows)
        slots[layer, :, :home_rows] = order
        for rank in range(RANKS):
            slots[layer, rank, home_rows:] = order[(rank + 1) % RANKS, : like.replica_slots]
            home[layer, order[rank]] = rank * like.slots_per_rank + np.arange(home_rows)
    return eplb.Placement(slots.reshape(layers, -1), EXPERTS, RANKS, home)


def started(family: str = "qwen3_moe", replica_slots: int = 0) -> Run:
    settings = {"interval": None, "lag": 1, "replica_slots": replica_slots}
    return Run(dist.get_rank(), Job(family, experts=EXPERTS, planner=eplb.plan, settings=settings)).attach().train(1)


def move(balancer: eplb.Balancer) -> None:
    balancer.load_state_dict({"step": 1, "placement": shuffled(balancer.placement).to_json()})


def taken(stream: Iterable[tuple[str, Tensor]]) -> Named:
    return {name: tensor.clone() for name, tensor in stream}


def by_the_library(model: nn.Module, stack: Callable[[str, Tensor], Tensor]) -> Named:
    """The names of a Hugging Face folder for all of a model, whose stacks of experts are made by a function."""
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and "eplb" not in name:
            state[name] = stack(name, tensor.detach()).clone()
    return dict(revert_weight_conversion(model, state))


def by_local_index(model: nn.Module, balancer: eplb.Balancer) -> Named:
    """What a framework exports that knows nothing of moves. Collective."""

    def stack(name: str, rows: Tensor) -> Tensor:
        if name not in balancer.layer_of_parameter:
            return rows
        of_ranks = [torch.empty_like(rows) for _ in range(RANKS)]
        dist.all_gather(of_ranks, rows.contiguous())
        return torch.cat(of_ranks)

    return by_the_library(model, stack)


def in_order(model: nn.Module, balancer: eplb.Balancer) -> Named:
    """The reference: gathered whole, and converted by the library."""
    state = eplb.logical_state_dict(model)
    return by_the_library(model, lambda name, _: state[f"model.{name}"])


# -- wherever experts are ----------------------------------------------------------------------------------------------


def exported(rank: int, family: str, replica_slots: int) -> None:
    """The folder of the whole model, before and after a move. A walk by local index is right before it alone."""
    job = started(family, replica_slots)
    model, balancer = job.model, job.balancer
    static = taken(balancer.named_logical_tensors(bucket_bytes=BUCKET))
    assert differing(static, in_order(model, balancer)) == [] == differing(static, by_local_index(model, balancer))
    move(balancer)
    with balancer.named_logical_tensors(bucket_bytes=BUCKET) as stream:
        moved, experts = taken(stream), dict(stream.experts)
    assert differing(moved, static) == [] and list(moved) == list(static)
    walked = by_local_index(model, balancer)
    assert set(differing(walked, moved)) == set(experts)
    whole = taken(balancer.named_logical_tensors())
    assert differing(whole, moved) == [] and list(whole) == list(moved), "in one bucket"
    on_one = taken(balancer.named_logical_tensors(bucket_bytes=BUCKET, rank=1))
    assert differing(on_one, moved if rank == 1 else {}) == []
    cast = taken(balancer.named_logical_tensors(bucket_bytes=BUCKET, dtype=torch.bfloat16))
    assert differing(cast, {name: tensor.to(torch.bfloat16) for name, tensor in moved.items()}) == []
    verified(balancer, moved, walked, cast, next(name for name, (_, expert) in experts.items() if expert in (3, None)))
    in_logical_order(job)
    balancer.close()
    assert "after close()" in said_by(lambda: balancer.named_logical_tensors())


@pytest.mark.parametrize("case", CASES)
def test_the_stream_is_the_folder_of_the_whole_model_wherever_experts_are(case: str) -> None:
    """`verify_export` names experts that differ; inside `logical_order` any walk is right, and experts go back."""
    run_ranks(RANKS, exported, *CASES[case])


def verified(balancer: eplb.Balancer, moved: Named, walked: Named, cast: Named, of_expert: str) -> None:
    rank, dense = dist.get_rank(), "model.norm.weight"

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(moved.items())[:2]
        if rank == 2:
            raise OSError("the disk is full")

    lacking = {name: tensor for name, tensor in moved.items() if name != of_expert}
    all_equal = "equal to the model's, all experts among them"
    given: list[tuple[str, Any]] = [
        (all_equal, moved),
        (all_equal, moved.items),
        (all_equal, dict(list(moved.items())[rank::RANKS])),
        (all_equal, moved if rank == 1 else lacking),
        ("model.layers.0.mlp.experts.", walked),
        (f"not equal to the model's: {of_expert}; where experts", {**moved, of_expert: moved[of_expert] + (rank == 1)}),
        (f"experts that no rank has given: {of_expert}", lacking),
        (f"not equal to the model's: {dense}; where", {**moved, dense: moved[dense] + 1}),
        ("dtype= casts", cast),
        (
            "rank 0: verify_export was given module.",
            {f"module.{n}": t for n, t in moved.items()} if not rank else moved,
        ),
        ("rank 2: the weights to verify could not be read: OSError: the disk is full", broken()),
    ]
    for words, tensors in given:
        lines: list[str] = []
        said = said_by(lambda tensors=tensors, lines=lines: lines.append(balancer.verify_export(tensors)))
        said += "".join(lines)
        assert words in said and "\n" not in said, said
    assert all_equal in balancer.verify_export(cast, dtype=torch.bfloat16)


def in_logical_order(job: Run) -> None:
    model, balancer = job.model, job.balancer
    rank, placement, state = job.rank, balancer.placement, job.state()

    def is_back() -> bool:
        return np.array_equal(balancer.placement.physical_to_logical, placement.physical_to_logical)

    with heard(logging.INFO) as lines, balancer.logical_order():
        homes = balancer.placement.physical_to_logical.reshape(2, RANKS, -1)
        assert (homes[:, :, :2] == np.arange(EXPERTS).reshape(RANKS, 2)).all() and (homes[:, :, 2:] == EMPTY).all()
        assert [balancer.logical_expert_ids(layer) for layer in range(2)] == [[2 * rank, 2 * rank + 1]] * 2
        assert "are equal to the model's" in balancer.verify_export(by_local_index(model, balancer))
        for what, call in {
            "rebalance": balancer.rebalance,
            "logical_order": lambda: balancer.logical_order().__enter__(),
            "load_state_dict": lambda: balancer.load_state_dict({}),
        }.items():
            assert said_by(call) == f"{what}() inside logical_order(): experts stay in logical order until its end"
    there, back = (line for line in lines if "logical order" in line)
    initial = eplb.Placement.initial(2, EXPERTS, RANKS)
    moves = int((shuffled(initial).home_rank != initial.home_rank).sum())
    assert f"in logical order: {moves} experts moved" in there and f"back from logical order: {moves} experts" in back
    assert is_back()
    with suppress(KeyError), balancer.logical_order():
        if rank == 1:
            raise KeyError("the body")
    assert is_back() and differing(state, job.state()) == []
    model.eval()
    with torch.no_grad():  # replicas are refreshed, or this forward would be refused
        assert model(input_ids=batch_of(rank, 5)).logits.isfinite().all()


# -- consumers ---------------------------------------------------------------------------------------------------------


def moved_job() -> Run:
    job = started()
    move(job.balancer)
    return job


def memory(rank: int) -> None:
    balancer = moved_job().balancer
    gc.collect()
    largest, whole = 0, 0
    with LiveMemory() as live:
        for _, tensor in balancer.named_logical_tensors(bucket_bytes=LARGER_BUCKET):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, "who keeps one tensor keeps no others"
            largest, whole = max(largest, tensor.nbytes), whole + tensor.nbytes
    # Besides, one expert as the library converts it, and some words. gloo's threads may hold a bucket longer.
    assert LARGER_BUCKET - largest <= live.peak <= 2 * LARGER_BUCKET + 2 * largest + 4096 < whole
    balancer.close()


@pytest.mark.long
def test_a_rank_holds_a_bucket_and_its_consumer_one_tensor() -> None:
    run_ranks(RANKS, memory)


def stops(rank: int) -> None:
    """Whatever a consumer does, the next stream is whole."""
    balancer = moved_job().balancer

    def stream() -> Any:
        return balancer.named_logical_tensors(bucket_bytes=BUCKET)

    whole = taken(stream())

    def leaves(ranks: tuple[int, ...]) -> None:
        for number, _ in enumerate(stream()):
            if rank in ranks and number == 4:
                break

    def fails() -> None:
        with stream() as tensors:
            for number, _ in enumerate(tensors):
                if rank == 2 and number == 4:
                    raise ValueError("no room in the engine")

    def goes_on() -> None:
        tensors = stream()
        for _ in range(4 if rank == 1 else 10**6):
            if next(tensors, None) is None:
                break
        if rank == 1:
            balancer.weights_changed()

    def cannot_write() -> None:
        tensors = stream()
        if rank == 0:
            tensors._tensors.value = lambda *_: (_ for _ in ()).throw(MemoryError("no memory"))
        taken(tensors)

    def freed() -> None:
        memory = balancer.runtime.registry.parameters()[0].untyped_storage()
        before = torch.empty(0, dtype=torch.uint8).set_(memory).clone()
        if rank == 2:
            memory.resize_(0)
        try:
            stream()
        finally:
            if rank == 2:
                memory.resize_(len(before))
                torch.empty(0, dtype=torch.uint8).set_(memory).copy_(before)

    failed = "" if rank == 2 else "rank 2: its consumer failed: ValueError: "
    cases: list[tuple[Callable[[], Any], str | None]] = [
        (lambda: leaves((1,)), "" if rank == 1 else "rank 1 has stopped before the end"),
        (lambda: leaves((0, 1, 2)), ""),
        (fails, f"{failed}no room in the engine"),
        (goes_on, None if rank == 1 else "rank 1: it called weights_changed() while its stream of weights was open"),
        (cannot_write, "rank 0: MemoryError: no memory"),
        (freed, "rank 2: model.layers.0.mlp.experts.gate_up_proj: its memory is freed"),
        (
            lambda: balancer.named_logical_tensors(bucket_bytes=BUCKET + rank),
            "has another choice of options than rank 0",
        ),
        (lambda: balancer.named_logical_tensors(rank=3), "rank is 3"),
    ]
    for work, words in cases:
        said = said_by(work)
        assert words is None or (words in said and bool(words) == bool(said)), (words, said)
        gc.collect()
        assert differing(taken(stream()), whole) == [], words
    balancer.close()


@pytest.mark.long
def test_a_consumer_that_stops_or_fails_ends_the_stream_on_all_ranks() -> None:
    run_ranks(RANKS, stops)


def late(rank: int) -> None:
    """Rank 1 raises, and its exception holds on to the stream, so nobody closes it: the others wait no longer than was
    said, and all find together again."""
    job = moved_job()
    balancer = job.balancer

    def work() -> None:
        tensors = balancer.named_logical_tensors(bucket_bytes=BUCKET, timeout_seconds=training.DEADLINE)
        for number, _ in enumerate(tensors):
            if rank == 1 and number == 4:
                raise ValueError("in the loop")

    with pytest.raises((ValueError, RuntimeError)) as held:
        work()
    late_by = f"a rank did not come within {training.DEADLINE:g} s, or is lost"
    assert ("in the loop" if rank == 1 else late_by) in str(held.value)
    dist.barrier()  # the others are through before this rank lets go
    del held
    for step in range(1, 200):
        job.step()
        apart = torch.tensor([float(balancer.rebalancer.control.reconnecting)])
        dist.all_reduce(apart)
        if step > 1 and not apart.item():
            break
    assert not apart.item()
    assert differing(taken(balancer.named_logical_tensors()), in_order(job.model, balancer)) == []
    balancer.close()


@pytest.mark.long
def test_a_rank_that_never_comes_is_waited_for_no_longer_than_was_said() -> None:
    run_ranks(RANKS, late)
