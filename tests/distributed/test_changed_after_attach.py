"""Models and optimizers that are made, wrapped or changed after attach: right, or refused in one line on every rank."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from support import training
from support.job import Job, Run, of_next_tokens
from support.moe_models import batch_of, make_model
from support.ranks import run_ranks
from support.seen import assert_refused, differing, digests
from support.shuffle import with_replicas
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import eplb_runtime as eplb

EXPERTS = 8
AdamW, SGD = torch.optim.AdamW, torch.optim.SGD
State = dict[str, Tensor]
OPEN: list[eplb.Balancer] = []
SETTINGS = {"interval": 2, "lag": 1, "gate": "always", "guard": "raise"}


def attach(model: nn.Module, optimizer: Any = None, **options: Any) -> eplb.Balancer:
    """A balancer that is closed after its case: threads of connections that stay open wake a hundred times a second."""
    OPEN.append(training.attach(model, optimizer, **{**SETTINGS, **options}))
    return OPEN[-1]


def batches(rank: int, step: int) -> Tensor:
    return batch_of(rank, step) % 12 + 12 * (step // 4)


def attached(make: Any = AdamW, **options: Any) -> Run:
    job = Job(optimizer=make, batches=batches, planner=eplb.plan, settings={**SETTINGS, **options})
    run = Run(dist.get_rank(), job)  # a hook on its steps that is older than attach evaluates
    run.optimizer.register_step_post_hook(lambda *_: torch.no_grad()(run.model)(input_ids=batches(run.rank, 0)))
    OPEN.append(run.attach().balancer)
    return run


def closing(case: Callable[[], Any]) -> Callable[[], Any]:
    def call() -> Any:
        try:
            return case()
        finally:
            while OPEN:
                OPEN.pop().close()

    return call


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 5, first: int = 0) -> None:
    model.train()
    for step in range(first, first + steps):
        of_next_tokens(model, batches(dist.get_rank(), step)).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()


def halves(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters in two parts, experts in both."""
    parts: tuple[list[Tensor], list[Tensor]] = [], []
    for name, parameter in model.named_parameters():
        parts["layers.1" in name or "lm_head" in name].append(parameter)
    return parts


# -- right -----------------------------------------------------------------------------------------------------------


def two_optimizers(adopts: bool) -> State:
    """The second one's parameters are frozen until it is there."""
    model = make_model("olmoe", experts=EXPERTS)
    first, second = halves(model)
    for parameter in second:
        parameter.requires_grad_(not adopts)
    optimizers = [] if adopts else [AdamW(first), AdamW(second)]
    balancer = attach(model, None if adopts else optimizers)
    for part in halves(model) if adopts else ():
        optimizers.append(AdamW([parameter.requires_grad_() for parameter in part]))
        balancer.adopt(optimizers[-1])
    train(model, *optimizers)
    assert balancer.placement.epoch
    return eplb.logical_state_dict(model, optimizers)


def another_in_mid_run(policy: str) -> State:
    """Two optimizers train a head besides; then one other takes the place of the second, and a third that one's."""
    model, head = make_model("olmoe", experts=EXPERTS), nn.Linear(8, 8)
    first, second = halves(model)
    old = SGD([*second, *head.parameters()], lr=0.05, momentum=0.9)
    other = AdamW(first)
    balancer = attach(model, [other, old], policy=policy)
    train(model, other, old)
    moved = balancer.placement.epoch
    for phase, make in enumerate((AdamW, torch.optim.RMSprop), 1):
        new = make(halves(model)[1], lr=1e-3)
        balancer.adopt(new, instead_of=old)
        assert not any(p is head.weight for p in balancer.tensors.dense.values())
        assert "eplb_runtime_experts" not in old.state_dict() and "eplb_runtime_experts" in new.state_dict()
        old.param_groups.clear()
        train(model, other, new, first=5 * phase)
        old = new
    assert policy == "static" or balancer.placement.epoch > moved
    state = eplb.logical_state_dict(model)
    for name, layer in balancer.layer_of_parameter.items():
        for key, tensor in old.state[model.get_parameter(name)].items():
            if key != "step":
                state[f"{name} {key}"] = balancer.gather_experts(layer, tensor)
    return state


