"""Loops on Transformers' OLMoE whose gradients, ranks or optimizers are wrong."""

from __future__ import annotations

import tempfile
from typing import Any

import optimizers
import torch
import torch.distributed as dist
from job import Job, Table, in_ddp, with_penalty
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

CASES = Table()
found = CASES.found


# -- clipping ----------------------------------------------------------------------------------------------------------


@found("either")
def clip_by_torch(job: Job) -> None:
    """each rank clips by the norm of its own gradients"""
    job.before_step = lambda step: clip_grad_norm_(job.model.parameters(), 0.05)


@found("either")
def clip_by_torch_late(job: Job) -> None:
    """the same, from step 5"""
    job.before_step = job.from_step(5, lambda: clip_grad_norm_(job.model.parameters(), 0.05))


@found("either")
def clip_by_torch_reduced(job: Job) -> None:
    """each rank clips reduced gradients by the norm of its own"""

    def clip(step: int) -> None:
        job.balancer.reduce_gradients()
        clip_grad_norm_(job.model.parameters(), 0.05)

    job.before_step = clip


@found("either")
def clip_by_torch_ddp(job: Job) -> None:
    """each rank clips by the norm of its own gradients, beside DistributedDataParallel, from step 5"""
    in_ddp(job)
    clip_by_torch_late(job)


@found("either")
def clip_each_tensor(job: Job) -> None:
    """each tensor of experts is clipped by the norm of the rows that a rank holds"""

    def clip(step: int) -> None:
        job.balancer.reduce_gradients()
        for parameter in job.experts().values():
            clip_grad_norm_([parameter], 1e-3)

    job.before_step = clip


@found("either")
def clip_one_rank_late(job: Job) -> None:
    """one rank alone clips, in two calls, from step 5"""

    def clip() -> None:
        job.balancer.reduce_gradients()
        norm = nn.utils.get_total_norm([p.grad for p in job.model.parameters()])
        nn.utils.clip_grads_with_norm_(job.model.parameters(), 1e9 if job.rank else 0.05, norm)

    job.before_step = job.from_step(5, clip)


@found("either")
def clip_in_a_hook(job: Job) -> None:
    """a hook of the optimizer clips by each rank's norm, from step 5"""
    steps = iter(range(1, 10**6))

    def clip(*_: Any) -> None:
        if next(steps) >= 5:
            clip_grad_norm_(job.model.parameters(), 0.05)

    job.after_attach = lambda: job.optimizer.register_step_pre_hook(clip)


@found("either")
def clip_value_early(job: Job) -> None:
    """gradients are clipped by value before they are averaged"""
    job.before_step = lambda step: clip_grad_value_(job.model.parameters(), 1e-4)


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


@found("either")
def penalty_that_couples_late(job: Job) -> None:
    """the same, from step 5"""
    seen = iter(range(1, 10**6))
    with_penalty(job, lambda: (next(seen) >= 5) * sum(p.flatten(1).norm(dim=1).var() for p in job.experts().values()))


@found("either")
def no_averaging(job: Job) -> None:
    """nobody averages the gradients outside the experts"""
    job.settings["dense_gradients"] = "host"


def average_all(job: Job) -> None:
    for parameter in job.model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@found("either")
def all_averaged(job: Job) -> None:
    """the loop averages every gradient, those of the experts, too"""
    job.before_step = lambda step: average_all(job)


@found("either")
def all_averaged_late(job: Job) -> None:
    """the same, from step 5"""
    job.before_step = job.from_step(5, lambda: average_all(job))


@found("either")
@torch.no_grad()
def all_averaged_equal_experts(job: Job) -> None:
    """the same, with experts that are all equal at first"""
    for parameter in job.experts().values():
        parameter.copy_(parameter[:1].clone().expand_as(parameter))
    all_averaged(job)


