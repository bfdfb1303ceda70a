"""Hooks, gradients, attributes and optimizer state of expert parameters: they go along, or are refused."""

from collections.abc import Callable
from copy import deepcopy

import torch
from support.job import Job, Run
from support.moe_models import batch_of
from support.ranks import run_ranks
from support.seen import digests, heard, said_by
from test_rollout_phases import started
from torch import Tensor, nn

import eplb_runtime as eplb


class Hung(Run):
    """A model in training, attached or not."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, Job(planner=eplb.plan, settings={"interval": 1000, "lag": 1}))
        self.experts = self.model.model.layers[1].mlp.experts

    def backward_of(self, number: int) -> None:
        self.steps = number
        self.backward(self.forward())


def halve(gradient: Tensor) -> Tensor:
    return gradient / 2


def hooked_with_copies(job: Hung) -> None:
    job.attach(replica_slots=1)
    job.experts.down_proj.register_hook(halve)
    job.step()


def tied(job: Hung) -> None:
    job.experts.down_proj = job.model.model.layers[0].mlp.experts.down_proj
    job.attach()


def state_of_before_a_migration(job: Hung) -> None:
    job.attach()
    job.step()
    before = deepcopy(job.optimizer.state_dict())
    # All heavy experts are at home on one rank: some must move.
    job.balancer.declare([[100.0] * 4 + [1.0] * 4] * 2)
    assert job.balancer.rebalance()
    job.optimizer.load_state_dict(before)


def gradient_penalty(job: Hung) -> None:
    job.attach()
    ids = batch_of(job.rank, 0)
    embedded = job.model.get_input_embeddings()(ids)
    loss = job.model(inputs_embeds=embedded, labels=ids).loss
    (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
    (loss + gradient.square().sum()).backward()


def step_in_backward(job: Hung) -> None:
    job.attach()
    job.experts.down_proj.register_post_accumulate_grad_hook(lambda _: job.optimizer.step())
    job.backward_of(0)


def registered_after_ddp(job: Hung) -> None:
    job.attach()
    average = {name: job.model.get_parameter(name).detach().clone() for name in job.balancer.layer_of_parameter}
    job.model.register_buffer("average", average[next(iter(average))])
    wrapped = nn.parallel.DistributedDataParallel(job.model)
    job.balancer.register_all("average", average)
    wrapped(batch_of(job.rank, 0))
    job.step()


REFUSED: dict[str, tuple[Callable[[Hung], object], str]] = {
    "hook": (
        lambda job: (job.experts.down_proj.register_hook(halve), job.attach()),
        "layers.1.mlp.experts.down_proj has gradient hooks, and attach puts",
    ),
    "gradients": (lambda job: (job.backward_of(0), job.attach()), "has a gradient from a backward pass before attach"),
    "tied": (tied, "down_proj is the same tensor as model.layers.1.mlp.experts.down_proj: tied"),
    "hook with copies": (hooked_with_copies, "layers.1.mlp.experts.down_proj has gradient hooks, and with replica"),
    "an average that DDP broadcasts": (registered_after_ddp, "attach, call balancer.register, and then wrap"),
    "gradient penalty": (gradient_penalty, "create_graph=True through MoE layers"),
    "step in a backward pass": (step_in_backward, "optimizer.step() inside a backward pass"),
    "state of before a migration": (state_of_before_a_migration, "the optimizer's state dict may hold other experts"),
}


def all_refused(rank: int) -> None:
    for name, (case, words) in REFUSED.items():
        said = said_by(lambda case=case: case(Hung(rank)))
        assert words in said and "\n" not in said, (name, said)


def test_what_would_be_lost_is_refused_in_one_line() -> None:
    run_ranks(2, all_refused)


def hooks_and_state(rank: int) -> None:
    """A hook where there are no copies changes gradients, attributes stay, and a state goes back where it fits."""
    plain, hooked = Hung(rank), Hung(rank)
    hooked.experts.down_proj.no_weight_decay = True
    for job in (plain, hooked):
        job.rank = 0  # whole models learn the same on every rank
        job.step()
        job.rank = rank
        job.backward_of(1)
        job.optimizer.zero_grad(set_to_none=False)
        job.attach()
    assert hooked.experts.down_proj.no_weight_decay
    hooked.experts.down_proj.register_hook(halve)
    for job in (plain, hooked):
        job.backward_of(1)
    whole, half = plain.experts.down_proj.grad, hooked.experts.down_proj.grad
    assert whole.any() and torch.equal(whole / 2, half)
    plain.optimizer.step()
    state = deepcopy(plain.optimizer.state_dict())
    weights = [parameter.detach().clone() for parameter in plain.model.parameters()]
    plain.optimizer.zero_grad()
    plain.step()
    first = plain.experts.down_proj.clone()
    plain.optimizer.load_state_dict(state)
    with torch.no_grad():
        for parameter, before in zip(plain.model.parameters(), weights, strict=True):
            parameter.copy_(before)
    plain.steps -= 1
    plain.step()
    assert torch.equal(first, plain.experts.down_proj)


def right_use(rank: int) -> None:
    hooks_and_state(rank)
    job = Hung(rank)
    job.attach()
    job.step()
    own = {name: job.model.get_parameter(name).detach() for name in job.balancer.layer_of_parameter}
    buffers = {name: weights.clone() for name, weights in own.items()}
    for number, buffer in enumerate(buffers.values()):
        job.model.register_buffer(f"average_{number}", buffer)
    job.balancer.register_all("average", buffers)
    nn.parallel.DistributedDataParallel(job.model)(batch_of(rank, 0))
    assert all(map(torch.equal, buffers.values(), own.values())), "DDP leaves registered buffers alone"


def test_right_use_is_silent() -> None:
    run_ranks(2, right_use)


# -- A job takes optimizer state out of its optimizer between steps, and puts it back later: experts stay meanwhile


Take = Callable[[torch.optim.Optimizer], Callable[[], object]]


def popped(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Take two tensors of each parameter out; what is returned puts copies back."""
    keys = ("exp_avg", "exp_avg_sq")
    taken = [(state, {key: state.pop(key).clone() for key in keys}) for state in optimizer.state.values()]
    return lambda: [state.update(own) for state, own in taken]


def cleared(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """As `popped`; nothing of any parameter stays."""
    taken = dict(optimizer.state)
    optimizer.state.clear()
    return lambda: optimizer.state.update(taken)


def taken_out(rank: int) -> None:
    def trained(take: Take | None) -> dict[str, object]:
        job = started(rank, "between steps", interval=None, lag=1, guard="off")
        for _ in range(2):
            job.step()
            if take is not None:
                back = take(job.optimizer)
                assert not job.balancer.rebalance()
                back()
        bits = {"losses": [*job.losses], **digests(job.state())}
        if take is not None:
            job.step()
            assert job.balancer.rebalance(), "it is there again"
        job.balancer.close()
        return bits

    static = trained(None)
    for take in (popped, cleared):
        with heard() as lines:
            assert trained(take) == static
        assert "is not in the optimizer's state any more: load it first" in lines[0]
        assert "\n" not in lines[0]


def test_experts_stay_while_their_state_is_elsewhere() -> None:
    run_ranks(2, taken_out)
