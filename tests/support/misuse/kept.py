"""Loops on Transformers' OLMoE that keep weights by row, or set them from elsewhere."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job import Job, Table, clones, in_ddp, lerp, with_penalty
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel

import eplb_runtime as eplb

CASES = Table()
found = CASES.found


# -- what a loop keeps -------------------------------------------------------------------------------------------------


@found("verify")
def ema_in_dict(job: Job) -> None:
    """an average of weights in a dict"""
    kept: dict[str, Tensor] = {}
    job.after_attach = lambda: kept.update(clones(job))
    job.after_step = lambda step: lerp(kept, job)


@found("verify")
def ema_in_closure(job: Job) -> None:
    """an average of weights in variables of functions"""

    def averaging(parameter: Tensor) -> Callable[[], Tensor]:
        kept = parameter.detach().clone()
        return lambda: kept.lerp_(parameter.detach(), 0.1)

    averages: list[Callable[[], Tensor]] = []
    job.after_attach = lambda: averages.extend(averaging(p) for p in job.model.parameters())
    job.after_step = lambda step: [average() for average in averages]


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


@found("verify")
def ema_of_flat_experts(job: Job) -> None:
    """an average of each tensor of experts, flattened, in bfloat16"""
    kept: dict[str, Tensor] = {}

    def average(step: int) -> None:
        for name, parameter in job.experts().items():
            flat = parameter.detach().flatten().bfloat16()
            kept.setdefault(name, flat.clone()).lerp_(flat, 0.1)

    job.after_step = average


@found("verify")
def ema_of_each_expert(job: Job) -> None:
    """an average of each expert in a tensor of its own, by its row"""
    kept: dict[tuple[str, int], Tensor] = {}

    def average(step: int) -> None:
        for name, parameter in job.experts().items():
            for row, weights in enumerate(parameter.detach()):
                kept.setdefault((name, row), weights.clone()).lerp_(weights, 0.1)

    job.after_step = average


@found("verify")
def snapshots(job: Job) -> None:
    """the last four states of experts in tensors [4, E/R, ...]"""
    kept: dict[str, Tensor] = {}

    def keep(step: int) -> None:
        for name, parameter in job.experts().items():
            kept.setdefault(name, parameter.detach().new_zeros(4, *parameter.shape))[step % 4] = parameter.detach()

    job.after_step = keep


@found("verify")
def ema_in_file(job: Job) -> None:
    """an average of weights in a file, by row"""
    file = Path(tempfile.mkdtemp()) / "average.pt"

    def average(step: int) -> None:
        kept = torch.load(file) if file.exists() else clones(job)
        lerp(kept, job)
        torch.save(kept, file)
        if step % 4 == 3:
            job.model.load_state_dict(kept, strict=False)

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
def pull_to_start(job: Job) -> None:
    """gradients pull to the weights of the start, kept by row"""
    kept: list[Tensor] = []
    job.after_attach = lambda: kept.extend(clones(job).values())

    def pull(step: int) -> None:
        job.balancer.reduce_gradients()
        for start, parameter in zip(kept, job.model.parameters(), strict=True):
            parameter.grad.add_(parameter.detach() - start, alpha=0.1)

    job.before_step = pull


@found("either")
def masks(job: Job) -> None:
    """a mask [E/R, 1, 1] freezes the second expert of each rank"""

    def mask(step: int) -> None:
        job.balancer.reduce_gradients()
        for parameter in job.experts().values():
            rows = torch.arange(len(parameter)) != 1
            parameter.grad.mul_(rows.view(-1, 1, 1))

    job.before_step = mask


@found("either")
def buffers_under_ddp(job: Job) -> None:
    """weights of the start in buffers, which DistributedDataParallel sets to rank 0's in each forward"""
    in_ddp(job)
    wrap = job.after_attach

    def keep() -> None:
        for number, parameter in enumerate(job.experts().values()):
            job.model.register_buffer(f"start_{number}", parameter.detach().clone())
        wrap()

    job.after_attach = keep
    starts = lambda: [value for name, value in job.model.named_buffers() if name.startswith("start_")]  # noqa: E731
    distances = lambda: [(p - b).square().sum() for p, b in zip(job.experts().values(), starts(), strict=True)]  # noqa: E731
    with_penalty(job, lambda: 0.01 * sum(distances()))


