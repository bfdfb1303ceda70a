"""Exports that are given something unusable, or begin beside something else, end on all ranks in a line: 2 ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

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


ENDED = ("this stream of weights has ended", "lambda: balancer.named_logical_tensors()")
NORM = ("rank 1: model.norm.weight: its memory is freed or of another size",)
EXPECTED: dict[str, tuple[str, ...]] = {
    "a function that begins it": ("equal to the model's, among them those of all 8 experts",),
    "after all": ("equal to the model's, among them those of all 8 experts",),
    "the stream": ENDED,
    "a generator over it": ENDED,
    "goes on after": ENDED,
    "a function that fails on one": ("rank 1: the weights to verify could not be walked: OSError: no such folder",),
    "a list that fails on one": ("rank 1: KeyError: 7",),
    "other options": ("choice of options",),
    "a stream on one": ("choice of options",),
    "dense emptied": NORM,
    "dense emptied, verified": NORM,
    "dense emptied on the way": NORM,
    "experts emptied": ("rank 1: model.layers.0.mlp.experts.",),
    "dense emptied, saved": ("CheckpointError",),
}
"""What every rank hears."""


def test_what_is_wrong_on_one_rank_is_said_on_all() -> None:
    for rank, said in enumerate(run_ranks(2, misused)):
        assert said.keys() == EXPECTED.keys()
        for what, words in EXPECTED.items():
            assert all(one in said[what] for one in words), (what, said[what])
        assert ("model.norm.weight: its memory is freed" in said["dense emptied, saved"]) == (rank == 1)
