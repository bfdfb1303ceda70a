"""Replica slots: weights-only copies of experts whose homes are on other ranks, kept from step to step.

A bank is one layer's slots on one rank. The Parameter is the home rows; replica rows are no parameter of anything.
Their gradients gather here, in float32 at least, until `sync.py` brings them to the homes. One exchange is under way at
a time, so all layers take turns with one set of gradient rows; only what `no_sync` holds back has memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..moe.experts.slices import has_memory, is_sliced, local, version

Zeros = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]
"""Makes memory of a shape, as `plan.RowTransport.zeros` does."""


class ReplicaPool:
    """Replica rows, or their gradients, that layers of equal shapes use in turn; with ``num_shards``, slices."""

    def __init__(self, replica_slots: int, zeros: Zeros, num_shards: int = 1) -> None:
        self._replica_slots = replica_slots
        self._zeros = zeros
        self.num_shards = num_shards
        self._made: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}

    def rows(self, position: int, home: Tensor, dtype: torch.dtype) -> Tensor:
        """``[k, ...]`` for a layer's tensor number ``position``; zeros at first."""
        key = (position, self._shape(home), dtype)
        if key not in self._made:
            self._made[key] = self._zeros((self._replica_slots, *self._shape(home)), dtype, local(home).device)
        return self._made[key]

    def own_rows(self, home: Tensor, dtype: torch.dtype) -> Tensor:
        """As ``rows``, for one layer alone, not carried by a transport."""
        return local(home).detach().new_zeros((self._replica_slots, *self._shape(home)), dtype=dtype)

    def _shape(self, home: Tensor) -> torch.Size:
        return slice_of_row(local(home), self.num_shards).shape[1:]


def slice_of_row(rows: Tensor, num_shards: int, shard: int = 0) -> Tensor:
    """``[..., N, ...]`` -> ``[..., N/D, ...]``, of rows ``[k, N, ...]`` a part of each."""
    if num_shards == 1:
        return rows
    width = rows.shape[1] // num_shards
    return rows[:, shard * width : (shard + 1) * width]


