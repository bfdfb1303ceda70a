"""One rank's part in a round: sending and staging experts, comparing checksums, copying at the commit.

Until the commit staged memory belongs to this file, and live rows are only read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product, takewhile
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..distributed.transports.base import Message, Pending, PendingGroup, Transport
from ..moe.experts.registry import End, Record, RecordFormat
from ..placement import HomeRows
from ..utils.checksums import CHECKSUM_BYTES, as_bytes, checksum_of
from .records import Records, packed_bytes, segments_of
from .schedule import Ints, Round, Transfer, TransferSchedule


class Shipment(NamedTuple):
    """What of a transfer goes from one rank to another: the whole record, or a piece; with the live memory of it at
    this rank's end."""

    transfer: Transfer
    source: int
    destination: int
    leaves: Record | None
    arrives: Record | None


class Staged(NamedTuple):
    """A record from another rank, or a piece of one, staged until the commit.

    Args:
        record: its bytes.
        target: the live memory that it goes to.
        messages: its bytes by message.
        last: number of its last message among the received ones.
    """

    transfer: Transfer
    source: int
    record: Tensor
    target: Record
    messages: Sequence[Tensor] = ()
    last: int = -1


@dataclass
class Exchange:
    """A round in flight, on this rank.

    Args:
        staged: records from other ranks, in the order of the schedule.
        within: transfers between slots of this rank.
        copied: pieces that stay on this rank, read before anything is written.
        pending: all messages in flight.
        incoming: the received ones of them.
        arrived_checksums: of experts that have arrived, in the order of ``staged``.
        sent_checksums: checksums that each rank computed before it sent its experts.
    """

    staged: list[Staged] = field(default_factory=list)
    within: list[Transfer] = field(default_factory=list)
    copied: list[Staged] = field(default_factory=list)
    pending: PendingGroup = field(default_factory=PendingGroup)
    incoming: Pending | None = None
    arrived_checksums: list[Tensor] = field(default_factory=list)
    sent_checksums: dict[int, Tensor] = field(default_factory=dict)

    @property
    def received_bytes(self) -> int:
        return sum(shard.memory.nbytes for s in self.staged for shard in s.target.shards)


class Arena:
    """One growing uint8 buffer, cut into new pieces for each round."""

    def __init__(self, empty: Callable[[int], Tensor], nbytes: int) -> None:
        self._empty = empty
        self.memory = empty(nbytes)
        self._used = 0

    def reserve(self, nbytes: int) -> None:
        """Make room for a round of so many bytes; allocates only if the buffer is too small."""
        if nbytes > self.memory.shape[0]:
            self.memory = self.memory[:0]  # not the old and the new at once
            self.memory = self._empty(nbytes)

    def forget(self) -> None:
        """Free the memory."""
        self.memory = self._empty(0)

    def restart(self) -> None:
        self._used = 0

    def take(self, nbytes: int) -> Tensor:
        piece = self.memory[self._used : self._used + nbytes]
        if piece.shape[0] != nbytes:
            raise RuntimeError(f"the staging buffer of {self.memory.shape[0]} bytes is too small for this round")
        self._used += nbytes
        return piece


