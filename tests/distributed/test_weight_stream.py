"""Weights leave an attached model of Transformers in logical order, wherever its experts are: 3 ranks.

The reference is the library's own conversion of the whole model. The control is what frameworks do: each rank walks its
modules and takes expert ``i`` for ``ep_rank * E/R + i``.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from live_memory import LiveMemory
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from support.seen import differing, heard
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


def attached(family: str, replica_slots: int) -> tuple[nn.Module, torch.optim.Optimizer, eplb.Balancer]:
    model = make_model(family, experts=EXPERTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return (model, optimizer, training.attach(model, optimizer, interval=None, replica_slots=replica_slots))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model.train()
    batch = batch_of(dist.get_rank(), step)
    training.step(model, optimizer, batch)


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


def line_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# -- one case ----------------------------------------------------------------------------------------------------------


def exported(family: str, replica_slots: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rank = dist.get_rank()
    for what in ("static", "moved"):
        model, optimizer, balancer = attached(family, replica_slots)
        train(model, optimizer, 0)
        if what == "moved":
            move(balancer)
        with balancer.named_logical_tensors(bucket_bytes=BUCKET) as stream:
            found[what] = taken(stream)
            found["experts"] = dict(stream.experts)
        found[f"{what}, in order"] = in_order(model, balancer)
        found[f"{what}, walked"] = by_local_index(model, balancer)
        if what == "static":
            balancer.close()
    found["one rank"] = taken(balancer.named_logical_tensors(bucket_bytes=BUCKET, rank=1))
    found["bfloat16"] = taken(balancer.named_logical_tensors(bucket_bytes=BUCKET, dtype=torch.bfloat16))
    found["one bucket"] = taken(balancer.named_logical_tensors())
    found["verified"] = verified(model, balancer, found)
    found["logical order"] = in_logical_order(model, optimizer, balancer)
    if replica_slots == 0:
        found["memory"] = [memory(balancer, hoard) for hoard in (False, True)]
        found["stops"] = stops(balancer, found["moved"])
        found["late"] = late(model, optimizer, balancer)
    balancer.close()
    found["closed"] = line_of(lambda: balancer.named_logical_tensors())
    found["rank"] = rank
    return found


def verified(model: nn.Module, balancer: eplb.Balancer, found: dict[str, Any]) -> dict[str, str]:
    """What is said of each of `GIVEN`, by the words that belong there."""
    moved, rank = found["moved"], dist.get_rank()
    of_expert = next(name for name, (_, expert) in found["experts"].items() if expert in (3, None))
    dense = "model.norm.weight"

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(moved.items())[:2]
        if rank == 2:
            raise OSError("the disk is full")

    lacking = {name: tensor for name, tensor in moved.items() if name != of_expert}
    all_equal = "equal to the model's, among them those of all 12 experts"
    given: list[tuple[str, Any]] = [
        (all_equal, moved),
        (all_equal, moved.items),
        (all_equal, dict(list(moved.items())[rank::RANKS])),
        (all_equal, moved if rank == 1 else lacking),
        (
            "layer 0: 0, 1, 2, 3, 4, 5; layer 1: 0, 1, 2, 3, 4, 5; each has the weights of another",
            found["moved, walked"],
        ),
        ("experts that are not the model's: layer 0: ", {**moved, of_expert: moved[of_expert] + (rank == 1)}),
        ("experts that no rank has given: layer 0: ", lacking),
        (f"tensors that are not the model's: {dense}", {**moved, dense: moved[dense] + 1}),
        ("dtype= says", found["bfloat16"]),
        (
            "rank 0: verify_export was given module.",
            {f"module.{n}": t for n, t in moved.items()} if not rank else moved,
        ),
        ("rank 2: the weights to verify could not be read: OSError: the disk is full", broken()),
    ]
    said = {}
    for number, (words, tensors) in enumerate(given):
        lines: list[str] = []
        line = line_of(lambda tensors=tensors, lines=lines: lines.append(balancer.verify_export(tensors)))
        said[f"{number}: {words}"] = line + "".join(lines)
    said[f"bfloat16: {all_equal}"] = balancer.verify_export(found["bfloat16"], dtype=torch.bfloat16)
    return said


def in_logical_order(model: nn.Module, optimizer: torch.optim.Optimizer, balancer: eplb.Balancer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    slots, state = slots_of(balancer), eplb.logical_state_dict(model, optimizer)
    with heard(logging.INFO) as lines, balancer.logical_order():
        found["inside"] = slots_of(balancer)
        found["ids"] = [balancer.logical_expert_ids(layer) for layer in range(2)]
        found["walk"] = balancer.verify_export(by_local_index(model, balancer))
        found["rebalance"] = line_of(balancer.rebalance)
        found["logical_order"] = line_of(lambda: nested(balancer))
        found["load_state_dict"] = line_of(lambda: balancer.load_state_dict({}))
    found["lines"] = [line for line in lines if "logical order" in line]
    found["back"] = slots_of(balancer) == slots
    try:
        with balancer.logical_order():
            if dist.get_rank() == 1:
                raise KeyError("the body")
    except KeyError as error:
        found["raised"] = str(error)
    found["back after an error"] = slots_of(balancer) == slots
    found["state differs"] = differing(state, eplb.logical_state_dict(model, optimizer))
    model.eval()
    with torch.no_grad():  # replicas are refreshed, or this forward would be refused
        found["finite"] = bool(model(input_ids=batch_of(dist.get_rank(), 5)).logits.isfinite().all())
    return found


def slots_of(balancer: eplb.Balancer) -> list[list[int]]:
    return balancer.placement.physical_to_logical.tolist()


def nested(balancer: eplb.Balancer) -> None:
    with balancer.logical_order():
        pass


def memory(balancer: eplb.Balancer, hoard: bool) -> tuple[int, int, list[bool]]:
    """The most bytes held at a time, those of the largest tensor, and whether each tensor shares its memory."""
    gc.collect()
    largest, hoarded, shares = 0, [], []
    with LiveMemory() as live:
        for _, tensor in balancer.named_logical_tensors(bucket_bytes=LARGER_BUCKET):
            largest = max(largest, tensor.nbytes)
            shares.append(tensor.untyped_storage().nbytes() > tensor.nbytes)
            if hoard:
                hoarded.append(tensor)
    return live.peak, largest, shares


# -- consumers that stop -----------------------------------------------------------------------------------------------


def stops(balancer: eplb.Balancer, whole: Named) -> dict[str, Any]:
    rank, said = dist.get_rank(), {}

    def stream() -> Any:
        return balancer.named_logical_tensors(bucket_bytes=BUCKET)

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

    cases: dict[str, Callable[[], Any]] = {
        "one leaves": lambda: leaves((1,)),
        "all leave": lambda: leaves((0, 1, 2)),
        "one fails": fails,
        "one goes on": goes_on,
        "one cannot write": cannot_write,
        "freed": freed,
        "other options": lambda: balancer.named_logical_tensors(bucket_bytes=BUCKET + rank),
        "no bucket": lambda: balancer.named_logical_tensors(bucket_bytes=0),
        "no rank": lambda: balancer.named_logical_tensors(rank=3),
    }
    for what, work in cases.items():
        said[what] = line_of(work)
        gc.collect()
        said[f"after {what}"] = differing(taken(stream()), whole)
    return said


def late(model: nn.Module, optimizer: torch.optim.Optimizer, balancer: eplb.Balancer) -> dict[str, Any]:
    """Rank 1 raises, and its exception holds on to the stream, so nobody closes it: the others wait no longer than was
    said."""
    rank, found = dist.get_rank(), {}
    held: list[Any] = []

    def work() -> None:
        tensors = balancer.named_logical_tensors(bucket_bytes=BUCKET, timeout_seconds=training.DEADLINE)
        for number, _ in enumerate(tensors):
            if rank == 1 and number == 4:
                raise ValueError("in the loop")

    try:
        work()
    except (ValueError, RuntimeError) as error:
        held.append(error)
        found["said"] = str(error)
    dist.barrier()  # the others are through before this rank lets go
    held.clear()
    train(model, optimizer, 1)
    for step in range(2, 200):
        train(model, optimizer, step)
        apart = torch.tensor([float(balancer.rebalancer.control.reconnection.under_way)])
        dist.all_reduce(apart)
        if not apart.item():
            break
    found["joined"] = not apart.item()
    found["equal"] = differing(taken(balancer.named_logical_tensors()), in_order(model, balancer))
    return found


def everything(rank: int) -> dict[str, Any]:
    return {what: exported(*case) for what, case in CASES.items()}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(RANKS, everything)


# -- what is said of them ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_the_stream_is_the_folder_of_the_whole_model_wherever_experts_are(
    results: list[dict[str, Any]], case: str
) -> None:
    for of_rank in results:
        found = of_rank[case]
        assert differing(found["static"], found["static, in order"]) == []
        assert differing(found["moved"], found["moved, in order"]) == []
        assert differing(found["one bucket"], found["moved"]) == []
        assert list(found["static"]) == list(found["moved"]) == list(found["one bucket"])
        if CASES[case][1] == 0:
            assert differing(found["static"], found["moved"]) == []
        # The control: a walk by local index is right before moves, and wrong after.
        assert differing(found["static, walked"], found["static"]) == []
        assert set(differing(found["moved, walked"], found["moved"])) == set(found["experts"])
        assert differing(found["one rank"], found["moved"] if found["rank"] == 1 else {}) == []
        cast = {name: tensor.to(torch.bfloat16) for name, tensor in found["moved"].items()}
        assert differing(found["bfloat16"], cast) == []


@pytest.mark.parametrize("case", CASES)
def test_verify_export_names_the_experts_that_differ_and_the_walk(results: list[dict[str, Any]], case: str) -> None:
    for of_rank in results:
        for what, said in of_rank[case]["verified"].items():
            assert what.partition(": ")[2] in said and "\n" not in said, (what, said)


@pytest.mark.parametrize("case", CASES)
def test_inside_logical_order_any_walk_is_right_and_experts_go_back(results: list[dict[str, Any]], case: str) -> None:
    for of_rank in results:
        found, rank = of_rank[case]["logical order"], of_rank[case]["rank"]
        homes = np.array(found["inside"]).reshape(2, RANKS, -1)
        assert (homes[:, :, :2] == np.arange(EXPERTS).reshape(RANKS, 2)).all() and (homes[:, :, 2:] == EMPTY).all()
        assert found["ids"] == [[2 * rank, 2 * rank + 1]] * 2
        assert "are equal to the model's" in found["walk"]
        for what in ("rebalance", "logical_order", "load_state_dict"):
            assert found[what] == (
                f"RuntimeError: {what}() inside logical_order(): experts stay in logical order until its end"
            )
        there, back = found["lines"]
        initial = eplb.Placement.initial(2, EXPERTS, RANKS)
        moves = int((shuffled(initial).home_rank != initial.home_rank).sum())
        assert f"in logical order: {moves} experts moved" in there
        assert f"back from logical order: {moves} experts moved" in back
        assert found["back"] and found["back after an error"] and found["finite"]
        assert found.get("raised") == ("'the body'" if rank == 1 else None)
        assert found["state differs"] == []


def test_a_rank_holds_a_bucket_and_its_consumer_one_tensor(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        (peak, largest, shares), (hoarded, _, _) = of_rank["one tensor for each expert"]["memory"]
        whole = sum(tensor.nbytes for tensor in of_rank["one tensor for each expert"]["moved"].values())
        # Besides, one expert as the library converts it, and some words. gloo's threads may hold a bucket longer.
        assert LARGER_BUCKET - largest <= peak <= 2 * LARGER_BUCKET + 2 * largest + 4096 < whole
        assert not any(shares), "who keeps one tensor keeps no others"
        assert hoarded >= whole, "control: who keeps all tensors is seen"


def test_a_consumer_that_stops_or_fails_ends_the_stream_on_all_ranks(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        said, rank = of_rank["one tensor for each expert"]["stops"], of_rank["one tensor for each expert"]["rank"]
        assert all(found == [] for what, found in said.items() if what.startswith("after "))
        assert ("rank 1 has stopped before the end" in said["one leaves"]) == (rank != 1)
        assert (said["one leaves"] == "") == (rank == 1)
        assert said["all leave"] == ""
        if rank == 2:
            assert said["one fails"] == "ValueError: no room in the engine"
        else:
            assert "rank 2: its consumer failed: ValueError: no room in the engine" in said["one fails"]
        if rank != 1:
            assert "rank 1: it went on to weights_changed() with its stream of weights open" in said["one goes on"]
        assert "rank 0: MemoryError: no memory" in said["one cannot write"]
        assert "rank 2: model.layers.0.mlp.experts.gate_up_proj: its memory is freed" in said["freed"]
        assert "has another choice of options than rank 0" in said["other options"]
        assert "bucket_bytes is 0" in said["no bucket"] and "rank is 3" in said["no rank"]


def test_a_rank_that_never_comes_is_waited_for_no_longer_than_was_said(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        found, rank = of_rank["one tensor for each expert"]["late"], of_rank["one tensor for each expert"]["rank"]
        if rank == 1:
            assert found["said"] == "in the loop"
        else:
            assert f"a rank did not come within {training.DEADLINE:g} s, or is lost" in found["said"]
        assert found["joined"] and found["equal"] == []


def test_after_close_it_is_refused(results: list[dict[str, Any]]) -> None:
    assert all("RuntimeError" in of_rank[case]["closed"] for of_rank in results for case in CASES)
    assert all("after close()" in of_rank[case]["closed"] for of_rank in results for case in CASES)
