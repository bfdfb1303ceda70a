"""A gradient that reaches an expert past its layer (a penalty over all parameters, a second head) counts as it does in
one process: it is there on the expert's owners alone, and is not divided by the ranks whose tokens it never saw."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from flat_settings import config_from_settings
from moe_models import batch_of, make_model
from ranks import run_ranks
from torch import Tensor, nn

import eplb_runtime as eplb

EXPERTS = 8
WEIGHT = 0.5
TOLERANCE = 1e-11
"""Largest difference over largest value: the order of sums differs from one process to several."""


def whole(family: str = "olmoe") -> nn.Module:
    model = make_model(family, experts=EXPERTS).double()
    model.set_experts_implementation("eager")
    return model


def penalty(model: nn.Module, times: int) -> Tensor:
    return times * WEIGHT * sum(p.square().sum() for p in model.parameters())


def head(model: nn.Module, times: int) -> Tensor:
    """Something else that is computed with weights of experts, each by itself."""
    return times * WEIGHT * model.model.layers[0].mlp.experts.down_proj.sin().sum()


def in_the_loss(model: nn.Module, loss: Tensor, times: int) -> None:
    (loss + penalty(model, times)).backward()


def in_a_backward_of_its_own(model: nn.Module, loss: Tensor, times: int) -> None:
    loss.backward()
    penalty(model, times).backward()


def as_gradients_of_a_head(model: nn.Module, loss: Tensor, times: int) -> None:
    """As code does that adds what `torch.autograd.grad` gives it."""
    loss.backward()
    parameter = model.model.layers[0].mlp.experts.down_proj
    (gradient,) = torch.autograd.grad(head(model, times), [parameter])
    parameter.grad += gradient


def not_at_all(model: nn.Module, loss: Tensor, times: int) -> None:
    loss.backward()


WAYS = {
    "in the loss": in_the_loss,
    "apart": in_a_backward_of_its_own,
    "head": as_gradients_of_a_head,
    "not at all": not_at_all,
}


def expected(world_size: int) -> dict[str, dict[str, Tensor]]:
    """Gradients of the mean of the ranks' losses: of their sum, divided in float64, which the losses are not in."""
    found = {}
    for name, way in WAYS.items():
        model = whole()
        total = sum(model(input_ids=ids, labels=ids).loss for ids in map(batch_of, range(world_size), [0] * world_size))
        way(model, total, world_size)
        found[name] = {name: p.grad / world_size for name, p in model.named_parameters()}
    return found


def of_ranks(rank: int, ep: int, options: dict) -> dict[str, dict[str, Tensor]]:
    groups = [dist.new_group(list(range(first, first + ep))) for first in range(0, dist.get_world_size(), ep)]
    found = {}
    for name, way in WAYS.items():
        model = whole()
        # Momentum's buffer after the first step is the gradient.
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        settings = {"dense_gradients": "allreduce", "policy": "static", **options}
        if options.get("replica_slots"):
            settings["initial_placement"] = copied(ep)
        balancer = eplb.attach(model, optimizer, config=config_from_settings(settings), ep_group=groups[rank // ep])
        model.train()
        ids = batch_of(rank, 0)
        way(model, model(input_ids=ids, labels=ids).loss, 1)
        optimizer.step()
        state = eplb.logical_state_dict(model, optimizer)
        suffix = ".momentum_buffer"
        found[name] = {
            key.removeprefix("optimizer.").removesuffix(suffix): value for key, value in state.items() if suffix in key
        }
        balancer.close()
    return found


def copied(ranks: int) -> eplb.Placement:
    """Each rank holds a copy of an expert of the next one."""
    plain = eplb.Placement.initial(2, EXPERTS, ranks, 1)
    map_ = plain.physical_to_logical.reshape(2, ranks, -1).copy()
    for rank in range(ranks):
        map_[:, rank, -1] = (rank + 1) % ranks * (EXPERTS // ranks)
    return eplb.Placement(map_.reshape(2, -1), EXPERTS, ranks, plain.home)


@pytest.mark.parametrize(
    ("world_size", "ep", "options"),
    [
        (4, 2, {"replica_slots": 1, "split_least_tokens": 0}),
        (3, 1, {}),
    ],
    ids=["EP 2 x EDP 2, copies", "EDP 3"],
)
def test_what_reaches_experts_past_their_layer_counts_as_in_one_process(
    world_size: int, ep: int, options: dict
) -> None:
    right = expected(world_size)
    for found in run_ranks(world_size, of_ranks, ep, options):
        for way, gradients in right.items():
            assert found[way].keys() == gradients.keys()
            for name, gradient in gradients.items():
                off = (found[way][name] - gradient).abs().max() / gradient.abs().max()
                assert off <= TOLERANCE, f"{way}: {name} is off by {off:.2g}"
