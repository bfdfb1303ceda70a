"""Checks facts in a running job, and finds mistakes that would spoil training in silence.

Ranks that share a tensor have the same bits in it; ranks with different experts have different ones; all ranks have the
same options, trained parameters and registered tensors; the optimizer steps what the model computes with; tokens are
counted while the model computes. The first steps are sampled with exchanges of their own, later samples go
along with each decision. All ranks come to the same finding before any of them raises.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..distributed.consensus import gather_rows, maxima
from ..distributed.process_groups import ProcessGroups
from ..load.aggregate import HostCopy
from .gradients.division import foreign_hooks
from .guard_samples import FACTS, PIECE, STEPS, Sample, SampleDigest, Watched, bit_sums

logger = logging.getLogger("eplb_runtime")

FIRST_STEPS = 3
"""Steps after attach that are sampled completely, and in which ``guard="auto"`` raises."""
_FREED = "weights have no memory now"
_POLL_SECONDS = 0.02
_NAMED = 16
"""Tensors of each kind whose update is looked at in one of the first steps."""
_ELEMENTS = 1024
"""Elements of each."""
_MOST_NAMED = 8
"""Names of layers in a warning."""


class GuardError(RuntimeError):
    """Something in this job makes training wrong; the message says what, on which ranks, and how to mend it."""


@dataclass(frozen=True)
class SampleComparison:
    """Result of comparing samples; the same on every rank.

    Args:
        finding: a mistake; empty: none.
        stays: reason for which experts must stay where they are; empty: they may move.
    """

    finding: str = ""
    stays: str = ""


class Guard:
    """The guard of one rank.

    Args:
        mode: ``"auto"`` raises in the first steps and warns later; ``"raise"``, ``"warn"``, ``"off"``.
        run: does work on the control group, one task at a time and in the same order on every rank.
        number: of the last step that is over.
        on_finding: called with each finding once.

    Attributes:
        seconds, clocked_steps: time that sampling took of the training thread after the first steps, and the number of
            those steps.
        said: all findings and notices so far, in their order, each once.
    """

    def __init__(
        self,
        mode: str,
        groups: ProcessGroups,
        watched: Watched,
        device: torch.device,
        *,
        run: Callable[[Callable[[], str]], str],
        number: Callable[[], int],
        on_finding: Callable[[str], None],
    ) -> None:
        self._mode = mode
        self._groups = groups
        self._watched = watched
        self._device = device
        self._steps, self._complete_steps = 0, FIRST_STEPS
        self._sample_number = 0
        self._forwards_before = (0, 0)
        self._late_problem = ""
        self._uncounted_was_reported = False
        self._calls_at_decision = 0
        self._reported: set[str] = set()
        self._uncounted_layers: set[str] = set()
        self._noted_before_forward = False
        self._piece: tuple[str, Tensor, Tensor] | None = None
        self._comparisons = 0
        self._broadcast = ""
        self.seconds, self.clocked_steps = 0.0, 0
        self._snapshots: list[tuple[str, int, Tensor, object]] = []
        self._passed_over: set[int] = set()
        self._run = run
        self._number = number
        self._on_finding = on_finding
        self.said: list[str] = []

    def begin(self) -> None:
        """Begin with a new or another optimizer. Collective."""
        self._steps = 0
        if self._mode != "off":
            # Experts may start alike (copied from a dense model): then equal ones say nothing.
            self._piece = self._choose_piece()
            self._note_piece()
            if self._alike("weights", self._exchange(self._pieces_alone(), self._groups.data, on_device=True)):
                self._piece = None

    def sample_completely(self, steps: int) -> None:
        """Sample so many steps completely, and not the first ones alone."""
        self._complete_steps = steps

    @property
    def is_new(self) -> bool:
        """Return whether this is one of the steps that are sampled completely: the first ones."""
        return self._mode != "off" and bool(self._watched.optimizers) and self._steps < self._complete_steps

    @contextmanager
    def clocked(self) -> Iterator[None]:
        """Count the time inside as a cost of sampling; the first steps do not count."""
        counts, began = not self.is_new, time.perf_counter()
        try:
            yield
        finally:
            if counts:
                self.seconds += time.perf_counter() - began

    def before_forward(self) -> None:
        """Note a few elements of an expert ahead of the first forward of each step: nobody else has written them."""
        if not self._noted_before_forward and self._mode != "off":
            self._noted_before_forward = True
            self._note_piece()

    def _choose_piece(self) -> tuple[str, Tensor, Tensor] | None:
        """Name of an expert tensor, a few of its elements that differ, and memory for them from some steps."""
        known = not (self._groups.job.divided_state or self._watched.freed())
        experts = _whole(self._watched.experts) if known else {}
        for name, tensor in experts.items():
            piece = tensor.detach().view(-1)[:PIECE] if tensor.is_contiguous() else None
            if piece is not None and len(piece) == PIECE and bool((piece != piece[:1]).any()):
                return name, tensor, piece.new_zeros(STEPS, PIECE)
        return None

    def _note_piece(self) -> None:
        if self._piece is not None:
            _, tensor, pieces = self._piece
            if tensor.numel() >= PIECE and tensor.is_contiguous():
                piece, last = tensor.detach().view(-1)[:PIECE], tensor.detach()[-1].view(-1)[:PIECE]
                if len(tensor) > 1 and len(last) == PIECE:
                    piece = piece * (piece != last).any()  # experts that are all alike on a rank may be so on all
                pieces[self._steps % STEPS].copy_(piece)

    def _pieces_alone(self) -> Sample:
        return Sample("weights", "", pieces=None if self._piece is None else HostCopy(self._piece[2].clone()))

    def _gradient_pieces(self) -> HostCopy | None:
        """A few elements from all over the gradient of an expert tensor."""
        gradient = None if self._piece is None else self._piece[1].grad
        if gradient is None or not gradient.is_contiguous() or gradient.numel() < STEPS * PIECE:
            return None
        return HostCopy(gradient.view(-1)[: gradient.numel() // STEPS * STEPS].view(STEPS, -1)[:, :PIECE].clone())

    def before_reduction(self) -> None:
        """In the first steps, compare ahead of the first collective that a rank without a step would never reach."""
        if self.is_new:
            sample = replace(self._pieces_alone(), facts=self._watched.facts())
            self._raise_or_warn(self._compare_job(sample, "optimizer.step()"))

    def before_step(self) -> None:
        """In the first steps, compare reduced gradients over ranks."""
        if self.is_new:
            sample = self._take_sample("gradients")
            self._raise_or_warn(self._compare_job(sample, "the end of the reduction of gradients"))
            if not self._snapshots:  # with several optimizers: before the first of them
                self._snapshots = [
                    (name, p._version, self._elements(p).clone(), self._state_of(p)) for name, p in self._stepped()
                ]

    def passed_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that all ranks have skipped an optimizer in this step: it will have written nothing."""
        self._passed_over.update(id(p) for group in optimizer.param_groups for p in group["params"])

    def after_step(self) -> None:
        """Compare weights after a training step, before its counts are closed."""
        if self.is_new:
            problem = self._uncounted() or self._not_stepped()
            self._raise_or_warn(self._compare_job(self._take_sample("weights", problem=problem), "the end of a step"))
        elif self._mode != "off":
            self.clocked_steps += 1
            with self.clocked():
                self._late_problem = self._late_problem or self._uncounted()
        self._steps += 1
        self._noted_before_forward = False
        self._passed_over.clear()

    def sample(self) -> Sample | None:
        """Take the sample that a decision compares while training goes on; None: the guard is off."""
        if self._mode == "off" or not self._watched.optimizers:
            return None
        problem, self._late_problem = self._late_problem, ""
        with self.clocked():
            return self._take_sample("weights", problem=problem, decides=True)

    def computed(self) -> bool:
        """Return whether MoE layers ran since the last call."""
        with self.clocked():
            before, self._calls_at_decision = self._calls_at_decision, self._watched.calls()
        return self._calls_at_decision > before

    def report(self, finding: str, stays: str = "") -> None:
        """Raise or warn as the mode says; a reason why experts stay is only logged."""
        if stays and stays not in self._reported:
            self._reported.add(stays)
            self._say(stays)
            logger.warning("%s", stays)
        self._raise_or_warn(finding)

    def _say(self, text: str) -> None:
        self.said.append(text)
        self._on_finding(text)

    def report_uncounted(self, layers: Sequence[str]) -> None:
        """Warn of MoE layers in evaluation mode while others train, of each once; a frozen part of a model is no error.

        Args:
            layers: names of their experts modules.
        """
        new = [name for name in layers if name not in self._uncounted_layers]
        if self._mode == "off" or not new:
            return
        self._uncounted_layers.update(new)
        more = f" and {len(new) - _MOST_NAMED} more" if len(new) > _MOST_NAMED else ""
        text = (
            f"MoE layers are in evaluation mode while others train: {', '.join(new[:_MOST_NAMED])}{more}; their tokens "
            "are not counted, so their experts are placed without knowing their load: call train() on these modules "
            "(frozen parameters stay frozen), or on the whole model"
        )
        self._say(text)
        logger.warning("%s", text)

    def end(self) -> None:
        """Stop sampling; the thread that talks to the other ranks is gone."""
        self._mode = "off"

    # -- looking -------------------------------------------------------------------------------------------------------

    def _take_sample(self, what: str, *, problem: str = "", decides: bool = False) -> Sample:
        """Sum the bits of tensors that other ranks share.

        Args:
            what: ``"weights"`` or ``"gradients"``.
            decides: for a decision, which may move experts.
        """
        self._sample_number += 1
        watched, job = self._watched, self._groups.job
        stays = self._freed() if what == "weights" else ""
        problem = problem or self._misplaced()
        if stays:
            return Sample(what, problem, stays=stays, facts=watched.facts())
        if decides:
            stays = self._row_hooks() or watched.immovable()
        # Of divided state what another rank has stepped may come in the next forward alone.
        experts = {} if job.divided_state else _whole(watched.experts)
        dense = _whole(watched.dense) if len(job.data_ranks) > 1 else {}
        twins = experts if len(job.edp_ranks) > 1 else {}
        if what == "weights":
            twins = {**twins, **self._states(twins)}
            both: list[Tensor | None] = [*dense.values(), *twins.values()]
        else:
            both = [p.grad if p.grad is None or p.grad.layout is torch.strided else None for p in dense.values()]
            both += [p.grad for p in twins.values()]
        pieces = self._pieces_alone().pieces if what == "weights" else self._gradient_pieces()
        sums = HostCopy(bit_sums(both, self._device))
        return Sample(what, problem, sums, (tuple(dense), tuple(twins)), pieces, stays, watched.facts())

    def _states(self, experts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Optimizer state of experts, by name."""
        return {
            f"{name} ({key} of {type(optimizer).__name__})": value
            for optimizer in self._watched.optimizers
            if isinstance(optimizer, torch.optim.Optimizer)
            for name, parameter in experts.items()
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.shape == parameter.shape and not isinstance(value, DTensor)
        }

    def _freed(self) -> str:
        """Name weights that have no memory now."""
        name = self._watched.freed()
        return f"{_FREED} ({name}): load them before a decision; experts stay where they are" if name else ""

    def _row_hooks(self) -> str:
        """Name foreign gradient hooks on experts. They may go by row: nobody can tell."""
        for name, parameter in self._watched.experts.items():
            if foreign_hooks(parameter):
                return (
                    f"{name} has gradient hooks, and one that goes by row would act on other experts once these have "
                    "moved: experts stay where they are while it is there; remove it, and change the gradients of an "
                    "expert after balancer.reduce_gradients(), by a mask that moves with it (balancer.register)"
                )
        return ""

    def _chosen(self, names: list[str]) -> list[str]:
        """The next few names in rotation."""
        start = self._sample_number * _NAMED % len(names) if len(names) > _NAMED else 0
        return [*names[start:], *names[:start]][:_NAMED]

    def _elements(self, tensor: Tensor) -> Tensor:
        """Some elements of a tensor, other ones in another step."""
        flat = (tensor if tensor.is_contiguous() else tensor[:1]).detach().reshape(-1)
        first = self._sample_number * _ELEMENTS % max(1, flat.numel() - _ELEMENTS + 1)
        return flat[first : first + _ELEMENTS]

    def _misplaced(self) -> str:
        """Check that the optimizers hold each expert parameter of the model once."""
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
        """Check that a step's tokens count, once. A rank may have no token in a step, or padding alone, and evaluate
        between steps; forwards for gradients in evaluation mode alone are a mistake."""
        calls_before, uncounted_before = self._forwards_before
        self._forwards_before = calls, uncounted = self._watched.calls(), self._watched.uncounted()
        if uncounted == uncounted_before or uncounted - uncounted_before != calls - calls_before:
            return ""
        if self._uncounted_was_reported:
            return ""
        self._uncounted_was_reported = True
        return (
            f"the MoE layers ran in step {self._number() + 1}, but no token was counted: the model is in evaluation "
            "mode (call model.train() before a training step, as from_pretrained and evaluations leave it there)"
        )

    def _stepped(self) -> list[tuple[str, Tensor]]:
        """Some parameters with gradients that an optimizer is about to write."""
        experts, dense = _whole(self._watched.experts), _whole(self._watched.dense)
        both, chosen = {**experts, **dense}, self._chosen(list(experts)) + self._chosen(list(dense))
        held = {
            id(p): group.get("lr", 1)
            for optimizer in self._watched.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        stepped = [(name, both[name]) for name in chosen if held.get(id(both[name]))]
        return [(name, p) for name, p in stepped if p.grad is not None and p.grad.layout is torch.strided]

    def _state_of(self, parameter: Tensor) -> object:
        """Identity and versions of an optimizer's state of a parameter: they change if the optimizer does anything."""
        states = [getattr(optimizer, "state", {}).get(parameter) for optimizer in self._watched.optimizers]
        values = [value for state in states if isinstance(state, dict) for value in state.values()]
        return [(id(one), _writes_of(one)) if isinstance(one, Tensor) else repr(one) for one in values]

    def _not_stepped(self) -> str:
        """Check that each parameter the optimizer lists was changed by its step."""
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
                and parameter.grad is not None
                and bool(self._elements(parameter.grad).any())
                and torch.equal(self._elements(parameter), piece)
                and self._state_of(parameter) == state  # a warm-up may write its own state alone, for some steps
            ):
                return (
                    f"the optimizer lists {name}, which has a gradient, and its step does not write it (it may step "
                    "other tensors, or a part of the parameters on each rank, as ZeroRedundancyOptimizer does): use an "
                    "optimizer that steps all that it lists, on every rank"
                )
        return ""

    # -- comparing ---------------------------------------------------------------------------------------------------

    def _compare_job(self, sample: Sample, where: str) -> str:
        """Compare over the job, on the thread that has the control group to itself. A rank that does not arrive is
        named."""
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
        """Ranks that do not arrive by the deadline; one that hung up may still arrive."""
        missing = list(self._groups.job.ranks)
        with contextlib.suppress(RuntimeError):
            while missing := [rank for rank in missing if not self._groups.store.word_of(f"{name}/{rank}")]:
                if time.monotonic() > deadline:
                    return missing
                time.sleep(_POLL_SECONDS)
        return []

    def compare(self, sample: Sample, group: dist.ProcessGroup) -> SampleComparison:
        """Exchange samples over a group, on any thread, and find what is wrong; the same on every rank. Collective."""
        seen = self._exchange(sample, group)
        stays = next((f"rank {rank}: {one.stays}" for rank, one in seen.items() if one.stays), "")
        for rank, one in seen.items():
            if one.problem:
                return SampleComparison(f"rank {rank}: {one.problem}", stays)
        freed = next((f"rank {rank}: {one.stays}" for rank, one in seen.items() if one.stays.startswith(_FREED)), "")
        if freed:  # nothing of such a rank can be compared
            return SampleComparison("", freed)
        finding = self._other_facts(seen) or self._deviation(sample, seen, group) or self._alike(sample.what, seen)
        return SampleComparison(finding, stays)

    def _exchange(
        self, sample: Sample, group: dist.ProcessGroup, *, on_device: bool = False
    ) -> dict[int, SampleDigest]:
        """Samples of all ranks."""
        mine = sample.encode()
        rows = gather_rows(mine.to(self._device) if on_device else mine, group).cpu()
        return dict(zip(dist.get_process_group_ranks(group), map(SampleDigest.decode, rows), strict=True))

    def _other_facts(self, seen: Mapping[int, SampleDigest]) -> str:
        """Find ranks of the same stages that do not have the same `FACTS`; the same on every rank."""
        for together in self._groups.job.data_sets:
            here = [rank for rank in together if rank in seen]
            for kind, what in enumerate(FACTS):
                deviating = [rank for rank in here if seen[rank].facts[kind] != seen[here[0]].facts[kind]]
                if deviating:
                    return (
                        f"the {what} on rank {', '.join(map(str, deviating[:8]))} differ from rank {here[0]}'s: set "
                        "them alike on every rank, and not by a rank's own loss (ReduceLROnPlateau), by norms of its "
                        "experts (D-Adaptation) or by an if on the rank"
                    )
        return ""

    def _deviation(self, sample: Sample, seen: Mapping[int, SampleDigest], group: dist.ProcessGroup) -> str:
        """Find shared weights that differ between ranks in any bit; the same on every rank."""
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
        """Name the first tensor whose bits differ between these ranks, and the ranks that differ from the first.
        Collective."""
        mine, ranks = sample.sums_of_kinds()[kind], dist.get_process_group_ranks(group)
        padded = torch.zeros(int(maxima(torch.tensor(len(mine)), group)), dtype=torch.int64)
        padded[: len(mine)] = mine
        rows = dict(zip(ranks, gather_rows(padded, group), strict=True))
        differs = torch.stack([rows[rank] != rows[here[0]] for rank in here])
        position = int(differs.any(dim=0).to(torch.uint8).argmax())
        deviating = [rank for rank, other in zip(here, differs[:, position].tolist(), strict=True) if other]
        return self._name(sample.names[kind], position, here), deviating

    def _name(self, names: Sequence[str], position: int, together: Sequence[int]) -> str:
        """Name of a tensor that these ranks have; ranks of other stages do not know it."""
        known = self._groups.job.rank in together and position < len(names)
        return names[position] if known else "a parameter"

    def _dense_hint(self) -> str:
        if self._watched.average_dense:
            return (
                "weights were written on some ranks alone, or a rank changes gradients by a measure of its own, as "
                "clipping does: use balancer.clip_grad_norm_(value), with parameters=... for a part of the model"
            )
        return (
            "nobody averages the gradients outside the experts, or a rank clips them by its own norm (use "
            "balancer.clip_grad_norm_): wrap the model in DistributedDataParallel after attach, or set "
            "BalancerConfig(dense_gradients='allreduce')"
        )

    def _alike(self, what: str, seen: Mapping[int, SampleDigest]) -> str:
        """Find ranks with different experts and identical weights: something has broadcast or averaged them."""
        for together in self._groups.job.ep_sets:
            here = [rank for rank in together if rank in seen]
            for place in range(STEPS if len(here) > 1 else 0):
                values = {seen[rank].pieces[place] for rank in here}
                if len(values) == 1 and values != {0}:
                    known = self._groups.job.rank in together and self._piece is not None
                    self._broadcast = (
                        f"the {what} of {self._piece[0] if known and self._piece else 'a parameter'} were the same on "
                        f"ranks {here[0]} to {here[-1]}, which hold other experts each: something broadcasts or "
                        "averages them (DistributedDataParallel around a wrapper?): wrap the very module that was "
                        "attached, or set dense_gradients='allreduce'"
                    )
                    return self._broadcast
        return ""

    def _raise_or_warn(self, finding: str) -> None:
        if not finding or finding in self._reported:
            return
        self._reported.add(finding)
        self._say(finding)
        lost = finding == self._broadcast  # the experts of other ranks are gone: nothing can go on
        if self._mode == "raise" or (self._mode == "auto" and (lost or self._steps < FIRST_STEPS)):
            raise GuardError(finding)
        logger.warning("%s", finding)


def _writes_of(tensor: Tensor) -> int:
    """Number of in-place writes; 0 for a tensor made in inference mode, which has no version."""
    return 0 if tensor.is_inference() else tensor._version


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that are not sharded over ranks, and have numbers as wide as two bytes."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not isinstance(tensor, DTensor) and tensor.numel() and tensor.element_size() > 1
    }
