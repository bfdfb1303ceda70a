"""Train a user's model several times from the same seed - experts fixed, experts moving - and compare bit by bit.

Moving is forced: every few steps all homes change places, whether the load asks for it or not. With replica slots a
further run does each step twice, with tokens split over copies and without, and holds the difference against a bound.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...balancer.balancer import Balancer
from ...config import BalancerConfig, DispatchConfig
from ...events import RebalanceAborted, RebalanceCommitted
from ...hosts import attach
from ...moe.dispatch import notes as notes_of_dispatch
from ...planner.shuffle import plan_shuffle
from ...replicas.bank import accumulation_dtype
from .record import CapturedState, Place, StateReader, differing
from .report import Difference, ReplicaCheck, Report, Verdict

LEAST_MIGRATIONS = 3
"""With fewer, a verification says that it proved nothing."""
SEED = 0

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class _Task:
    """What the user gave, and what all runs share."""

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    make_batch: Callable[[int], Any]
    loss: Loss
    steps: int
    ep_group: dist.ProcessGroup | None
    reader: StateReader
    ep_sets: list[list[int]]
    on_step: Callable[[], None]


@dataclass
class _TrainingRun:
    """One training run, while its model is there. ``states[s]``: after step s; ``losses``: float64 ``[W, steps]``."""

    task: _Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    balancer: Balancer
    states: list[CapturedState]
    losses: Tensor


def verify(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    make_batch: Callable[[int], Any],
    *,
    steps: int,
    config: BalancerConfig | None = None,
    ep_group: dist.ProcessGroup | None = None,
    loss: Loss | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> Report:
    """Train ``steps`` steps with and without migrations and say whether it makes any difference. Collective.

    The parts of a run: ``make_model()``, ``make_optimizer(model)``, ``attach``; then for each step, from 0, seeds are
    set, ``model(make_batch(step))``, backward, ``optimizer.step()``. Runs follow each other, so one model is in memory
    at a time; only checksums are kept. Gradients outside the experts are averaged by the balancer (no DDP here).

    Args:
        make_model: a new model on its device, the same weights at each call and on every rank (seeds are set before).
        make_optimizer: an optimizer for it.
        make_batch: this rank's batch of a step, the same at each call: a mapping is given to the model as keyword
            arguments, a tuple or list as positional ones, anything else as the only one.
        steps: of each run. Migrations come every ``config.interval`` steps, or more often where that would be fewer
            than three of them, or where it is None.
        config: of the balancer; policy, gate and limits of moves don't count here. ``replica_slots`` asks for the
            further run with copies.
        ep_group: as for ``attach``.
        loss: ``(output, batch) -> scalar``; None: ``output.loss``.
        on_step: called after each step of each run: ``steps`` times two, once more that with replica slots, and once
            more where runs differ.

    Returns:
        The report, equal on every rank.

    Raises:
        AttachError: the model, optimizer or config cannot be balanced.
        TypeError: a callback returns something else than it should.
        ValueError: ``steps`` is not positive.
    """
    if steps < 1:
        raise ValueError(f"steps={steps}: give at least 1")
    config = config if config is not None else BalancerConfig()
    interval = max(1, min(config.interval or steps, steps // (LEAST_MIGRATIONS + 1)))
    config = replace(
        config,
        interval=interval,
        migration=replace(config.migration, lag=min(config.migration.lag, interval - 1)),
        window=None,
        policy="static",
        dense_gradients="allreduce",
    )
    plain = without_replicas(config)
    group = dist.new_group(backend="gloo", group_desc="eplb_runtime verify")
    reader, ep_sets = _reader(group, ep_group)
    loss = loss if loss is not None else (lambda output, batch: output.loss)
    task = _Task(make_model, make_optimizer, make_batch, loss, steps, ep_group, reader, ep_sets, on_step)
    try:
        report = _compare(task, plain)
        return replace(report, replicas=_check_replicas(task, config)) if config.replica_slots else report
    finally:
        dist.destroy_process_group(group)


def without_replicas(config: BalancerConfig) -> BalancerConfig:
    """Return the same settings without replica slots, and without what is of use to replicas alone. An initial
    placement is for one number of replica slots: runs without them start from logical order."""
    if not config.replica_slots:
        return config
    usual = DispatchConfig()
    dispatch = replace(
        config.dispatch,
        split=usual.split,
        split_locality=usual.split_locality,
        split_least_tokens=usual.split_least_tokens,
    )
    return replace(
        config,
        replica_slots=0,
        copies_by="torch",
        initial_placement=None,
        dispatch=dispatch,
    )


def _reader(group: dist.ProcessGroup, ep_group: dist.ProcessGroup | None) -> tuple[StateReader, list[list[int]]]:
    world = list(range(dist.get_world_size()))
    mine = world if ep_group is None else dist.get_process_group_ranks(ep_group)
    first = StateReader(group, []).gather(torch.tensor([min(mine)])).reshape(-1).tolist()
    ep_sets = [[rank for rank in world if first[rank] == start] for start in sorted(set(first))]
    return StateReader(group, ep_sets), ep_sets


# -- homes that move: the same bits ----------------------------------------------------------------------------------


def _compare(task: _Task, config: BalancerConfig) -> Report:
    with _attached(task, config) as static:
        _train(static)
    with _attached(task, config) as moving:
        moving.balancer._plan_with(plan_shuffle)
        _train(moving)
        committed = [e for e in moving.balancer.events if isinstance(e, RebalanceCommitted)]
        dropped = tuple(e.cause for e in moving.balancer.events if isinstance(e, RebalanceAborted))
        step, place = _first_difference(static, moving)
        theirs = _values(moving, place)
    first_difference, verdict = None, _verdict(len(committed))
    if place is not None:
        with _attached(task, config) as again:
            _train(again)
            repeatable = _first_difference(static, again)[1] is None and torch.equal(static.losses, again.losses)
            first_difference = _difference(static.states[step], step, place, _values(again, place), theirs)
        verdict = "different" if repeatable else "not repeatable"
    first_loss_step = _first_loss_step(static.losses, moving.losses)
    if place is None and first_loss_step is not None:
        verdict = "different"
    bytes_moved = task.reader.gather(torch.tensor([sum(event.received_bytes for event in committed)]))
    return Report(
        verdict=verdict,
        steps=task.steps,
        ranks=dist.get_world_size(),
        interval=config.interval or task.steps,
        migrations=len(committed),
        experts_moved=sum(event.moved_experts for event in committed) * len(task.ep_sets),
        bytes_moved=int(bytes_moved.sum()),
        dropped=dropped,
        tensors=len(static.states[-1].names),
        tensors_different=len({found.index for found in differing(static.states[-1], moving.states[-1])}),
        first_difference=first_difference,
        first_loss_step=first_loss_step,
        replicas=None,
        notes=_notes(task, config, len(committed)),
    )


def _verdict(migrations: int) -> Verdict:
    return "identical" if migrations >= LEAST_MIGRATIONS else "nothing proved"


def _notes(task: _Task, config: BalancerConfig, migrations: int) -> tuple[str, ...]:
    notes = [*notes_of_dispatch(config)]
    if len(task.ep_sets[0]) == 1:
        notes.append(
            "one rank has all experts: they changed slots, but nothing went between ranks; use torchrun with more"
        )
    if migrations < LEAST_MIGRATIONS:
        notes.append(f"{LEAST_MIGRATIONS} migrations are wanted at least: give {LEAST_MIGRATIONS + 1} steps or more")
    return tuple(notes)


@contextmanager
def _attached(task: _Task, config: BalancerConfig) -> Iterator[_TrainingRun]:
    torch.manual_seed(SEED)
    model = task.make_model()
    if not isinstance(model, nn.Module):
        raise TypeError(f"make_model() must return a torch module, not {type(model).__name__}")
    optimizer = task.make_optimizer(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"make_optimizer(model) must return a torch optimizer, not {type(optimizer).__name__}")
    balancer = attach(model, optimizer, config=config, ep_group=task.ep_group)
    balancer._rebalancer.held_outside = None  # what is kept to be compared is ours
    balancer._wait_until_compiled()  # the first decisions are to move something
    model.train()
    run = _TrainingRun(task, model, optimizer, balancer, [], torch.zeros(0))
    try:
        yield run
    finally:
        balancer.close()
        # What follows makes a model of the same size: this one must be gone, cycles (hooks) and all.
        del run.model, run.optimizer, run.balancer, model, optimizer, balancer
        gc.collect()


def _train(run: _TrainingRun) -> None:
    task, losses = run.task, torch.zeros(run.task.steps, dtype=torch.float64)
    run.states.append(task.reader.read(run.model, run.optimizer))
    for step in range(task.steps):
        loss = _forward(run, step)
        loss.backward()
        losses[step] = loss.item()
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
        run.states.append(task.reader.read(run.model, run.optimizer))
        task.on_step()
    run.losses = task.reader.gather(losses)


def _forward(run: _TrainingRun, step: int) -> Tensor:
    """Dropout and the like draw the same numbers in every run."""
    torch.manual_seed((SEED * 1_000_003 + step + 1) * 4099 + dist.get_rank())
    batch = run.task.make_batch(step)
    if isinstance(batch, Mapping):
        output = run.model(**batch)
    else:
        output = run.model(*batch) if isinstance(batch, (tuple, list)) else run.model(batch)
    loss = run.task.loss(output, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"the loss must be a tensor of one value, not {found}: give labels in the batch, or loss=")
    return loss


def _first_difference(one: _TrainingRun, other: _TrainingRun) -> tuple[int, Place | None]:
    for step, (before, after) in enumerate(zip(one.states, other.states, strict=True)):
        places = differing(before, after)
        if places:
            return step, places[0]
    return 0, None


def _first_loss_step(one: Tensor, other: Tensor) -> int | None:
    """Bits are compared, so that NaN equals itself."""
    odd = (one.view(torch.int64) != other.view(torch.int64)).any(dim=0).nonzero()
    return int(odd[0]) + 1 if len(odd) else None


def _values(run: _TrainingRun, place: Place | None) -> Tensor:
    if place is None:
        return torch.zeros(0)
    ep_set = next(ranks for ranks in run.task.ep_sets if place.rank in ranks)
    return run.task.reader.fetch(run.model, run.optimizer, place, ep_set)


def _difference(state: CapturedState, step: int, place: Place, ours: Tensor, theirs: Tensor) -> Difference:
    largest = float((ours - theirs).abs().max()) if ours.numel() else 0.0
    scale = float(ours.abs().max()) if ours.numel() else 0.0
    return Difference(
        step=step,
        tensor=state.names[place.index],
        layer=state.layers[place.index],
        expert=place.expert,
        rank=place.rank,
        largest=largest,
        relative=largest / scale if scale else float(largest > 0),
    )


# -- copies: the same up to the order of sums ------------------------------------------------------------------------


def _check_replicas(task: _Task, config: BalancerConfig) -> ReplicaCheck:
    """Train with copies; at each step, from the same weights, also with every token at home, and compare gradients.

    From the same weights, because an optimizer that divides by the gradient's size makes rounding errors of whole runs
    incomparable. What a copy gets wrong shows at the step it happens: a stale or decayed weight in loss and gradients,
    a gradient lost, averaged or added twice in the home's.
    """
    steps, summands, parts = 0, 0, 1
    with _attached(task, config) as run:
        run.balancer._plan_with(plan_shuffle)
        parameters = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
        experts = [parameters[name] for name in run.balancer.layer_of_parameter if name in parameters]
        worst = _Worst(list(parameters))
        for step in range(task.steps):
            copy_count = int(run.balancer.placement.copy_count.max())
            with run.balancer._unsplit():
                loss_at_home, at_home = _gradients(run, step, parameters)
            counted = task.reader.gather(run.balancer._counted.cpu()).sum(dim=0)
            loss_split, split = _gradients(run, step, parameters)
            if copy_count > 1:
                steps, parts = steps + 1, max(parts, copy_count)
                summands = max(summands, int(counted.max()))
                worst.see(step + 1, loss_at_home, loss_split, at_home, split)
            run.optimizer.step()  # with the gradients of the split pass
            run.optimizer.zero_grad(set_to_none=True)
            task.on_step()
        placement = run.balancer.placement
        copies = int((placement.copy_count - 1).sum())
        dtype = experts[0].dtype if experts else torch.float32
        width = max((max(p.shape[1:]) for p in experts if p.ndim > 1), default=1)
    accumulation = accumulation_dtype(torch.empty(0, dtype=dtype))
    summands += width
    bound = 2 * summands * torch.finfo(accumulation).eps + 2 * parts * torch.finfo(dtype).eps
    gradient, loss, tensor, at_step = worst.over_ranks(task.reader)
    return ReplicaCheck(
        steps=steps,
        copies=copies,
        summands=summands,
        parts=parts,
        dtype=_name(dtype),
        accumulation_dtype=_name(accumulation),
        bound=bound,
        gradient_difference=gradient,
        tensor=tensor,
        step=at_step,
        loss_difference=loss,
        passed=steps > 0 and gradient <= bound and loss <= bound,
    )


def _gradients(run: _TrainingRun, step: int, parameters: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one pass, as the optimizer would get them. The parameters keep theirs."""
    run.optimizer.zero_grad(set_to_none=True)
    loss = _forward(run, step)
    loss.backward()
    run.balancer.reduce_gradients()
    return loss.item(), {name: p.grad for name, p in parameters.items() if p.grad is not None}


