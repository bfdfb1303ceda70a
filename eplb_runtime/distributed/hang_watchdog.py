"""Where this rank is, for the others: who waits too long for them asks, and says who is missing and where.

A job hangs when ranks run unequal numbers of forwards or steps: each waits in another call, for ever as far as anyone
can see. A thread of its own looks at how long the training thread has waited; ranks that are asked answer through the
launcher's store, so it needs no collective that works.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..utils.errors import JobError, brief_tracebacks, one_line
from .consensus import all_gather_into
from .store import JobStore, StoreError

logger = logging.getLogger("eplb_runtime")

_MEND = (
    "every rank must run equally many forwards and steps (evaluation too; generate: synced_gpus=True), and no rank may "
    "skip one alone"
)


_PLACEMENT = 0xFC
"""Bits of a tag that name the placement of the layer."""
_IN_GRAPH = 1 << 60
"""Bit of a tag: gradients of replicas will be sent as from graphs of torch.compile."""


class Watch:
    """One rank's.

    Args:
        ranks: of the job, all of which have one.
        store: of the job; it answers in time, so that this thread ends in time, too.
        timeout_seconds: how long a wait may be before it is said.

    Attributes:
        rank: this one, in the world.
        said: the last warning.
    """

    def __init__(self, ranks: Sequence[int], store: JobStore, timeout_seconds: float) -> None:
        self._ranks = list(ranks)
        self._timeout = timeout_seconds
        self._tick = min(5.0, timeout_seconds / 4)
        self._place: str | int = "its own code before the first forward"
        self._forwards: dict[int, tuple[int, int]] = {}
        self._waits: dict[int, _Wait] = {}
        self._count = 0
        self.said = ""
        self._store = store
        self.rank = dist.get_rank()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._undo: Callable[[], None] = lambda: None

    def start(self) -> None:
        """From here on, waits are looked at."""
        if len(self._ranks) > 1:
            self._undo = brief_tracebacks()
            self._thread = threading.Thread(target=self._run, name="eplb_runtime watch", daemon=True)
            self._thread.start()

    def at(self, place: str | int) -> None:
        """The training thread has come here: a text, or the tag of a forward (`ForwardTag`)."""
        self._place = place
        if isinstance(place, int):
            layer, step = _layer_and_step(place)
            since, number = self._forwards.get(layer, (step, 0))
            self._forwards[layer] = step, number + 1 if since == step else 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this thread waits for other ranks. Two threads may, in a forward and in a backward pass. A wait
        within a wait is a part of it.

        Raises:
            LostRankError: the wait failed: the process group's own timeout, or a rank that has ended.
        """
        thread = threading.get_ident()
        if thread in self._waits:
            yield
            return
        self._count += 1
        self._waits[thread] = _Wait(self._count, time.monotonic(), bool(torch._C._current_graph_task_id() != -1))
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            ended = "" if self.said or not _has_ended(error) else _ENDED
            raise LostRankError(
                f"rank {self.rank} waited in vain for other ranks in {self._shown()} ({one_line(error)}): "
                f"{ended}{self.said or _MEND}"
            ) from error
        finally:
            del self._waits[thread]

    def close(self) -> None:
        """Nobody looks any more."""
        self._undo()
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        answered, asked_for, mine, ticks = 0, 0, 0, 0
        while not self._over.wait(self._tick):
            try:
                wait = self._longest()
                # The others are asked two looks ahead of the timeout: by then all that live have answered.
                asks = wait is not None and time.monotonic() - wait.since > self._timeout - 2 * self._tick
                if asks and wait is not None and wait.number != asked_for:
                    asked_for, mine, ticks = wait.number, self._store.add("watch/asked", 1), 3
                asked = self._store.add("watch/asked", 0)
                for question in range(max(answered, asked - 8) + 1, asked + 1):
                    self._answer(question)
                answered = asked
                ticks -= 1
                if ticks == 0 and wait is not None and wait.number == asked_for:
                    self._report(mine)
            except StoreError as error:  # it may answer again at a later look
                logger.debug("the watch hears nothing: %s", error)
        with suppress(StoreError):
            self._store.compare_set(f"watch/closed/{self.rank}", "closed")

    def _answer(self, asked: int) -> None:
        wait = self._longest()
        waits = "" if wait is None else f"waits for {time.monotonic() - wait.since:.0f} s in "
        self._store.compare_set(f"watch/{asked}/{self.rank}", waits + self._shown())

    def _report(self, asked: int) -> None:
        """One rank speaks for all that wait in the same place."""
        places: dict[str, list[int]] = {}
        for rank in self._ranks:
            if place := self._store.word_of(f"watch/{asked}/{rank}"):
                pass
            elif self._store.word_of(f"watch/closed/{rank}"):
                place = "has closed its balancer, which all ranks do together"
            else:
                place = "no answer: it has ended, or is stuck"
            places.setdefault(_without_seconds(place), []).append(rank)
        mine = _without_seconds(next(place for place, ranks in places.items() if self.rank in ranks))
        others = "; ".join(
            f"rank {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}: {place}"
            for place, ranks in places.items()
            if place != mine
        )
        self.said = (
            f"rank {', '.join(map(str, places[mine][:8]))} has waited for more than {self._timeout:g} s in "
            f"{mine.removeprefix(_WAITS)} and others do not come: {others or 'all are there'}; {_MEND}"
        )
        if places[mine][0] == self.rank:
            logger.warning("%s", self.said)

    def _shown(self) -> str:
        place = self._place if isinstance(self._place, str) else self._shown_forward(self._place)
        wait = self._longest()
        return f"the backward pass after {place}" if wait is not None and wait.in_backward else place

    def _shown_forward(self, tag: int) -> str:
        """With its number, where a layer has several in a step: a rank that gave one up is in another than the rest."""
        _, number = self._forwards[_layer_and_step(tag)[0]]
        return _forward(tag) + (f" (number {number} in this step)" if number > 1 else "")

    def _longest(self) -> _Wait | None:
        return min(self._waits.copy().values(), key=lambda wait: wait.since, default=None)


