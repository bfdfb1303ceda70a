"""Checks facts in a running job, and finds mistakes that would spoil training in silence.

A rank says of itself: the optimizers list each expert once and write what they list, tokens are counted. Ranks compare
`FACTS`. The first steps are sampled with exchanges of their own: ahead of the reduction of gradients, after it, and at
the end. Later samples go along with each decision. All ranks come to the same finding before any of them raises.
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..distributed.consensus import deviating, gather_bytes
from ..distributed.store import StoreError
from ..events import EventLog, GuardFinding
from ..load.counter import HostCopy
from ..utils.spans import phase
from .gradients.reduction import bit_sums
from .loop_state import LoopHooks, LoopState
from .runtime import Runtime

logger = logging.getLogger("eplb_runtime")

FIRST_STEPS = 3
"""Steps after attach that are sampled completely, and in which ``guard="auto"`` raises."""
MOST_NAMED = 8
"""Ranks in a line."""
_BY_RANK = "set them by what all ranks share, not by a rank's own loss, the norm of its experts or its number"
_BY_AVERAGING = "average gradients (dense_gradients='allreduce', or DDP after attach)"
_BY_WRITING = {"gradients": "clip by balancer.clip_grad_norm_", "weights": "write weights on every rank alike"}
_BY_AVERAGE = "write experts on every rank that has them, and leave averaging them to the balancer"
FACTS = (
    ("learning rates of the optimizer", "dp_groups", _BY_RANK),
    ("options of the optimizer", "dp_groups", _BY_RANK),
    ("trained parameters", "dp_groups", _BY_RANK),
    ("tensors given to balancer.register", "dp_groups", _BY_RANK),
    ("tensors outside the experts", "dp_groups", ""),  # by what is seen
    ("experts with the same ids", "edp_sets", _BY_AVERAGE),
)
"""What is the same on ranks, the sets of these ranks in `Job`, and what to do where it is not."""
_SKIPS = "every rank must make each step (equally many batches; eplb.GradScaler(balancer), not torch's)"
_POLL_SECONDS = 0.02
_TEXTS = 4
"""Facts ahead of those about tensors."""
_ELEMENTS = 1024
"""Elements of a tensor, about, that tell whether an optimizer has written it."""
Snapshot = tuple[str, Tensor, Tensor, object]
"""A parameter that is about to be stepped, by name: some elements, and the versions of it and its state."""


class GuardError(RuntimeError):
    """Something in this job makes training wrong; the message says what, on which ranks, and how to mend it."""


@dataclass(frozen=True)
class Sample:
    """A sample of one rank.

    Args:
        what: ``"weights"`` or ``"gradients"``.
        problem: a mistake on this rank; empty: none.
        facts: a hash of each of `FACTS` but those about tensors.
        names: of the tensors of each fact about tensors.
        numbers: int64, sums of all bits of these tensors; None: weights have no memory.
    """

    what: str
    problem: str
    facts: Sequence[int]
    names: Sequence[Sequence[str]] = ((), ())
    numbers: HostCopy | None = None

    def sums(self) -> list[dict[str, int]]:
        """Return the sums by tensor name, for each fact about tensors; empty without ``numbers``. Waits for them."""
        numbers = iter(() if self.numbers is None else self.numbers.wait().tolist())
        return [dict(zip(names, numbers, strict=False)) for names in self.names]

    def encode(self) -> bytes:
        """Return the problem and the hashes of all facts as JSON, for the other ranks. Waits for the device."""
        of_tensors = [] if self.numbers is None else [_hash(list(sums.values())) for sums in self.sums()]
        return json.dumps([self.problem, [*self.facts, *of_tensors]]).encode()


class Guard(LoopHooks):
    """The guard of one rank; ``run`` does work on the control group. ``complete_steps``: how many steps are sampled
    completely after `begin`. ``said``: all findings so far, in their order, each once."""

    def __init__(self, runtime: Runtime, loop: LoopState, events: EventLog, run: Callable[..., str]) -> None:
        self._runtime, self._groups, self._mode = runtime, runtime.groups, runtime.config.guard
        self._experts = runtime.parameters
        self._tensors, self._loop, self._events, self._run = loop.tensors, loop, events, run
        self._comparisons = 0
        self._snapshots: list[Snapshot] = []
        self._skipped: set[int] = set()
        self._steps, self.complete_steps = 0, FIRST_STEPS
        self._forwards = 0, 0
        self._late_problem = ""
        self._is_uncounted = False
        self.said: list[str] = []

    def begin(self) -> None:
        """Sample the next `complete_steps` steps completely again, since an optimizer is new or replaced."""
        self._steps = 0

    def end(self) -> None:
        """Turn the guard off for good; the thread that talks to the other ranks is gone."""
        self._mode = "off"

    @property
    def in_first_steps(self) -> bool:
        """Return whether this is one of the first steps, which are sampled completely; False with the guard off."""
        return self._mode != "off" and bool(self._tensors.optimizers) and self._steps < self.complete_steps

    def sample(self) -> Sample | None:
        """Return a sample of weights, for the next decision to compare, with a problem that was found in steps since
        the last one; None: the guard is off, or there is no optimizer."""
        if self._mode == "off" or not self._tensors.optimizers:
            return None
        problem, self._late_problem = self._late_problem, ""
        return self.take_sample("weights", problem)

    def uncounted(self) -> str:
        """Return a message if MoE layers ran for gradients since the last call, and in evaluation mode alone, so that
        no token was counted; else "", and after the first message always. A rank may have no token in a step."""
        (calls, counted), layers = self._forwards, self._runtime.layers
        self._forwards = sum(one.calls for one in layers), sum(one.calls - one.uncounted for one in layers)
        if self._forwards[0] == calls or self._forwards[1] > counted or self._is_uncounted:
            return ""
        self._is_uncounted = True  # said once
        return (
            "call model.train() before a training step, also after from_pretrained and evaluations: the MoE layers ran "
            f"in step {self._loop.step + 1} in evaluation mode, and no token was counted"
        )

    def take_sample(self, what: str, problem: str = "") -> Sample:
        """Return a sample of this rank: hashes of its settings, and sums of the bits of weights or gradients (``what``)
        that other ranks hold, too, computed without waiting. ``problem`` goes with it, or else that optimizers do not
        list an expert once. There are no sums of weights whose memory is freed."""
        job = self._groups.job
        trained = [parameter.requires_grad for parameter in (*self._tensors.dense.values(), *self._experts.values())]
        facts = [*map(_hash, (*options_of(self._tensors.optimizers), trained, list(self._tensors.registered)))]
        problem = problem or why_misplaced(self._experts, self._tensors.optimizers)
        if what == "weights" and self._tensors.memory.why_freed():
            return Sample(what, problem, facts)
        dense = _whole(self._tensors.dense) if len(job.data_ranks) > 1 else {}
        of_edp = _whole(self._experts) if len(job.edp_ranks) > 1 and not job.divided_state else {}
        of_edp = of_edp | (self._states(of_edp) if what == "weights" else {})
        shared: list[Tensor | None] = [*dense.values(), *of_edp.values()]
        if what == "gradients":
            gradients = [None if one is None else one.grad for one in shared]
            shared = [one if one is not None and one.layout is torch.strided else None for one in gradients]
        sums = HostCopy(bit_sums(shared, self._runtime.device))
        return Sample(what, problem, facts, (tuple(dense), tuple(of_edp)), sums)

    def _states(self, experts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Optimizer state of experts, by name."""
        return {
            f"{name} ({key} of {type(optimizer).__name__})": value
            for optimizer in self._tensors.optimizers
            if isinstance(optimizer, torch.optim.Optimizer)
            for name, parameter in experts.items()
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.shape == parameter.shape and not isinstance(value, DTensor)
        }

    def compare(self, sample: Sample, group: dist.ProcessGroup) -> str:
        """Exchange samples over a group, on any thread. Returns a line that says the first mistake in them, the same on
        every rank; "": there is none. Collective."""
        rows = gather_bytes(sample.encode(), group)
        said = dict(zip(dist.get_process_group_ranks(group), map(json.loads, rows), strict=True))
        finding = next((f"{problem} (rank {rank})" for rank, (problem, _) in said.items() if problem), "")
        return finding or self._different(sample, {rank: facts for rank, (_, facts) in said.items()}, group)

    def _different(self, sample: Sample, seen: Mapping[int, Sequence[int]], group: dist.ProcessGroup) -> str:
        """Find ranks that do not have the same `FACTS`; the same on every rank. Collective where there are some."""
        for kind, (what, sets, mend) in enumerate(FACTS):
            known = {rank: facts[kind] for rank, facts in seen.items() if kind < len(facts)}
            for together in getattr(self._groups.job, sets):
                here = [rank for rank in together if rank in known]
                odd = deviating(known, here)
                if odd and kind >= _TEXTS:
                    name, odd = _first_odd(sample.sums()[kind - _TEXTS], here, group)
                    what = f"{sample.what} of {name}"
                    averaged = self._runtime.config.dense_gradients == "allreduce" or self._tensors.seen_in_ddp
                    mend = mend or (_BY_WRITING[sample.what] if averaged else _BY_AVERAGING)
                if odd:
                    listed = ", ".join(map(str, odd[:MOST_NAMED]))
                    return f"the {what} on rank {listed} differ from rank {here[0]}'s: {mend}"
        return ""

    def report(self, finding: str) -> None:
        """Raise GuardError or log a warning, as ``guard`` of the config says, with a `GuardFinding` event and an entry
        in `said`. An empty finding, one that was reported before, and a guard that is off do nothing."""
        if not finding or finding in self.said or self._mode == "off":
            return
        self.said.append(finding)
        self._events.emit(GuardFinding(self._loop.step, finding))
        if self._mode == "raise" or (self._mode == "auto" and self._steps < FIRST_STEPS):
            raise GuardError(finding)
        logger.warning("%s", finding)

    # -- in the loop: the first steps are sampled completely, with exchanges of their own ---------------------------

    def on_forward_begin(self, trains: bool) -> None:
        """Raise StructureError if the model was changed since attach, in forwards that train, or that use replicas."""
        # Replicas are copies of the model's own parameters; one of two batches may compute with them just now.
        if trains or (self._runtime.maps.replicas is not None and not self._runtime.channels.busy):
            self._tensors.check(thoroughly=trains and self.in_first_steps)

    def before_reduce(self) -> None:
        """In the first steps compare settings and weights over ranks, ahead of the first collective that a rank without
        a step would never reach. Collective. A mistake is reported by `report`."""
        if self.in_first_steps:
            self._compare(self.take_sample("weights"), "optimizer.step()")

    def before_step(self) -> None:
        """Put FSDP2's slices back. In the first steps also compare reduced gradients over ranks, which is collective,
        and copy some elements of each parameter, for `on_step_end` to see whether the optimizer writes it."""
        self._tensors.keep_slices()
        if self.in_first_steps:
            self._compare(self.take_sample("gradients"), "the end of the reduction of gradients")
            both = _whole({**self._runtime.parameters, **self._tensors.dense})
            # With several optimizers before the first one.
            self._snapshots = self._snapshots or snapshots(both, self._tensors.optimizers)

    def on_step_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note this optimizer's parameters, which need not change in this step."""
        self._skipped.update(id(p) for group in optimizer.param_groups for p in group["params"])

    def on_step_end(self) -> None:
        """Count a step, after a check that its tokens were counted. In the first steps also check that optimizers have
        written parameters, and compare weights over ranks (collective). Later a problem waits for the next `sample`."""
        with phase("guard"):
            problem = self.uncounted()
            if self.in_first_steps:
                problem = problem or why_not_stepped(self._snapshots, self._tensors.optimizers, self._skipped)
                self._snapshots = []
                self._compare(self.take_sample("weights", problem), "the end of a step")
                problem = ""
            self._late_problem = self._late_problem or problem  # the next sample shows it
            self._steps += 1
            self._skipped.clear()

    def on_moved(self) -> None:
        self._tensors.keep_slices()

    def _compare(self, sample: Sample, where: str) -> None:
        """Compare over the job; raise or warn. Collective."""
        self._comparisons += 1
        groups, name, limit = self._groups, f"guard/{self._comparisons}", self._groups.timeout_seconds
        late, deadline = list(groups.job.ranks), time.monotonic() + limit
        try:
            groups.store.compare_set(f"{name}/{groups.job.rank}", "here", passing=True)
            finding = self._run(lambda group, _: self.compare(sample, group))
        except RuntimeError as error:
            with suppress(StoreError):  # a silent store says nothing of ranks; one that hung up may still arrive
                while late := [rank for rank in late if not groups.store.word_of(f"{name}/{rank}")]:
                    if time.monotonic() > deadline:
                        listed = ", ".join(map(str, late[:MOST_NAMED]))
                        return self.report(f"rank {listed} did not come to {where} within {limit:g} s: {_SKIPS}")
                    time.sleep(_POLL_SECONDS)
            return logger.info("the ranks could not compare their facts at %s: %s", where, error)
        self.report(finding)