class ReplicaBank:
    """The slots of one layer on one rank.

    Args:
        homes: home rows ``[H, ...]`` per tensor, or this rank's slices of them; then replicas are slices, too.
        replica_slots: k, rows for replicas (zeros until they are refreshed).
        zeros: makes memory for replicas, unless ``rows`` has it.
        gradients: memory for gradients of replicas, shared by the banks of one `ReplicaSync`. None: inference.
        num_shards: D, ranks over which each rank's homes are divided (`distributed.ranks.Job.dp_shard_degree`):
            ``homes`` have ``[H/D, ...]`` then, whole ones, and replicas are slices.
    """

    def __init__(
        self,
        homes: Sequence[nn.Parameter],
        replica_slots: int,
        zeros: Zeros,
        gradients: ReplicaPool | None,
        num_shards: int = 1,
    ) -> None:
        self.homes_per_rank = local(homes[0]).shape[0] * num_shards
        self.replica_slots = replica_slots
        self.is_sliced = is_sliced(homes[0])
        self.parameters = [home if self.is_sliced else _in_one_piece(home) for home in homes]
        self.slots: list[Tensor] = []
        if self.is_sliced:  # the homes stay where they are: FSDP has its own memory for whole ones
            own = ReplicaPool(replica_slots, zeros, num_shards)
            self.replicas = [own.rows(position, p, p.dtype) for position, p in enumerate(homes)]
        else:  # replica rows follow the homes in one tensor, which a grouped GEMM reads without a copy
            self.slots = [_with_rows(p.detach(), replica_slots, zeros) for p in homes]
            self.replicas = [slots[self.homes_per_rank :] for slots in self.slots]
            self.parameters = [
                nn.Parameter(slots[: self.homes_per_rank], requires_grad=p.requires_grad)
                for slots, p in zip(self.slots, homes, strict=True)
            ]
        self._pool = gradients
        self._trained = [position for position, p in enumerate(homes) if gradients is not None and p.requires_grad]
        self._leaving = [self._gradient_rows_of(position) for position in self._trained]
        self._held: list[Tensor] = []
        self._noted: list[tuple[int, ...] | None] = []
        self._noted_after_pass = False
        self._backward = -1
        self.unsent = False
        """Whether gradients are held back here, to be sent home later."""

    def replica_rows(self, replica: int) -> list[Tensor]:
        """The live rows of a replica slot, one per tensor."""
        return [rows[replica] for rows in self.replicas]

    def gradient_rows(self, replica: int) -> list[Tensor]:
        """Gradients of a replica slot as they leave, in ``accumulation_dtype``, one per tensor that needs one."""
        return [rows[replica] for rows in self._leaving]

    def trained(self) -> list[nn.Parameter]:
        """The parameters that have gradients, in the order of ``gradient_rows``."""
        return [self.parameters[position] for position in self._trained]

    def collect(self, gradients: Sequence[Tensor | None], hold: bool, backward: int) -> None:
        """Take what a backward pass gave the replicas, with what was held back before; ``hold``: keep it here, else it
        is in the pool's rows, which no other layer may use until it has left. RuntimeError: gradients were rewritten
        meanwhile."""
        if hold and not self._held:
            self._held = [self._gradient_rows_of(position, own=True) for position in self._trained]
        for number, position in enumerate(self._trained):
            new, leaving = gradients[position], self._leaving[number]
            into = self._held[number] if hold else leaving
            goes_on = self.unsent and (backward == self._backward or not self._discarded(number))
            if not goes_on:
                into.zero_() if new is None else into.copy_(new)
                continue
            if not hold:
                into.copy_(self._held[number])
            if new is not None:
                into.add_(new)
        self.unsent, self._backward = hold, backward
        self._note(after_pass=False)

    def release(self) -> None:
        """Put what was held back into the pool's rows, to leave; errors as for ``collect``."""
        for number, (leaving, held) in enumerate(zip(self._leaving, self._held, strict=True)):
            leaving.zero_() if self._discarded(number) else leaving.copy_(held)
        self.unsent = False

    @torch.compiler.disable
    def note(self) -> None:
        """A backward pass is over. The gradients of the homes are what belongs to what is held back here: nobody else
        may write them."""
        self._note(after_pass=True)

    def holds_gradients(self) -> bool:
        """Return whether gradients are held back here that the optimizer is yet to see; errors as for ``collect``."""
        return self.unsent and any(not self._discarded(number) for number in range(len(self._trained)))

    def free(self) -> int:
        """Free the memory of replicas and their gradients; homes that share it get memory of their own. Returns the
        freed bytes."""
        self._held = []
        freed = 0
        for parameter, slots in zip(self.parameters, self.slots, strict=False):
            if not _is_resizable(slots):
                continue
            if _shares_storage(parameter, slots):
                if not has_memory(parameter):
                    raise RuntimeError("weights of experts have no memory any more, and replicas lie behind them")
                parameter.data = parameter.detach().clone()
            freed += _free(slots)
        return freed + sum(_free(rows) for rows in (*([] if self.slots else self.replicas), *self._leaving))

    def take(self) -> None:
        """Take the memory that `free` has freed, for what the homes hold now. Replicas are zeros until refreshed."""
        for parameter, slots in zip(self.parameters, self.slots, strict=False):
            if _shares_storage(parameter, slots):
                needed = slots.numel() * slots.element_size()
                if slots.untyped_storage().nbytes() < needed:
                    raise RuntimeError(
                        "weights of experts were loaded into memory that replicas lie in, and cut it short"
                    )
            else:
                if parameter.device != slots.device:
                    raise RuntimeError(f"weights of experts are on {parameter.device}: bring them to {slots.device}")
                _take(slots)
                slots[: self.homes_per_rank] = parameter.detach()
                parameter.data = slots[: self.homes_per_rank]
        for rows in (*([] if self.slots else self.replicas), *self._leaving):
            _take(rows)

    def _note(self, *, after_pass: bool) -> None:
        self._noted = [_version(parameter) for parameter in self.trained()]
        self._noted_after_pass = after_pass

    def _discarded(self, number: int) -> bool:
        """Return whether the gradient that what is held back belongs to is gone; RuntimeError: it was changed in
        another way."""
        parameter = self.parameters[self._trained[number]]
        if _version(parameter) == self._noted[number]:
            # FSDP has no gradient of slices yet after a pass in which it was set not to reduce: its own is unsharded.
            return parameter.grad is None and not (self.is_sliced and self._noted_after_pass)
        # Somebody has written it, which is seldom: so the look at its values, which waits for a device, may cost.
        if parameter.grad is None or not local(parameter.grad).any():
            return True
        raise RuntimeError(
            "gradients of experts were rewritten (clipped or scaled by hand) while copies held a part of them back: "
            + (
                "with fully_shard they do until balancer.reduce_gradients(), so call that first"
                if self.is_sliced
                else "call balancer.reduce_gradients() first, or run the last backward pass outside no_sync"
            )
        )

    def _gradient_rows_of(self, position: int, own: bool = False) -> Tensor:
        assert self._pool is not None
        parameter = self.parameters[position]
        dtype = accumulation_dtype(parameter)
        return self._pool.own_rows(parameter, dtype) if own else self._pool.rows(position, parameter, dtype)


