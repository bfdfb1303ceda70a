"""The bytes of a migration: ranks agree on records; each stages experts, compares checksums, and commits.

A record is what moves with an expert of a layer. With pipelines a rank holds some of the layers, yet all ranks compute
the same rounds, so they exchange a few words a layer. Until the commit live rows are only read.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..distributed.consensus import Agreement, Verdict, differing
from ..distributed.transports.base import Message, Pending, Transport, TransportError
from ..moe.experts.registry import End, ExpertTensors, Record, RecordFormat, RegistryError, Shard, why_not_written
from ..placement import HomeRows
from ..utils.checksums import CHECKSUM_BYTES, as_bytes, checksum_of
from ..utils.text import one_line
from .schedule import Ints, Round, Transfer, TransferSchedule

DIRECT_BYTES = 1 << 20
"""Rows of this many bytes or more are sent from their place; smaller ones are packed (measured on gloo: packing loses
from 1 MiB on)."""


class Segment(NamedTuple):
    """One message of a record: a shard that is sent from its place, or neighbours that are packed."""

    shards: Sequence[Shard]
    first: int
    end: int
    direct: bool


@dataclass(frozen=True)
class Records:
    """The records of a job: formats of layers that change and are here, bytes per layer, and which layers the same
    ranks hold."""

    formats: Mapping[int, RecordFormat]
    nbytes: tuple[int, ...]
    holders: tuple[int, ...]


def formats_of(registry: ExpertTensors, layers: Sequence[int]) -> tuple[dict[int, RecordFormat], str]:
    """Return the record formats of those of ``layers`` that this rank holds, and "". If one cannot be exchanged: an
    empty dict, and why; no error is raised. Optimizers' state is read, so nothing may train meanwhile."""
    try:
        held = set(registry.layers)
        tensors = {layer: registry.of_home(layer) for layer in layers if layer in held}
        for layer, of_layer in tensors.items():
            if problem := registry.why_freed(layer):
                raise RegistryError(f"layer {layer}: {problem}")
            for tensor in of_layer:  # a commit may not fail
                written = (*tensor.memory, *(copied for copies in tensor.copies for copied in copies))
                problem = next(filter(None, map(why_not_written, written)), "")
                if not problem and tensor.ranges and not all(part.is_contiguous() for part in tensor.memory):
                    problem = "its ranges are not contiguous, so they cannot be sent by themselves"
                if problem:
                    raise RegistryError(f"layer {layer}: {tensor.name}: {problem}")
        if problem := registry.why_state_lacks(tensors):
            raise RegistryError(problem)
        formats = {layer: RecordFormat(tuple(of_layer)) for layer, of_layer in tensors.items()}
        for record_format in formats.values():
            record_format.state_digest()  # raises for what cannot be exchanged
        return formats, ""
    except Exception as error:
        return {}, f"{type(error).__name__}: {error}"


def agree_on_records(
    num_layers: int, found: tuple[Mapping[int, RecordFormat], str], agreement: Agreement, device: torch.device
) -> tuple[Records | None, Verdict]:
    """Compare ``found``, of `formats_of`, over all ranks. Returns all layers' records and a verdict to commit; None and
    a verdict with the cause if a rank has a problem or ranks differ. Collective."""
    formats, problem = found
    # A row for every layer, whatever this rank believes will change: messages of other sizes would end the process.
    mine_L5 = np.zeros((num_layers, 5), dtype=np.int64)
    try:
        for layer, record_format in formats.items():
            digests = _digest(record_format, device) + (record_format.state_digest() or bytes(16))
            mine_L5[layer] = [*np.frombuffer(digests, dtype=np.int64), record_format.nbytes]
    except Exception as error:  # the others wait for this rank
        problem = f"{type(error).__name__}: {error}"
    try:
        words, cause = agreement.gather_words(mine_L5.tobytes(), problem)
    except RuntimeError as error:
        return None, Verdict(False, f"the ranks could not compare their records: {one_line(error)}", True)
    ranks = list(words)
    said_RL5 = np.frombuffer(b"".join(words.values()), dtype=np.int64).reshape(len(ranks), num_layers, 5)
    for what, said_RL2 in (("record", said_RL5[..., :2]), ("optimizer state", said_RL5[..., 2:4])):
        has_RL = said_RL2.any(axis=2)
        differs_RL = has_RL & (said_RL2 != said_RL2[has_RL.argmax(axis=0), range(num_layers)]).any(axis=2)
        if not cause and differs_RL.any():
            layer = int(differs_RL.any(axis=0).argmax())
            said = {rank: said_RL2[index, layer].tobytes() for index, rank in enumerate(ranks)}
            cause = differing(said, [rank for rank in ranks if any(said[rank])], f"{what} of layer {layer}")
    if cause:
        return None, Verdict(False, cause)
    nbytes_RL = said_RL5[..., 4]
    nbytes, holders = nbytes_RL.max(axis=0).tolist(), nbytes_RL.argmax(axis=0).tolist()
    return Records(formats, tuple(nbytes), tuple(holders)), Verdict(True)