class Wrapped(torch.optim.Optimizer):
    """As Accelerate's, without hooks of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def another_after_a_skipped_step_and_close() -> State:
    run = attached().train(1)
    scaler = eplb.GradScaler(run.balancer)
    run.backward(run.forward())
    run.model.lm_head.weight.grad.fill_(torch.inf)
    scaler.scale(torch.ones(()))
    scaler.step(run.optimizer)
    scaler.update()
    assert run.balancer.rebalancer.step == 1
    run.balancer.rebalance()  # no step has begun, though gradients are there
    run.optimizer.zero_grad()
    assert run.balancer.runtime.expert_clock.on
    run.balancer.close()
    assert not run.balancer.runtime.expert_clock.on
    run.backward(run.forward())
    run.optimizer.step()
    new = SGD(run.model.parameters(), lr=0.05)
    run.balancer.adopt(Wrapped(new), instead_of=Wrapped(run.optimizer))
    new.zero_grad()
    train(run.model, new)
    return eplb.logical_state_dict(run.model, new)


def another_after_close_where_nothing_is_averaged() -> None:
    run = attached(dense_gradients="host", guard="off")
    run.balancer.close()
    run.backward(run.forward())
    SGD(run.model.parameters(), lr=0.05).step()


def with_copies() -> dict[str, Any]:
    """Settings: replicas of the first home of the other rank; nothing moves."""
    start = with_replicas(EXPERTS, 2, {0: EXPERTS // 2, 1: 0})
    return {"policy": "static", "replica_slots": 1, "initial_placement": start}


@torch.no_grad()
def halve_experts(model: nn.Module) -> None:
    for layer in model.model.layers:
        for parameter in layer.mlp.experts.parameters():
            parameter.mul_(0.5)


def written_between_steps(**options: Any) -> State:
    run = attached(partial(SGD, lr=0.1), **options)
    for _ in range(2):
        run.train(2)
        halve_experts(run.model)
        run.balancer.weights_changed()
    return run.train(2).state()


def right(rank: int) -> list[dict[str, str]]:
    closing(another_after_close_where_nothing_is_averaged)()
    given, adopted = (closing(partial(two_optimizers, adopts))() for adopts in (False, True))
    assert differing(given, adopted) == []
    static, moved = (closing(partial(another_in_mid_run, policy))() for policy in ("static", "incremental"))
    assert differing(static, moved) == []
    without, beside = (closing(partial(written_between_steps, **o))() for o in ({"policy": "static"}, with_copies()))
    assert all(torch.allclose(tensor, without[key], rtol=0, atol=1e-6) for key, tensor in beside.items())
    return [digests(state) for state in (given, static, beside, closing(another_after_a_skipped_step_and_close)())]


def test_adopted_optimizers_train_as_given_ones_and_copies_follow_what_is_written_between_steps() -> None:
    first, second = run_ranks(2, right)
    assert first == second


# -- refused ---------------------------------------------------------------------------------------------------------


def not_adopted() -> None:
    model = make_model("olmoe", experts=EXPERTS)
    attach(model)
    train(model, AdamW(model.parameters()))


def unknown_second_optimizer() -> None:
    run = attached()
    run.backward(run.forward())
    AdamW([run.model.lm_head.weight]).step()


def adopted_what_another_has() -> None:
    run = attached()
    run.balancer.adopt(AdamW([run.model.lm_head.weight]))


def stepped_by_another_after_close() -> None:
    run = attached().train(1)
    run.balancer.close()
    SGD(run.model.parameters()).step()


def stepped_after_it_was_let_go() -> None:
    run = attached().train(1)
    run.balancer.adopt(SGD(run.model.parameters()), instead_of=run.optimizer)
    run.train(5)


def adopted_inside_a_step() -> None:
    run = attached().train(1)
    run.backward(run.forward())
    run.balancer.adopt(SGD(run.model.parameters()), instead_of=run.optimizer)


def written_and_not_said() -> None:
    run = attached(**with_copies()).train(1)
    halve_experts(run.model)
    run.train(5)


def adapters_unknown() -> None:
    """A trained map beside a frozen one."""
    model = make_model("olmoe", experts=EXPERTS).requires_grad_(False)
    optimizer = AdamW([model.lm_head.weight.requires_grad_()])
    attach(model, optimizer)
    model.lm_head.adapter = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
    model.lm_head.register_forward_hook(lambda module, args, out: out + module.adapter(args[0]))
    train(model, optimizer)


def replaced() -> None:
    run = attached()
    experts = run.model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach().clone())
    run.train(5)


def unfrozen_with_copies() -> None:
    model = make_model("olmoe", experts=EXPERTS)
    model.model.layers[0].mlp.experts.requires_grad_(False)
    optimizer = AdamW(model.parameters())
    attach(model, optimizer, replica_slots=1)
    train(model, optimizer, steps=1)
    model.model.layers[0].mlp.experts.requires_grad_(True)
    train(model, optimizer)


def in_ddp_before() -> None:
    model = make_model("olmoe", experts=EXPERTS)
    wrapped, optimizer = DistributedDataParallel(model), AdamW(model.parameters())
    attach(model, optimizer, dense_gradients="host")
    train(wrapped, optimizer)


def each_rank_a_part() -> None:
    """An optimizer that updates on each rank a part of what it lists and sends the others that."""
    attached(partial(ZeroRedundancyOptimizer, optimizer_class=AdamW)).train(5)


REFUSED: dict[str, Callable[[], None]] = {
    "balancer.adopt(optimizer)": not_adopted,
    "a AdamW that the balancer does not know steps lm_head.weight": unknown_second_optimizer,
    "lm_head.weight is in several optimizers: give each parameter to one, and let go": adopted_what_another_has,
    "a SGD that the balancer does not know steps": stepped_by_another_after_close,
    "balancer.adopt(optimizer), with instead_of=old where it replaces one": stepped_after_it_was_let_go,
    "adopt() between a backward pass and the optimizer's step": adopted_inside_a_step,
    "call balancer.weights_changed() after writing, on every rank": written_and_not_said,
    "lm_head.adapter.weight was added after attach": adapters_unknown,
    "model.layers.1.mlp.experts.down_proj was replaced after attach": replaced,
    "was frozen when the model was attached and is trained now": unfrozen_with_copies,
    "and then wrap the attached module": in_ddp_before,
    "ZeroRedundancyOptimizer.optim is a AdamW with a state of its own": each_rank_a_part,
}


def refused(rank: int) -> None:
    assert_refused({words: closing(case) for words, case in REFUSED.items()})


def test_what_would_be_wrong_is_refused_in_one_line_on_every_rank() -> None:
    run_ranks(2, refused)