@dataclass(frozen=True)
class _Wait:
    number: int
    since: float
    in_backward: bool


_WAITS = "waits in "


def _without_seconds(answer: str) -> str:
    """Ranks that wait in the same place belong together, however long each has."""
    if answer.startswith("waits for "):
        return _WAITS + answer.partition(" s in ")[2]
    return answer


_ENDED = "a rank has ended, and its own output says why; if it ended as it should: "


def _has_ended(error: BaseException) -> bool:
    """Return whether a connection of gloo says that the process at its other end is gone."""
    return any(
        words in str(error) for words in ("Connection reset by peer", "Connection closed by peer", "Broken pipe")
    )


class LostRankError(JobError):
    """Other ranks did not come to an exchange: the process group's own timeout is over, or a rank has ended."""


class OutOfStepError(JobError):
    """Ranks exchanged counts in forwards that do not belong together."""


class ForwardTag:
    """The forward that each thread of this rank is in, as one number that travels with the counts of every batch.

    Args:
        ranks: of the EP group.
    """

    def __init__(self, ranks: Sequence[int], watch: Watch) -> None:
        self._ranks = list(ranks)
        self.watch = watch
        self._here = threading.local()

    @property
    def value(self) -> int:
        """Return the tag of the forward that this thread is in."""
        value: int = getattr(self._here, "value", 0)
        return value

    @property
    def training(self) -> bool:
        """Return whether the forward that this thread is in trains the model."""
        return bool(self.value >> 1 & 1)

    @property
    def place(self) -> tuple[int, int] | tuple[None, None]:
        """Return layer and epoch of the forward that this thread is in."""
        found: tuple[int, int] | tuple[None, None] = getattr(self._here, "place", (None, None))
        return found

    @property
    def is_checked(self) -> bool:
        """Return whether the ranks' tags of this thread's forward have been compared, on the device."""
        return bool(getattr(self._here, "is_checked", False))

    def mark_checked(self) -> None:
        """Note that they have been (`is_checked`)."""
        self._here.is_checked = True

    def enter(self, layer: int, step: int, training: bool, epoch: int = 0, in_graph: bool = False) -> None:
        """Begin a forward of a layer on this rank.

        Args:
            in_graph: of torch.compile, and with gradients of copies, which all ranks must send at the same time.
        """
        tag = (step << 24) | (layer << 8) | (training << 1) | torch.is_grad_enabled()
        self._here.value = tag = tag | _IN_GRAPH if in_graph else tag
        self._here.is_checked = False
        self._here.place = layer, epoch
        self.watch.at(tag)

    def set_placement(self, changes: int) -> None:
        """Note the placement that this forward uses, as the number of changes that led to it."""
        self._here.value = (self.value & ~_PLACEMENT) | (changes << 2 & _PLACEMENT)

    def check(self, tags: NDArray[np.int64], own: int | None = None) -> None:
        """Check that all ranks are in this forward; raises on every rank of the group.

        Args:
            tags: int64 ``[R]``, of each rank.
            own: this rank's tag when they were exchanged; None: its current one.

        Raises:
            OutOfStepError: they are not equal.
        """
        own = self.value if own is None else own
        if (tags != own).any():
            self._check_placements(tags, own)
            places: dict[int, list[int]] = {}
            for rank, tag in zip(self._ranks, tags.tolist(), strict=True):
                places.setdefault(tag, []).append(rank)
            listed = "; ".join(
                f"rank {', '.join(map(str, ranks[:8]))} in {_forward(tag)}" for tag, ranks in sorted(places.items())
            )
            raise OutOfStepError(f"ranks run different forwards at once: {listed}; {_MEND}")

    def _check_placements(self, tags: NDArray[np.int64], own: int) -> None:
        """Raises if all are in the same forward, and do not agree on where its experts are."""
        if ((tags ^ own) & ~_PLACEMENT).any():
            return
        others = ", ".join(str(rank) for rank, tag in zip(self._ranks, tags, strict=True) if tag != own)
        raise OutOfStepError(
            f"ranks have parted: rank {self.watch.rank} and rank {others} have different placements of MoE layer "
            f"{own >> 8 & 0xFFFF}, a migration was committed on some of them only; go back to a checkpoint"
        )