class RoundExecutor:
    """Memory and messages for the rounds of one rank; a migration that needs more than ``nbytes`` reserves it."""

    def __init__(
        self,
        transport: Transport,
        home_rows: HomeRows,
        row_rank: int,
        device: torch.device,
        nbytes: int,
    ) -> None:
        self._transport = transport
        self._home_rows = home_rows
        self._row_rank, self._ep_rank = row_rank, row_rank // home_rows.holders
        self._arrivals = Arena(lambda size: self._transport.empty(size), nbytes)
        self._departures = Arena(lambda size: self._transport.empty(size), 0)
        self._spare = Arena(lambda size: torch.empty(size, dtype=torch.uint8, device=device), 0)
        self._freed_bytes = [0, 0, 0]

    @property
    def device(self) -> torch.device:
        """Device of the messages."""
        return self._transport.device

    @property
    def in_order(self) -> bool:
        """Return whether rounds must be posted by the thread that trains (`Transport.in_order`)."""
        return self._transport.in_order

    def reconnect(self, transport: Transport) -> None:
        self._transport.close()
        self._transport = transport
        for arena in (self._arrivals, self._departures):
            arena.forget()  # it was the old one's memory; the next migration reserves the new one's

    def free_memory(self) -> int:
        """Free all memory for experts in flight; `take_memory` takes as much again. Returns its bytes."""
        self._freed_bytes = [arena.memory.nbytes for arena in self._arenas]
        for arena in self._arenas:
            arena.forget()
        return sum(self._freed_bytes)

    def take_memory(self) -> None:
        """Take the memory that `free_memory` has freed; RuntimeError: there is none, and nothing is taken."""
        try:
            for arena, nbytes in zip(self._arenas, self._freed_bytes, strict=True):
                arena.reserve(nbytes)
        except BaseException:
            for arena in self._arenas:
                arena.forget()
            raise

    @property
    def memory(self) -> list[Tensor]:
        """Memory of experts in flight."""
        return [arena.memory for arena in self._arenas]

    @property
    def _arenas(self) -> tuple[Arena, ...]:
        return self._arrivals, self._departures, self._spare

    def close(self) -> None:
        """Release the transport and its group. Nothing is sent any more."""
        self.__dict__.pop("_transport").close()

    def reserve(self, schedule: TransferSchedule, records: Records, at_once: int | None = None) -> None:
        """Reserve memory for the largest round, or for ``at_once`` bytes: arriving records, packed ones that leave, one
        spare row."""
        arriving, leaving = (np.zeros(schedule.num_rounds, dtype=np.int64) for _ in range(2))
        spare, transfers = 0, schedule.transfers[self._concerns(schedule.transfers[:, 3:])]
        leaves_M, arrives_M = (self._home_rows.rank_of(transfers[:, 3:]) == self._ep_rank).T
        for layer, record_format in records.formats.items():
            of_layer = transfers[:, 1] == layer
            if not record_format.is_divided:  # each expert's record is as large
                whole = record_format.row(0)
                packed = packed_bytes(segments_of(whole, self.device))
                np.add.at(leaving, transfers[of_layer & ~arrives_M, 0], packed)
                np.add.at(arriving, transfers[of_layer & ~leaves_M, 0], whole.nbytes)
                spare = max(spare, *(one.row_bytes for one in record_format.tensors))
                continue
            for number, *row in transfers[of_layer].tolist():
                for shipment in self._shipments(Transfer(*row), record_format):
                    if shipment.arrives is not None:
                        arriving[number] += shipment.arrives.nbytes
                    elif shipment.leaves is not None:
                        leaving[number] += packed_bytes(segments_of(shipment.leaves, self.device))
        if at_once is not None:
            arriving, leaving = (np.minimum(nbytes.sum(keepdims=True), at_once) for nbytes in (arriving, leaving))
        self._arrivals.reserve(int(arriving.max(initial=0)))
        self._departures.reserve(int(leaving.max(initial=0)))
        self._spare.reserve(spare)

    def restart(self) -> None:
        """Free the staged memory for the next round."""
        self._arrivals.restart()
        self._departures.restart()

    @torch.no_grad()
    def post(self, round_: Round, records: Records, exchange: Exchange) -> None:
        """Begin to exchange the experts of a round."""
        own = list(self._own(round_, records))
        receives = self._expect(own, records, exchange)
        departing: dict[int, list[list[Message]]] = defaultdict(list)
        # Pairs of ranks send in the order of the schedule, and then the checksums of all of it.
        for shipment in own:
            if shipment.leaves is not None and shipment.arrives is None:
                departing[shipment.destination].append(self._departing(shipment.destination, shipment.leaves))
        sends = [message for experts in departing.values() for expert in experts for message in expert]
        if self._transport.one_by_one:
            exchange.incoming = self._add(exchange, [], receives)
            self._add(exchange, sends, [])
            self._add(exchange, self._checksums(departing), [])  # computed while experts travel
        else:
            exchange.incoming = self._add(exchange, [*sends, *self._checksums(departing)], receives)

    def arrived(self, exchange: Exchange) -> list[Staged]:
        """Records that have arrived and are not hashed yet, in order."""
        left, incoming = exchange.staged[len(exchange.arrived_checksums) :], exchange.incoming
        return list(takewhile(lambda s: incoming is not None and incoming.has(s.last), left))

    def hash_arrived(self, exchange: Exchange, arrived: Sequence[Staged]) -> bool:
        """Hash arrived records; returns whether all are."""
        exchange.arrived_checksums += [checksum_of(s.messages) for s in arrived]
        return len(exchange.arrived_checksums) == len(exchange.staged)

    def difference(self, exchange: Exchange) -> str:
        """Name the first expert whose checksum changed on the way; empty: none. Only here the host waits for flags."""
        if not exchange.staged:
            return ""
        sums_of = {peer: iter(sums.view(-1, CHECKSUM_BYTES)) for peer, sums in exchange.sent_checksums.items()}
        sent = torch.stack([next(sums_of[s.source]) for s in exchange.staged])
        differs = (sent != torch.stack(exchange.arrived_checksums)).any(dim=1).tolist()
        if not any(differs):
            return ""
        of = exchange.staged[differs.index(True)].transfer
        return (
            f"layer {of.layer}: expert {of.expert} from slot {of.source_slot} arrived with another checksum than it "
            "left with"
        )

    @torch.no_grad()
    def commit(self, exchange: Exchange, layer: int, record_format: RecordFormat) -> None:
        """Copy a layer's staged records into its live slots, in place. Allocates nothing."""
        within = [
            (self._home_rows.row_of(t.source_slot), self._home_rows.row_of(t.destination_slot))
            for t in exchange.within
            if t.layer == layer
        ]
        for chain in chains_of(within):
            self._move_within(record_format, chain)
        for s in (*exchange.staged, *exchange.copied):
            if s.transfer.layer == layer:
                s.target.unpack(s.record)

    def _concerns(self, slots: Ints) -> NDArray[np.bool_]:
        """Which of the transfers between these slots, ``[T, 2]``, begin or end here, or where the same experts are."""
        found: NDArray[np.bool_] = (self._home_rows.rank_of(slots) == self._ep_rank).any(axis=1)
        return found

    def _own(self, round_: Round, records: Records) -> Iterator[Shipment]:
        """What this rank sends, receives, or moves within itself, in the order of the schedule."""
        for row in round_.transfers[self._concerns(round_.transfers[:, 2:])].tolist():
            transfer = Transfer(*row)
            if transfer.layer in records.formats:
                yield from self._shipments(transfer, records.formats[transfer.layer])

    def _shipments(self, transfer: Transfer, record_format: RecordFormat) -> Iterator[Shipment]:
        """What of a transfer concerns this rank: all of it, or pieces from and to several of those that hold the same
        experts."""
        slots, rows = (transfer.source_slot, transfer.destination_slot), self._home_rows
        (first_of_source, source_row), (first_of_destination, destination_row) = (
            (int(rows.rank_of(slot)) * rows.holders, int(rows.row_of(slot))) for slot in slots
        )
        for source_part, destination_part in product(range(rows.holders), repeat=2):
            source, destination = first_of_source + source_part, first_of_destination + destination_part
            ends = End(source_row, source_part), End(destination_row, destination_part)
            leaves, arrives = (
                record_format.piece(*ends, here=end) if rank == self._row_rank else None
                for end, rank in zip(ends, (source, destination), strict=True)
            )
            if any(record is not None and record.shards for record in (leaves, arrives)):
                yield Shipment(transfer, source, destination, leaves, arrives)

    def _expect(self, own: Sequence[Shipment], records: Records, exchange: Exchange) -> list[Message]:
        """Messages of the experts that arrive here. Notes the moves within the rank, and reads pieces of them."""
        receives: list[Message] = []
        for transfer, source, _, leaves, target in own:
            if target is None:
                continue
            if leaves is not None and not records.formats[transfer.layer].is_divided:
                exchange.within.append(transfer)
                continue
            record = self._arrivals.take(target.nbytes)
            if leaves is not None:  # others may be about to write over it
                leaves.pack(record)
                exchange.copied.append(Staged(transfer, source, record, target))
                continue
            messages = [record[run.first : run.end] for run in segments_of(target, self.device)]
            receives += [Message(source, part) for part in messages]
            exchange.staged.append(Staged(transfer, source, record, target, messages, len(receives) - 1))
        for peer, experts in Counter(s.source for s in exchange.staged).items():
            sums = torch.empty(experts * CHECKSUM_BYTES, dtype=torch.uint8, device=self.device)
            exchange.sent_checksums[peer] = sums
            receives.append(Message(peer, sums))
        return receives

    def _departing(self, peer: int, record: Record) -> list[Message]:
        """Messages of one expert that leaves."""
        messages = []
        for run in segments_of(record, self.device):
            if run.direct:
                messages.append(Message(peer, as_bytes(run.shards[0].memory)))
                continue
            packed = self._departures.take(run.end - run.first)
            for shard in run.shards:
                shard.within(packed, run.first).copy_(shard.memory)
            messages.append(Message(peer, packed))
        return messages

    def _checksums(self, departing: Mapping[int, Sequence[Sequence[Message]]]) -> list[Message]:
        """For each peer, the checksums of the experts sent to it."""
        return [
            Message(peer, torch.cat([checksum_of([message.data for message in expert]) for expert in experts]))
            for peer, experts in departing.items()
        ]

    def _add(self, exchange: Exchange, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        pending = self._transport.post(sends, receives)
        exchange.pending.add(pending)
        return pending

    def _move_within(self, record_format: RecordFormat, chain: Sequence[tuple[int, int]]) -> None:
        """Carry out moves of one rank front to back; in a ring the first row is in spare memory until the last move."""
        end, ring = chain[0][1], chain[-1][0] == chain[0][1]
        rows = {slot: record_format.row(slot).shards for move in chain for slot in move}
        for number, last in enumerate(rows[end]):
            spare = self._spare.memory[: last.memory.nbytes].view(last.memory.dtype).view(last.memory.shape)
            if ring:
                spare.copy_(last.memory)
            for source, to in chain:
                rows[to][number].write(spare if ring and source == end else rows[source][number].memory)


def chains_of(moves: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Return moves ``(from, to)`` between slots of one rank as chains that overwrite nothing before it is read. A chain
    whose last move ends where its first began is a ring: that slot's content is saved before, and is what the last move
    writes."""
    source_of = {to: source for source, to in moves}
    read = {source for source, _ in moves}
    chains = []
    for start in (*(to for _, to in moves if to not in read), *(to for _, to in moves if to in read)):
        chain, slot = [], start
        while slot in source_of:
            chain.append((source_of.pop(slot), slot))
            slot = chain[-1][0]
        if chain:
            chains.append(chain)
    return chains