def _first_odd(sums: Mapping[str, int], here: Sequence[int], group: dist.ProcessGroup) -> tuple[str, list[int]]:
    """Name the first tensor whose bits differ between these ranks, and ranks that differ from the first. Collective."""
    rows = map(json.loads, gather_bytes(json.dumps(sums).encode(), group))
    of_rank = dict(zip(dist.get_process_group_ranks(group), rows, strict=True))
    for name in of_rank[here[0]]:
        if odd := deviating({rank: of_rank[rank].get(name) for rank in here}, here):
            return name, odd
    return "a parameter", [rank for rank in here if of_rank[rank] != of_rank[here[0]]]


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that are not sharded over ranks, and have numbers as wide as two bytes."""
    here = {name: one for name, one in tensors.items() if not isinstance(one, DTensor)}
    return {name: one for name, one in here.items() if one.numel() and one.element_size() > 1}


def _hash(value: object) -> int:
    return xxhash.xxh3_64_intdigest(repr(value).encode())


def why_misplaced(experts: Mapping[str, Tensor], optimizers: Sequence[Any]) -> str:
    """Return a message that names a trained expert tensor which the optimizers do not list exactly once; "": none."""
    rates = _rates(optimizers)
    for name, parameter in experts.items() if optimizers else ():
        if parameter.requires_grad and (times := len(rates.get(id(parameter), ()))) != 1:
            return (
                f"the optimizer must list each trained expert parameter once, but lists {name} {times} times: freeze "
                "or unfreeze, make the optimizer and attach, in this order"
            )
    return ""


def snapshots(parameters: Mapping[str, Tensor], optimizers: Sequence[Any]) -> list[Snapshot]:
    """Return snapshots (some elements, versions) of parameters with gradient and learning rate, in float32 or wider."""
    rates = _rates(optimizers)
    # Writing through .data leaves no version; the values tell then, where rounding hides no update.
    wide = [(name, p) for name, p in parameters.items() if p.element_size() > 2 and any(rates.get(id(p), ()))]
    return [(name, p, _elements(p).clone(), _versions(p, optimizers)) for name, p in wide if p.grad is not None]


def why_not_stepped(before: Sequence[Snapshot], optimizers: Sequence[Any], skipped: Collection[int]) -> str:
    """Return a message that names a parameter which a step has left as it was in ``before``, though its gradient is not
    0; "": none. ``skipped``: ids of parameters that are passed over, as all ranks have skipped their optimizer."""
    for name, p, elements, versions in before:
        is_as_before = _versions(p, optimizers) == versions and torch.equal(_elements(p), elements)
        gradient = p.grad if p.grad is not None and p.grad.layout is torch.strided else None
        if is_as_before and gradient is not None and id(p) not in skipped and _elements(gradient).any():
            return (
                f"optimizer.step() did not change {name}, which has a gradient: use an optimizer that updates all "
                "its parameters on every rank (not ZeroRedundancyOptimizer)"
            )
    return ""


def options_of(optimizers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the learning rate of each parameter group, and each group's other options as ``(name, value)`` pairs;
    values that are no numbers on the host are None. Frameworks' own optimizers may differ by rank, and are left out."""
    groups = [group for one in optimizers if isinstance(one, torch.optim.Optimizer) for group in one.param_groups]
    others = [[(key, _numbers(group[key])) for key in sorted(set(group) - {"lr", "params"})] for group in groups]
    return [_numbers(group.get("lr")) for group in groups], others


def _numbers(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, list | tuple):
        return [_numbers(one) for one in value]
    return value if isinstance(value, int | float) else None


def _rates(optimizers: Sequence[Any]) -> dict[int, list[Any]]:
    """Learning rates by id of a parameter, one for each time that an optimizer lists it."""
    rates: dict[int, list[Any]] = {}
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        for parameter in group["params"]:
            rates.setdefault(id(parameter), []).append(group.get("lr", 1))
    return rates


def _versions(parameter: Tensor, optimizers: Sequence[Any]) -> object:
    """Versions of a parameter and its state: an optimizer may write its state alone in some steps (a warm-up)."""
    states = [getattr(optimizer, "state", {}).get(parameter) for optimizer in optimizers]
    values = [parameter, *(value for state in states if isinstance(state, dict) for value in state.values())]
    have = [isinstance(one, Tensor) and not one.is_inference() for one in values]
    return [(id(one), one._version) if has else repr(one) for one, has in zip(values, have, strict=True)]


def _elements(tensor: Tensor) -> Tensor:
    """Elements from all over a tensor."""
    flat = (tensor if tensor.is_contiguous() else tensor[:1]).detach().reshape(-1)
    return flat[:: max(1, len(flat) // _ELEMENTS)]
