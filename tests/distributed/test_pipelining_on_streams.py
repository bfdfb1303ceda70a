"""Pairs of DualPipeV with streams of a double: a backward pass runs on the stream of its forward, the forward beside it
on the other, and nothing of a micro-batch on the caller's.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from ranks import run_ranks
from stream_double import Module
from support.training import undone
from test_pipelining import AT_ONCE, batches, start
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import OVERLAP_F_B

from eplb_runtime.hosts.attaching import attach
from eplb_runtime.moe.dispatch.channels import MicroBatchChannels, TwoStreams

Where = dict[tuple[str, int, int], Any]


def streams_of(rank: int, never_turned: bool) -> tuple[list[bool], list[bool], int]:
    """Of each pair whether its two have two streams, and whether the backward has that of its forward; and how many
    forwards of micro-batches were on the caller's stream."""
    module, where, pairs = Module(), Where(), []
    attach.MicroBatchChannels = partial(MicroBatchChannels, streams=TwoStreams(torch.device("meta"), module))  # type: ignore[misc]
    if never_turned:
        MicroBatchChannels.both = lambda self, here, beside, turned=False, own=MicroBatchChannels.both: own(
            self, here, beside
        )  # type: ignore[method-assign]

    def noted(kind: str, own: Any) -> Any:
        def call(stage: PipelineStage, micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            where[kind, stage.stage_index, micro_batch] = module.current_stream()
            return own(stage, micro_batch, *args, **kwargs)

        return call

    for kind in ("forward", "backward"):
        name = f"{kind}_one_chunk"
        setattr(PipelineStage, name, noted(kind, getattr(PipelineStage, name)))
    run = start(rank, AT_ONCE)
    own = run.schedule._comp_type_to_function_map[OVERLAP_F_B]

    def pair(action: Any, ctx: Any) -> None:
        own(action, ctx)
        pairs.append([(one.stage_index, one.microbatch_index) for one in action.sub_actions])

    run.schedule._comp_type_to_function_map[OVERLAP_F_B] = pair
    ids, labels, _ = batches(AT_ONCE, run.column, 0)
    run.schedule.step(ids, target=labels)
    run.balancer.close()
    apart = [where["forward", *forward] is not where["backward", *backward] for forward, backward in pairs]
    its_own = [where["forward", *backward] is where["backward", *backward] for _, backward in pairs]
    on_callers = sum(stream is module.default for (kind, *_), stream in where.items() if kind == "forward")
    return apart, its_own, on_callers


def turned_and_not(rank: int) -> list[tuple[list[bool], list[bool], int]]:
    found = []
    for never_turned in (False, True):
        with undone(attach, MicroBatchChannels, PipelineStage):
            found.append(streams_of(rank, never_turned))
    return found


@cache
def results() -> list[list[tuple[list[bool], list[bool], int]]]:
    return run_ranks(4, turned_and_not)


def test_a_backward_pass_runs_on_the_stream_of_its_forward_and_the_forward_beside_it_on_the_other() -> None:
    for (apart, its_own, on_callers), _ in results():
        assert len(apart) >= AT_ONCE.micro_batches and all(apart) and all(its_own) and not on_callers
