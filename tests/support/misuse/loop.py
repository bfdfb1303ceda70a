"""A training loop on Transformers' OLMoE that is wrong, or right, in one thing:
``torchrun --nproc-per-node 2 tests/support/misuse/loop.py --case NAME`` (``--list`` has the names)."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import optimizers
import torch
import torch.distributed as dist
from job import Job, Table, clones, lerp, main, with_penalty
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from transformers import OlmoeConfig, OlmoeForCausalLM

import eplb_runtime as eplb

CASES = Table()
found, right = CASES.found, CASES.is_right


def make(options: argparse.Namespace) -> Job:
    """The right loop. Rows are a multiple of 128 bytes wide, in bfloat16, too."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = OlmoeConfig(**sizes, vocab_size=96, num_experts=8, num_experts_per_tok=2, pad_token_id=0, eos_token_id=1)
    model = OlmoeForCausalLM(config).to(getattr(torch, options.dtype))
    job = Job(options, model, loss=lambda ids: job.trained(input_ids=ids, labels=ids).loss)
    return job


# -- clipping ----------------------------------------------------------------------------------------------------------


@found("either")
def clip_by_torch_late(job: Job) -> None:
    """the same, from step 5"""
    job.before_step = job.from_step(5, lambda: clip_grad_norm_(job.model.parameters(), 0.05))


@found("either")
def scale_by_rank_once(job: Job) -> None:
    """each rank scales gradients by a factor of its own, in step 5 alone, past autograd's versions"""

    def scale(step: int) -> None:
        for parameter in job.model.parameters() if step == 4 else ():
            parameter.grad.data.mul_(0.5 + 0.25 * job.rank)

    job.before_step = scale


@found("either")
def scaler_of_torch(job: Job) -> None:
    """torch's GradScaler looks for overflows on each rank by itself"""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1)
    job.backward = lambda loss: scaler.scale(loss).backward()
    job.step = lambda: (scaler.step(job.optimizer), scaler.update())


# -- losses and gradients ----------------------------------------------------------------------------------------------


@found("either")
def penalty_that_couples(job: Job) -> None:
    """a penalty in the loss pulls the experts' norms together, over those that a rank holds"""
    with_penalty(job, lambda: sum(p.flatten(1).norm(dim=1).var() for p in job.experts().values()))


def average_all(job: Job) -> None:
    for parameter in job.model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@found("either")
def all_averaged_late(job: Job) -> None:
    """the same, from step 5"""
    job.before_step = job.from_step(5, lambda: average_all(job))


@found("verify")
def clip_what_attach_has_replaced(job: Job) -> None:
    """torch's clipping of a list of parameters from before attach, which has no gradients of experts any more"""
    parameters = list(job.model.parameters())
    job.before_step = lambda step: clip_grad_norm_(parameters, 0.1)


@found("verify")
def summed_by_the_loop(job: Job) -> None:
    """a loop that divides its loss by the number of ranks and sums the gradients that the balancer leaves to it"""
    job.settings["dense_gradients"] = "host"
    job.backward = lambda loss: (loss / dist.get_world_size()).backward()
    dense = lambda: [p for name, p in job.model.named_parameters() if ".experts." not in name]  # noqa: E731
    job.before_step = lambda step: [dist.all_reduce(p.grad) for p in dense()]


# -- ranks that differ -------------------------------------------------------------------------------------------------


@found("either")
def rates_by_rank(job: Job) -> None:
    """each rank lowers its learning rate by its own loss, from step 5"""

    def lower() -> None:
        job.optimizer.param_groups[0]["lr"] *= 0.9 if job.rank else 0.7

    job.before_step = job.from_step(5, lower)


@found("either")
def one_rank_skips(job: Job) -> None:
    """one rank skips an optimizer step"""
    job.settings["timeout_seconds"] = 5.0
    step, numbers = job.step, iter(range(10**6))
    job.step = lambda: step() if next(numbers) != 3 or job.rank == 0 else None


# -- optimizers --------------------------------------------------------------------------------------------------------


def stepped_by(job: Job, kind: Any, **options: Any) -> None:
    job.make_optimizers = lambda model: [kind(model.parameters(), **options)]


@found("either")
def mixes_late(job: Job) -> None:
    """an optimizer that scales by norms over a rank's experts, from step 5"""
    stepped_by(job, optimizers.TrustRatio, begins=5)


@found("either")
def state_in_closure(job: Job) -> None:
    """an optimizer keeps momentum where a function alone has it"""
    stepped_by(job, optimizers.MomentumInClosure)


