"""Exports that are given something unusable, or begin beside something else, end on all ranks in a line: 2 ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_models import make_model
from ranks import run_ranks
from torch import Tensor

import eplb_runtime as eplb

BUCKET = 20_000


def line_of(work: Callable[[], Any]) -> str:
    try:
        return str(work())
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def misused(rank: int) -> dict[str, str]:
    model = make_model("qwen3_moe", experts=4)
    balancer = eplb.attach(model, None, config=eplb.BalancerConfig(interval=None, timeout_seconds=60))
    said: dict[str, str] = {}

    def stream() -> Any:
        return balancer.named_logical_tensors(bucket_bytes=BUCKET)

    def stream_on_one() -> str:
        tensors, open_stream = dict(stream()), stream()
        return balancer.verify_export(open_stream if rank == 0 else tensors)

    def generator() -> str:
        tensors = stream()
        return balancer.verify_export((name, tensor) for name, tensor in tensors)

    def goes_on_after() -> str:
        tensors = stream()
        next(tensors)
        balancer._end_stream("something else")
        return str(len(list(tensors)))

    def fails_on_one() -> Iterator[tuple[str, Tensor]]:
        if rank == 1:
            raise OSError("no such folder")
        return iter(())

    def other_options() -> str:
        return balancer.verify_export(stream(), dtype=torch.bfloat16 if rank == 1 else None)

    def unlisted() -> str:
        listed = balancer._export._weights_of_stages
        balancer._export._weights_of_stages = {0: lambda: {}[7]} if rank == 1 else listed
        try:
            return str(stream())
        finally:
            balancer._export._weights_of_stages = listed

    def emptied(parameter: Tensor, work: Callable[[], Any]) -> str:
        """What is said where one rank has let go of a weight by its ``.data``."""
        here = parameter.data
        if rank == 1:
            parameter.data = torch.empty(0)
        try:
            return line_of(work)
        finally:
            parameter.data = here

    def emptied_on_the_way() -> str:
        tensors = stream()
        next(tensors)
        return emptied(dense, lambda: len(list(tensors)))

    expert, dense = balancer._runtime.registry.parameters()[0], model.model.norm.weight
    cases: dict[str, Callable[[], Any]] = {
        "experts emptied": lambda: emptied(expert, stream),
        "dense emptied": lambda: emptied(dense, stream),
        "dense emptied, verified": lambda: emptied(dense, lambda: balancer.verify_export({})),
        "dense emptied, saved": lambda: emptied(dense, lambda: eplb.logical_state_dict(model)),
        "dense emptied on the way": emptied_on_the_way,
        "the stream": lambda: balancer.verify_export(stream()),
        "a function that begins it": lambda: balancer.verify_export(stream),
        "a generator over it": generator,
        "goes on after": goes_on_after,
        "a stream on one": stream_on_one,
        "a function that fails on one": lambda: balancer.verify_export(fails_on_one),
        "other options": other_options,
        "a list that fails on one": unlisted,
    }
    for what, work in cases.items():
        said[what] = line_of(work)
        gc.collect()
        dist.barrier()
    said["after all"] = balancer.verify_export(dict(stream()))
    balancer.close()
    return said


@pytest.fixture(scope="module")
def results() -> list[dict[str, str]]:
    return run_ranks(2, misused)


def test_a_stream_is_verified_by_a_function_that_begins_it(results: list[dict[str, str]]) -> None:
    for said in results:
        assert "equal to the model's, among them those of all 8 experts" in said["a function that begins it"]
        assert said["after all"] == said["a function that begins it"]


def test_a_loop_over_a_stream_that_something_else_ended_raises(results: list[dict[str, str]]) -> None:
    for said in results:
        for what in ("the stream", "a generator over it", "goes on after"):
            assert "this stream of weights has ended" in said[what], said
            assert "lambda: balancer.named_logical_tensors()" in said[what]


def test_what_fails_on_one_rank_is_said_on_all(results: list[dict[str, str]]) -> None:
    for said in results:
        assert (
            "rank 1: the weights to verify could not be walked: OSError: no such folder"
            in (said["a function that fails on one"])
        )
        assert "rank 1: KeyError: 7" in said["a list that fails on one"]
        for what in ("other options", "a stream on one"):
            assert "choice of options" in said[what]


def test_weights_without_elements_are_not_exported(results: list[dict[str, str]]) -> None:
    for rank, said in enumerate(results):
        for what in ("dense emptied", "dense emptied, verified", "dense emptied on the way"):
            assert "rank 1: model.norm.weight: its memory is freed or of another size" in said[what], said
        assert "rank 1: model.layers.0.mlp.experts." in said["experts emptied"]
        assert ("model.norm.weight: its memory is freed" in said["dense emptied, saved"]) == (rank == 1)
        assert "CheckpointError" in said["dense emptied, saved"]
