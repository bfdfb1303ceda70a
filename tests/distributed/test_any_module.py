"""Models of the user's own: named layers, lists of experts or stacked tensors, against the same model without us."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.examples import load_example
from support.job import Job, Run, alone, mean_over_ranks, moved
from support.ranks import run_ranks
from support.seen import assert_refused, differing
from support.shuffle import plan_shuffle
from support.training import config_from_settings
from torch import Tensor, nn
from torch.nn import functional

import eplb_runtime as eplb
from eplb_runtime.moe.experts.compute import SlotCounts
from eplb_runtime.planner.policies import shuffled

STEPS, ALIGNMENT = 8, 16


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
    results, known = [], counts.known()
    assert sum(known) == len(rows) and not any(count % ALIGNMENT for count in known)
    for slot, mine in enumerate(rows.split(list(known))):
        up = functional.gelu(functional.linear(mine, weights["up_weight"][slot], weights["up_bias"][slot]))
        results.append(functional.linear(up, weights["down_weight"][slot], weights["down_bias"][slot]))
    return torch.cat(results)


def go_on_in_place(layer: nn.Module) -> None:
    """As many models add what shared experts give."""

    def forward(tokens: Tensor) -> Tensor:
        weights, ids = layer.router(tokens).softmax(-1).topk(example().TOP_K)
        out = layer.run_experts(tokens, ids, weights)
        out += tokens
        return out

    layer.forward = forward


def with_lists(job: Job) -> Any:
    ours = example()
    torch.manual_seed(0)
    model = ours.Model().to(job.dtype)
    eplb.stack_experts(model, ours.LAYERS_TO_BALANCE)
    for layer in model.layers:
        go_on_in_place(layer)
    return model


def with_tensors(job: Job) -> Any:
    """Experts in tensors of the model's own."""
    torch.manual_seed(0)
    model = example().Model()
    model.layers = nn.ModuleList(StackedLayer(layer) for layer in model.layers)
    return model.to(job.dtype)


def as_it_is(job: Job) -> Any:
    torch.manual_seed(0)
    return example().Model().to(job.dtype)


def loss_of(model: Any, ids: Tensor) -> Tensor:
    return functional.cross_entropy(model(ids[:-1]), ids[1:])


ADAMW = partial(torch.optim.AdamW, lr=1e-3)
job = partial(Job, loss=loss_of, batches=lambda *of: example().batch(*of), optimizer=ADAMW, settings={"interval": 3})


def attached(rank: int, job: Job) -> Run:
    run, layers = Run(rank, job), example().LAYERS_TO_BALANCE
    if job.model is with_tensors:
        aligned = {"run": "mix", "compute": compute, "alignment": ALIGNMENT}
        layers = [eplb.MoE(layer.experts, **aligned) for layer in layers]
    return run.attach(layers=layers)


def as_without_us(rank: int, job: Job) -> int:
    """Compare with the example's model in this process alone; how many copies stand at the end."""
    ours = attached(rank, job).train(STEPS)
    plain = alone(replace(job, model=as_it_is), dist.get_world_size()).train(STEPS)
    assert mean_over_ranks(ours.losses) == pytest.approx(plain.losses, abs=1e-11)
    experts = [plain.model.layers[1].experts[expert][0] for expert in range(example().EXPERTS)]
    name = "up_weight" if job.model is with_tensors else "0__weight"
    up = torch.stack([expert.weight for expert in experts])
    assert (ours.state()[f"model.layers.1.experts.{name}"] - up).abs().max() < 1e-9
    copies = int((ours.balancer.placement.copy_count - 1).sum())
    ours.balancer.close()
    return copies


def with_copies(rank: int) -> None:
    for model in (with_lists, with_tensors):
        settings = {"interval": 3, "replica_slots": 1}
        moving = job(model=model, dtype=torch.float64, planner=plan_shuffle, settings=settings)
        assert as_without_us(rank, moving) > 0


def test_equals_the_model_without_us() -> None:
    run_ranks(2, with_copies)


def moving_and_compiled(rank: int) -> None:
    still, moving = attached(rank, job(model=with_lists)), attached(rank, moved(job(model=with_lists)))
    moving.module = torch.compile(moving.model, backend="aot_eager")
    one, other = still.train(STEPS).end(), moving.train(STEPS).end()
    assert other.commits > 0 == one.commits and differing(one.bits, other.bits) == []


def test_moving_experts_and_graphs_change_no_bit() -> None:
    run_ranks(2, moving_and_compiled)


def one_process(rank: int) -> None:
    """And with aligned rows, whose number only the device knows there."""
    for model in (with_lists, with_tensors):
        as_without_us(rank, job(model=model, dtype=torch.float64))


def test_one_process_alone_works_too() -> None:
    run_ranks(1, one_process)


