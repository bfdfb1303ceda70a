"""Mistakes that would spoil training without a word are found in its first steps; right use is silent and unchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from flat_settings import config_from_settings
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from support.seen import heard
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import eplb_runtime as eplb
from eplb_runtime.balancer.guard import GuardError
from eplb_runtime.balancer.model_check import StructureError
from eplb_runtime.events import GuardFinding, LoadMeasured

EXPERTS = 8


class Job:
    """An attached model in training, in the way that a case says."""

    def __init__(self, rank: int, **options: object) -> None:
        self.rank = rank
        self.model = make_model("olmoe", experts=EXPERTS, layers=1)
        self.before_attach()
        self.optimizer = self.make_optimizer()
        settings = {"interval": 4, "lag": 1, "dense_gradients": "allreduce", "policy": "static", **options}
        self.balancer = eplb.attach(self.model, self.optimizer, config=config_from_settings(settings))
        self.model.train()
        self.trained: nn.Module = self.model

    def before_attach(self) -> None:
        pass

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def before_step(self, step: int) -> None:
        pass

    def after_step(self, step: int) -> None:
        pass

    def run(self, steps: int = 6) -> dict:
        losses, error = [], ""
        with heard() as warnings:
            try:
                for step in range(steps):
                    ids = batch_of(self.rank, step)
                    loss = self.trained(input_ids=ids, labels=ids).loss
                    loss.backward()
                    self.before_step(step)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.after_step(step)
                    losses.append(loss.item())
            except (GuardError, StructureError) as raised:
                error = str(raised)
        events = self.balancer.events
        result = {
            "losses": losses,
            "error": error,
            "findings": [(event.step, event.finding) for event in events.of_type(GuardFinding)],
            "imbalance": [event.imbalance for event in events.of_type(LoadMeasured)],
            "warnings": warnings,
        }
        self.balancer.close()
        return result


class InEvaluationMode(Job):
    def __init__(self, rank: int, **options: object) -> None:
        super().__init__(rank, **options)
        self.model.eval()


class TrainsOnceInEvaluationMode(Job):
    """Forgets `model.train()` after a late evaluation, for one step."""

    def after_step(self, step: int) -> None:
        self.model.train(step != 4)


class WithPaddingAlone(Job):
    """One rank has nothing but padding, as at the end of data that does not divide evenly."""

    def run(self, steps: int = 6) -> dict:
        def pad(module: nn.Module, args: tuple, batch: dict) -> tuple:
            if self.rank == 1:
                batch["attention_mask"] = torch.zeros_like(batch["input_ids"])
            return args, batch

        self.model.register_forward_pre_hook(pad, with_kwargs=True, prepend=True)
        return super().run(steps)


class RightlyWrapped(Job):
    def __init__(self, rank: int, **options: object) -> None:
        super().__init__(rank, dense_gradients="host", **options)
        self.trained = DistributedDataParallel(self.model)


class ClippedByEachRank(Job):
    def before_step(self, step: int) -> None:
        self.balancer.reduce_gradients()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


class RatesByOwnLoss(Job):
    """Of experts alone: nothing that ranks share shows it."""

    def __init__(self, rank: int, **options: object) -> None:
        super().__init__(rank, **options)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(".experts." in name)

    def before_step(self, step: int) -> None:
        if step >= 4:  # when everything is no longer looked at
            self.optimizer.param_groups[0]["lr"] *= 0.9 if self.rank else 0.8


class UnfrozenLater(Job):
    def before_attach(self) -> None:
        self.model.model.layers[0].mlp.experts.requires_grad_(False)

    def __init__(self, rank: int, **options: object) -> None:
        super().__init__(rank, **options)
        kept = [p for p in self.optimizer.param_groups[0]["params"] if p.requires_grad]
        self.optimizer.param_groups[0]["params"] = kept
        self.model.model.layers[0].mlp.experts.requires_grad_(True)


class FrozenOnOneRank(Job):
    def before_attach(self) -> None:
        self.model.model.layers[0].mlp.experts.requires_grad_(self.rank == 0)


class SkippedOnOneRank(Job):
    """As torch's GradScaler does where an overflow shows on one rank alone."""

    def __init__(self, rank: int, **options: object) -> None:
        super().__init__(rank, timeout_seconds=training.DEADLINE, **options)
        self.optimizer.step = (lambda *_: None) if rank == 1 else self.optimizer.step


class WritesNothing(Job):
    def make_optimizer(self) -> torch.optim.Optimizer:
        class Nothing(torch.optim.SGD):
            def step(self, closure: object = None) -> None: ...

        return Nothing(self.model.parameters(), lr=1e-3)


class WrittenOnOneRank(Job):
    """Long after the first steps, somebody writes a parameter on rank 1 alone."""

    def before_step(self, step: int) -> None:
        if step == 4 and self.rank == 1:
            with torch.no_grad():
                self.model.lm_head.weight[-1, -1] += 1e-3