def _is_resizable(rows: Tensor) -> bool:
    """Return whether these rows are all of their storage, and torch may give it another size."""
    storage = rows.untyped_storage()
    return storage.resizable() and storage.nbytes() in (0, rows.nbytes)


def _shares_storage(parameter: Tensor, slots: Tensor) -> bool:
    return parameter.untyped_storage()._cdata == slots.untyped_storage()._cdata


def _free(rows: Tensor) -> int:
    nbytes = rows.untyped_storage().nbytes()
    if not nbytes or not _is_resizable(rows):
        return 0
    rows.untyped_storage().resize_(0)
    return nbytes


def _take(rows: Tensor) -> None:
    if not rows.untyped_storage().nbytes():
        rows.untyped_storage().resize_(rows.nbytes)
        rows.zero_()


def _in_one_piece(home: nn.Parameter) -> nn.Parameter:
    """Rows leave from where they are, so each must lie in one piece: a transposed tensor becomes a new Parameter."""
    if home.is_contiguous():
        return home
    return nn.Parameter(home.detach().contiguous(), requires_grad=home.requires_grad)


def _with_rows(homes: Tensor, replica_slots: int, zeros: Zeros) -> Tensor:
    """``[H, ...]`` -> ``[H + k, ...]``: homes, and rows for copies behind them."""
    rows = zeros((len(homes) + replica_slots, *homes.shape[1:]), homes.dtype, homes.device)
    rows[: len(homes)] = homes
    return rows


def _version(parameter: Tensor) -> tuple[int, ...] | None:
    """Changes whenever the gradient is written or replaced."""
    return None if parameter.grad is None else version(parameter.grad)


def are_accumulated(edges: Sequence[tuple[Any, int]]) -> bool:
    """Return whether the running backward pass adds gradients of these parameters to their ``.grad``; RuntimeError:
    only some, or they are wanted elsewhere."""
    try:
        wanted = {torch._C._will_engine_execute_node(node) for node, _ in edges if node is not None}  # type: ignore[attr-defined]
    except RuntimeError:
        raise RuntimeError(
            "torch.autograd.grad of expert weights that have copies: gradients of copies come home in .grad alone; "
            "call backward(), or use replica_slots=0"
        ) from None
    if len(wanted) > 1:
        raise RuntimeError(
            "backward(inputs=...) names some expert weights of a layer and leaves others out, and copies bring the "
            "gradients of a layer home together: name all of a layer, freeze the others (requires_grad), or use "
            "replica_slots=0"
        )
    return wanted == {True}


def accumulation_dtype(parameter: Tensor) -> torch.dtype:
    """What gradients of copies are summed in: float32, or the weights' own dtype where that is wider."""
    return torch.promote_types(parameter.dtype, torch.float32)