def ids_of_no_expert(rank: int) -> None:
    """-1 and an expert too many, in training and in evaluation, beside copies."""
    ours = example()
    model = ours.Model()
    eplb.stack_experts(model, ours.LAYERS_TO_BALANCE)
    optimizer = torch.optim.AdamW(model.parameters())
    balancer = eplb.attach(model, optimizer, layers=ours.LAYERS_TO_BALANCE, config=config(replica_slots=1))
    hidden, weights = torch.zeros(3, ours.HIDDEN), torch.full((3, ours.TOP_K), 0.5)
    for wrong, most in ((-1, "-1 to 2"), (ours.EXPERTS, "0 to 8")):
        ids = torch.tensor([[0, 1], [2, wrong], [0, 1]])
        for training in (True, False):
            model.train(training)
            said = f"MoE layer 0 was given expert ids from {most}, and its experts are 0 to 7"
            with torch.set_grad_enabled(training):
                assert_refused({said: lambda ids=ids: model.layers[0].run_experts(hidden, ids, weights)})
    balancer.close()


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
        settings = config(replica_slots=slots, initial_placement=start, guard="warn")
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


@pytest.mark.long
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


@pytest.mark.long
def test_padding_in_a_routing_that_is_given_is_told_by_real_tokens() -> None:
    for out, load in run_ranks(2, padded):
        assert not any(out[2] + out[3]) and any(out[1])
        assert sum(load) == 4 and load[2] >= 1 and load[5] >= 1 and load[3] == load[4] == 0


def refusals(rank: int) -> None:
    ours, models = example(), []
    moe = eplb.MoE("layers.0.experts", run="run_experts")

    def made(change: Callable[[nn.Module], object] = len) -> nn.Module:
        models.append(ours.Model())
        change(models[-1].layers[0].experts)
        return models[-1]

    def attached(*layers: eplb.MoE, model: nn.Module | None = None) -> Callable[[], object]:
        model = model or made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return lambda: eplb.attach(model, optimizer, layers=list(layers), config=config())

    def stacked(change: Callable[[nn.Module], object]) -> Callable[[], object]:
        model = made(change)
        return lambda: eplb.stack_experts(model, [moe])

    def put(at: int, expert: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], None]:
        return lambda experts: experts.__setitem__(at, expert(experts))

    ready, given = made(), ours.Model()
    for model in (ready, given):
        eplb.stack_experts(model, ours.LAYERS_TO_BALANCE)
    balancer = eplb.attach(given, torch.optim.SGD(given.parameters()), layers=[moe], config=config())
    swapped = torch.ones(3, ours.HIDDEN), torch.ones(3, 2), torch.ones(3, 2).long()
    aligned, odd = replace(moe, alignment=16), nn.Linear(ours.HIDDEN, ours.HIDDEN)
    cases = {
        "call eplb.stack_experts": attached(moe),
        "has no module layers.7.experts": attached(replace(moe, experts="layers.7.experts")),
        "takes 1 arguments": attached(replace(moe, run="forward"), model=ready),
        "names the same experts twice": attached(moe, moe, model=ready),
        "alignment=16 must be 1 or more, and is for a compute= of your own": attached(aligned, model=ready),
        "experts.3 is not a module as": stacked(put(3, lambda experts: odd)),
        "share tensors": stacked(put(1, lambda experts: experts[0])),
        "keeps buffers": stacked(lambda experts: [one.append(nn.BatchNorm1d(ours.HIDDEN)) for one in experts]),
        "expert ids (integers) and router weights, in this order": lambda: given.layers[0].run_experts(*swapped),
    }
    before = [[id(parameter) for parameter in model.parameters()] for model in models]
    assert_refused(cases)
    assert before == [[id(parameter) for parameter in model.parameters()] for model in models]
    balancer.close()
    ids_of_no_expert(rank)


def test_what_cannot_be_balanced_is_refused_in_one_line_and_nothing_is_changed() -> None:
    """And no wrong id is taken for that of the last expert."""
    run_ranks(2, refusals)


def compute_whole(rows: Tensor, counts: SlotCounts, weights: Mapping[str, Tensor]) -> Tensor:
    """By a product of whole tensors, whose casts autocast keeps."""
    known = counts.known()
    padded = nn.utils.rnn.pad_sequence(list(rows.split(list(known))), batch_first=True)
    out = torch.bmm(padded, weights["weight"])
    return torch.cat([mine[:count] for mine, count in zip(out, known, strict=True)])


def moved_inside_a_block_of_autocast(rank: int) -> None:
    torch.manual_seed(0)
    model, hidden = Drawing(), torch.rand(32, 8)
    layers = [eplb.MoE("experts", run="run", compute=compute_whole)]
    balancer = eplb.attach(model, torch.optim.SGD(model.parameters()), layers=layers, config=config())
    placement, given = balancer.placement, (torch.rand(32, 4).topk(2).indices, torch.rand(32, 2))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = model.run(hidden, *given)
        balancer.place(shuffled(placement, np.ones((1, 4))).with_epoch(placement.epoch + 1))
        torch.testing.assert_close(model.run(hidden, *given), before, rtol=0.05, atol=0.05)
    balancer.close()


@pytest.mark.long
def test_experts_may_move_inside_a_block_of_autocast() -> None:
    run_ranks(2, moved_inside_a_block_of_autocast)
