"""Models of the user's own: named layers, lists of experts or stacked tensors, against the same model without us."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from examples import load_example
from flat_settings import config_from_settings
from ranks import run_ranks
from support.shuffle import plan_by, plan_shuffle
from torch import Tensor, nn
from torch.nn import functional

import eplb_runtime as eplb
from eplb_runtime.hosts import AttachError
from eplb_runtime.moe.experts.compute import SlotCounts
from eplb_runtime.planner.shuffle import shuffled

STEPS = 8


def example() -> ModuleType:
    return load_example("any_module")


def config(**options: object) -> eplb.BalancerConfig:
    return config_from_settings({"interval": 3, "gate": "always", "dense_gradients": "allreduce", **options})


class StackedLayer(nn.Module):
    """The example's layer with its experts in tensors of its own and its tokens ``[1, T, D]``."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self.router = like.router
        self.experts = nn.Module()
        for key in ("0.weight", "0.bias", "2.weight", "2.bias"):
            stacked = torch.stack([dict(expert.named_parameters())[key].detach() for expert in like.experts])
            name = {"0": "up", "2": "down"}[key[0]] + "_" + key[2:]
            self.experts.register_parameter(name, nn.Parameter(stacked))

    def forward(self, tokens: Tensor) -> Tensor:
        weights, ids = self.router(tokens).softmax(-1).topk(example().TOP_K)
        batch = {"probabilities": weights, "tokens": tokens, "ids": ids.int()}
        return tokens + self.mix(**{name: tensor.unsqueeze(0) for name, tensor in batch.items()}).squeeze(0)

    def mix(self, tokens: Tensor, ids: Tensor, probabilities: Tensor) -> Tensor:
        raise AssertionError("replaced")


def compute(rows: Tensor, counts: SlotCounts, weights: Mapping[str, Tensor]) -> Tensor:
    results = []
    for slot, mine in enumerate(rows.split(list(counts.known()))):
        up = functional.gelu(functional.linear(mine, weights["up_weight"][slot], weights["up_bias"][slot]))
        results.append(functional.linear(up, weights["down_weight"][slot], weights["down_bias"][slot]))
    return torch.cat(results)


def compute_aligned(rows: Tensor, counts: SlotCounts, weights: Mapping[str, Tensor]) -> Tensor:
    known = counts.known()
    assert sum(known) == len(rows) and not any(count % 16 for count in known)
    return compute(rows, counts, weights)


def compute_whole(rows: Tensor, counts: SlotCounts, weights: Mapping[str, Tensor]) -> Tensor:
    """By products of whole tensors, whose casts autocast keeps."""
    known = counts.known()
    padded = nn.utils.rnn.pad_sequence(list(rows.split(list(known))), batch_first=True)
    out = torch.bmm(weights["down_weight"], torch.bmm(weights["up_weight"], padded.mT).relu()).mT
    return torch.cat([mine[:count] for mine, count in zip(out, known, strict=True)])