@found("either")
def averaged_model(job: Job) -> None:
    """torch's AveragedModel of a model whose experts are cut already"""
    eplb.shard_experts(job.model)
    average = AveragedModel(job.model)
    job.after_step = lambda step: average.update_parameters(job.model)


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


@found("live")
def copied_after_attach(job: Job) -> None:
    """a deep copy of the attached model"""
    job.after_attach = lambda: copy.deepcopy(job.model)


@found("either")
def parameters_of_before(job: Job) -> None:
    """an average of parameters in a list from before attach, which nobody trains any more"""
    parameters = list(job.model.parameters())
    kept = [p.detach().clone() for p in parameters]
    job.after_step = lambda step: [a.lerp_(p.detach(), 0.1) for a, p in zip(kept, parameters, strict=True)]


@found("either")
def in_a_group(job: Job) -> None:
    """weights of the start among the options of the optimizer's group"""

    def keep() -> None:
        job.optimizer.param_groups[0]["start"] = [p.detach().clone() for p in job.experts().values()]

    job.after_attach = keep


# -- weights that come from elsewhere ----------------------------------------------------------------------------------


def on_all(job: Job) -> str:
    folder = [tempfile.mkdtemp() if job.rank == 0 else None]
    dist.broadcast_object_list(folder)
    return str(folder[0])


@found("either")
def dcp_load(job: Job) -> None:
    """torch's distributed checkpoint of plain rows, which all ranks hold under one name, loaded into the live model"""
    folder = on_all(job)

    def save_or_load(step: int) -> None:
        if step == 3:
            dcp.save({"model": job.model.state_dict()}, checkpoint_id=folder)
        if step == 6:
            dcp.load({"model": job.model.state_dict()}, checkpoint_id=folder)

    job.after_step = save_or_load


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


@found("live")
def state_of_other_rank(job: Job) -> None:
    """every rank loads the file of rank 0"""
    folder = on_all(job)

    def save_and_load(step: int) -> None:
        if step == 3:
            if job.rank == 0:
                torch.save(job.model.state_dict(), Path(folder) / "model.pt")
            dist.barrier()
            job.model.load_state_dict(torch.load(Path(folder) / "model.pt"))

    job.after_step = save_and_load


@found("live")
def other_memory(job: Job) -> None:
    """parameters get other memory beside replicas"""
    job.settings["replica_slots"] = 1

    def replace(step: int) -> None:
        for parameter in job.model.parameters() if step == 3 else ():
            parameter.data = parameter.data.clone()

    job.after_step = replace


@found("either")
def written_beside_replicas(job: Job) -> None:
    """experts are halved beside replicas, and nobody says so"""
    job.settings["replica_slots"] = 1

    @torch.no_grad()
    def halve(step: int) -> None:
        for parameter in job.experts().values() if step == 5 else ():
            parameter.mul_(0.5)

    job.after_step = halve


@found("live")
def sharded_after_attach(job: Job) -> None:
    """fully_shard after attach"""
    job.settings["dense_gradients"] = "host"
    job.after_attach = lambda: [fully_shard(layer) for layer in [*job.model.model.layers, job.model]]


@found("live")
def replaced_parameter(job: Job) -> None:
    """a parameter of experts is replaced after attach"""

    def replace() -> None:
        experts = job.model.model.layers[1].mlp.experts
        experts.down_proj = nn.Parameter(experts.down_proj.detach().clone())

    job.after_attach = replace


@found("live")
def hook_before_attach(job: Job) -> None:
    """a gradient hook on experts, which attach replaces"""
    job.model.model.layers[1].mlp.experts.down_proj.register_hook(lambda gradient: gradient / 2)


@found("live")
def adapter_after_attach(job: Job) -> None:
    """an adapter that is put beside the head after attach, and no optimizer trains"""

    def adapt() -> None:
        job.model.lm_head.adapter = nn.Linear(64, 96, bias=False)
        job.model.lm_head.register_forward_hook(lambda module, args, out: out + module.adapter(args[0]))

    job.after_attach = adapt