class _Worst:
    """The largest relative differences so far on this rank: of a gradient (and where), of a loss."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._gradient, self._index, self._step, self._loss = 0.0, 0, 0, 0.0

    def see(
        self, step: int, loss: float, loss_split: float, gradients: Mapping[str, Tensor], split: Mapping[str, Tensor]
    ) -> None:
        self._loss = max(self._loss, _relative(abs(loss - loss_split), abs(loss)))
        for index, name in enumerate(self._names):
            if name not in gradients:
                continue
            one, other = gradients[name], split[name]
            largest = float((one.double() - other.double()).abs().max())
            found = _relative(largest, float(one.abs().max()))
            if found > self._gradient:
                self._gradient, self._index, self._step = found, index, step

    def over_ranks(self, reader: StateReader) -> tuple[float, float, str, int]:
        mine = torch.tensor([self._gradient, self._loss, self._index, self._step], dtype=torch.float64)
        every = reader.gather(mine)
        _, _, index, step = every[int(every[:, 0].argmax())].tolist()
        return float(every[:, 0].max()), float(every[:, 1].max()), self._names[int(index)], int(step)


def _relative(difference: float, scale: float) -> float:
    """NaN counts as the largest difference there is."""
    if difference == 0:
        return 0.0
    return difference / scale if scale > 0 and difference == difference else float("inf")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