def _digest(record_format: RecordFormat, device: torch.device) -> bytes:
    """16 bytes, equal on two ranks when their records look the same and travel in the same messages."""
    ends = [] if record_format.is_divided else [run.end for run in segments_of(record_format.row(0), device)]
    return hashlib.blake2b(record_format.digest() + str(ends).encode(), digest_size=16).digest()


def segments_of(record: Record, device: torch.device) -> list[Segment]:
    """Return the messages of a record, in byte order: large shards go from their place, small neighbours packed."""
    found: list[tuple[bool, list[Shard]]] = []
    for shard in record.shards:
        direct = shard.memory.nbytes >= DIRECT_BYTES and _can_send_rows(shard, device)
        if direct or not found or found[-1][0]:
            found.append((direct, []))
        found[-1][1].append(shard)
    ends = [*(shards[0].offset for _, shards in found[1:]), record.nbytes]
    return [
        Segment(shards, shards[0].offset, shards[0].end if direct else end, direct)
        for (direct, shards), end in zip(found, ends, strict=True)
    ]


def _can_send_rows(shard: Shard, device: torch.device) -> bool:
    """Return whether each row of its tensor is contiguous and on the device of the messages, on every rank."""
    rows = shard.tensor.memory if isinstance(shard.tensor.tensor, tuple) else (shard.tensor.tensor[:1],)
    return all(row.device == device and row.is_contiguous() for row in rows)


def packed_bytes(runs: Sequence[Segment]) -> int:
    """Return how many bytes of these segments are packed, that is copied before they are sent."""
    return sum(run.end - run.first for run in runs if not run.direct)


class RankTransfer(NamedTuple):
    """A transfer from one rank to another, of a whole record or a piece, with its live memory at this rank's end."""

    transfer: Transfer
    source: int
    destination: int
    leaves: Record | None
    arrives: Record | None


class StagedTransfer(NamedTuple):
    """A record from another rank, or a piece of it, staged until the commit: its bytes, the live memory that they go
    to, and its bytes by message."""

    transfer: Transfer
    source: int
    record: Tensor
    target: Record
    messages: Sequence[Tensor] = ()


@dataclass
class RoundState:
    """A round in flight, on this rank: records from other ranks, in the order of the schedule, and the checksums that
    each computed before it sent them; transfers within this rank; pieces that stay, read before anything is written;
    all messages in flight (None: they could not be posted)."""

    staged: list[StagedTransfer] = field(default_factory=list)
    within: list[Transfer] = field(default_factory=list)
    copied: list[StagedTransfer] = field(default_factory=list)
    pending: Pending | None = None
    sent_checksums: dict[int, Tensor] = field(default_factory=dict)

    @property
    def received_bytes(self) -> int:
        return sum(shard.memory.nbytes for s in self.staged for shard in s.target.shards)


