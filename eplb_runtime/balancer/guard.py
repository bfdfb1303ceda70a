"""Checks, in a running job, what the runtime assumes of it: mistakes that would spoil training without a word.

Looked at are assumptions, not names: ranks that share a tensor have the same bits in it, ranks with different experts
have different ones, what the optimizer steps is what the model computes with, and tokens are counted while the model
computes. In the first steps everything is looked at, with exchanges of their own; later what was seen goes along with
each decision: all bits of what ranks share, a sample of the rest, and by what gradients were changed in each step since
the last. All ranks come to the same finding before any of them raises.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..distributed.process_groups import ProcessGroups
from ..distributed.ranks import gather_rows
from ..load.aggregate import HostCopy
from ..moe.experts.lone_step import LoneSteps
from .gradients.division import foreign_hooks
from .gradients.rescaled import DENSE, WATCHED, WEIGHTS, WHEN, GradientSampler
from .guard_samples import SAMPLES, Sample, SampleDigest, Watched, bit_sums, options_of

logger = logging.getLogger("eplb_runtime")

FIRST_STEPS = 3
"""Steps after attach in which everything is looked at, and ``guard="auto"`` raises."""
_SAMPLE_ELEMENTS = 1024
"""Of a tensor, from a place that moves on from look to look."""
_POLL_SECONDS = 0.02


class GuardError(RuntimeError):
    """Something in this job makes training wrong; the message says what, on which ranks, and how to mend it."""


@dataclass(frozen=True)
class Comparison:
    """What a comparison has come to; the same on every rank.

    Args:
        finding: what is wrong; empty: nothing.
        stays: why experts must stay where they are; empty: they may move.
    """

    finding: str = ""
    stays: str = ""


class Guard:
    """One rank's guard.

    Args:
        mode: ``"auto"`` raises in the first steps and warns later; ``"raise"``, ``"warn"``, ``"off"``.
        steps: between two decisions, at most.
        lone: steps single experts alone; None: nothing will ever move.
        run: does work on the control group, one thing at a time and in the same order on every rank.
        number: of the last step that is over.
        on_finding: hears each finding once.

    Attributes:
        lone: as given.
        seconds, clocked_steps: what looking took of the training thread after the first steps, and how many steps.
    """

    def __init__(
        self,
        mode: str,
        groups: ProcessGroups,
        watched: Watched,
        device: torch.device,
        steps: int,
        *,
        lone: LoneSteps | None,
        run: Callable[[Callable[[], str]], str],
        number: Callable[[], int],
        on_finding: Callable[[str], None],
    ) -> None:
        self._mode = mode
        self._groups = groups
        self._watched = watched
        self._device = device
        self._steps = 0
        self._sample_number = 0
        self._uncounted_before = 0
        self._calls_at_decision = 0
        self._reported: set[str] = set()
        self._sampled_before_forward = False
        self._distinct = True
        self._comparisons = 0
        self.seconds, self.clocked_steps = 0.0, 0
        self._snapshots: list[tuple[str, int, Tensor, object]] = []
        self._passed_over: set[int] = set()
        self._steps_between = steps
        self._gradient_sampler: GradientSampler | None = None
        self._rescaled_by = ""
        self._rescaled_was_reported = False
        self._sample_before_forward: Sample | None = None
        self.lone = lone
        self._run = run
        self._number = number
        self._on_finding = on_finding

    def begin(self) -> None:
        """Training begins: there is an optimizer now. Collective."""
        self._steps = 0
        if self._mode != "off":
            # Experts may start alike (copied from a dense model): then equal ones say nothing.
            sample = self._take_sample("weights", dense=False)
            seen = self._exchange(sample, self._groups.data, on_device=True)
            self._distinct = not self._alike(sample, {rank: one.hashes for rank, one in seen.items()})
            self._watch_gradients()

    @property
    def is_new(self) -> bool:
        """Whether these are the first steps, in which everything is looked at."""
        return self._mode != "off" and bool(self._watched.optimizers) and self._steps < FIRST_STEPS

    @contextmanager
    def clocked(self) -> Iterator[None]:
        """What runs inside is a cost of looking; the first steps do not count."""
        counts, began = not self.is_new, time.perf_counter()
        try:
            yield
        finally:
            if counts:
                self.seconds += time.perf_counter() - began

    def before_forward(self) -> None:
        """In the first steps, ahead of the first forward of each: nobody else has written expert weights. They are
        compared ahead of the reduction: a rank may be in another forward, which the layers find out."""
        if self._gradient_sampler is not None:
            with self.clocked():
                self._gradient_sampler.forward_begins()
        if self.is_new and not self._sampled_before_forward:
            self._sampled_before_forward = True
            self._sample_before_forward = self._take_sample("weights", dense=False)

    def _watch_gradients(self) -> None:
        if self._gradient_sampler is not None:
            self._gradient_sampler.end()
        self._gradient_sampler = None
        if len(self._groups.job.data_ranks) > 1:
            watched = self._watched
            dense, experts, average = watched.dense, watched.experts, watched.average_dense
            self._gradient_sampler = GradientSampler(dense, experts, average, self._steps_between, self._device)

    def gradients_are_there(self) -> None:
        """A schedule of micro-batches is through, which may have made gradients by itself."""
        if self._gradient_sampler is not None:
            self._gradient_sampler.again()

    def before_averaging(self) -> None:
        """Gradients are about to be reduced: nobody has changed them by another measure on each rank."""
        if self._gradient_sampler is not None:
            with self.clocked():
                self._gradient_sampler.before_reduction()

    def gradients_are_reduced(self) -> None:
        """They are what the optimizer is to see."""
        if self._gradient_sampler is not None:
            with self.clocked():
                self._gradient_sampler.reduced()

    def optimizer_has_stepped(self) -> None:
        """Gradients are still what it has seen."""
        if self._gradient_sampler is not None:
            with self.clocked():
                self._gradient_sampler.stepped()

    def before_reduction(self) -> None:
        """In the first steps, ahead of the first collective that a rank without a step would never come to."""
        if self.is_new:
            nothing = Sample("weights", "", (), (), HostCopy(torch.empty(0, dtype=torch.uint8)), ())
            sample, self._sample_before_forward = self._sample_before_forward or nothing, None
            self._raise_or_warn(self._compare_job(sample, "optimizer.step()"))

    def before_step(self) -> None:
        """In the first steps, when gradients are reduced: they are what the optimizer is to see on every rank."""
        if self.is_new:
            sample = self._take_sample("gradients")
            self._raise_or_warn(self._compare_job(sample, "the end of the reduction of gradients"))
            if not self._snapshots:  # with several optimizers: before the first of them
                self._snapshots = [
                    (name, p._version, self._piece(p).clone(), self._state_of(p)) for name, p in self._stepped()
                ]

    def passed_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Some decision of all ranks has left out an optimizer in this step: it will have written nothing."""
        self._passed_over.update(id(p) for group in optimizer.param_groups for p in group["params"])

    def after_step(self) -> None:
        """A training step is over, counts not yet closed."""
        if self.is_new:
            problem = self._uncounted() or self._not_stepped()
            self._raise_or_warn(self._compare_job(self._take_sample("weights", problem=problem), "the end of a step"))
        else:
            self.clocked_steps += 1
        self._steps += 1
        self._sampled_before_forward = False
        self._passed_over.clear()
        if self._gradient_sampler is not None:
            with self.clocked():
                self._gradient_sampler.step_is_over(self._number() + 1)

    def experts_are_left(self) -> None:
        """After a step, where they stand now: until the next forward nobody changes them by a rank's own measure."""
        if self._gradient_sampler is not None:
            with self.clocked():
                self._gradient_sampler.left()

    def sample(self) -> Sample | None:
        """For a decision: what is compared by `finding`, beside training; None: the guard is off."""
        if self._mode == "off" or not self._watched.optimizers:
            return None
        with self.clocked():
            return self._take_sample("weights", decides=True)

    def computed(self) -> bool:
        """Whether MoE layers ran since the last time that this was asked."""
        with self.clocked():
            before, self._calls_at_decision = self._calls_at_decision, self._watched.calls()
        return self._calls_at_decision > before

    def report(self, finding: str, stays: str = "") -> None:
        """Raise or warn as the mode says; only say why experts stay where they are."""
        if stays and stays not in self._reported:
            self._reported.add(stays)
            self._on_finding(stays)
            logger.warning("%s", stays)
        self._raise_or_warn(finding)

    def end(self) -> None:
        """Nothing is looked at any more; the thread that meets the other ranks is gone."""
        self._mode = "off"
        if self._gradient_sampler is not None:
            self._gradient_sampler.end()
            self._gradient_sampler = None

    # -- looking -------------------------------------------------------------------------------------------------------

    def _take_sample(self, what: str, *, dense: bool = True, problem: str = "", decides: bool = False) -> Sample:
        """Pieces of gradients and experts; of other weights, and of experts that other ranks have, all bits."""
        self._sample_number += 1
        names, pieces = [], []
        for kind in (self._watched.dense if what == "gradients" else {}, self._watched.experts):
            chosen = self._chosen(list(kind))
            names.append(chosen)
            pieces += [self._piece(kind[name] if what == "weights" else kind[name].grad) for name in chosen]
        together = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
        sizes = tuple(piece.numel() for piece in pieces)
        problem, names_of_kinds = problem or self._misplaced(), (tuple(names[0]), tuple(names[1]))
        sums, summed = self._summed() if dense and what == "weights" else (None, ((), ()))
        gradients = None
        if dense and self._gradient_sampler is not None:
            gradients = self._gradient_sampler.take() if decides else self._gradient_sampler.now(self._number() + 1)
        stays, lone = (self._row_hooks() or self._left_behind(), self._lone()) if decides else ("", None)
        options = options_of(self._watched.optimizers) if dense else ("", "")
        return Sample(
            what, problem, *names_of_kinds, HostCopy(together), sizes, sums, summed, gradients, stays, lone, options
        )

    def _left_behind(self) -> str:
        """Name what optimizers keep for experts and would not move."""
        return "" if self.lone is None else self.lone.why_not_moved(self._watched.optimizers)

    def _lone(self) -> Callable[[], str] | None:
        """Judges what single experts came to since the last decision."""
        return None if self.lone is None else partial(self.lone.judge, self.lone.take())

    def _summed(self) -> tuple[HostCopy, tuple[tuple[str, ...], tuple[str, ...]]]:
        """Of what other ranks have, too."""
        job, watched = self._groups.job, self._watched
        dense = _unsharded(watched.dense) if len(job.data_ranks) > 1 else {}
        experts = _unsharded(watched.experts) if len(job.edp_ranks) > 1 else {}
        sums = bit_sums([*dense.values(), *experts.values()], self._device)
        return HostCopy(sums), (tuple(dense), tuple(experts))

    def _row_hooks(self) -> str:
        """Hooks of others on gradients of experts, which may go by row: nobody can tell."""
        for name, parameter in self._watched.experts.items():
            if foreign_hooks(parameter):
                return (
                    f"{name} has gradient hooks, and one that goes by row would act on other experts once these have "
                    "moved: experts stay where they are while it is there; remove it, and change the gradients of an "
                    "expert after balancer.reduce_gradients(), by a mask that moves with it (balancer.register)"
                )
        return ""

    def _chosen(self, names: list[str]) -> list[str]:
        """The next few in turn."""
        start = self._sample_number * SAMPLES % len(names) if len(names) > SAMPLES else 0
        return [*names[start:], *names[:start]][:SAMPLES]

    def _piece(self, tensor: Tensor | None) -> Tensor:
        """Some bytes of a tensor that is whole on this rank; of others none."""
        if tensor is None or isinstance(tensor, DTensor) or not tensor.numel():
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        flat = (tensor if tensor.is_contiguous() else tensor[:1]).detach().reshape(-1)
        first = self._sample_number * _SAMPLE_ELEMENTS % max(1, flat.numel() - _SAMPLE_ELEMENTS + 1)
        return flat[first : first + _SAMPLE_ELEMENTS].view(torch.uint8)

    def _misplaced(self) -> str:
        """What the optimizers hold is what the model computes with, once."""
        if not self._watched.optimizers:
            return ""
        held: dict[int, int] = {}
        for optimizer in self._watched.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    held[id(parameter)] = held.get(id(parameter), 0) + 1
        for name, parameter in self._watched.experts.items():
            times = held.get(id(parameter), 0)
            if parameter.requires_grad and times != 1:
                return (
                    f"the optimizer holds {name} {times} times, not once: it was unfrozen or param groups were "
                    "changed after attach; make the optimizer from the parameters that are to be trained, then attach"
                )
        return ""

    def _uncounted(self) -> str:
        """A rank may have no token in a step, or padding alone; what it does not count for its mode is a mistake."""
        before, self._uncounted_before = self._uncounted_before, self._watched.uncounted()
        if self._uncounted_before > before and not self._watched.counts():
            return (
                "the MoE layers ran, but no token was counted: the model is in evaluation mode (call model.train(), as "
                "from_pretrained leaves it there)"
            )
        return ""

    def _stepped(self) -> list[tuple[str, Tensor]]:
        """Some parameters with gradients, that an optimizer is about to write."""
        both = {**self._watched.experts, **self._watched.dense}
        chosen = self._chosen(list(self._watched.experts)) + self._chosen(list(self._watched.dense))
        held = {
            id(p): group.get("lr", 1)
            for optimizer in self._watched.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        return [(name, both[name]) for name in chosen if held.get(id(both[name])) and both[name].grad is not None]

    def _state_of(self, parameter: Tensor) -> object:
        """Return what changes where an optimizer does anything for it: its state, and how often that was written."""
        states = [getattr(optimizer, "state", {}).get(parameter) for optimizer in self._watched.optimizers]
        values = [value for state in states if isinstance(state, dict) for value in state.values()]
        return [(id(one), _writes_of(one)) if isinstance(one, Tensor) else repr(one) for one in values]

    def _not_stepped(self) -> str:
        """What an optimizer lists, it has written; with another rank's optimizer in its place, it would have not."""
        before, self._snapshots = self._snapshots, []
        now = {name: parameter for name, parameter in self._stepped() if id(parameter) not in self._passed_over}
        for name, version, piece, state in before:
            parameter = now.get(name)
            # Writing through .data leaves no version; the values tell then, where rounding hides no update.
            if (
                parameter is not None
                and parameter._version == version
                and parameter.dtype in (torch.float32, torch.float64)
                and piece.numel()
                and bool(self._piece(parameter.grad).any())
                and torch.equal(self._piece(parameter), piece)
                and self._state_of(parameter) == state  # a warm-up may write its own state alone, for some steps
            ):
                return (
                    f"the optimizer lists {name}, which has a gradient, and its step does not write it (it may step "
                    "other tensors, or a part of the parameters on each rank, as ZeroRedundancyOptimizer does): use an "
                    "optimizer that steps all that it lists, on every rank"
                )
        return ""

    # -- meeting and comparing ----------------------------------------------------------------------------------------

    def _compare_job(self, sample: Sample, where: str) -> str:
        """Compare over the job, in the thread that has the control group to itself; who does not come is named."""
        self._comparisons += 1
        name, store = f"guard/{self._comparisons}", self._groups.store
        began = time.monotonic()
        try:
            store.compare_set(f"{name}/{self._groups.job.rank}", "here", passing=True)
            control = self._groups.control
            return self._run(lambda: self.compare(sample, control).finding)
        except RuntimeError as error:
            missing = self._missing(name, began + self._groups.timeout_seconds)
            if not missing:
                # No rank's mistake: connections broke, and the balancer makes new ones.
                logger.info("the ranks could not compare what they see at %s: %s", where, error)
                return ""
            listed = ", ".join(map(str, missing[:8]))
            return (
                f"rank {listed} did not come to {where} in time: it skips a step that the others make (torch's "
                "GradScaler decides on each rank: use eplb.GradScaler(balancer)), runs fewer batches, or is stuck"
            )

    def _missing(self, name: str, deadline: float) -> list[int]:
        """Ranks that do not come to a meeting by then; one that hung up may still come."""
        missing = list(self._groups.job.ranks)
        with contextlib.suppress(RuntimeError):
            while missing := [rank for rank in missing if not self._groups.store.look(f"{name}/{rank}")]:
                if time.monotonic() > deadline:
                    return missing
                time.sleep(_POLL_SECONDS)
        return []

    def compare(self, sample: Sample, group: dist.ProcessGroup) -> Comparison:
        """Exchange samples over a group, on any thread, and find what is wrong; the same on every rank. Collective."""
        seen = self._exchange(sample, group)
        stays = next((f"rank {rank}: {one.stays}" for rank, one in seen.items() if one.stays), "")
        for rank, one in seen.items():
            if one.problem:
                return Comparison(f"rank {rank}: {one.problem}", stays)
        hashes = {rank: one.hashes for rank, one in seen.items()}
        finding = (
            self._rescaled(sample, seen, group)
            or self._other_options(seen)
            or self._differing(sample, hashes)
            or self._deviation(sample, seen, group)
            or self._alike(sample, hashes)
        )
        return Comparison(finding, stays)

    def _exchange(
        self, sample: Sample, group: dist.ProcessGroup, *, on_device: bool = False
    ) -> dict[int, SampleDigest]:
        """What each rank saw."""
        mine = sample.encode()
        rows = gather_rows(mine.to(self._device) if on_device else mine, group).cpu()
        return dict(zip(dist.get_process_group_ranks(group), map(SampleDigest.decode, rows), strict=True))

    def _other_options(self, seen: Mapping[int, SampleDigest]) -> str:
        """Optimizers of ranks with the same parameters that have other numbers; the same on every rank."""
        for together in self._groups.job.data_sets:
            here = [rank for rank in together if rank in seen]
            for kind, what in enumerate(("learning rates", "options")):
                deviating = [rank for rank in here if seen[rank].options[kind] != seen[here[0]].options[kind]]
                if deviating:
                    return (
                        f"the {what} of the optimizer on rank {', '.join(map(str, deviating[:8]))} differ from rank "
                        f"{here[0]}'s: what sets them (a scheduler, such as ReduceLROnPlateau by each rank's own loss, "
                        "or the optimizer itself by norms of this rank's experts, as D-Adaptation does) must go by the "
                        "same values on every rank"
                    )
        return ""

    def _rescaled(self, sample: Sample, seen: Mapping[int, SampleDigest], group: dist.ProcessGroup) -> str:
        """Gradients, or experts, that ranks changed by other factors; the same on every rank."""
        job, steps = self._groups.job, {one.steps for one in seen.values()}
        samples, data_set_here = sample.gradients, job.data_sets.index(job.data_ranks)
        if self._rescaled_was_reported or samples is None or steps != {len(samples.steps)} or steps == {0}:
            return ""
        own = samples.factors().transpose(1, 0, 2)
        highest = np.full((2, len(samples.steps), len(WHEN), len(job.data_sets), WATCHED), -np.inf)
        highest[0, :, :, data_set_here] = np.where(np.isnan(own), -np.inf, own)
        highest[1, :, :, data_set_here] = np.where(np.isnan(own), -np.inf, -own)
        numbers = torch.from_numpy(np.append(highest, samples.tolerance))
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
        high, low = numbers[:-1].numpy().reshape(highest.shape) * np.array([1, -1]).reshape(2, 1, 1, 1, 1)
        with np.errstate(invalid="ignore"):
            apart = high - low > float(numbers[-1]) * np.maximum(np.abs(high), np.abs(low))
        apart &= np.isfinite(high) & np.isfinite(low)
        if not apart.any():
            return ""
        step, window, data_set, position = map(int, np.argwhere(apart)[0])
        value = own[step, window, position] if data_set == data_set_here else np.nan
        values = gather_rows(torch.tensor([value], dtype=torch.float64), group)[:, 0].tolist()
        here = {rank: one for rank, one in zip(seen, values, strict=True) if not np.isnan(one)}
        first, second = sorted((min(here, key=lambda rank: here[rank]), max(here, key=lambda rank: here[rank])))
        watched = samples.watched[position]
        name = watched.name if data_set == data_set_here and watched is not None else "a parameter"
        digits = 3 if f"{here[first]:.3g}" != f"{here[second]:.3g}" else 9
        what = "weights" if window == WEIGHTS else "gradients"
        text = (
            f"the {what} of {name} were changed by a factor of {here[first]:.{digits}g} on rank {first} and "
            f"{here[second]:.{digits}g} on rank {second} in step {samples.steps[step]}, "
            + ("before they were averaged" if window == 0 and position < DENSE else WHEN[window])
        )
        return self._experts_finding(text) if window == WEIGHTS else self._rescaled_finding(text)

    def _rescaled_finding(self, text: str) -> str:
        self._rescaled_by = (
            f"{text}, as clipping by each rank's own norm does: use balancer.clip_grad_norm_(value), or "
            "balancer.clip_grad_norm_(value, parameters=...) for a part of them; whatever else changes gradients comes "
            "after balancer.reduce_gradients(), and does the same on every rank"
        )
        return self._rescaled_by

    def _experts_finding(self, text: str) -> str:
        self._rescaled_by = (
            f"{text}, as scaling by the norm of an expert parameter does, of which each rank has its own rows: scale "
            "each expert by its own norm, or all by one over the rows of balancer.gather_experts(layer, parameter)"
        )
        return self._rescaled_by

    def _deviation(self, sample: Sample, seen: Mapping[int, SampleDigest], group: dist.ProcessGroup) -> str:
        """Weights that ranks share and that differ anywhere; the same on every rank."""
        job = self._groups.job
        over_edp = "something has written them on some ranks alone, or their averaging over these ranks was disturbed"
        for kind, (sets, hint) in enumerate(((job.data_sets, self._dense_hint()), (job.edp_sets, over_edp))):
            for together in sets:
                here = [rank for rank in together if rank in seen]
                deviating = [rank for rank in here if seen[rank].sums[kind] != seen[here[0]].sums[kind]]
                if deviating:
                    name, deviating = self._first_deviating(sample, kind, here, group)
                    listed = ", ".join(map(str, deviating[:8]))
                    return f"the {sample.what} of {name} on rank {listed} differ from rank {here[0]}'s: {hint}"
        return ""

    def _first_deviating(
        self, sample: Sample, kind: int, here: Sequence[int], group: dist.ProcessGroup
    ) -> tuple[str, list[int]]:
        """The first tensor of which these ranks have other bits, and those that differ from the first. Collective."""
        mine, ranks = sample.sums_of_kinds()[kind], dist.get_process_group_ranks(group)
        longest = torch.tensor([len(mine)])
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
        padded = torch.zeros(int(longest), dtype=torch.int64)
        padded[: len(mine)] = mine
        rows = dict(zip(ranks, gather_rows(padded, group), strict=True))
        differs = torch.stack([rows[rank] != rows[here[0]] for rank in here])
        position = int(differs.any(dim=0).to(torch.uint8).argmax())
        deviating = [rank for rank, other in zip(here, differs[:, position].tolist(), strict=True) if other]
        return self._name(sample.summed[kind], position, here), deviating

    def _differing(self, sample: Sample, hashes: Mapping[int, Sequence[int]]) -> str:
        """Ranks that share a tensor and do not have the same in it."""
        job = self._groups.job
        over_edp = "their averaging over the ranks that hold the same experts was disturbed"
        for first, names, sets, hint in (
            (0, sample.dense, job.data_sets, self._dense_hint()),
            (SAMPLES, sample.experts, job.edp_sets, over_edp),
        ):
            for together in sets:
                here = [rank for rank in together if rank in hashes]
                for position in range(first, first + SAMPLES):
                    deviating = [rank for rank in here if hashes[rank][position] != hashes[here[0]][position]]
                    if deviating:
                        name = self._name(names, position - first, together)
                        listed = ", ".join(map(str, deviating[:8]))
                        return f"the {sample.what} of {name} on rank {listed} differ from rank {here[0]}'s: {hint}"
        return ""

    def _name(self, names: Sequence[str], position: int, together: Sequence[int]) -> str:
        """Of a tensor that these ranks have; ranks of other stages don't know it."""
        known = self._groups.job.rank in together and position < len(names)
        return names[position] if known else "a parameter"

    def _dense_hint(self) -> str:
        if self._watched.average_dense:
            return (
                "weights were written on some ranks alone, gradients were put aside before they were averaged and "
                "copied back later, or something changes gradients by another measure on each rank, such as clipping "
                "by its own norm (use balancer.clip_grad_norm_(value), with parameters=... for a part of the model)"
            )
        return (
            "nobody averages the gradients outside the experts, or they were changed afterwards (clipping by each "
            "rank's own norm: use balancer.clip_grad_norm_(value), with parameters=... for a part of the model); wrap "
            "the model in DistributedDataParallel after attach, or set BalancerConfig(dense_gradients='allreduce')"
        )

    def _alike(self, sample: Sample, hashes: Mapping[int, Sequence[int]]) -> str:
        """Ranks with different experts that have the same in them: somebody has broadcast or averaged over them."""
        if not self._distinct:
            return ""
        for together in self._groups.job.ep_sets:
            here = [rank for rank in together if rank in hashes]
            for position in range(SAMPLES if len(here) > 1 else 0):
                values = {hashes[rank][SAMPLES + position] for rank in here}
                if len(values) == 1 and values != {0}:
                    name = self._name(sample.experts, position, together)
                    return (
                        f"the {sample.what} of {name} are the same on ranks {here[0]} to {here[-1]}, which hold other "
                        "experts each: something broadcasts or averages them, as DistributedDataParallel does "
                        "around a wrapper or a compiled model; wrap the very module that was attached, or leave the "
                        "wrapper out and set dense_gradients='allreduce'"
                    )
        return ""

    def _raise_or_warn(self, finding: str) -> None:
        if not finding or finding in self._reported:
            return
        self._reported.add(finding)
        self._rescaled_was_reported = self._rescaled_was_reported or finding == self._rescaled_by
        self._on_finding(finding)
        if self._mode == "raise" or (self._mode == "auto" and self._steps < FIRST_STEPS):
            raise GuardError(finding)
        logger.warning("%s", finding)


def _writes_of(tensor: Tensor) -> int:
    """How often it was written; one that was made in inference mode does not say."""
    return 0 if tensor.is_inference() else tensor._version


def _unsharded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those that are not sharded over ranks."""
    return {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor) and tensor.numel()}