CASES: dict[str, Callable[[int], dict]] = {
    "right": lambda rank: Job(rank, policy="incremental", gate="always").run(10),
    "off": lambda rank: Job(rank, policy="incremental", gate="always", guard="off").run(10),
    "DDP": lambda rank: RightlyWrapped(rank).run(),
    "padding alone": lambda rank: WithPaddingAlone(rank).run(),
    "evaluation mode": lambda rank: InEvaluationMode(rank).run(),
    "evaluation mode in one late step": lambda rank: TrainsOnceInEvaluationMode(rank).run(14),
    "nobody averages": lambda rank: Job(rank, dense_gradients="host").run(),
    "clipped by each rank": lambda rank: ClippedByEachRank(rank).run(),
    "rates by rank": lambda rank: RatesByOwnLoss(rank).run(10),
    "writes nothing": lambda rank: WritesNothing(rank).run(),
    "frozen on one rank": lambda rank: FrozenOnOneRank(rank).run(),
    "unfrozen later": lambda rank: UnfrozenLater(rank).run(),
    "skipped on one rank": lambda rank: SkippedOnOneRank(rank, interval=1000).run(1),
    "written on one rank": lambda rank: WrittenOnOneRank(rank).run(14),
    "written on one rank, raising": lambda rank: WrittenOnOneRank(rank, guard="raise").run(10),
}


def all_cases(rank: int) -> dict[str, dict]:
    return {name: run(rank) for name, run in CASES.items()}


@pytest.fixture(scope="module")
def results() -> list[dict[str, dict]]:
    return run_ranks(2, all_cases)


RIGHT = (
    "right",
    "DDP",
    "padding alone",
)


@pytest.mark.parametrize("name", RIGHT)
def test_right_use_is_silent(results: list[dict[str, dict]], name: str) -> None:
    for result in results:
        assert (result[name]["error"], result[name]["findings"]) == ("", [])
        assert not [line for line in result[name]["warnings"] if "differ from rank" in line]


def test_the_guard_changes_no_bit(results: list[dict[str, dict]]) -> None:
    for result in results:
        assert result["right"]["losses"] == result["off"]["losses"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("evaluation mode", "call model.train()"),
        ("nobody averages", "dense_gradients='allreduce'"),
        ("clipped by each rank", "clip by balancer.clip_grad_norm_"),
        ("frozen on one rank", "the trained parameters on rank 1 differ from rank 0's"),
        ("unfrozen later", "it holds model.layers.0.mlp.experts"),
        ("writes nothing", "its step does not write"),
    ],
)
def test_a_mistake_is_raised_in_the_first_step_on_every_rank(
    results: list[dict[str, dict]], name: str, said: str
) -> None:
    errors = {result[name]["error"] for result in results}
    assert len(errors) == 1 and said in min(errors) and len(min(errors)) <= 200
    for result in results:
        assert result[name]["losses"] == []
        assert "\n" not in result[name]["error"]


def test_learning_rates_by_rank_are_said_whenever_they_begin(results: list[dict[str, dict]]) -> None:
    for result in results:
        ((_, finding),) = result["rates by rank"]["findings"]
        assert "the learning rates of the optimizer on rank 1 differ from rank 0's" in finding


