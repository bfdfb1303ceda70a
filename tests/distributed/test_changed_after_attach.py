"""Models and optimizers that are made, wrapped or changed after attach: right, or refused in one line on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from flat_settings import config_from_settings
from moe_models import batch_of, make_model
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import eplb_runtime as eplb

EXPERTS = 8
AdamW = torch.optim.AdamW
OPEN: list[eplb.Balancer] = []


def attach(*args: object, **options: object) -> eplb.Balancer:
    """A balancer that is closed after its case: threads of connections that stay open wake a hundred times a second."""
    OPEN.append(eplb.attach(*args, **options))  # type: ignore[arg-type]
    return OPEN[-1]


def close_all() -> None:
    while OPEN:
        OPEN.pop().close()


def moe_model() -> nn.Module:
    return make_model("olmoe", experts=EXPERTS)


def config(**options: object) -> eplb.BalancerConfig:
    settings = {"interval": 2, "lag": 1, "gate": "always", "dense_gradients": "allreduce", "guard": "raise", **options}
    return config_from_settings(settings)


def loss_of(model: nn.Module, step: int) -> Tensor:
    ids = batch_of(dist.get_rank(), step) % 12 + 12 * (step // 4)
    return model(input_ids=ids, labels=ids).loss


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 5, first: int = 0) -> None:
    model.train()
    for step in range(first, first + steps):
        loss_of(model, step).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def halves(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters in two parts, experts in both."""
    named = dict(model.named_parameters())
    second = [p for name, p in named.items() if "layers.1" in name or "lm_head" in name]
    return [p for p in named.values() if not any(p is q for q in second)], second


def state_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Tensor]:
    return eplb.logical_state_dict(model, optimizers[0] if len(optimizers) == 1 else None)


# -- right -----------------------------------------------------------------------------------------------------------


def given(rank: int) -> dict[str, Tensor]:
    model = moe_model()
    optimizer = AdamW(model.parameters())
    balancer = attach(model, optimizer, config=config())
    train(model, optimizer)
    assert balancer.placement.epoch
    return state_of(model, optimizer)


def adopted(rank: int) -> dict[str, Tensor]:
    model = moe_model()
    balancer = attach(model, config=config())
    optimizer = AdamW(model.parameters())
    balancer.adopt(optimizer)
    train(model, optimizer)
    assert balancer.placement.epoch
    return state_of(model, optimizer)


def two_given(rank: int) -> dict[str, Tensor]:
    model = moe_model()
    optimizers = [AdamW(part) for part in halves(model)]
    attach(model, optimizers, config=config())
    train(model, *optimizers)
    return state_of(model)


def second_adopted(rank: int) -> dict[str, Tensor]:
    model = moe_model()
    first, second = halves(model)
    names = {id(p): name for name, p in model.named_parameters()}
    later = [names[id(p)] for p in second]
    for parameter in second:
        parameter.requires_grad_(False)
    optimizer = AdamW(first)
    balancer = attach(model, optimizer, config=config())
    parameters = [p.requires_grad_() for name, p in model.named_parameters() if name in later]
    other = AdamW(parameters)
    balancer.adopt(other)
    train(model, optimizer, other)
    return state_of(model)