@found("either")
def averaged_by_tokens(job: Job) -> None:
    """the loop weighs ranks by their tokens where it averages, and the experts' gradients are not"""
    job.settings["dense_gradients"] = "host"

    def average(step: int) -> None:
        experts = set(map(id, job.experts().values()))
        for parameter in job.model.parameters():
            if id(parameter) not in experts:
                parameter.grad *= (0.5, 0.495)[job.rank]
                dist.all_reduce(parameter.grad)

    job.before_step = average


@found("live")
def ddp_around_a_wrapper(job: Job) -> None:
    """DistributedDataParallel around another module, whose names it does not know"""
    job.settings["dense_gradients"] = "host"

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = job.model

        def forward(self, **batch: Tensor) -> Any:
            return self.inner(**batch)

    job.after_attach = lambda: setattr(job, "trained", DistributedDataParallel(Wrapper()))


@found("live")
def gradient_penalty(job: Job) -> None:
    """gradients of gradients"""

    def loss(ids: Tensor) -> Tensor:
        embedded = job.model.get_input_embeddings()(ids)
        of_batch = job.model(inputs_embeds=embedded, labels=ids).loss
        (gradient,) = torch.autograd.grad(of_batch, embedded, create_graph=True)
        return of_batch + gradient.square().sum()

    job.loss = loss


@found("live")
def rebalance_inside_a_step(job: Job) -> None:
    """experts are moved between a forward and its backward pass"""
    job.backward = lambda loss: (job.balancer.rebalance(), loss.backward())


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