class BackwardCheck:
    """Check, before a layer's exchanges in a backward pass, that all ranks have reached this layer.

    The counts of a forward say where each rank is. A backward pass exchanges rows alone: ranks would take those of one
    layer for another's, and gloo ends the process where they differ in size.

    Args:
        group: gloo, the EP group; nothing else goes over it.
    """

    def __init__(self, group: dist.ProcessGroup, watch: Watch) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        self._group = group
        self._watch = watch
        self._mine, self._tags_R = torch.zeros(1, dtype=torch.int64), torch.zeros(len(self._ranks), dtype=torch.int64)
        self._own, self._of_ranks = self._mine.numpy(), self._tags_R.numpy()

    def __call__(self, layer: int, step: int) -> None:
        """Check that every rank's backward pass has reached this layer. Collective.

        Raises:
            OutOfStepError: another rank has reached another layer; on every rank of the group.
        """
        self._own[0] = tag = (step << 16) | layer
        with self._watch.waiting():
            all_gather_into(self._tags_R, self._mine, group=self._group)
        if (self._of_ranks == tag).all():
            return
        places: dict[int, list[int]] = {}
        for rank, other in zip(self._ranks, self._of_ranks.tolist(), strict=True):
            places.setdefault(other, []).append(rank)
        listed = "; ".join(
            f"rank {', '.join(map(str, ranks[:8]))} through MoE layer {other & 0xFFFF} after {other >> 16} steps"
            for other, ranks in sorted(places.items())
        )
        raise OutOfStepError(
            f"ranks run different backward passes at once: {listed}; every rank's loss must use the same MoE layers "
            "and micro-batches (where one leaves a layer's output out, as an early exit does, add 0 * output.sum())"
        )


def _forward(tag: int) -> str:
    kind = "training" if tag >> 1 & 1 else "evaluation"
    gradients = "" if tag & 1 else " without gradients"
    graph = " in a graph of torch.compile" if tag & _IN_GRAPH else ""
    layer, steps = _layer_and_step(tag)
    return f"the forward of MoE layer {layer} in {kind}{gradients}{graph} after {steps} steps"


def _layer_and_step(tag: int) -> tuple[int, int]:
    return tag >> 8 & 0xFFFF, (tag & ~_IN_GRAPH) >> 24