class WithHead(nn.Module):
    """Attached is what stands below the head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = moe_model()
        torch.manual_seed(1)
        self.head = nn.Linear(self.backbone.config.vocab_size, 8)

    def forward(self, step: int) -> Tensor:
        return self.head(self.backbone(input_ids=batch_of(dist.get_rank(), step)).logits).square().mean()


def adapt(model: nn.Module) -> None:
    """A trained map beside a frozen one, as adapters are."""
    torch.manual_seed(2)
    adapter = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
    model.lm_head.adapter = adapter
    model.lm_head.register_forward_hook(lambda module, args, out: out + module.adapter(args[0]))


def with_copies() -> eplb.BalancerConfig:
    """Of the first home of the other rank, in each layer; nothing moves."""
    placement = eplb.Placement.initial(2, EXPERTS, 2, 1)
    slots = placement.physical_to_logical.copy()
    slots[:, EXPERTS // 2], slots[:, -1] = EXPERTS // 2, 0
    copied = eplb.Placement(slots, EXPERTS, 2, placement.home, 0)
    return config(policy="static", replica_slots=1, initial_placement=copied)


@torch.no_grad()
def halve_experts(model: nn.Module) -> None:
    for layer in model.model.layers:
        for parameter in layer.mlp.experts.parameters():
            parameter.mul_(0.5)


def written_between_steps(settings: eplb.BalancerConfig) -> dict[str, Tensor]:
    model = moe_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balancer = attach(model, optimizer, config=settings)
    for _ in range(2):
        train(model, optimizer, steps=2)
        halve_experts(model)
        balancer.weights_changed()
    train(model, optimizer, steps=2)
    return state_of(model, optimizer)


def written_beside_copies(rank: int) -> dict[str, Tensor]:
    return written_between_steps(with_copies())


def written_without_copies(rank: int) -> dict[str, Tensor]:
    return written_between_steps(config(policy="static"))


def another_in_mid_run(policy: str) -> dict[str, Tensor]:
    """Two optimizers train a head besides; then one other takes the place of the second, and a third that one's."""
    whole = WithHead()
    first, second = halves(whole.backbone)
    old = torch.optim.SGD([*second, *whole.head.parameters()], lr=0.05, momentum=0.9)
    other = AdamW(first)
    balancer = attach(whole.backbone, [other, old], config=config(policy=policy))
    train(whole.backbone, other, old)
    moved, (_, second) = balancer.placement.epoch, halves(whole.backbone)  # this rank's experts
    for phase, make in enumerate((AdamW, torch.optim.RMSprop), 1):
        new = make(second, lr=1e-3)
        balancer.adopt(new, instead_of=old)
        assert not any(p is whole.head.weight for p in balancer.tensors.dense.values())
        assert "eplb_runtime_experts" not in old.state_dict() and "eplb_runtime_experts" in new.state_dict()
        old.param_groups.clear()
        train(whole.backbone, other, new, first=5 * phase)
        old = new
    assert policy == "static" or balancer.placement.epoch > moved
    return eplb.logical_state_dict(whole.backbone) | {
        f"{name} {key}": balancer.gather_experts(layer, old.state[parameter][key])
        for name, layer in balancer.layer_of_parameter.items()
        for parameter in [whole.backbone.get_parameter(name)]
        for key in old.state[parameter]
        if key != "step"
    }


def another_in_mid_run_static(rank: int) -> dict[str, Tensor]:
    return another_in_mid_run("static")


def another_in_mid_run_moved(rank: int) -> dict[str, Tensor]:
    return another_in_mid_run("incremental")


RIGHT = [
    another_in_mid_run_static,
    another_in_mid_run_moved,
    written_beside_copies,
    written_without_copies,
    given,
    adopted,
    two_given,
    second_adopted,
]


