"""Which logical expert is in each physical slot, per layer: the value that planner, router and migration share.

A ground-floor value type: numpy only, no torch.distributed. Every rule of a placement is checked when one is made, so
every ``Placement`` that exists is valid.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .utils import placement_file
from .utils.files import FileError, write_file
from .utils.placement_file import PlacementError as PlacementError

EMPTY = -1
"""The value of a replica slot that holds no expert (``home`` layout only). Functions of @jit have it compiled in."""

IntArray = NDArray[np.int32]


@dataclass(frozen=True)
class HomeRows:
    """Numbers of the ranks that hold each home row once (`distributed.ranks.Job.row_ranks`), and of the rows on them.
    Methods take a home slot, or an array of home slots.

    Args:
        slots_per_rank, homes_per_rank: S and E/R.
        parts: D, over how many ranks the homes of each are divided; divides E/R.
        holders: how many ranks that hold the same homes take part in a migration, each numbered after the other.
    """

    slots_per_rank: int
    homes_per_rank: int
    parts: int = 1
    holders: int = 1

    @property
    def rows(self) -> int:
        """Home rows on each rank, E/(R D)."""
        return self.homes_per_rank // self.parts

    def rank_of(self, slot: Any) -> Any:
        """Return which rank holds the row of a home slot, as an index into `distributed.ranks.Job.row_ranks`; for an
        array of slots an array."""
        return self.place_of(slot) // self.rows

    def row_of(self, slot: Any) -> Any:
        """Return the index that the row of a home slot has on its rank; for an array of slots an array."""
        return slot % self.slots_per_rank % self.rows

    def place_of(self, slot: Any) -> Any:
        """Return the index of a home slot's row among the rows of all ranks, rank after rank; for an array of slots an
        array."""
        return slot // self.slots_per_rank * self.homes_per_rank + slot % self.slots_per_rank

    def slot_at(self, place: Any) -> Any:
        """Return the home slot whose row has this index among the rows of all ranks: the inverse of `place_of`."""
        return place // self.homes_per_rank * self.slots_per_rank + place % self.homes_per_rank


@dataclass(frozen=True, eq=False)
class Placement:
    """The expert of every slot, for L layers, E logical experts, R ranks and P = R * S slots.

    Slot ``p`` is local slot ``p % S`` of rank ``p // S``. Two layouts:

    * ``home`` (``home`` is given): training. Local slots ``0 .. E/R - 1`` of a rank are its home slots, the rest its
      replica slots. Every expert has exactly one home; a replica is on another rank than its home; no expert
      is twice on a rank; a replica slot may be empty (-1).
    * ``free`` (``home`` is None): planning, export, inference. Any expert in any slot, each at least once, none empty.

    Args:
        physical_to_logical: int ``[L, P]``, the logical expert of each slot.
        num_experts: E.
        num_ranks: R; divides P.
        home: int ``[L, E]``, the home slot of each expert, or None.
        epoch: counts commits.

    Raises:
        PlacementError: a rule is broken; the message names layer, rank and expert.

    Example:
        Four experts on two ranks of three slots; slot 2, for a copy, is empty, and slot 5 holds a copy of expert 0:

        >>> placement = Placement([[0, 1, -1, 2, 3, 0]], num_experts=4, num_ranks=2, home=[[0, 1, 3, 4]])
        >>> placement.copy_count.tolist(), placement.home_rank.tolist()
        ([[2, 1, 1, 1]], [[0, 0, 1, 1]])
    """

    physical_to_logical: IntArray
    num_experts: int
    num_ranks: int
    home: IntArray | None = None
    epoch: int = 0

    def __init__(
        self,
        physical_to_logical: ArrayLike,
        num_experts: int,
        num_ranks: int,
        home: ArrayLike | None = None,
        epoch: int = 0,
    ) -> None:
        map_ = _frozen_copy(physical_to_logical, "physical_to_logical")
        homes = None if home is None else _frozen_copy(home, "home")
        self._set(map_, int(num_experts), int(num_ranks), homes, int(epoch))
        for problem in self._problems():
            raise PlacementError(problem)

    @classmethod
    def initial(cls, num_layers: int, num_experts: int, num_ranks: int, replica_slots: int = 0) -> "Placement":
        """Return the placement where every job starts: experts in logical order over the ranks, and ``replica_slots``
        empty replica slots on each rank.
        Raises PlacementError: ``num_ranks`` does not divide ``num_experts``."""
        if num_ranks < 1 or num_experts % num_ranks:
            raise PlacementError(uneven(num_experts, num_ranks))
        homes = num_experts // num_ranks
        row = np.full((num_ranks, homes + replica_slots), EMPTY, dtype=np.int32)
        row[:, :homes] = np.arange(num_experts, dtype=np.int32).reshape(num_ranks, homes)
        experts = np.arange(num_experts)
        home = (experts // homes) * (homes + replica_slots) + experts % homes
        return cls(
            np.broadcast_to(row.reshape(1, -1), (num_layers, row.size)),
            num_experts,
            num_ranks,
            np.broadcast_to(home, (num_layers, num_experts)),
        )

    # -- shape ---------------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        return int(self.physical_to_logical.shape[0])

    @property
    def num_slots(self) -> int:
        """P, the slots of a layer over all ranks."""
        return int(self.physical_to_logical.shape[1])

    @property
    def slots_per_rank(self) -> int:
        """S, the slots of a layer on each rank."""
        return self.num_slots // self.num_ranks

    @property
    def homes_per_rank(self) -> int:
        """E/R, the home slots of a layer on each rank (``home`` layout)."""
        return self.num_experts // self.num_ranks

    @property
    def replica_slots(self) -> int:
        """k, the replica slots of a layer on each rank (``home`` layout)."""
        return self.slots_per_rank - self.homes_per_rank

    @property
    def layout(self) -> str:
        return "free" if self.home is None else "home"

    # -- derived maps --------------------------------------------------------------------------------------------

    @cached_property
    def copy_count(self) -> IntArray:
        """Number of slots that hold each expert, its home included: int32 ``[L, E]``, read-only."""
        layers, slots = np.nonzero(self.physical_to_logical != EMPTY)
        flat = layers * self.num_experts + self.physical_to_logical[layers, slots]
        counts = np.bincount(flat, minlength=self.num_layers * self.num_experts)
        return _read_only(counts.reshape(self.num_layers, self.num_experts).astype(np.int32))

    @cached_property
    def logical_to_physical(self) -> IntArray:
        """The slots of each expert, home first, then ascending, padded with -1: int32 ``[L, E, C]``, read-only; C is
        the largest `copy_count`."""
        layers, slots = np.nonzero(self.physical_to_logical != EMPTY)
        experts = self.physical_to_logical[layers, slots]
        group = layers * self.num_experts + experts
        is_home = np.zeros(len(slots), dtype=bool) if self.home is None else self.home[layers, experts] == slots
        order = np.argsort(2 * group + ~is_home, kind="stable")  # slots ascend already
        layers, experts, slots, group = layers[order], experts[order], slots[order], group[order]
        first = np.searchsorted(group, np.arange(self.num_layers * self.num_experts))
        copy = np.arange(len(group)) - first[group]
        table = np.full((self.num_layers, self.num_experts, int(self.copy_count.max())), -1, dtype=np.int32)
        table[layers, experts, copy] = slots
        return _read_only(table)

    def rank_of(self, slot: Any) -> Any:
        """Return the rank of a slot, or of each slot of an array; -1 for `EMPTY`."""
        return slot // self.slots_per_rank

    @property
    def homes_LRH(self) -> IntArray:
        """The logical experts at home on each rank, by slot: int32 ``[L, R, E/R]``; PlacementError: free placement."""
        return self._by_rank()[:, :, : self.homes_per_rank]

    @property
    def replicas_LRK(self) -> IntArray:
        """The logical expert in each replica slot, or `EMPTY`: int32 ``[L, R, k]``; PlacementError: as `homes_LRH`."""
        return self._by_rank()[:, :, self.homes_per_rank :]

    def _by_rank(self) -> IntArray:
        self.require_homes()
        return self.physical_to_logical.reshape(self.num_layers, self.num_ranks, self.slots_per_rank)

    def require_homes(self) -> IntArray:
        """Return ``home``, the home slot of each expert, int32 ``[L, E]``; PlacementError: this is a free placement."""
        if self.home is None:
            raise PlacementError("a free placement has no homes: make one in the home layout")
        return self.home

    @cached_property
    def home_rank(self) -> IntArray:
        """The rank that has the home of each expert: int32 ``[L, E]``, read-only; PlacementError: a free placement."""
        return _read_only((self.require_homes() // self.slots_per_rank).astype(np.int32))

    def homes_over(self, num_ranks: int) -> IntArray:
        """Return the logical experts at home on each rank, in the order of ``homes_LRH``, where homes are divided over
        another number of ranks (`distributed.ranks.Ranks`): int32 ``[L, num_ranks, E/num_ranks]``."""
        return self.homes_LRH.reshape(self.num_layers, num_ranks, -1)

    def home_rows(self, parts: int = 1, holders: int = 1) -> HomeRows:
        """Return the `HomeRows` of this placement, for homes that are divided over ``parts`` ranks or held by
        ``holders`` ranks at once."""
        return HomeRows(self.slots_per_rank, self.homes_per_rank, parts, holders)

    def with_epoch(self, epoch: int) -> "Placement":
        return Placement(self.physical_to_logical, self.num_experts, self.num_ranks, self.home, epoch)

    def stepped(self, physical_to_logical: IntArray, home: IntArray, epoch: int) -> "Placement":
        """Return a placement of the same sizes with these maps, int32 ``[L, P]`` and ``[L, E]``. They are neither
        checked nor copied, and become read-only. Only for maps that are valid by how they were made (a migration's
        rounds)."""
        step = object.__new__(Placement)
        step._set(_read_only(physical_to_logical), self.num_experts, self.num_ranks, _read_only(home), epoch)
        return step

    def _set(self, *values: Any) -> None:
        self.__dict__.update(zip(Placement.__dataclass_fields__, values, strict=True))  # it is frozen for others

    def without_replicas(self) -> "Placement":
        """Return a placement with the same homes and epoch, and every replica slot empty; PlacementError: a free
        placement."""
        self.require_homes()
        is_replica = np.arange(self.num_slots) % self.slots_per_rank >= self.homes_per_rank
        map_ = np.where(is_replica, EMPTY, self.physical_to_logical)
        return Placement(map_, self.num_experts, self.num_ranks, self.home, self.epoch)

    def digest(self) -> str:
        """Return 32 hex digits over shape and content (not the epoch): equal digests mean equal placements."""
        hasher = hashlib.blake2b(digest_size=16)
        shape = (self.num_layers, self.num_experts, self.num_ranks, self.slots_per_rank, self.home is not None)
        hasher.update(np.array(shape, dtype="<i8").tobytes())
        hasher.update(self.physical_to_logical.astype("<i4").tobytes())
        if self.home is not None:
            hasher.update(self.home.astype("<i4").tobytes())
        return hasher.hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        return self.epoch == other.epoch and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash((self.digest(), self.epoch))

    def __str__(self) -> str:
        return (
            f"{self.layout} placement, epoch {self.epoch}: {self.num_layers} layers, {self.num_experts} experts, "
            f"{self.num_ranks} ranks x {self.slots_per_rank} slots, digest {self.digest()[:12]}"
        )

    # -- files ---------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        numbers = {"layers": self.num_layers, "experts": self.num_experts, "ranks": self.num_ranks}
        numbers |= {"slots_per_rank": self.slots_per_rank, "epoch": self.epoch}
        maps = {"physical_to_logical": self.physical_to_logical, "home": self.home}
        return placement_file.to_json({**numbers, **maps})

    @classmethod
    def from_json(cls, text: str) -> "Placement":
        """Return the placement that `to_json` wrote; PlacementError: the text is something else, or breaks a rule."""
        return cls.from_fields(placement_file.from_json(text))

    def save(self, path: str | Path) -> None:
        """Write the placement to a ``.json`` file, which appears whole or not at all. PlacementError: another name."""
        if Path(path).suffix not in placement_file.ENDINGS:
            raise PlacementError(f"{path}: a placement is written as .json")
        write_file(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> "Placement":
        """Return the placement that a file holds.
        Raises PlacementError: the file is missing or holds no valid placement; the message names the file."""
        try:
            return cls.from_fields(placement_file.read(Path(path)))
        except (OSError, FileError) as error:
            said = f"cannot be read: {error.strerror or error}" if isinstance(error, OSError) else error
            raise PlacementError(f"{path}: {said}") from None

    @classmethod
    def from_fields(cls, fields: Any) -> "Placement":
        """Return the placement of a file's fields.
        Raises PlacementError: a field is missing or of another type, or the fields contradict each other."""
        known = placement_file.checked(fields)
        placement = cls(known["physical_to_logical"], known["experts"], known["ranks"], known["home"], known["epoch"])
        said, mine = (known["layers"], known["slots_per_rank"]), (placement.num_layers, placement.slots_per_rank)
        if said != mine:
            words = "{} layers and {} slots per rank"
            raise PlacementError(f"the file says {words.format(*said)}, its map has {words.format(*mine)}")
        return placement

    def require_model(self, num_layers: int, num_experts: int, num_ranks: int, replica_slots: int) -> None:
        """Raise PlacementError unless this placement has the ``home`` layout and these sizes: MoE layers, experts,
        ranks of the EP group and replica slots on each rank."""
        if self.layout != "home":
            raise PlacementError("the placement is in the free layout; training needs the home layout")
        mine = (self.num_layers, self.num_experts, self.num_ranks, self.replica_slots)
        wanted = (num_layers, num_experts, num_ranks, replica_slots)
        if mine != wanted:
            words = "{} MoE layers x {} experts on {} ranks with {} replica slots"
            raise PlacementError(
                f"the placement is for {words.format(*mine)}, this job has {words.format(*wanted)}: "
                "give the placement of this model and EP size, or none"
            )

    # -- rules ---------------------------------------------------------------------------------------------------

    def _problems(self) -> Iterator[str]:
        """Yield the rules that it breaks; what comes later may fail where an earlier one is broken."""
        map_, experts, ranks = self.physical_to_logical, self.num_experts, self.num_ranks
        if map_.ndim != 2 or map_.size == 0:
            yield f"physical_to_logical has shape {map_.shape}; it must be [layers, slots], not empty"
        if experts < 1 or ranks < 1:
            yield f"{experts} experts on {ranks} ranks: both must be positive"
        if self.num_slots % ranks:
            yield f"{self.num_slots} slots cannot be spread evenly over {ranks} ranks"
        if experts > self.num_slots:
            yield f"{experts} experts do not fit in {self.num_slots} slots; each needs one"
        lowest = 0 if self.home is None else EMPTY
        for layer, slot in np.argwhere((map_ < lowest) | (map_ >= experts)):
            held = f"{self._at(layer, slot)}: slot {slot} holds expert {map_[layer, slot]}"
            yield f"{held}: no such expert; ids are 0..{experts - 1}"
        for layer, expert in np.argwhere(self.copy_count == 0):
            yield f"layer {layer}: expert {expert} is in no slot; every expert needs one"
        if self.home is not None:
            yield from self._problems_of_homes(self.home)

    def _problems_of_homes(self, home: IntArray) -> Iterator[str]:
        map_, experts, ranks = self.physical_to_logical, self.num_experts, self.num_ranks
        if experts % ranks:
            yield f"home layout: {ranks} ranks do not divide {experts} experts"
        if self.replica_slots < 0:
            yield f"home layout: {self.slots_per_rank} slots per rank hold fewer than {experts}/{ranks}"
        if home.shape != (self.num_layers, experts):
            yield f"home has shape {home.shape}; it must be [{self.num_layers}, {experts}]"
        for layer, expert in np.argwhere((home < 0) | (home >= self.num_slots)):
            yield f"layer {layer}: expert {expert} has home slot {home[layer, expert]}, which is none"
        for layer, expert in np.argwhere(np.take_along_axis(map_, home, 1) != np.arange(experts)):
            slot = home[layer, expert]
            said = f"slot {slot} is said to be the home of expert {expert} but holds {map_[layer, slot]}"
            yield f"{self._at(layer, slot)}: {said}"
        for layer, expert in np.argwhere(home % self.slots_per_rank >= self.homes_per_rank):
            slot = home[layer, expert]
            said = f"the home of expert {expert} is local slot {slot % self.slots_per_rank}"
            yield f"{self._at(layer, slot)}: {said}, but homes are local slots 0..{self.homes_per_rank - 1}"
        by_rank = np.sort(self._by_rank(), axis=2)
        for layer, rank, slot in np.argwhere((by_rank[:, :, 1:] == by_rank[:, :, :-1]) & (by_rank[:, :, 1:] != EMPTY)):
            said = f"expert {by_rank[layer, rank, slot]} is there twice; a rank holds an expert once"
            yield f"layer {layer}, rank {rank}: {said}"

    def _at(self, layer: int, slot: int) -> str:
        return f"layer {layer}, rank {self.rank_of(slot)}"


def _frozen_copy(values: ArrayLike, name: str) -> IntArray:
    try:
        array = np.asarray(values)
    except ValueError:
        raise PlacementError(f"{name} is ragged: every layer needs the same number of entries") from None
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise PlacementError(f"{name} holds {array.dtype}; it must hold integers")
    if array.size and (array.max() > np.iinfo(np.int32).max or array.min() < np.iinfo(np.int32).min):
        raise PlacementError(f"{name} holds {array.max()}, which is no id")
    return _read_only(np.array(array, dtype=np.int32, order="C"))


def _read_only(array: NDArray[np.int32]) -> IntArray:
    array.setflags(write=False)
    return array


def uneven(num_experts: int, num_ranks: int) -> str:
    """Return the message that refuses ranks which do not divide the experts; it lists the EP sizes that do."""
    sizes = [str(size) for size in range(1, num_experts + 1) if num_experts % size == 0]
    return f"{num_experts} experts cannot be spread evenly over {num_ranks} ranks: EP sizes are {', '.join(sizes)}"
