"""A training loop on Transformers' OLMoE that is wrong, or right, in one thing:
``torchrun --nproc-per-node 2 tests/support/misuse/loop.py --case NAME`` (``--list`` has the names)."""

from __future__ import annotations

import argparse
from typing import Any

import gradients
import kept
import torch
import torch.distributed as dist
from job import Job, Table, clones, in_ddp, lerp, main, with_penalty
from torch import Tensor, nn
from transformers import OlmoeConfig, OlmoeForCausalLM

import eplb_runtime as eplb

CASES = Table(gradients.CASES.wrong | kept.CASES.wrong)
right = CASES.is_right


def make(options: argparse.Namespace) -> Job:
    """The right loop. Rows are a multiple of 128 bytes wide, in bfloat16, too."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = OlmoeConfig(**sizes, vocab_size=96, num_experts=8, num_experts_per_tok=2, pad_token_id=0, eos_token_id=1)
    model = OlmoeForCausalLM(config).to(getattr(torch, options.dtype))
    job = Job(options, model, loss=lambda ids: job.trained(input_ids=ids, labels=ids).loss)
    return job


@right
def plain(job: Job) -> None:
    """As it is."""


@right
def ddp(job: Job) -> None:
    """In DistributedDataParallel, clipped by the balancer."""
    in_ddp(job)
    job.before_step = lambda step: job.balancer.clip_grad_norm_(0.05)


@right
def parameters_kept(job: Job) -> None:
    """A list of parameters from before attach, which nobody uses."""
    parameters = list(job.model.parameters())
    job.after_step = lambda step: len(parameters)


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
def accumulation(job: Job) -> None:
    """Two micro-batches a step, the first under ``no_sync``; clipped by the balancer."""
    of_batch, first = job.loss, iter(range(1000, 10**6))

    def loss(ids: Tensor) -> Tensor:
        with job.balancer.no_sync():
            (of_batch(job.batch(next(first))) / 2).backward()
        return of_batch(ids) / 2

    job.loss = loss
    job.before_step = lambda step: job.balancer.clip_grad_norm_(0.05)


@right
def scaler(job: Job) -> None:
    """`eplb_runtime.GradScaler`, whose first scale overflows."""
    made: list[Any] = []
    job.after_attach = lambda: made.append(eplb.GradScaler(job.balancer, init_scale=2.0**126))
    job.backward = lambda loss: made[0].scale(loss).backward()
    job.step = lambda: (made[0].step(job.optimizer), made[0].update())


@right
def lora(job: Job) -> None:
    """PEFT's LoRA on the experts' matrices and on attention."""
    from peft import LoraConfig, get_peft_model

    targets = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    job.model = get_peft_model(job.model, LoraConfig(r=32, init_lora_weights=False, **targets))
    trained = lambda model: [p for p in model.parameters() if p.requires_grad]  # noqa: E731
    job.make_optimizers = lambda model: [torch.optim.AdamW(trained(model), lr=3e-3)]


@right
def activation_checkpointing(job: Job) -> None:
    """Each layer is computed again in the backward pass."""
    job.model.gradient_checkpointing_enable({"use_reentrant": False})


@right
def two_optimizers(job: Job) -> None:
    """Experts by AdamW, the rest by gradient descent with momentum."""

    def both(model: nn.Module) -> list[torch.optim.Optimizer]:
        experts = list(job.experts().values())
        rest = [p for name, p in model.named_parameters() if ".experts." not in name]
        return [torch.optim.AdamW(experts, lr=3e-3), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]

    job.make_optimizers = both


@right
def scheduler(job: Job) -> None:
    """A learning rate that warms up and falls."""
    made: list[Any] = []
    job.after_attach = lambda: made.append(
        torch.optim.lr_scheduler.OneCycleLR(job.optimizer, max_lr=1e-2, total_steps=job.options.steps + 1)
    )
    job.after_step = lambda step: made[0].step()


@right
def bfloat16(job: Job) -> None:
    """The model in bfloat16."""
    job.model.bfloat16()


@right
def replicas(job: Job) -> None:
    """A replica slot on each rank."""
    job.settings["replica_slots"] = 1


@right
def overlap(job: Job) -> None:
    """Experts move while training goes on."""
    job.settings["overlap"] = True


@right
def ema_registered(job: Job) -> None:
    """An average of weights that moves with the experts."""
    average: dict[str, Tensor] = {}

    def register() -> None:
        average.update(clones(job))
        job.balancer.register_all("average", average)

    job.after_attach = register
    job.after_step = lambda step: lerp(average, job)


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