def right(rank: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for case in RIGHT:
        found[case.__name__] = case(rank)
        close_all()
    return found


@pytest.fixture(scope="module")
def states() -> list[dict[str, dict[str, Tensor]]]:
    return run_ranks(2, right)


def test_ranks_agree_and_nothing_is_found(states: list[dict[str, dict[str, Tensor]]]) -> None:
    for name, state in states[0].items():
        assert all(torch.equal(tensor, states[1][name][key]) for key, tensor in state.items()), name


@pytest.mark.parametrize(
    ("one", "other"),
    [("given", "adopted"), ("two_given", "second_adopted"), ("another_in_mid_run_static", "another_in_mid_run_moved")],
)
def test_an_adopted_optimizer_is_as_one_that_was_given(
    states: list[dict[str, dict[str, Tensor]]], one: str, other: str
) -> None:
    for state in states:
        assert state[one].keys() == state[other].keys()
        assert all(torch.equal(tensor, state[other][key]) for key, tensor in state[one].items())
    assert not all(torch.equal(tensor, states[0]["given"][key]) for key, tensor in state_of(moe_model()).items())


def test_copies_follow_what_is_written_between_steps(states: list[dict[str, dict[str, Tensor]]]) -> None:
    for state in states:
        beside, without = state["written_beside_copies"], state["written_without_copies"]
        assert all(torch.allclose(tensor, without[key], rtol=0, atol=1e-6) for key, tensor in beside.items())


# -- refused ---------------------------------------------------------------------------------------------------------


def not_adopted() -> None:
    model = moe_model()
    attach(model, config=config())
    train(model, AdamW(model.parameters()))


def unknown_second_optimizer() -> None:
    model = moe_model()
    optimizer = AdamW(model.parameters())
    attach(model, optimizer, config=config())
    loss_of(model, 0).backward()
    AdamW([model.lm_head.weight]).step()


def adopted_what_another_has() -> None:
    model = moe_model()
    balancer = attach(model, AdamW(model.parameters()), config=config())
    balancer.adopt(AdamW([model.lm_head.weight]))


def let_go() -> tuple[nn.Module, eplb.Balancer, torch.optim.Optimizer, torch.optim.Optimizer]:
    model = moe_model()
    old = AdamW(model.parameters())
    balancer = attach(model, old, config=config())
    train(model, old, steps=1)
    return model, balancer, old, torch.optim.SGD(model.parameters())


def stepped_after_it_was_let_go() -> None:
    model, balancer, old, new = let_go()
    balancer.adopt(new, instead_of=old)
    train(model, old)


def adopted_inside_a_step() -> None:
    model, balancer, old, new = let_go()
    loss_of(model, 1).backward()
    balancer.adopt(new, instead_of=old)


def written_and_not_said() -> None:
    model = moe_model()
    optimizer = AdamW(model.parameters())
    attach(model, optimizer, config=with_copies())
    train(model, optimizer, steps=1)
    halve_experts(model)
    train(model, optimizer)


def adapters_unknown() -> None:
    model = moe_model().requires_grad_(False)
    model.lm_head.requires_grad_()
    optimizer = AdamW([model.lm_head.weight])
    attach(model, optimizer, config=config())
    adapt(model)
    train(model, optimizer)


def replaced() -> None:
    model = moe_model()
    optimizer = AdamW(model.parameters())
    attach(model, optimizer, config=config())
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach().clone())
    train(model, optimizer)


def unfrozen_with_copies() -> None:
    model = moe_model()
    model.model.layers[0].mlp.experts.requires_grad_(False)
    optimizer = AdamW(model.parameters())
    attach(model, optimizer, config=config(replica_slots=1))
    train(model, optimizer, steps=1)
    model.model.layers[0].mlp.experts.requires_grad_(True)
    train(model, optimizer)


def in_ddp_before() -> None:
    model = moe_model()
    wrapped, optimizer = DistributedDataParallel(model), AdamW(model.parameters())
    attach(model, optimizer, config=config(dense_gradients="host"))
    train(wrapped, optimizer)


def each_rank_a_part() -> None:
    """An optimizer that updates on each rank a part of what it lists and sends the others that."""
    model = moe_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=AdamW)
    attach(model, optimizer, config=config())
    train(model, optimizer)


REFUSED: dict[Callable[[], None], str] = {
    not_adopted: "balancer.adopt(optimizer)",
    unknown_second_optimizer: "a AdamW that the balancer does not know steps lm_head.weight",
    adopted_what_another_has: "lm_head.weight is in several optimizers: give each parameter to one, and let go",
    stepped_after_it_was_let_go: "balancer.adopt(optimizer), with instead_of=old where it replaces one",
    adopted_inside_a_step: "adopt() between a backward pass and the optimizer's step",
    written_and_not_said: "call balancer.weights_changed() after writing, on every rank",
    adapters_unknown: "lm_head.adapter.weight was added after attach",
    replaced: "model.layers.1.mlp.experts.down_proj was replaced after attach",
    unfrozen_with_copies: "was frozen when the model was attached and is trained now",
    in_ddp_before: "attach first, then wrap the very module",
    each_rank_a_part: "ZeroRedundancyOptimizer.optim is a AdamW with a state of its own",
}


def refused(rank: int) -> dict[str, str]:
    said = {}
    for case in REFUSED:
        said[case.__name__] = "nothing"
        try:
            case()
        except (RuntimeError, ValueError) as error:
            said[case.__name__] = str(error)
        close_all()
    return said


def test_what_would_be_wrong_is_refused_in_one_line_on_every_rank() -> None:
    for said in run_ranks(2, refused):
        for case, expected in REFUSED.items():
            assert expected in said[case.__name__], said[case.__name__]
            assert "\n" not in said[case.__name__]