def alone(rank: int) -> list[str]:
    """Said to a rank that adopts an optimizer alone, and to ranks whose top-k parts in a later forward."""
    model = make_model("olmoe", experts=EXPERTS, layers=1)
    balancer = training.attach(model, policy="static", timeout_seconds=training.DEADLINE)
    said = []
    if rank == 1:
        with pytest.raises(RuntimeError, match="rank 0 did not come") as raised:
            balancer.adopt(torch.optim.SGD(model.parameters(), lr=0.1))
        said.append(str(raised.value))
    torch.distributed.barrier()
    balancer.adopt(optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    if rank == 1:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        with pytest.raises(RuntimeError, match="rank 0 did not come to add_param_group of a SGD") as raised:
            balancer.reduce_gradients()
        said.append(str(raised.value))
    torch.distributed.barrier()
    with torch.no_grad():
        model(input_ids=batch_of(rank, 0))
    model.model.layers[0].mlp.gate.top_k = 2 + rank
    with pytest.raises(RuntimeError, match="with top-k 2; rank 1 in") as raised:
        model(input_ids=batch_of(rank, 0))
    balancer.close()
    return [*said, str(raised.value)]


def test_a_rank_that_adopts_alone_and_ranks_of_another_top_k_get_a_line() -> None:
    first, second = run_ranks(2, alone)
    assert "balancer.adopt()" in second[0] and "with top-k 3" in first[0]


def test_a_rank_that_skips_a_step_alone_is_named(results: list[dict[str, dict]]) -> None:
    stepped, skipped = (result["skipped on one rank"] for result in results)
    assert f"rank 1 did not come to optimizer.step() within {training.DEADLINE:g} s" in stepped["error"]
    assert "eplb.GradScaler(balancer)" in stepped["error"]
    assert skipped["error"] == ""  # it goes on until it needs the others


def test_one_late_step_in_evaluation_mode_is_warned_of(results: list[dict[str, dict]]) -> None:
    for result in results:
        late = result["evaluation mode in one late step"]
        assert late["error"] == "" and len(late["losses"]) == 14
        ((step, finding),) = late["findings"]
        assert step == 9 and finding.startswith("call model.train()") and "in step 6 in evaluation mode" in finding
        assert finding in late["warnings"]


def test_a_later_mistake_is_warned_of_at_the_next_decision(results: list[dict[str, dict]]) -> None:
    for result in results:
        late = result["written on one rank"]
        assert late["error"] == "" and len(late["losses"]) == 14
        ((step, finding),) = late["findings"]
        assert (
            step == 9
            and finding.startswith("write weights on every rank alike: ")
            and "rank 1 differ from rank 0's" in finding
        )
        assert "lm_head.weight" in finding
        assert finding in late["warnings"]
        raised = result["written on one rank, raising"]
        assert raised["error"] == finding and len(raised["losses"]) == step - 1


# -- MoE layers that stay in evaluation mode while others train are named once, whenever that begins


STEPS, INTERVAL = 5, 3


def trained(rank: int, modes: Callable[[nn.Module, int], None], guard: str = "warn", steps: int = STEPS) -> list[str]:
    """Warnings, and findings with their steps, of a training whose modules' modes are set ahead of each step."""
    model = make_model("olmoe", layers=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    settings = {"interval": INTERVAL, "lag": 1, "dense_gradients": "allreduce", "policy": "static", "guard": guard}
    balancer = eplb.attach(model, optimizer, config=config_from_settings(settings))
    model.train()
    with heard() as warned:
        for step in range(steps):
            modes(model, step)
            training.step(model, optimizer, batch_of(rank, step))
    found = [(event.step, event.finding) for event in balancer.events.of_type(GuardFinding)]
    balancer.close()
    return [f"step {step}: {finding}" for step, finding in found if finding in warned]


def one_layer_late(model: nn.Module, step: int) -> None:
    """From the second step of an interval on; later another layer, too."""
    if step >= 4:
        model.model.layers[1].eval()
    if step >= 9:
        model.model.layers[2].eval()


def most_layers(model: nn.Module, step: int) -> None:
    for layer in model.model.layers[1:]:
        layer.mlp.experts.eval()


def without_the_experts(model: nn.Module, step: int) -> None:
    """Frozen parts in evaluation mode: all but the experts modules."""
    model.eval()
    for layer in model.model.layers:
        layer.mlp.experts.train()


def between_steps(model: nn.Module, step: int) -> None:
    model.eval()
    with torch.no_grad():
        model(input_ids=batch_of(0, step))
    model.train()


EVALUATED: dict[str, Callable[[int], list[str]]] = {
    "one layer, late": lambda rank: trained(rank, one_layer_late, steps=13),
    "no guard": lambda rank: trained(rank, most_layers, "off"),
    "whole model": lambda rank: trained(rank, lambda model, step: model.eval() and None),
    "without the experts": lambda rank: trained(rank, without_the_experts),
    "evaluations between steps": lambda rank: trained(rank, between_steps),
}


def all_evaluated(rank: int) -> dict[str, list[str]]:
    return {name: run(rank) for name, run in EVALUATED.items()}


@pytest.fixture(scope="module")
def of_evaluated() -> list[dict[str, list[str]]]:
    return run_ranks(2, all_evaluated)


def about_layers(found: list[str]) -> list[str]:
    return [line for line in found if "MoE layers in evaluation mode, while others train" in line]


def test_a_layer_is_named_once_at_the_next_decision(of_evaluated: list[dict[str, list[str]]]) -> None:
    first, second = about_layers(of_evaluated[0]["one layer, late"])
    assert first.startswith("step 6: ")
    assert first.endswith(": model.layers.1.mlp.experts") and "\n" not in first
    assert "step 6: call train() on the whole model" in first
    assert second.startswith("step 12: ") and second.endswith(": model.layers.1.mlp.experts and 1 more")
    assert of_evaluated[1]["one layer, late"] == [], "one rank says it for all that hold the layer"


@pytest.mark.parametrize("name", ["whole model", "without the experts", "evaluations between steps", "no guard"])
def test_other_uses_of_evaluation_mode_say_nothing_of_layers(
    of_evaluated: list[dict[str, list[str]]], name: str
) -> None:
    for result in of_evaluated:
        assert about_layers(result[name]) == []
        assert name != "evaluations between steps" or result[name] == []
    said = [line for line in of_evaluated[0][name] if "no token was counted" in line]
    assert bool(said) == (name == "whole model"), "which has a finding of its own"