@found("live")
def gradients_of_grad(job: Job) -> None:
    """experts' gradients by torch.autograd.grad, beside replicas"""
    job.settings["replica_slots"] = 1

    def backward(loss: Tensor) -> None:
        parameters = list(job.model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient

    job.backward = backward


@found("either")
def hook_on_gradients(job: Job) -> None:
    """a hook scales the gradient of experts by its norm over the rows that a rank holds"""
    job.after_attach = lambda: [p.register_hook(lambda g: g / (1 + 100 * g.norm())) for p in job.experts().values()]


# -- ranks that differ -------------------------------------------------------------------------------------------------


@found("either")
def one_rank_freezes(job: Job) -> None:
    """one rank freezes its experts of a layer"""
    job.after_attach = lambda: [p.requires_grad_(job.rank == 0) for n, p in job.experts().items() if "layers.1" in n]


@found("live")
def unfrozen_after_attach(job: Job) -> None:
    """experts that were frozen at attach are trained, in no optimizer"""
    frozen = [p.requires_grad_(False) for n, p in job.experts().items() if "layers.1" in n]
    trained = [p for p in job.model.parameters() if all(p is not one for one in frozen)]
    job.make_optimizers = lambda model: [torch.optim.AdamW(trained, lr=3e-3)]
    job.after_attach = lambda: [p.requires_grad_(True) for p in job.experts().values()]


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


@found("either")
@torch.no_grad()
def written_on_one_rank(job: Job) -> None:
    """a weight outside the experts is written on one rank alone, in step 5"""

    @torch.no_grad()
    def write(step: int) -> None:
        if step == 4 and job.rank == 1:
            job.model.lm_head.weight[-1, -1] += 1e-3

    job.before_step = write


@found("either")
def broadcast_after_evaluation(job: Job) -> None:
    """weights of rank 0 are broadcast to all after an evaluation"""

    @torch.no_grad()
    def evaluate(step: int) -> None:
        if step == 5:
            job.model.eval()(input_ids=job.batch(100))
            job.model.train()
            for parameter in job.model.parameters():
                dist.broadcast(parameter, 0)

    job.after_step = evaluate


@found("live")
def evaluation_mode(job: Job) -> None:
    """training in evaluation mode: no load is counted"""
    job.after_attach = lambda: job.model.eval()


@found("live")
def evaluation_mode_late(job: Job) -> None:
    """the same, in one late step"""
    job.after_step = lambda step: job.model.train(step != 5)


@found("live")
def saved_by_one_rank(job: Job) -> None:
    """one rank alone saves, which is collective"""
    job.settings["timeout_seconds"] = 5.0
    job.after_step = lambda step: step == 3 and job.rank == 0 and job.model.save_pretrained(tempfile.mkdtemp())


# -- optimizers --------------------------------------------------------------------------------------------------------


def stepped_by(job: Job, kind: Any, **options: Any) -> None:
    job.make_optimizers = lambda model: [kind(model.parameters(), **options)]


@found("live")
def adafactor(job: Job) -> None:
    """an optimizer that scales by norms over all experts of a tensor"""
    stepped_by(job, torch.optim.Adafactor)


@found("live")
def zero_redundancy(job: Job) -> None:
    """an optimizer that steps a part on each rank"""
    stepped_by(job, ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)


@found("either")
def mixes_late(job: Job) -> None:
    """an optimizer that scales by norms over a rank's experts, from step 5"""
    stepped_by(job, optimizers.TrustRatio, begins=5)


@found("either")
def mixes_between_decisions(job: Job) -> None:
    """the same, in no step that ends in a decision"""
    stepped_by(job, optimizers.TrustRatioInOddSteps, begins=5)


@found("either")
def clips_inside_late(job: Job) -> None:
    """an optimizer that clips each tensor by its norm, from step 5"""
    stepped_by(job, optimizers.ClipsInside, begins=5)


@found("either")
def mixes_on_one_rank(job: Job) -> None:
    """an optimizer that scales by norms over experts on one rank alone, from step 5"""
    stepped_by(job, optimizers.TrustRatio, begins=5 if job.rank else 10**6)


@found("either")
def numbers_in_state(job: Job) -> None:
    """an optimizer keeps a plain number for each expert"""
    stepped_by(job, optimizers.StepSizes)


@found("either")
def objects_in_state(job: Job) -> None:
    """an optimizer keeps momentum in objects"""
    stepped_by(job, optimizers.MomentumInObject)


@found("either")
def objects_in_state_late(job: Job) -> None:
    """the same, from step 5"""
    stepped_by(job, optimizers.MomentumInObject, begins=5)


@found("either")
def lists_in_state(job: Job) -> None:
    """an optimizer keeps momentum in lists"""
    stepped_by(job, optimizers.MomentumInList)


@found("either")
def arrays_in_state(job: Job) -> None:
    """an optimizer keeps momentum in numpy's arrays"""
    stepped_by(job, optimizers.MomentumInArray)


@found("either")
def state_in_attribute(job: Job) -> None:
    """an optimizer keeps momentum in an attribute, from step 5"""
    stepped_by(job, optimizers.MomentumInAttribute, begins=5)


@found("either")
def state_in_closure(job: Job) -> None:
    """an optimizer keeps momentum where a function alone has it"""
    stepped_by(job, optimizers.MomentumInClosure)


@found("verify")
def writes_nothing(job: Job) -> None:
    """an optimizer steps weights of its own, which the model never reads"""
    stepped_by(job, optimizers.WritesNothing)


@found("live")
def unknown_optimizer(job: Job) -> None:
    """another optimizer than the attached one steps the model"""

    def replace() -> None:
        job.optimizers = [torch.optim.AdamW(job.model.parameters(), lr=3e-3)]

    job.after_attach = replace


@found("live")
def unknown_second_optimizer(job: Job) -> None:
    """a second optimizer, made after attach, steps the head once more"""
    job.after_attach = lambda: job.optimizers.append(torch.optim.SGD([job.model.lm_head.weight], lr=0.1))


@found("either")
@torch.no_grad()
def scaled_by_norm_late(job: Job) -> None:
    """weights of experts are scaled to a norm, which is over a rank's rows, after step 5"""

    @torch.no_grad()
    def scale(step: int) -> None:
        for parameter in job.experts().values() if step == 4 else ():
            parameter.mul_(2 / parameter.norm())

    job.after_step = scale
