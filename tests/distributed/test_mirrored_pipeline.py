"""DualPipe's two copies of every stage, by a double of its schedule: same placement, gradients summed slot by slot."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import training
from support.pipeline_models import EXPERTS, HIDDEN, TOP_K, make_stages, micro_batch
from support.ranks import run_ranks
from support.shuffle import plan_by, plan_shuffle, wait_until_compiled
from support.stream_double import Module
from test_pipelining import AT_ONCE, STEPS, TOKENS, batches, differing, renamed, start, whole
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import OVERLAP_F_B

import eplb_runtime as eplb
from eplb_runtime.distributed.ranks import Ranks
from eplb_runtime.events import LoadMeasured, RebalanceAborted
from eplb_runtime.hosts.attaching import attach
from eplb_runtime.moe.dispatch.channels import MicroBatchChannels, TwoStreams

pytestmark = pytest.mark.long

POSITIONS, EP, MICRO_BATCHES = 2, 2, 4


class BothWays:
    """One rank's part: micro-batches enter at both ends in turn, and cross the same ranks in opposite directions."""

    def __init__(self, rank: int, stages: list[nn.Module]) -> None:
        self.position, self.column = divmod(rank, EP)
        self.stages = stages
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def step(self, step: int) -> list[float]:
        losses: list[float] = []
        open_: dict[int, tuple[Tensor, Tensor]] = {}
        for number, stage in self.work():
            incoming, labels = micro_batch(self.column, step, number, TOKENS)
            if stage > 0:
                incoming = self.receive(number).requires_grad_()
            out = self.stages[stage](incoming)
            if stage < POSITIONS - 1:
                self.send(out, number)
            else:
                out = nn.functional.cross_entropy(out, labels) / MICRO_BATCHES
                losses.append(out.item())
            open_[number] = incoming, out
        for number, stage in self.work():
            incoming, out = open_.pop(number)
            out.backward(self.receive(number) if stage < POSITIONS - 1 else None)
            if stage > 0:
                self.send(incoming.grad, number)
        for message, _ in self._sent:
            message.wait()
        self._sent.clear()
        return losses

    def work(self) -> Iterator[tuple[int, int]]:
        """Which stage of each micro-batch is here."""
        for number in range(MICRO_BATCHES):
            yield number, self.position if number % 2 == 0 else POSITIONS - 1 - self.position

    @property
    def _mirror(self) -> int:
        return (POSITIONS - 1 - self.position) * EP + self.column

    def send(self, tensor: Tensor, number: int) -> None:
        message = tensor.detach().contiguous()
        self._sent.append((dist.isend(message, self._mirror, tag=number), message))

    def receive(self, number: int) -> Tensor:
        arrived = torch.empty(TOKENS, HIDDEN, dtype=torch.float64)
        dist.recv(arrived, self._mirror, tag=number)
        return arrived


