"""Checks facts in a running job, and finds mistakes that would spoil training in silence.

A rank says of itself: the optimizers list each expert once and write what they list, tokens are counted. Ranks compare
`FACTS`. The first steps are sampled with exchanges of their own: ahead of the reduction of gradients, after it, and at
the end. Later samples go along with each decision. All ranks come to the same finding before any of them raises.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..distributed.consensus import deviating, gather_bytes
from ..distributed.store import StoreError
from ..load.aggregate import HostCopy
from ..moe.experts.memory import WeightMemory
from .gradients.averaging import bit_sums
from .model_check import Snapshot, options_of, snapshots, why_misplaced, why_not_stepped
from .runtime import Runtime

logger = logging.getLogger("eplb_runtime")

FIRST_STEPS = 3
"""Steps after attach that are sampled completely, and in which ``guard="auto"`` raises."""
MOST_NAMED = 8
"""Ranks in a line."""
_BY_RANK = "set them alike on every rank (not by its own loss, norms of its experts or an if on the rank)"
_BY_AVERAGING = "average gradients (dense_gradients='allreduce', or DDP after attach)"
_BY_WRITING = {"gradients": "clip by balancer.clip_grad_norm_", "weights": "write weights on every rank alike"}
_BY_AVERAGE = "write experts on every rank that has them, and leave averaging them to the balancer"
FACTS = (
    ("learning rates of the optimizer", "data_sets", _BY_RANK),
    ("options of the optimizer", "data_sets", _BY_RANK),
    ("trained parameters", "data_sets", _BY_RANK),
    ("tensors given to balancer.register", "data_sets", _BY_RANK),
    ("tensors outside the experts", "data_sets", ""),  # by what is seen
    ("experts with the same ids", "edp_sets", _BY_AVERAGE),
)
"""What is the same on ranks, the sets of these ranks in `Job`, and what to do where it is not."""
_SKIPS = "let every rank make each step (eplb.GradScaler(balancer), not torch's; as many batches; nothing stuck)"
_POLL_SECONDS = 0.02
_TEXTS = 4
"""Facts ahead of those about tensors."""


class GuardError(RuntimeError):
    """Something in this job makes training wrong; the message says what, on which ranks, and how to mend it."""


class SampleComparison(NamedTuple):
    """A mistake, and a reason why experts must stay where they are; empty: none. The same on every rank."""

    finding: str = ""
    stays: str = ""


class Digest(NamedTuple):
    """A rank's sample as other ranks receive it.

    Args:
        problem, stays: of this rank alone, as in `SampleComparison`.
        facts: a hash of each of `FACTS`; of the first ones alone where weights have no memory.
    """

    problem: str = ""
    stays: str = ""
    facts: Sequence[int] = ()


@dataclass(frozen=True)
class Sample:
    """A sample of one rank.

    Args:
        what: ``"weights"`` or ``"gradients"``.
        digest: without the numbers that are in transfer.
        names: of the tensors of each fact about tensors.
        numbers: int64, sums of all bits of these tensors; None: weights have no memory.
    """

    what: str
    digest: Digest
    names: Sequence[Sequence[str]] = ((), ())
    numbers: HostCopy | None = None

    def sums(self) -> list[dict[str, int]]:
        """Sums by name, of each fact about tensors; waits for them."""
        numbers = iter(() if self.numbers is None else self.numbers.wait().tolist())
        return [dict(zip(names, numbers, strict=False)) for names in self.names]

    def encode(self) -> bytes:
        """The whole digest as JSON."""
        digest = self.digest
        if self.numbers is not None:
            facts = [*digest.facts, *(_hash(list(sums.values())) for sums in self.sums())]
            digest = digest._replace(facts=facts)
        return json.dumps(digest).encode()


class Guard:
    """The guard of one rank.

    Args:
        dense: parameters outside the experts, by name.
        registered: tensors of the user's that move with experts, by name. What joins one of these later is seen.
        run: does work on the control group, one task at a time and in the same order on every rank.
        step: returns the number of the last step that is over.
        on_finding: called with each finding once.

    Attributes:
        complete_steps: that are sampled completely, after `begin`.
        said: all findings and notices so far, in their order, each once.
    """

    def __init__(
        self,
        runtime: Runtime,
        dense: Mapping[str, Tensor],
        optimizers: Sequence[Any],
        memory: WeightMemory,
        registered: Mapping[str, tuple[int, Tensor]],
        *,
        run: Callable[[Callable[[], str]], str],
        step: Callable[[], int],
        on_finding: Callable[[str], None],
    ) -> None:
        self._runtime, self._groups, self._mode = runtime, runtime.groups, runtime.config.guard
        self._experts = {name: runtime.parameters[name] for name in runtime.layer_of_parameter}
        self._dense, self._optimizers, self._memory, self._registered = dense, optimizers, memory, registered
        self._run, self._step, self._on_finding = run, step, on_finding
        self._steps, self._comparisons, self.complete_steps = 0, 0, FIRST_STEPS
        self._forwards = (0, 0)
        self._snapshots: list[Snapshot] = []
        self._passed_over: set[int] = set()
        self._late_problem = ""
        self._is_uncounted = False
        self.said: list[str] = []

    def begin(self) -> None:
        """Begin with a new or another optimizer."""
        self._steps = 0

    def end(self) -> None:
        """Stop sampling; the thread that talks to the other ranks is gone."""
        self._mode = "off"

    @property
    def is_new(self) -> bool:
        """Return whether this is one of the steps that are sampled completely: the first ones."""
        return self._mode != "off" and bool(self._optimizers) and self._steps < self.complete_steps

    def before_reduction(self) -> None:
        """In the first steps, compare ahead of the first collective that a rank without a step would never reach."""
        if self.is_new:
            self._compare_job(self._sample("weights"), "optimizer.step()")

    def before_step(self) -> None:
        """In the first steps, compare reduced gradients over ranks."""
        if self.is_new:
            self._compare_job(self._sample("gradients"), "the end of the reduction of gradients")
            both = _whole({**self._experts, **self._dense})
            self._snapshots = self._snapshots or snapshots(both, self._optimizers)  # of several, before the first one

    def passed_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that every rank skipped this optimizer's step: it will have written nothing."""
        self._passed_over.update(id(p) for group in optimizer.param_groups for p in group["params"])

    def after_step(self) -> None:
        """Compare weights after a training step, before its counts are closed."""
        if self.is_new:
            problem = self._uncounted() or why_not_stepped(self._snapshots, self._optimizers, self._passed_over)
            self._snapshots = []
            self._compare_job(self._sample("weights", problem), "the end of a step")
        elif self._mode != "off":
            self._late_problem = self._late_problem or self._uncounted()
        self._steps += 1
        self._passed_over.clear()

    def sample(self, stays: str) -> Sample | None:
        """Take the sample that a decision compares while training goes on; None: the guard is off. ``stays`` says why
        no expert can move from this rank."""
        if self._mode == "off" or not self._optimizers:
            return None
        problem, self._late_problem = self._late_problem, ""
        return self._sample("weights", problem, stays)

    def _uncounted(self) -> str:
        """Check that a step's tokens count. A rank may have no token in a step, or padding alone, and evaluate between
        steps; forwards for gradients in evaluation mode alone are a mistake."""
        layers, before = self._runtime.layers, self._forwards
        self._forwards = sum(layer.calls for layer in layers), sum(layer.uncounted for layer in layers)
        calls, uncounted = (now - then for now, then in zip(self._forwards, before, strict=True))
        if not uncounted or uncounted != calls or self._is_uncounted:
            return ""
        self._is_uncounted = True  # said once
        return (
            "call model.train() before a training step, also after from_pretrained and evaluations: the MoE layers ran "
            f"in step {self._step() + 1} in evaluation mode, and no token was counted"
        )

    def _sample(self, what: str, problem: str = "", stays: str = "") -> Sample:
        """Sum the bits of tensors that other ranks share; nothing is waited for."""
        job = self._groups.job
        trained = [parameter.requires_grad for parameter in (*self._dense.values(), *self._experts.values())]
        facts = [*map(_hash, (*options_of(self._optimizers), trained, list(self._registered)))]
        problem = problem or why_misplaced(self._experts, self._optimizers)
        if what == "weights" and (name := self._memory.name_of_freed()):
            stays = f"load weights ahead of decisions: {name} has no memory now, and experts stay where they are"
            return Sample(what, Digest(problem, stays, facts))
        dense = _whole(self._dense) if len(job.data_ranks) > 1 else {}
        twins = _whole(self._experts) if len(job.edp_ranks) > 1 and not job.divided_state else {}
        twins = twins | (self._states(twins) if what == "weights" else {})
        shared: list[Tensor | None] = [*dense.values(), *twins.values()]
        if what == "gradients":
            gradients = [None if one is None else one.grad for one in shared]
            shared = [one if one is not None and one.layout is torch.strided else None for one in gradients]
        sums = HostCopy(bit_sums(shared, self._runtime.device))
        return Sample(what, Digest(problem, stays, facts), (tuple(dense), tuple(twins)), sums)

    def _states(self, experts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Optimizer state of experts, by name."""
        return {
            f"{name} ({key} of {type(optimizer).__name__})": value
            for optimizer in self._optimizers
            if isinstance(optimizer, torch.optim.Optimizer)
            for name, parameter in experts.items()
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.shape == parameter.shape and not isinstance(value, DTensor)
        }

    def _compare_job(self, sample: Sample, where: str) -> None:
        """Compare over the job, on the thread that has the control group to itself; raise or warn. Collective."""
        self._comparisons += 1
        groups, name = self._groups, f"guard/{self._comparisons}"
        deadline = time.monotonic() + groups.timeout_seconds
        try:
            groups.store.compare_set(f"{name}/{groups.job.rank}", "here", passing=True)
            finding = self._run(lambda: self.compare(sample, groups.control).finding)
        except RuntimeError as error:
            missing = list(groups.job.ranks)
            with suppress(StoreError):  # a silent store says nothing of ranks; one that hung up may still arrive
                while missing := [rank for rank in missing if not groups.store.word_of(f"{name}/{rank}")]:
                    if time.monotonic() > deadline:
                        who = ", ".join(map(str, missing[:MOST_NAMED]))
                        limit = f"within {groups.timeout_seconds:g} s, which is collective"
                        return self.report(f"{_SKIPS}: rank {who} did not come to {where} {limit}")
                    time.sleep(_POLL_SECONDS)
            return logger.info("the ranks could not compare what they see at %s: %s", where, error)
        self.report(finding)

    def compare(self, sample: Sample, group: dist.ProcessGroup) -> SampleComparison:
        """Exchange samples over a group, on any thread, and find what is wrong; the same on every rank. Collective."""
        rows = gather_bytes(sample.encode(), group)
        seen = {r: Digest(*json.loads(row)) for r, row in zip(dist.get_process_group_ranks(group), rows, strict=True)}
        finding = next((f"{one.problem} (rank {rank})" for rank, one in seen.items() if one.problem), "")
        stays = next((f"{one.stays} (rank {rank})" for rank, one in seen.items() if one.stays), "")
        return SampleComparison(finding or self._different(sample, seen, group), stays)

    def _different(self, sample: Sample, seen: Mapping[int, Digest], group: dist.ProcessGroup) -> str:
        """Find ranks that do not have the same `FACTS`; the same on every rank. Collective where there are some."""
        for kind, (what, sets, mend) in enumerate(FACTS):
            known = {rank: one.facts[kind] for rank, one in seen.items() if kind < len(one.facts)}
            for together in getattr(self._groups.job, sets):
                here = [rank for rank in together if rank in known]
                odd = deviating(known, here)
                if odd and kind >= _TEXTS:
                    name, odd = _first_odd(sample.sums()[kind - _TEXTS], here, group)
                    what = f"{sample.what} of {name}"
                    averaged = self._runtime.averages_dense or self._runtime.model_check.seen_in_ddp
                    mend = mend or (_BY_WRITING[sample.what] if averaged else _BY_AVERAGING)
                if odd:
                    listed = ", ".join(map(str, odd[:MOST_NAMED]))
                    return f"{mend}: the {what} on rank {listed} differ from rank {here[0]}'s"
        return ""

    def report(self, finding: str, *notices: str) -> None:
        """Raise or warn of a finding as the mode says; notices are only logged. Each line is said once."""
        for notice in filter(self._is_news, notices):
            logger.warning("%s", notice)
        if self._is_news(finding):
            if self._mode == "raise" or (self._mode == "auto" and self._steps < FIRST_STEPS):
                raise GuardError(finding)
            logger.warning("%s", finding)

    def _is_news(self, text: str) -> bool:
        """Put a line on record; return whether it was not there."""
        if not text or text in self.said or self._mode == "off":
            return False
        self.said.append(text)
        self._on_finding(text)
        return True


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
