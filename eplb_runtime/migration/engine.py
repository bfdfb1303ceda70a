"""Stage, verify, agree, commit: how experts change their ranks without a bit lost and without a rank left behind.

Who owns what: until a round is committed, live rows belong to training and are only read; staging belongs to the
engine. In ``_commit`` live rows belong to the engine, between two steps, on every rank. Nothing here waits for ever.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checksum import CHECKSUM_BYTES, as_bytes, checksum
from ..experts.record import RecordFormat
from ..experts.registry import ExpertTensors
from ..placement import Placement
from .agreement import Agreement, Verdict
from .schedule import Round, Transfer, TransferSchedule, make_schedule
from .staging import Arena, runs_of
from .transports.base import Message, Transport, TransportError

logger = logging.getLogger("eplb_runtime")


class Phase(Enum):
    """The points of the protocol where something can go wrong; tests inject failures at these."""

    PLANNED = "planned"
    PREPARED = "prepared"
    STAGED = "staged"
    VERIFIED = "verified"
    DECIDED = "decided"
    COMMITTED = "committed"


Probe = Callable[[Phase, Any], None]
"""Called at each phase with what it works on. One that raises makes this rank fail there."""


@dataclass(frozen=True)
class Outcome:
    """What became of a migration. ``placement`` is the one that stands now, on every rank."""

    placement: Placement
    moved_experts: int
    received_bytes: int
    pause_seconds: float
    failed_phase: Phase | None = None
    cause: str = ""
    connections_broken: bool = False


@dataclass(frozen=True)
class _Staged:
    """A record that arrived (or was copied, on its own rank) and waits for the commit."""

    transfer: Transfer
    record_format: RecordFormat
    record: Tensor


class MigrationEngine:
    """Takes one rank through migrations; all ranks of the job call it at the same step.

    Args:
        registry: the live tensors.
        transport: carries the bytes.
        agreement: compares and votes over all ranks.
        slots_per_rank: S.
        ep_rank: this rank within its EP group.
        staging_bytes: bytes of received experts held at once.
    """

    def __init__(
        self,
        registry: ExpertTensors,
        transport: Transport,
        agreement: Agreement,
        slots_per_rank: int,
        ep_rank: int,
        staging_bytes: int,
    ) -> None:
        self._registry = registry
        self._transport = transport
        self._agreement = agreement
        self._slots_per_rank = slots_per_rank
        self._ep_rank = ep_rank
        self._budget = staging_bytes
        self._arrivals = Arena(transport, min(staging_bytes, self._largest_layer_bytes()))
        self._departures = Arena(transport, 0)
        self.probe: Probe = lambda phase, subject: None

    def reconnect(self, transport: Transport, agreement: Agreement) -> None:
        """Go on with new connections after a failure broke the old ones."""
        self._transport, self._agreement = transport, agreement

    def migrate(
        self, current: Placement, target: Placement, key: str, on_commit: Callable[[Placement], None]
    ) -> Outcome:
        """Take the experts from ``current`` to ``target``; both are the same on every rank.

        Args:
            key: names this migration's decisions; new for each, equal on every rank.
            on_commit: called after each committed round with the placement that stands now.
        """
        started = time.perf_counter()
        standing, moved, received = current, 0, 0

        def outcome(phase: Phase | None = None, verdict: Verdict | None = None) -> Outcome:
            cause, broken = (verdict.cause, verdict.connections_broken) if verdict else ("", False)
            return Outcome(standing, moved, received, time.perf_counter() - started, phase, cause, broken)

        schedule, formats, digest = self._prepare(current, target)
        agreed = self._agreement.same_on_all(digest, "transfer schedule")
        if not agreed.commit or schedule is None:
            return outcome(Phase.PREPARED, agreed)
        for number, round_ in enumerate(schedule.rounds):
            staged, problem, timed_out = self._stage_and_verify(round_, formats)
            decided = self._agreement.decide(f"{key}/{number}", problem, timed_out)
            self.probe(Phase.DECIDED, decided)
            if not decided.commit:
                return outcome(Phase.STAGED, decided)
            self._commit(round_, staged)
            standing = _placement_after(standing, round_, target.epoch)
            on_commit(standing)
            moved += len(round_.transfers)
            received += sum(s.record_format.payload_bytes for s in staged if not self._is_local(s.transfer))
            self.probe(Phase.COMMITTED, round_)
        return outcome()

    # -- the phases, in order ------------------------------------------------------------------------------------

    def _prepare(
        self, current: Placement, target: Placement
    ) -> tuple[TransferSchedule | None, list[RecordFormat], bytes]:
        """The schedule, the record_format of each record, memory for the largest round, and the digest of all that.

        What can fail on one rank alone fails here, before anybody waits for its bytes: then the digest is zeros.
        """
        formats: list[RecordFormat] = []
        try:
            formats = [RecordFormat.of(self._registry.of_home(layer)) for layer in range(self._registry.num_layers)]
            schedule = make_schedule(current, target, [record_format.nbytes for record_format in formats], self._budget)
            for round_ in schedule.rounds:
                arriving = [t.nbytes for t in round_.transfers if self._rank_of(t.destination_slot) == self._ep_rank]
                leaving = [t.nbytes for t in round_.transfers if self._leaves(t)]
                self._arrivals.reserve(sum(arriving))
                self._departures.reserve(sum(leaving))
            self.probe(Phase.PREPARED, schedule)
        except Exception:
            logger.warning("this rank cannot prepare the migration", exc_info=True)
            return None, formats, bytes(16)
        digest = np.frombuffer(schedule.digest(), dtype=np.uint8)
        for record_format in formats:
            digest = digest ^ np.frombuffer(record_format.digest(), dtype=np.uint8)
        return schedule, formats, digest.tobytes()

    def _stage_and_verify(self, round_: Round, formats: list[RecordFormat]) -> tuple[list[_Staged], str, bool]:
        """Bring this rank's part of a round into staging. Returns it, what is wrong with it, and whether by timeout."""
        try:
            staged, expected = self._stage(round_, formats)
            self.probe(Phase.STAGED, staged)
            problem = self._verify(staged, expected)
            self.probe(Phase.VERIFIED, staged)
            return staged, problem, False
        except TransportError as error:
            return [], str(error), True
        except Exception as error:
            return [], f"{type(error).__name__}: {error}", False

    def _stage(self, round_: Round, formats: list[RecordFormat]) -> tuple[list[_Staged], dict[int, Tensor]]:
        """Exchange records and their checksums. Pairs of ranks send in the order of the schedule."""
        self._arrivals.restart()
        self._departures.restart()
        staged: list[_Staged] = []
        sends: list[Message] = []
        receives: list[Message] = []
        sent_checksums: dict[int, list[bytes]] = defaultdict(list)
        expected_count: dict[int, int] = defaultdict(int)
        for transfer in round_.transfers:
            record_format = formats[transfer.layer]
            source, destination = self._rank_of(transfer.source_slot), self._rank_of(transfer.destination_slot)
            if destination == self._ep_rank:
                record = self._arrivals.take(record_format.nbytes)
                staged.append(_Staged(transfer, record_format, record))
                if source == self._ep_rank:
                    record_format.pack(self._local(transfer.source_slot), record)
                else:
                    runs = runs_of(record_format, self._transport.device)
                    receives.extend(Message(source, record[first:end]) for first, end, _ in runs)
                    expected_count[source] += 1
            elif source == self._ep_rank:
                messages, rows = self._departing(transfer, record_format, destination)
                sends.extend(messages)
                sent_checksums[destination].append(checksum(rows))
        expected = {}
        for peer, digests in sorted(sent_checksums.items()):
            sums = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).to(self._transport.device)
            sends.append(Message(peer, sums))
        for peer, count in sorted(expected_count.items()):
            expected[peer] = torch.empty(count * CHECKSUM_BYTES, dtype=torch.uint8, device=self._transport.device)
            receives.append(Message(peer, expected[peer]))
        self._transport.exchange(sends, receives)
        return staged, expected

    def _departing(
        self, transfer: Transfer, record_format: RecordFormat, destination: int
    ) -> tuple[list[Message], list[Tensor]]:
        """Messages that carry one expert away, and its rows as bytes, in field order, for the checksum."""
        slot = self._local(transfer.source_slot)
        record = self._departures.take(record_format.nbytes)
        messages, rows = [], {}
        for first, end, direct in runs_of(record_format, self._transport.device):
            if direct is not None:
                row = as_bytes(direct.live_row(slot))
                messages.append(Message(destination, row))
                rows[direct.offset] = row
                continue
            for field in record_format.fields:
                if first <= field.offset < end:
                    field.view_in(record).copy_(field.live_row(slot).detach())
                    rows[field.offset] = record[field.offset : field.offset + field.nbytes]
            messages.append(Message(destination, record[first:end]))
        return messages, [rows[field.offset] for field in record_format.fields]

    def _verify(self, staged: list[_Staged], expected: dict[int, Tensor]) -> str:
        """Compare checksums of what arrived with those of what left; returns the first difference, or nothing."""
        digests = {peer: bytes(sums.cpu().numpy()) for peer, sums in expected.items()}
        position: dict[int, int] = defaultdict(int)
        for s in staged:
            if self._is_local(s.transfer):
                continue
            source = self._rank_of(s.transfer.source_slot)
            at = position[source]
            position[source] += CHECKSUM_BYTES
            arrived = checksum([s.record[f.offset : f.offset + f.nbytes] for f in s.record_format.fields])
            if arrived != digests[source][at : at + CHECKSUM_BYTES]:
                return (
                    f"layer {s.transfer.layer}: expert {s.transfer.expert} from EP rank {source} arrived with another "
                    "checksum than it left with"
                )
        return ""

    def _commit(self, round_: Round, staged: list[_Staged]) -> None:
        """Copy staged rows into the live slots, in place, and tell caches about it."""
        changed: dict[int, list[int]] = defaultdict(list)
        for s in staged:
            slot = self._local(s.transfer.destination_slot)
            s.record_format.unpack(s.record, slot)
            changed[s.transfer.layer].append(slot)
        for layer, slots in changed.items():
            self._registry.settle_gradients(layer, slots)

    # -- small words ---------------------------------------------------------------------------------------------

    def _rank_of(self, slot: int) -> int:
        return slot // self._slots_per_rank

    def _local(self, slot: int) -> int:
        return slot % self._slots_per_rank

    def _is_local(self, transfer: Transfer) -> bool:
        return self._rank_of(transfer.source_slot) == self._rank_of(transfer.destination_slot)

    def _leaves(self, transfer: Transfer) -> bool:
        return self._rank_of(transfer.source_slot) == self._ep_rank and not self._is_local(transfer)

    def _largest_layer_bytes(self) -> int:
        """Parameters of one layer's homes with room for two more tensors of their size (Adam's), on this rank."""
        sizes = [
            sum(p.numel() * p.element_size() for p in self._registry.parameters(layer))
            for layer in range(self._registry.num_layers)
        ]
        return 3 * max(sizes)


def _placement_after(placement: Placement, round_: Round, epoch: int) -> Placement:
    map_, home = placement.physical_to_logical.copy(), np.array(placement.home)
    for layer, change in round_.after.items():
        map_[layer], home[layer] = change.physical_to_logical, change.home
    return Placement(map_, placement.num_experts, placement.num_ranks, home, epoch)