def both_ways(rank: int, moving: bool) -> dict[str, Any]:
    groups = [dist.new_group(list(range(first, first + EP))) for first in range(0, POSITIONS * EP, EP)]
    stages = make_stages((1, 1))
    optimizers = [torch.optim.AdamW(stage.parameters(), lr=1e-2) for stage in stages]
    balancer = eplb.attach(
        stages,
        optimizers,
        config=eplb.BalancerConfig(
            interval=1,
            policy="incremental" if moving else "static",
            guard="off",
            dense_gradients="allreduce",
            migration=eplb.MigrationConfig(lag=0),
        ),
        ranks=Ranks(
            ep=tuple(dist.get_process_group_ranks(groups[rank // EP])),
            stages=tuple(sorted((rank // EP, POSITIONS - 1 - rank // EP))),
            gradient_divisor=EP,
        ),
    )
    plan_by(balancer, plan_shuffle)
    wait_until_compiled(balancer)
    schedule = BothWays(rank, [stage.train() for stage in stages])
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        result["losses"].append(schedule.step(step))
        result["norms"].append(balancer.clip_grad_norm_(0.5).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    result["experts"] = [
        {name: p.detach().clone() for name, p in stage.named_parameters() if "experts" in name} for stage in stages
    ]
    result["placement"] = balancer.placement.digest()
    result["epoch"] = balancer.placement.epoch
    states = [eplb.logical_state_dict(*pair) for pair in zip(stages, optimizers, strict=True)]
    result["state"] = {
        renamed(name, number): value for number, state in enumerate(states) for name, value in state.items()
    }
    balancer.close()
    return result


def jobs(rank: int) -> list[dict[str, Any]]:
    return [both_ways(rank, moving) for moving in (False, True)]


def test_mirrored_stages_equal_the_whole_model_and_stay_alike() -> None:
    still, moved = zip(*run_ranks(POSITIONS * EP, jobs), strict=True)
    reference = whole(POSITIONS, EP, MICRO_BATCHES)
    for result in still:
        assert result["norms"] == pytest.approx(reference["norms"], abs=1e-10)
        assert result["state"].keys() == reference["state"].keys()
        assert all((mine - reference["state"][name]).abs().max() < 1e-10 for name, mine in result["state"].items())
    for results in (still, moved):
        assert len({result["placement"] for result in results}) == 1
        for column in range(EP):  # both copies of a stage have the same experts in the same slots
            for one, other in zip(results[column]["experts"], results[EP + column]["experts"], strict=True):
                assert all(torch.equal(one[name], other[name]) for name in one)
    assert moved[0]["epoch"] == STEPS
    for before, after in zip(still, moved, strict=True):
        assert differing(before, after) == []


# -- Pairs of DualPipeV with streams of a double


Where = dict[tuple[str, int, int], Any]


def streams_of(rank: int) -> tuple[list[bool], list[bool], int]:
    """Of each pair whether its two have two streams, and whether the backward has that of its forward; and how many
    forwards of micro-batches were on the caller's stream."""
    module, where, pairs = Module(), Where(), []
    attach.MicroBatchChannels = partial(MicroBatchChannels, streams=TwoStreams(torch.device("meta"), module))  # type: ignore[misc]

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


def test_a_backward_pass_runs_on_the_stream_of_its_forward_and_the_forward_beside_it_on_the_other() -> None:
    for apart, its_own, on_callers in run_ranks(4, streams_of):
        assert len(apart) >= AT_ONCE.micro_batches and all(apart) and all(its_own) and not on_callers


# -- Models cut into pipeline stages: one job, one plan for all stages. By torch's own schedules: `test_pipelining`


def one_stage_alone(rank: int) -> list:
    """A plan that changes the layers of one stage only, with replica slots: the others have nothing to do."""
    stage = make_stages((2, 1))[rank // 2]
    ranks = Ranks(ep=(0, 1) if rank < 2 else (2, 3), stages=(rank // 2,))
    balancer = training.attach(
        stage, torch.optim.SGD(stage.parameters(), lr=0.1), ranks=ranks, replica_slots=1, policy="static"
    )
    before = balancer.placement
    map_, home = before.physical_to_logical.copy(), before.home.copy()
    map_[0, [0, -2]], home[0, [0, EXPERTS - 1]] = map_[0, [-2, 0]], home[0, [EXPERTS - 1, 0]]
    balancer.place(eplb.Placement(map_, EXPERTS, 2, home, before.epoch + 1))
    aborted = [event.cause for event in balancer.events.of_type(RebalanceAborted)]
    epoch = balancer.placement.epoch
    balancer.close()
    return [epoch, aborted]


def test_a_plan_may_change_one_stage_alone() -> None:
    assert run_ranks(4, one_stage_alone) == [[1, []]] * 4


def load_of_stages(rank: int) -> list[Any]:
    """Two stages of one layer on one EP rank each: what was counted, as a decision has it."""
    stage = make_stages((1, 1))[rank]
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.0)
    balancer = training.attach([stage], [optimizer], ranks=Ranks(ep=(rank,), stages=(rank,)), interval=2, lag=1)
    totals: list[Any] = []
    balancer.events.called_at_once.append(
        lambda event: totals.append(event.load.sum(axis=-1).tolist()) if isinstance(event, LoadMeasured) else None
    )
    stage.train()
    for step in range(3):
        ids, _ = micro_batch(rank, step, 0, TOKENS)
        stage(ids if rank == 0 else torch.ones(TOKENS, HIDDEN, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    balancer.close()
    return totals


def test_one_sum_holds_the_load_of_every_stage() -> None:
    for totals in run_ranks(2, load_of_stages):
        assert totals == [[[TOKENS * TOP_K] * 2] * 2]


def attach_wrongly(rank: int) -> dict[str, str]:
    said = {}

    def refused(case: str, ranks: Ranks, models: int = 1) -> None:
        stages = make_stages((1, 1, 1))
        before = {name: p.data_ptr() for stage in stages for name, p in stage.named_parameters()}
        with pytest.raises(ValueError) as caught:
            eplb.attach(stages[:models], None, ranks=ranks)
        said[case] = str(caught.value)
        assert before == {name: p.data_ptr() for stage in stages for name, p in stage.named_parameters()}

    refused("a gap", Ranks(ep=(rank,), stages=(0,) if rank == 0 else (2,)))
    refused("no stage named", Ranks(ep=(rank,)), models=2)
    refused("overlap", Ranks(ep=(0, 1) if rank == 0 else (1,)))
    refused("another size", Ranks(ep=(0, 1) if rank < 2 else (2,)))
    refused("divisors", Ranks(gradient_divisor=rank + 1))
    refused("uneven stages", Ranks(ep=(rank,), stages=(0, 1) if rank else (0,)), models=2 if rank else 1)
    return said


def test_ranks_that_contradict_each_other_are_refused_on_all() -> None:
    first, *others = run_ranks(3, attach_wrongly)
    assert all(said == first for said in others)
    assert "stages [(0,), (2,)]" in first["a gap"]
    assert "Ranks(stages=...)" in first["no stage named"]
    assert "and no other rank may" in first["overlap"]
    assert "differ in size" in first["another size"]
    assert "gradient_divisor" in first["divisors"]
    assert "stages [(0,), (0, 1)]" in first["uneven stages"]
