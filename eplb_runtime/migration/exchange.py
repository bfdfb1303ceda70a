"""One rank's part in a round: what it sends and stages, whether what came is what left, the copies that commit it.

Who owns what: until it is committed, staged memory belongs to this room and live rows are only read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..checksum import CHECKSUM_BYTES, as_bytes, checksum
from ..experts.record import RecordFormat
from .records import Records
from .schedule import Round, Transfer, TransferSchedule
from .staging import Arena, in_turn, packed_bytes, runs_of
from .transports.base import Message, Pending, Transport


@dataclass(frozen=True)
class Staged:
    """A record that comes from another rank and waits for the commit."""

    transfer: Transfer
    record_format: RecordFormat
    record: Tensor


@dataclass
class Exchange:
    """A round on its way, on this rank.

    Args:
        staged: what comes from other ranks, in the order of the schedule.
        departed: where each expert goes that leaves, and its rows as bytes, in field order.
        within: transfers between slots of this rank.
        pending: the bytes on their way; None: they could not be posted.
        sent_checksums: what each rank says its experts left with, once it is here.
    """

    staged: list[Staged] = field(default_factory=list)
    departed: list[tuple[int, list[Tensor]]] = field(default_factory=list)
    within: list[Transfer] = field(default_factory=list)
    pending: Pending | None = None
    sent_checksums: dict[int, Tensor] = field(default_factory=dict)


class Exchanger:
    """Memory and messages for the rounds of one rank.

    Args:
        transport: carries the bytes.
        slots_per_rank: S.
        ep_rank: this rank within its EP group.
        device: where the live rows are.
        nbytes: of staged experts, for a start; a migration that needs more reserves it.
    """

    def __init__(
        self, transport: Transport, slots_per_rank: int, ep_rank: int, device: torch.device, nbytes: int
    ) -> None:
        self._transport = transport
        self._slots_per_rank = slots_per_rank
        self._ep_rank = ep_rank
        self._arrivals = Arena(self._staging, nbytes)
        self._departures = Arena(self._staging, 0)
        self._aside = Arena(lambda size: torch.empty(size, dtype=torch.uint8, device=device), 0)

    @property
    def device(self) -> torch.device:
        """Where messages are."""
        return self._transport.device

    def reconnect(self, transport: Transport) -> None:
        self.close()
        self._transport = transport
        for arena in (self._arrivals, self._departures):
            arena.forget()  # it was the old one's memory; the next migration reserves the new one's

    def close(self) -> None:
        """Give back what the transport keeps."""
        self._transport.close()

    def reserve(self, schedule: TransferSchedule, records: Records, at_once: int | None = None) -> None:
        """Memory for the largest round: what comes, what is packed before it leaves, one row to put aside.

        Args:
            at_once: bytes that come at most in rounds that are under way together; None: one is at a time.
        """
        arriving, leaving = (np.zeros(schedule.num_rounds, dtype=np.int64) for _ in range(2))
        aside = 0
        regions: list[Tensor] = []
        for layer, record_format in records.formats.items():
            runs = runs_of(record_format, self.device)
            of_layer = schedule.transfers[schedule.transfers[:, 1] == layer]
            source, destination = (of_layer[:, 3:] // self._slots_per_rank).T
            comes = (destination == self._ep_rank) & (source != self._ep_rank)
            goes = (source == self._ep_rank) & (destination != self._ep_rank)
            np.add.at(arriving, of_layer[comes, 0], record_format.nbytes)
            np.add.at(leaving, of_layer[goes, 0], packed_bytes(runs))
            aside = max(aside, *(part.nbytes for part in record_format.fields))
            direct = [tensor for _, _, part in runs if part is not None for tensor in part.source.memory]
            regions += [as_bytes(tensor) for tensor in direct if tensor.is_contiguous()]
        if at_once is not None:
            arriving, leaving = (np.minimum(nbytes.sum(keepdims=True), at_once) for nbytes in (arriving, leaving))
        self._arrivals.reserve(int(arriving.max(initial=0)))
        self._departures.reserve(int(leaving.max(initial=0)))
        self._aside.reserve(aside)
        self._transport.register([self._arrivals.memory, self._departures.memory, *regions])

    def restart(self) -> None:
        """What was staged is of no use any more: its memory is free."""
        self._arrivals.restart()
        self._departures.restart()

    @torch.no_grad()
    def post(self, round_: Round, records: Records, exchange: Exchange) -> None:
        """Begin to exchange the experts of a round.

        Raises:
            TransportError: a connection is closed.
        """
        sends: list[Message] = []
        receives: list[Message] = []
        # Pairs of ranks send in the order of the schedule.
        for transfer, record_format in self._own(round_, records):
            source, destination = self._rank_of(transfer.source_slot), self._rank_of(transfer.destination_slot)
            if source == destination:
                exchange.within.append(transfer)
            elif destination == self._ep_rank:
                record = self._arrivals.take(record_format.nbytes)
                receives += [
                    Message(source, record[first:end]) for first, end, _ in runs_of(record_format, self.device)
                ]
                exchange.staged.append(Staged(transfer, record_format, record))
            else:
                messages, rows = self._departing(transfer, record_format, destination)
                sends += messages
                exchange.departed.append((destination, rows))
        exchange.pending = self._transport.post(sends, receives)

    def say_checksums(self, exchange: Exchange) -> Pending:
        """While experts travel, compute the checksums of those that leave, and let them follow."""
        sent: dict[int, bytes] = defaultdict(bytes)
        for destination, rows in exchange.departed:
            sent[destination] += checksum(rows)
        count: dict[int, int] = defaultdict(int)
        for s in exchange.staged:
            count[self._rank_of(s.transfer.source_slot)] += CHECKSUM_BYTES
        exchange.sent_checksums = {
            peer: torch.empty(size, dtype=torch.uint8, device=self.device) for peer, size in count.items()
        }
        sends = [
            Message(peer, torch.frombuffer(bytearray(sums), dtype=torch.uint8).to(self.device))
            for peer, sums in sent.items()
        ]
        return self._transport.post(sends, [Message(peer, sums) for peer, sums in exchange.sent_checksums.items()])

    def difference(self, exchange: Exchange) -> str:
        """The first expert that did not arrive as it left, in words; empty: all did."""
        sent = {peer: bytes(sums.cpu().numpy()) for peer, sums in exchange.sent_checksums.items()}
        position: dict[int, int] = defaultdict(int)
        for s in exchange.staged:
            source = self._rank_of(s.transfer.source_slot)
            at = position[source]
            position[source] += CHECKSUM_BYTES
            arrived = checksum([s.record[part.offset : part.offset + part.nbytes] for part in s.record_format.fields])
            if arrived != sent[source][at : at + CHECKSUM_BYTES]:
                return (
                    f"layer {s.transfer.layer}: expert {s.transfer.expert} from EP rank {source} arrived with another "
                    "checksum than it left with"
                )
        return ""

    @torch.no_grad()
    def commit(self, exchange: Exchange, layer: int, record_format: RecordFormat) -> list[int]:
        """Copy what has come to a layer into its live slots, in place. Allocates nothing.

        Returns:
            The local slots that were written.
        """
        within = [
            (t.source_slot % self._slots_per_rank, t.destination_slot % self._slots_per_rank)
            for t in exchange.within
            if t.layer == layer
        ]
        for chain in in_turn(within):
            self._move_within(record_format, chain)
        written = [to for _, to in within]
        for s in exchange.staged:
            if s.transfer.layer == layer:
                written.append(s.transfer.destination_slot % self._slots_per_rank)
                record_format.unpack(s.record, written[-1])
        return written

    def _own(self, round_: Round, records: Records) -> Iterator[tuple[Transfer, RecordFormat]]:
        """The transfers that concern this rank, with the records they carry."""
        concerned = (round_.transfers[:, 2:] // self._slots_per_rank == self._ep_rank).any(axis=1)
        for row in round_.transfers[concerned].tolist():
            transfer = Transfer(*row)
            if transfer.layer in records.formats:
                yield transfer, records.formats[transfer.layer]

    def _departing(
        self, transfer: Transfer, record_format: RecordFormat, destination: int
    ) -> tuple[list[Message], list[Tensor]]:
        """Messages that carry one expert away, and its rows as bytes, in field order."""
        slot = transfer.source_slot % self._slots_per_rank
        messages, rows = [], []
        for first, end, direct in runs_of(record_format, self.device):
            if direct is not None:
                rows.append(as_bytes(direct.live_row(slot)))
                messages.append(Message(destination, rows[-1]))
                continue
            packed = self._departures.take(end - first)
            for part in record_format.fields:
                if first <= part.offset < end:
                    rows.append(packed[part.offset - first : part.offset - first + part.nbytes])
                    part.in_bytes(rows[-1]).copy_(part.live_row(slot))
            messages.append(Message(destination, packed))
        return messages, rows

    def _move_within(self, record_format: RecordFormat, chain: Sequence[tuple[int, int]]) -> None:
        """Carry out moves of one rank front to back; in a ring the first row is put aside until the last move."""
        end = chain[0][1]
        ring = chain[-1][0] == end
        for part in record_format.fields:
            aside = part.in_bytes(self._aside.memory[: part.nbytes])
            if ring:
                aside.copy_(part.live_row(end))
            for source, to in chain:
                part.live_row(to).copy_(aside if ring and source == end else part.live_row(source))

    def _rank_of(self, slot: int) -> int:
        return slot // self._slots_per_rank

    def _staging(self, nbytes: int) -> Tensor:
        return self._transport.empty(nbytes)
