"""Gradients of experts with copies, in the backward passes that are not the plain one: right, or refused in one line.

Right is what the same ranks compute without copies, to the rounding of float64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from torch import Tensor, nn

import eplb_runtime as eplb

EXPERTS = 8


def copied(slots: int) -> eplb.Placement:
    """Each rank holds copies of the other's first experts."""
    plain = eplb.Placement.initial(2, EXPERTS, 2, slots)
    map_ = np.array(plain.physical_to_logical).reshape(2, 2, -1)
    for copy in range(slots):
        map_[:, 0, EXPERTS // 2 + copy], map_[:, 1, EXPERTS // 2 + copy] = EXPERTS // 2 + copy, copy
    return eplb.Placement(map_.reshape(2, -1), EXPERTS, 2, plain.home)


class Job:
    """An attached model in float64, with copies or without."""

    def __init__(self, rank: int, slots: int) -> None:
        self.rank = rank
        self.model = make_model("olmoe", experts=EXPERTS).double()
        self.model.set_experts_implementation("eager")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.experts = {n: p for n, p in self.model.named_parameters() if ".experts." in n}
        self.balancer = training.attach(
            self.model, self.optimizer, policy="static", replica_slots=slots, initial_placement=copied(slots)
        )
        self.model.train()
        self.experts = {n: p for n, p in self.model.named_parameters() if ".experts." in n}

    def loss(self, step: int) -> Tensor:
        ids = batch_of(self.rank, step)
        return self.model(input_ids=ids, labels=ids).loss

    def held_back(self, step: int) -> None:
        with self.balancer.no_sync():
            self.loss(step).backward()

    def gradients(self) -> dict[str, Tensor | None]:
        self.balancer.reduce_gradients()
        return {n: None if p.grad is None else p.grad.clone() for n, p in self.model.named_parameters()}


def one_backward_of_two_forwards(job: Job) -> None:
    job.held_back(5)
    with job.balancer.no_sync():
        (job.loss(0) + job.loss(1)).backward()


def inputs_named(job: Job) -> None:
    job.loss(0).backward(inputs=list(job.model.parameters()))


def inputs_without_experts(job: Job) -> None:
    job.loss(0).backward(inputs=[p for n, p in job.model.named_parameters() if n not in job.experts])


def gradient_of_embeddings(job: Job) -> None:
    ids = batch_of(job.rank, 0)
    embedded = job.model.get_input_embeddings()(ids).detach().requires_grad_()
    loss = job.model(inputs_embeds=embedded, labels=ids).loss
    (gradient,) = torch.autograd.grad(loss, [embedded])
    assert gradient.any() and all(p.grad is None for p in job.model.parameters())


def frozen_later(job: Job) -> None:
    """One tensor of the first layer, and all of the second, after a step."""
    first, second = (layer.mlp.experts for layer in job.model.model.layers)
    job.loss(0).backward()
    job.optimizer.step()
    job.optimizer.zero_grad()
    frozen = [first.down_proj, second.gate_up_proj, second.down_proj]
    before = [p.requires_grad_(False).clone() for p in frozen]
    for step in (1, 2):
        job.loss(step).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(frozen, before, strict=True))
    assert not any(p.numel() > q.numel() for p in optimizer_tensors(job.optimizer) for q in [biggest(job.model)])
    job.loss(3).backward()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return held + [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]


def biggest(model: nn.Module) -> Tensor:
    return max(model.parameters(), key=lambda p: p.numel())


RIGHT: list[Callable[[Job], None]] = [
    one_backward_of_two_forwards,
    inputs_named,
    inputs_without_experts,
    gradient_of_embeddings,
    frozen_later,
]


def differences(rank: int) -> dict:
    worst = {}
    for case in RIGHT:
        found = []
        for slots in (0, 2):
            job = Job(rank, slots)
            case(job)
            found.append(job.gradients())
            job.balancer.close()
        plain, copies = found
        assert {n for n in plain if plain[n] is None} == {n for n in copies if copies[n] is None}, case.__name__
        pairs = [(plain[n], copies[n]) for n in plain if plain[n] is not None]
        worst[case.__name__] = max((float((a - b).abs().max() / (a.abs().max() + 1e-9)) for a, b in pairs), default=0.0)
    return worst


def test_gradients_are_those_without_copies() -> None:
    for worst in run_ranks(2, differences):
        assert len(worst) == len(RIGHT) and max(worst.values()) < 1e-12, worst


def clipped_by_hand(job: Job) -> None:
    job.held_back(0)
    nn.utils.clip_grad_norm_(list(job.experts.values()), 1e-3)
    job.optimizer.step()


def scaled_between(job: Job) -> None:
    job.held_back(0)
    for parameter in job.experts.values():
        parameter.grad = parameter.grad * 0.5
    job.loss(1).backward()


def gradients_elsewhere(job: Job) -> None:
    torch.autograd.grad(job.loss(0), list(job.experts.values()))


def some_of_a_layer(job: Job) -> None:
    job.loss(0).backward(inputs=[next(iter(job.experts.values()))])


def moved_since_the_forward(job: Job) -> None:
    loss = job.loss(0)
    plain = eplb.Placement.initial(2, EXPERTS, 2, 2)
    job.balancer.load_state_dict({"step": 0, "placement": plain.to_json()})
    loss.backward()


def closed_since_the_forward(job: Job) -> None:
    """Nobody would bring the gradients of copies home."""
    loss = job.loss(0)
    job.balancer.close()
    loss.backward()


REFUSED: dict[Callable[[Job], None], str] = {
    moved_since_the_forward: "experts changed places, or copies ended, between a forward and its backward pass",
    closed_since_the_forward: "experts changed places, or copies ended, between a forward and its backward pass",
    clipped_by_hand: "call balancer.reduce_gradients() first",
    scaled_between: "call balancer.reduce_gradients() first",
    gradients_elsewhere: "come home in .grad alone; call backward()",
    some_of_a_layer: "name all of a layer",
}


def refusals(rank: int) -> dict[str, str]:
    said = {}
    for case in REFUSED:
        job = Job(rank, 2)
        with pytest.raises(RuntimeError) as refused:
            case(job)
        said[case.__name__] = str(refused.value)
        job.optimizer.zero_grad()
        job.loss(0).backward()  # goes on
        job.balancer.close()
    job = Job(rank, 0)
    for parameter, gradient in zip(
        job.experts.values(), torch.autograd.grad(job.loss(0), list(job.experts.values())), strict=True
    ):
        job.loss(0).backward(inputs=[parameter])
        assert torch.equal(parameter.grad, gradient), "without copies all is as torch has it"
    job.balancer.close()
    return said


def test_what_would_be_wrong_is_refused_in_one_line() -> None:
    for said in run_ranks(2, refusals):
        for case, expected in REFUSED.items():
            assert expected in said[case.__name__] and "\n" not in said[case.__name__]