@found("verify")
def writes_nothing(job: Job) -> None:
    """an optimizer steps weights of its own, which the model never reads"""
    stepped_by(job, optimizers.WritesNothing)


# -- what a loop keeps -------------------------------------------------------------------------------------------------


@found("verify")
def ema_in_generator(job: Job) -> None:
    """an average of weights in a generator that waits"""

    def averaging() -> Iterator[None]:
        kept = clones(job)
        while True:
            lerp(kept, job)
            yield

    average = averaging()
    job.after_step = lambda step: next(average)


@found("verify")
def ema_as_vector(job: Job) -> None:
    """an average of all weights in one vector"""
    kept: list[Tensor] = []

    def average(step: int) -> None:
        vector = parameters_to_vector(job.model.parameters()).detach()
        kept[:] = [kept[0].lerp(vector, 0.1) if kept else vector]

    job.after_step = average


@found("verify")
def ema_in_arrays(job: Job) -> None:
    """an average of weights in numpy's arrays"""
    kept: list[np.ndarray[Any, Any]] = []

    def average(step: int) -> None:
        now = [p.detach().float().numpy() for p in job.model.parameters()]
        kept[:] = [0.9 * a + 0.1 * b for a, b in zip(kept, now, strict=True)] if kept else [a.copy() for a in now]

    job.after_step = average


@found("either")
def lookahead(job: Job) -> None:
    """slow weights, in a list, to which the weights return every third step"""
    kept: list[Tensor] = []

    @torch.no_grad()
    def look(step: int) -> None:
        kept[:] = kept or [p.detach().clone() for p in job.model.parameters()]
        for slow, parameter in zip(kept, job.model.parameters(), strict=True):
            if step % 3 == 2:
                parameter.copy_(slow.lerp_(parameter, 0.5))

    job.after_step = look


@found("either")
def deep_copy(job: Job) -> None:
    """a copy of the model with cut experts, to which gradients pull"""
    eplb.shard_experts(job.model)
    reference = copy.deepcopy(job.model)

    def pull(step: int) -> None:
        job.balancer.reduce_gradients()
        for start, parameter in zip(reference.parameters(), job.model.parameters(), strict=True):
            parameter.grad.add_(parameter.detach() - start.detach(), alpha=0.1)

    job.before_step = pull


# -- weights that come from elsewhere ----------------------------------------------------------------------------------


@found("either")
def state_of_before(job: Job) -> None:
    """weights go back to a state dict of earlier steps, rows and all"""
    kept: dict[str, Any] = {}

    def save_or_load(step: int) -> None:
        if step == 3:
            kept.update({name: value.clone() for name, value in job.model.state_dict().items()})
        if step == 6:
            job.model.load_state_dict(kept, strict=False)

    job.after_step = save_or_load


@found("either")
def optimizer_state_of_before(job: Job) -> None:
    """the optimizer's state goes back to that of earlier steps, rows and all"""
    kept: list[Any] = []

    def save_or_load(step: int) -> None:
        if step == 3:
            kept.append(copy.deepcopy(job.optimizer.state_dict()))
        if step == 6:
            job.optimizer.load_state_dict(kept[0])

    job.after_step = save_or_load


# -- right -------------------------------------------------------------------------------------------------------------


@right
def averaged_by_the_loop(job: Job) -> None:
    """The loop averages the gradients that the balancer leaves to it."""
    job.settings["dense_gradients"] = "host"

    def average(step: int) -> None:
        for name, parameter in job.model.named_parameters():
            if ".experts." not in name:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    job.before_step = average


@right
def replicas(job: Job) -> None:
    """A replica slot on each rank."""
    job.settings["replica_slots"] = 1


@right
def overlap(job: Job) -> None:
    """Experts move while training goes on."""
    job.settings["overlap"] = True


@right
def penalty(job: Job) -> None:
    """A penalty on each expert by itself, in the loss."""
    with_penalty(job, lambda: 0.01 * sum(p.square().sum() for p in job.model.parameters()))


@right
def each_expert_clipped(job: Job) -> None:
    """Each expert is clipped by its own norm, and scaled after the step."""

    def clip(step: int) -> None:
        job.balancer.reduce_gradients()
        for parameter in job.experts().values():
            norms = parameter.grad.flatten(1).norm(dim=1)
            parameter.grad.mul_((1e-3 / (norms + 1e-6)).clamp(max=1).view(-1, 1, 1))

    @torch.no_grad()
    def scale(step: int) -> None:
        for parameter in job.experts().values():
            parameter.mul_(0.99)

    job.before_step, job.after_step = clip, scale


if __name__ == "__main__":
    main(make, CASES)
