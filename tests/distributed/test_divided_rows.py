"""A host that divides whole experts over the ranks that hold the same ones, as torchtitan's FSDP does: homes that move,
copies beside them, and several replicas of the model. Training is training in one process without us."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.job import Job, Run, alone
from support.ranks import run_ranks
from support.seen import assert_refused, furthest, same
from support.shuffle import plan_by, plan_shuffle
from support.training import config_from_settings
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import eplb_runtime as eplb
from eplb_runtime.distributed.ranks import Ranks
from eplb_runtime.events import RebalanceCommitted
from eplb_runtime.hosts.attaching.attach import attach_stages
from eplb_runtime.hosts.attaching.description import Described, HostModel, MoELayer, ShardingMark, Stage, mark_spread
from eplb_runtime.moe.experts.compute import SlotCounts

pytestmark = pytest.mark.long

RANKS, EXPERTS, WIDTH, INNER, TOKENS, LAYERS, STEPS, CLIP = 4, 8, 6, 4, 40, 2, 4, 0.1


def through_experts(rows_MD: Tensor, counts_S: SlotCounts, parameters: Sequence[Tensor]) -> Tensor:
    rows = rows_MD.split(list(counts_S.known()))
    return torch.cat([(r @ up).tanh() @ down + b for r, up, down, b in zip(rows, *parameters, strict=True)])


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = {"up": (WIDTH, INNER), "down": (INNER, WIDTH), "bias": (WIDTH,)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(0.5 * torch.randn(EXPERTS, *shape)))
        self.layer: Any = None

    def forward(self, tokens_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if self.layer is not None:
            return self.layer(tokens_TD, ids_TK, weights_TK)
        order = ids_TK.reshape(-1).argsort(stable=True)
        rows = tokens_TD.repeat_interleave(ids_TK.shape[1], dim=0)[order]
        counts = SlotCounts.of(ids_TK.reshape(-1).bincount(minlength=EXPERTS).tolist(), rows.device)
        out = torch.empty_like(rows).index_copy(0, order, through_experts(rows, counts, list(self.parameters())))
        return (out.view(*ids_TK.shape, WIDTH) * weights_TK.unsqueeze(-1)).sum(dim=1)


class Model(nn.Module):
    def __init__(self, _: Job) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.routers = nn.ModuleList(nn.Linear(WIDTH, EXPERTS) for _ in range(LAYERS))
        self.experts = nn.ModuleList(Experts() for _ in range(LAYERS))
        self.to(torch.float64)

    def forward(self, tokens_TD: Tensor) -> Tensor:
        for router, experts in zip(self.routers, self.experts, strict=True):
            weights_TK, ids_TK = router(tokens_TD).softmax(-1).topk(2)
            tokens_TD = tokens_TD + experts(tokens_TD, ids_TK, weights_TK)
        return tokens_TD.square().sum() / TOKENS


def batch_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64) + torch.arange(WIDTH) % 3


def loss_of(model: Model, batch: Tensor) -> Tensor:
    return model(batch)


def share_of_loss(model: Model, batch: Tensor) -> Tensor:
    """For gradients that are summed over ranks."""
    return model(batch) / RANKS


ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
JOB = Job(model=Model, loss=loss_of, optimizer=ADAMW, batches=batch_of, clip=CLIP)


def divided(model: Model, mesh: DeviceMesh, everyone: DeviceMesh) -> None:
    """As torchtitan has it: experts over EP, and these, whole ones, over FSDP's ranks; nothing divides gradients."""
    for experts in model.experts:
        for name, parameter in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh["ep"], [Shard(0)])))
        fully_shard(experts, mesh=mesh["replica", "part"] if mesh["replica"].size() > 1 else mesh["part"])
    fully_shard(model, mesh=everyone)
    for part in (model, *model.experts):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def described(name: str, experts: Experts, ep_ranks: tuple[int, ...]) -> MoELayer:
    mark_spread(experts, ShardingMark(EXPERTS // len(ep_ranks), "", ep_ranks))
    names = tuple(own for own, _ in experts.named_parameters())

    def standing() -> list[Tensor]:
        return [getattr(experts, own).to_local() for own in names]

    def install(layer: Any) -> None:
        experts.layer = layer

    return MoELayer(name, experts, EXPERTS, names, through_experts, install, standing)


RUN = str(Path(tempfile.gettempdir()) / f"divided-rows-{os.getppid()}")
"""Rank 0 alone writes down what experts are: a row of a DTensor would be a collective that nobody joins."""


class Divided(Run):
    """EP 2.

    Args:
        parts: over how many ranks the homes of an EP rank are divided; the others have the same once more.
    """

    def __init__(self, rank: int, parts: int, replica_slots: int) -> None:
        super().__init__(rank, replace(JOB, loss=share_of_loss))
        shape = (RANKS // 2 // parts, parts, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "part", "ep"))
        divided(self.model, mesh, init_device_mesh("cpu", (RANKS,)))
        self.optimizer = ADAMW(self.model.parameters())
        ep_ranks = tuple(mesh["ep"].mesh.tolist())
        experts = enumerate(self.model.experts)
        layers = tuple(described(f"experts.{number}", one, ep_ranks) for number, one in experts)
        host = HostModel(layers)
        config = config_from_settings(
            {"interval": 1, "gate": "always", "lag": 0, "replica_slots": replica_slots, "run": RUN}
        )
        ranks = Ranks(ep=ep_ranks, gradient_divisor=1, divided_rows=parts)
        job = Described([Stage(0, self.model, host)], [self.optimizer], config, ranks, torch.device("cpu"))
        self.balancer = attach_stages(job)
        self.clip = self.balancer.clip_grad_norm_
        plan_by(self.balancer, plan_shuffle)


def distance(rank: int, whole: Run, parts: int, replica_slots: int) -> float:
    run = Divided(rank, parts, replica_slots).train(STEPS - 1)
    model, balancer = run.model, run.balancer
    copies = int((balancer.placement.copy_count > 1).sum())
    run.step()
    assert (copies >= LAYERS) == bool(replica_slots)
    assert min(run.norms) > CLIP, "clipping was not active"
    weights = {}
    for name, parameter in model.named_parameters():
        layer = balancer.layer_of_parameter.get(name)
        weights[name] = parameter.full_tensor() if layer is None else balancer.gather_experts(layer, parameter)
    stream = {name: tensor.clone() for name, tensor in balancer.named_logical_tensors(bucket_bytes=10_000)}
    assert same(stream, weights) and "equal to the model's" in balancer.verify_export(stream)
    moved = sum(event.moved_experts for event in balancer.events.of_type(RebalanceCommitted))
    assert moved >= STEPS * LAYERS * EXPERTS / 2
    balancer.close()
    off = [abs(a - b) / b for a, b in zip(run.norms, whole.norms, strict=True)]
    return max(*off, furthest(weights, dict(whole.model.named_parameters())))


RIGHT = {
    "homes": (2, 0),
    "homes, replicas of the model": (1, 0),
    "kept": (2, 1),
    "kept, replicas of the model": (1, 1),
    "two slots": (2, 2),
}
"""Parts, and replica slots of a rank."""


def odd_width() -> None:
    global WIDTH
    WIDTH, before = 7, WIDTH
    try:
        Divided(0, 2, 1)
    finally:
        WIDTH = before


def no_whole_sets() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replica", "part", "ep"))
    ranks = Ranks(ep=tuple(mesh["ep"].mesh.tolist()), gradient_divisor=1, divided_rows=3)
    host = HostModel(())
    stage = Stage(0, nn.Linear(2, 2), host)
    attach_stages(Described([stage], [], eplb.BalancerConfig(), ranks, torch.device("cpu")))


def train_all(rank: int) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    whole = alone(JOB, RANKS).train(STEPS)
    found = {name: distance(rank, whole, *ways) for name, ways in RIGHT.items()}
    assert_refused({"copies cannot be cut into 2 slices along dimension 1": odd_width})
    assert_refused({"are divided over 3 ranks, and 2 hold the same ones": no_whole_sets})
    return found


def test_training_is_training_in_one_process_and_what_cannot_be_divided_is_refused() -> None:
    for found in run_ranks(RANKS, train_all):
        assert {name: off for name, off in found.items() if not off < 1e-11} == {}