class Arena:
    """One growing uint8 buffer, cut into new pieces for each round."""

    def __init__(self, empty: Callable[[int], Tensor], nbytes: int = 0) -> None:
        self._empty = empty
        self.memory = empty(nbytes)
        self._used = 0

    def reserve(self, nbytes: int) -> None:
        """Make room for a round of so many bytes. Allocates, and frees the old buffer, only if that is too small."""
        if nbytes > self.memory.shape[0]:
            self.forget()  # not the old and the new at once
            self.memory = self._empty(nbytes)

    def forget(self) -> None:
        """Free the buffer; its size is 0 then."""
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
        self, transport: Transport, home_rows: HomeRows, row_rank: int, device: torch.device, nbytes: int
    ) -> None:
        self.transport, self._posts_whole = transport, True
        self._home_rows = home_rows
        self._row_rank, self._ep_rank = row_rank, row_rank // home_rows.holders
        self._arrivals = Arena(lambda size: self.transport.empty(size), nbytes)
        self._departures = Arena(lambda size: self.transport.empty(size), 0)
        self._spare = Arena(lambda size: torch.empty(size, dtype=torch.uint8, device=device), 0)
        self._arenas = self._arrivals, self._departures, self._spare

    @property
    def device(self) -> torch.device:
        """Device of the messages, which is the transport's."""
        return self.transport.device

    def reconnect(self, transport: Transport) -> None:
        self.transport.close()
        self.transport, self._posts_whole = transport, True
        for arena in (self._arrivals, self._departures):
            arena.forget()  # it was the old one's memory; the next migration reserves the new one's

    def free_memory(self) -> int:
        """Free all staging memory, and return its bytes. The next migration reserves its own."""
        nbytes = sum(arena.memory.nbytes for arena in self._arenas)
        for arena in self._arenas:
            arena.forget()
        return nbytes

    @property
    def memory(self) -> list[Tensor]:
        """The three staging buffers: for arriving and leaving experts, and a spare row."""
        return [arena.memory for arena in self._arenas]

    def close(self) -> None:
        """Close the transport, and delete ``transport``: nothing is sent any more. Not to be called twice."""
        self.__dict__.pop("transport").close()

    def reserve(self, schedule: TransferSchedule, records: Records, at_once: int | None = None) -> None:
        """Make the staging buffers (arriving records, packed leaving ones, a spare row) large enough for the largest
        round; with ``at_once`` (overlap), for all rounds or so many bytes, whichever is less."""
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
        """Let the next round use the staging buffers from their start again. Frees nothing."""
        self._arrivals.restart()
        self._departures.restart()

    @torch.no_grad()
    def post(self, round_: Round, records: Records, exchange: RoundState) -> None:
        """Begin to exchange a round's experts, and fill ``exchange``. If that fails, this and later calls raise until
        `reconnect`: other ranks wait for the rest, and messages of a later round would arrive in its place."""
        if not self._posts_whole:
            raise TransportError("an earlier round was not posted as a whole")
        self._posts_whole = False
        own = list(self._own(round_, records))
        receives = self._expect(own, records, exchange)
        departing: dict[int, list[Tensor]] = defaultdict(list)
        sends = []
        # Pairs of ranks send in the order of the schedule, and then the checksums of all of it.
        for shipment in own:
            if shipment.leaves is not None and shipment.arrives is None:
                messages = self._departing(shipment.leaves)
                sends += [Message(shipment.destination, message) for message in messages]
                departing[shipment.destination].append(checksum_of(messages))
        sends += [Message(peer, torch.cat(sums)) for peer, sums in departing.items()]
        exchange.pending = self.transport.post(sends, receives)
        self._posts_whole = True

    def difference(self, exchange: RoundState) -> str:
        """Hash the experts that arrived, and return a line on the first with another checksum than sent; "": none."""
        if not exchange.staged:
            return ""
        sums_of = {peer: iter(sums.view(-1, CHECKSUM_BYTES)) for peer, sums in exchange.sent_checksums.items()}
        sent = torch.stack([next(sums_of[s.source]) for s in exchange.staged])
        differs = (sent != torch.stack([checksum_of(s.messages) for s in exchange.staged])).any(dim=1).tolist()
        if not any(differs):
            return ""
        of = exchange.staged[differs.index(True)].transfer
        return (
            f"layer {of.layer}: expert {of.expert} from slot {of.source_slot} arrived with another checksum than it "
            "left with"
        )

    @torch.no_grad()
    def commit(self, exchange: RoundState, layer: int, record_format: RecordFormat) -> None:
        """Write a layer's staged records, and its moves in this rank, to its live slots. Allocates nothing."""
        within = [
            (self._home_rows.row_of(t.source_slot), self._home_rows.row_of(t.destination_slot))
            for t in exchange.within
            if t.layer == layer
        ]
        for moves in chains_of(within):
            self._move_within(record_format, moves)
        for s in (*exchange.staged, *exchange.copied):
            if s.transfer.layer == layer:
                s.target.unpack(s.record)

    def _concerns(self, slots: Ints) -> NDArray[np.bool_]:
        """Which of the transfers between these slots, ``[T, 2]``, begin or end here, or where the same experts are."""
        found: NDArray[np.bool_] = (self._home_rows.rank_of(slots) == self._ep_rank).any(axis=1)
        return found

    def _own(self, round_: Round, records: Records) -> Iterator[RankTransfer]:
        """What this rank sends, receives, or moves within itself, in the order of the schedule."""
        for row in round_.transfers[self._concerns(round_.transfers[:, 2:])].tolist():
            transfer = Transfer(*row)
            if transfer.layer in records.formats:
                yield from self._shipments(transfer, records.formats[transfer.layer])

    def _shipments(self, transfer: Transfer, record_format: RecordFormat) -> Iterator[RankTransfer]:
        """Return what of a transfer concerns this rank: all, or pieces from and to ranks that hold the same experts."""
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
                yield RankTransfer(transfer, source, destination, leaves, arrives)

    def _expect(self, own: Sequence[RankTransfer], records: Records, exchange: RoundState) -> list[Message]:
        """Return messages of experts that arrive here, and of checksums. Notes moves in this rank, and reads pieces."""
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
                exchange.copied.append(StagedTransfer(transfer, source, record, target))
                continue
            messages = [record[run.first : run.end] for run in segments_of(target, self.device)]
            receives += [Message(source, part) for part in messages]
            exchange.staged.append(StagedTransfer(transfer, source, record, target, messages))
        for peer, experts in Counter(s.source for s in exchange.staged).items():
            exchange.sent_checksums[peer] = torch.empty(experts * CHECKSUM_BYTES, dtype=torch.uint8, device=self.device)
        return receives + [Message(peer, sums) for peer, sums in exchange.sent_checksums.items()]

    def _departing(self, record: Record) -> list[Tensor]:
        """Return the bytes of one expert that leaves, by message."""
        messages = []
        for run in segments_of(record, self.device):
            if run.direct:
                messages.append(as_bytes(run.shards[0].memory))
                continue
            packed = self._departures.take(run.end - run.first)
            for shard in run.shards:
                shard.within(packed, run.first).copy_(shard.memory)
            messages.append(packed)
        return messages

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
    """Return moves ``(from, to)`` between slots of one rank as chains, each to be carried out front to back, so that
    nothing is overwritten before it is read. In a ring (the last move starts where the first ends), save that slot
    first: the last move writes its old content."""
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