def moved_inside_a_block_of_autocast(rank: int) -> float:
    """How far an evaluation after a move is from one before it, of the largest value."""
    torch.manual_seed(0)
    model = example().Model()
    model.layers = nn.ModuleList(StackedLayer(layer) for layer in model.layers)
    layers = [eplb.MoE(one.experts, run="mix", compute=compute_whole) for one in example().LAYERS_TO_BALANCE]
    balancer = eplb.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), layers=layers, config=config())
    placement, tokens = balancer.placement, torch.arange(64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = model(tokens)
        load = torch.ones(placement.num_layers, placement.num_experts).numpy()
        balancer.place(shuffled(placement, load).with_epoch(placement.epoch + 1))
        return float((model(tokens) - before).abs().max() / before.abs().max())


def go_on_in_place(layer: nn.Module) -> None:
    """As many models add what shared experts give."""

    def forward(tokens: Tensor) -> Tensor:
        weights, ids = layer.router(tokens).softmax(-1).topk(example().TOP_K)
        out = layer.run_experts(tokens, ids, weights)
        out += tokens
        return out

    layer.forward = forward


def losses_of(
    rank: int,
    stacked: bool,
    dtype: torch.dtype,
    move: bool,
    compiled: bool = False,
    alignment: int = 1,
    **options: object,
) -> tuple:
    """Losses of this rank, logical state, how many experts moved, how many copies stand at the end."""
    ours = example()
    torch.manual_seed(0)
    model = ours.Model()
    layers = ours.LAYERS_TO_BALANCE
    if stacked:
        model.layers = nn.ModuleList(StackedLayer(layer) for layer in model.layers)
        by = compute if alignment == 1 else compute_aligned
        layers = [eplb.MoE(layer.experts, run="mix", compute=by, alignment=alignment) for layer in layers]
    else:
        eplb.stack_experts(model, layers)
        for layer in model.layers:
            go_on_in_place(layer)
    model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    balancer = eplb.attach(model, optimizer, layers=layers, config=config(**options))
    if move:
        plan_by(balancer, plan_shuffle)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    losses = []
    for step in range(STEPS):
        ids = ours.batch(rank, step)
        loss = functional.cross_entropy(run(ids[:-1]), ids[1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = eplb.logical_state_dict(model, optimizer)
    moved = sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts"))
    copies = int((balancer.placement.copy_count - 1).sum())
    balancer.close()
    return losses, state, moved, copies


@cache
def whole(dtype: torch.dtype, ranks: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    """The example's model without us, in this process: the loss of each rank's batch by step, and its weights."""
    ours = example()
    torch.manual_seed(0)
    model = ours.Model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        of_ranks = []
        for rank in range(ranks):
            ids = ours.batch(rank, step)
            loss = functional.cross_entropy(model(ids[:-1]), ids[1:])
            (loss / ranks).backward()
            of_ranks.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(of_ranks)
    return losses, dict(model.named_parameters())


def everything(rank: int) -> dict[str, tuple]:
    return {
        "list": losses_of(rank, False, torch.float64, move=False),
        "stacked": losses_of(rank, True, torch.float64, move=False),
        "copies": losses_of(rank, False, torch.float64, move=True, replica_slots=1),
        "aligned": losses_of(rank, True, torch.float64, move=True, alignment=16),
        "aligned copies": losses_of(rank, True, torch.float64, move=True, alignment=16, replica_slots=1),
        "static": losses_of(rank, False, torch.float32, move=False, policy="static"),
        "moving": losses_of(rank, False, torch.float32, move=True),
        "compiled": losses_of(rank, False, torch.float32, move=True, compiled=True),
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, tuple]]:
    return run_ranks(2, everything)


@pytest.mark.parametrize("way", ["list", "stacked", "copies", "aligned", "aligned copies"])
def test_equals_the_model_without_us(results: list[dict[str, tuple]], way: str) -> None:
    losses, parameters = whole(torch.float64, 2)
    for rank, ways in enumerate(results):
        for mine, of_ranks in zip(ways[way][0], losses, strict=True):
            assert abs(mine - of_ranks[rank]) < 1e-11
    up = torch.stack([parameters[f"layers.1.experts.{expert}.0.weight"] for expert in range(example().EXPERTS)])
    name = "up_weight" if way in ("stacked", "aligned", "aligned copies") else "0__weight"
    mine = results[0][way][1][f"model.layers.1.experts.{name}"]
    assert (mine - up).abs().max() < 1e-9
    assert (results[0][way][3] > 0) == way.endswith("copies")


@pytest.mark.parametrize("way", ["moving", "compiled"])
def test_moving_experts_and_graphs_change_no_bit(results: list[dict[str, tuple]], way: str) -> None:
    for ways in results:
        (static_losses, static, none, _), (losses, state, moved, _) = ways["static"], ways[way]
        assert moved > 0 == none and losses == static_losses
        assert state.keys() == static.keys() and all(torch.equal(state[key], static[key]) for key in state)


def one_process(rank: int) -> list[list[float]]:
    """And with aligned rows, whose number only the device knows there."""
    return [losses_of(rank, aligned > 1, torch.float64, move=False, alignment=aligned)[0] for aligned in (1, 16)]


def test_one_process_alone_works_too() -> None:
    losses, _ = whole(torch.float64, 1)
    for mine in run_ranks(1, one_process)[0]:
        assert all(abs(loss - of_rank) < 1e-12 for loss, (of_rank,) in zip(mine, losses, strict=True))


def ids_of_no_expert(rank: int) -> list[str]:
    """What is said to -1 and to an expert too many, in training and in evaluation, without copies and with them."""
    said = []
    for slots in (0, 1):
        ours = example()
        model = ours.Model()
        eplb.stack_experts(model, ours.LAYERS_TO_BALANCE)
        optimizer = torch.optim.AdamW(model.parameters())
        balancer = eplb.attach(model, optimizer, layers=ours.LAYERS_TO_BALANCE, config=config(replica_slots=slots))
        given = torch.zeros(3, ours.HIDDEN), torch.full((3, ours.TOP_K), 0.5)
        for wrong in (-1, ours.EXPERTS):
            ids = torch.tensor([[0, 1], [2, wrong], [0, 1]])
            for training in (True, False):
                model.train(training)
                with torch.set_grad_enabled(training), pytest.raises(ValueError) as refused:
                    model.layers[0].run_experts(given[0], ids, given[1])
                said.append(str(refused.value))
        balancer.close()
    return said


class Drawing(nn.Module):
    """Its result is linear in the experts' weights, and in a parameter that ``compute`` closes over."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.scale = nn.Module(), nn.Parameter(torch.rand(8) + 1)
        self.experts.weight = nn.Parameter(torch.randn(4, 8, 8))

    def run(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        raise AssertionError("replaced")

    def compute(self, rows: Tensor, counts: SlotCounts, weights: Mapping[str, Tensor]) -> Tensor:
        of_slots = zip(rows.split(list(counts.known())), weights["weight"], strict=True)
        return functional.dropout(torch.cat([rows @ weight for rows, weight in of_slots]) * self.scale, 0.5)


def drawn(rank: int) -> list[list[float]]:
    found = []
    for slots in (1, 2):
        torch.manual_seed(0)
        model = Drawing().double()
        start = shuffled(eplb.Placement.initial(1, 4, 2, slots), np.ones((1, 4))).with_epoch(0)
        layers = [eplb.MoE("experts", run="run", compute=model.compute)]
        settings = config(replica_slots=slots, initial_placement=start, guard="warn", split_least_tokens=0)
        balancer = eplb.attach(model, torch.optim.SGD(model.parameters()), layers=layers, config=settings)
        torch.manual_seed(rank)
        hidden, weights = torch.rand(32, 8).double(), torch.rand(32, 2).double()
        loss = model.run(hidden, torch.rand(32, 4).topk(2).indices, weights).sum()
        loss.backward()
        balancer.reduce_gradients()
        weight, scale = model.experts.weight, model.scale
        sums = torch.stack([loss.detach(), 2 * (weight * weight.grad).sum(), (scale * scale.grad).sum()])
        dist.all_reduce(sums)
        found.append(sums.tolist())
        balancer.close()
    return found


def test_rows_are_drawn_once_and_what_a_compute_closes_over_is_trained() -> None:
    """By Euler's theorem a sum that is linear in weights is their product with their gradients."""
    for loss, of_experts, of_scale in run_ranks(2, drawn)[0]:
        assert of_experts == pytest.approx(loss) == of_scale


def padded(rank: int) -> tuple[list[list[float]], list[int]]:
    """Results and load of a call with ids of -1 and rows without weights, and what an expert gives for its row."""
    ours = example()
    model = ours.Model()
    eplb.stack_experts(model, ours.LAYERS_TO_BALANCE)
    layers = [
        replace(one, real_tokens=lambda ids, weights: (weights * (ids >= 0)).any(1)) for one in ours.LAYERS_TO_BALANCE
    ]
    alone = model.layers[0].experts[2](torch.ones(1, ours.HIDDEN)).tolist()
    balancer = eplb.attach(model, torch.optim.AdamW(model.parameters()), layers=layers, config=config())
    ids, weights = torch.tensor([[2, -1], [-1, 5], [-1, -1], [3, 4]]), torch.ones(4, 2)
    weights[3] = 0
    out = model.layers[0].run_experts(torch.ones(4, ours.HIDDEN), ids, weights)
    torch.testing.assert_close(out[:1], torch.tensor(alone))
    return out.tolist(), balancer.runtime.counter.counts[0].tolist()


def test_padding_in_a_routing_that_is_given_is_told_by_real_tokens() -> None:
    for out, load in run_ranks(2, padded):
        assert not any(out[2] + out[3]) and any(out[1])
        assert sum(load) == 4 and load[2] >= 1 and load[5] >= 1 and load[3] == load[4] == 0


def test_ids_of_no_expert_are_refused_in_one_line_and_none_is_taken_for_the_last_expert() -> None:
    for said in run_ranks(2, ids_of_no_expert):
        assert [line.partition(":")[0] for line in said] == 2 * [
            "MoE layer 0 was given expert ids from -1 to 2, and its experts are 0 to 7",
            "MoE layer 0 was given expert ids from -1 to 2, and its experts are 0 to 7",
            "MoE layer 0 was given expert ids from 0 to 8, and its experts are 0 to 7",
            "MoE layer 0 was given expert ids from 0 to 8, and its experts are 0 to 7",
        ]


def refusals(rank: int) -> list[str]:
    ours, said = example(), []

    def refused(layers: list[eplb.MoE], stack: bool = False, model: nn.Module | None = None) -> None:
        model = model if model is not None else ours.Model()
        before = {name: id(parameter) for name, parameter in model.named_parameters()}
        try:
            if stack:
                eplb.stack_experts(model, layers)
            else:
                eplb.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), layers=layers, config=config())
        except AttachError as error:
            said.append(str(error))
            assert before == {name: id(parameter) for name, parameter in model.named_parameters()}
        else:
            said.append("accepted")

    moe = eplb.MoE("layers.0.experts", run="run_experts")
    refused([moe])
    refused([eplb.MoE("layers.7.experts", run="run_experts")])
    stacked = ours.Model()
    eplb.stack_experts(stacked, ours.LAYERS_TO_BALANCE)
    refused([eplb.MoE("layers.0.experts", run="forward")], model=stacked)
    refused([moe, moe], model=stacked)
    refused([eplb.MoE("layers.0.experts", run="run_experts", alignment=16)], model=stacked)
    odd = ours.Model()
    odd.layers[0].experts[3] = nn.Linear(ours.HIDDEN, ours.HIDDEN)
    refused([moe], stack=True, model=odd)
    shared = ours.Model()
    shared.layers[0].experts[1] = shared.layers[0].experts[0]
    refused([moe], stack=True, model=shared)
    normed = ours.Model()
    for expert in normed.layers[0].experts:
        expert.append(nn.BatchNorm1d(ours.HIDDEN))
    refused([moe], stack=True, model=normed)
    swapped = ours.Model()
    eplb.stack_experts(swapped, [moe])
    balancer = eplb.attach(swapped, torch.optim.SGD(swapped.parameters()), layers=[moe], config=config())
    try:
        swapped.layers[0].run_experts(torch.ones(3, ours.HIDDEN), torch.ones(3, 2), torch.ones(3, 2).long())
    except ValueError as error:
        said.append(str(error))
    balancer.close()
    dist.barrier()
    return said


def test_what_cannot_be_balanced_is_refused_in_one_line_and_nothing_is_changed() -> None:
    wanted = (
        "call eplb.stack_experts",
        "has no module layers.7.experts",
        "takes 1 arguments",
        "names the same experts twice",
        "alignment=16 must be 1 or more, and is for a compute= of your own",
        "experts.3 is not a module as",
        "share tensors",
        "keeps buffers",
        "expert ids (integers) and router weights, in this order",
    )
    said = run_ranks(2, refusals)
    assert said[0] == said[1]
    for line, part in zip(said[0], wanted, strict=True):
        assert part in line and "\n" not in line


def test_experts_may_move_inside_a_block_of_autocast() -> None:
    assert max(run_ranks(2, moved_inside_a_block_of_autocast)) < 0.05
