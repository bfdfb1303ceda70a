"""Replica slots: weights-only copies of experts whose homes are on other ranks, kept from step to step.

A bank is one layer's slots on one rank. The Parameter is the home rows; replica rows are no parameter of anything.
Their gradients gather here until `sync.py` brings them to the homes. One exchange is under way at a time, so all layers
share one set of gradient rows; only gradients that `no_sync` holds back have memory of their own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..moe.experts.slices import is_sliced, local, version

GradientPool = dict[tuple[int, Sequence[int], torch.dtype], Tensor]
"""Rows in which gradients of replicas leave, by number, shape and dtype of the tensor: layers use them in turn."""


def slice_of_row(rows: Tensor, num_shards: int, shard: int = 0) -> Tensor:
    """Return slice ``shard`` of ``num_shards`` equal ones of dimension 1 of rows ``[k, N, ...]``, a view."""
    if num_shards == 1:
        return rows
    width = rows.shape[1] // num_shards
    return rows[:, shard * width : (shard + 1) * width]


class ReplicaBank:
    """The slots of one layer on one rank.

    Args:
        homes: home rows ``[H, ...]`` per tensor, or this rank's slices of them; then replicas are slices, too.
        replica_slots: k, rows for replicas (zeros until they are refreshed).
        zeros: makes memory for replicas and their gradients, as `plan.PointToPoint.zeros` does.
        gradients: memory for gradients of replicas, shared by the banks of one `ReplicaSync`. None: inference.
        num_shards: D, ranks over which homes are divided: each has whole ones, ``[H/D, ...]``, and slices of replicas.
    """

    def __init__(
        self,
        homes: Sequence[nn.Parameter],
        replica_slots: int,
        zeros: Callable[[Sequence[int], torch.dtype, torch.device], Tensor],
        gradients: GradientPool | None,
        num_shards: int = 1,
    ) -> None:
        self.homes_per_rank = local(homes[0]).shape[0] * num_shards
        self.is_sliced = is_sliced(homes[0])
        shapes = [(replica_slots, *slice_of_row(local(p), num_shards).shape[1:]) for p in homes]
        self.slots: list[Tensor] = []
        if self.is_sliced:  # the homes stay where they are: FSDP has its own memory for whole ones
            self.parameters, given = list(homes), zip(shapes, homes, strict=True)
            self.replicas = [zeros(shape, p.dtype, local(p).device) for shape, p in given]
        else:  # replica rows follow the homes in one tensor, which a grouped GEMM reads without a copy
            for p in homes:
                self.slots.append(zeros((self.homes_per_rank + replica_slots, *p.shape[1:]), p.dtype, p.device))
                self.slots[-1][: self.homes_per_rank] = p.detach()
            self.replicas = [slots[self.homes_per_rank :] for slots in self.slots]
            self.parameters = [
                nn.Parameter(slots[: self.homes_per_rank], requires_grad=p.requires_grad)
                for slots, p in zip(self.slots, homes, strict=True)
            ]
        self._trained = [position for position, p in enumerate(homes) if gradients is not None and p.requires_grad]
        self._leaving: list[Tensor] = []
        for position in self._trained:
            assert gradients is not None
            key = position, shapes[position], accumulation_dtype(homes[position])
            if key not in gradients:
                gradients[key] = zeros(*key[1:], local(homes[position]).device)
            self._leaving.append(gradients[key])
        self._held: list[Tensor] = []
        self._noted: list[tuple[int, ...] | None] = []
        self._noted_after_pass = False
        self._backward = -1
        self.unsent = False
        """Whether gradients are held back here, to be sent home later."""

    def replica_rows(self, replica: int) -> list[Tensor]:
        """Return the weights of a replica slot, one live row per tensor."""
        return [rows[replica] for rows in self.replicas]

    def gradient_rows(self, replica: int) -> list[Tensor]:
        """Return a replica slot's rows of the shared gradient memory, one per trained tensor."""
        return [rows[replica] for rows in self._leaving]

    def trained(self) -> list[nn.Parameter]:
        """Return the home parameters whose gradients replicas collect, in the order of `gradient_rows`."""
        return [self.parameters[position] for position in self._trained]

    def collect(self, gradients: Sequence[Tensor | None], hold: bool, backward: int) -> None:
        """Add gradients of replicas (None: zero) to those that are held back here. ``hold``: hold the sum back and set
        ``unsent``; else put it into the shared `gradient_rows` and clear ``unsent``. A new ``backward`` (id of the
        pass) drops what is held back if the home's ``.grad`` is None or zero; else RuntimeError if it was rewritten."""
        if hold and not self._held:
            self._held = [torch.zeros_like(rows) for rows in self._leaving]
        for number, position in enumerate(self._trained):
            new, into = gradients[position], (self._held if hold else self._leaving)[number]
            if not self.unsent or (backward != self._backward and self._discarded(number)):
                into.zero_() if new is None else into.copy_(new)
                continue
            if not hold:
                into.copy_(self._held[number])
            if new is not None:
                into.add_(new)
        self.unsent, self._backward = hold, backward
        self.note(after_pass=False)

    def release(self) -> None:
        """Copy held-back gradients into the shared `gradient_rows` (zeros where the home's ``.grad`` is None or zero),
        to be sent, and clear ``unsent``. RuntimeError: as for `collect`."""
        for number, (leaving, held) in enumerate(zip(self._leaving, self._held, strict=True)):
            leaving.zero_() if self._discarded(number) else leaving.copy_(held)
        self.unsent = False

    @torch.compiler.disable
    def note(self, after_pass: bool = True) -> None:
        """Record anew the versions of the homes' ``.grad``: `collect` and `release` notice by them if it is rewritten.
        ``after_pass``: a backward pass ends here; a sliced home's ``.grad`` that is None then counts as not cleared."""
        self._noted = [_version(parameter) for parameter in self.trained()]
        self._noted_after_pass = after_pass

    def was_cleared(self, number: int) -> bool:
        """Return whether a trained home's ``.grad`` was cleared, and not rewritten, since the pass that held gradients
        back ended; False in later passes."""
        return self._noted_after_pass and self._discarded(number)

    def free(self) -> int:
        """Free the memory of replicas and of their gradients, held ones too; return the freed bytes. Homes that lie in
        the same memory are copied to memory of their own first, which is ``.data`` of their parameters then."""
        self._held, self.unsent, freed = [], False, 0
        for parameter, slots in zip(self.parameters, self.slots, strict=False):
            if _is_resizable(slots) and _shares_storage(parameter, slots):
                parameter.data = parameter.detach().clone()
            freed += _free(slots)
        return freed + sum(_free(rows) for rows in (*([] if self.slots else self.replicas), *self._leaving))

    def allocate(self) -> None:
        """Allocate what `free` has freed: replicas are zeros, homes are copied in and their ``.data`` is set.
        RuntimeError: homes are on another device, or were loaded into the freed memory and cut it short."""
        for parameter, slots in zip(self.parameters, self.slots, strict=False):
            if _shares_storage(parameter, slots):
                if slots.untyped_storage().nbytes() < slots.nbytes:
                    raise RuntimeError(
                        "the storage of expert weights was resized without room for replicas: assign parameter.data"
                    )
            else:
                if parameter.device != slots.device:
                    raise RuntimeError(f"weights of experts are on {parameter.device}: bring them to {slots.device}")
                _take(slots)
                slots[: self.homes_per_rank] = parameter.detach()
                parameter.data = slots[: self.homes_per_rank]
        for rows in (*([] if self.slots else self.replicas), *self._leaving):
            _take(rows)

    def _discarded(self, number: int) -> bool:
        """Return whether a home's ``.grad`` is None or zero now. RuntimeError: it was rewritten in another way."""
        parameter = self.parameters[self._trained[number]]
        if _version(parameter) == self._noted[number]:
            # FSDP has no gradient of slices yet after a pass in which it was set not to reduce: its own is unsharded.
            return parameter.grad is None and not (self.is_sliced and self._noted_after_pass)
        # Somebody has written it, which is seldom: so the look at its values, which waits for a device, may cost.
        if parameter.grad is None or not local(parameter.grad).any():
            return True
        mend = "call balancer.reduce_gradients() first, or run the last backward pass outside no_sync"
        if self.is_sliced:
            mend = "with fully_shard balancer.reduce_gradients() adds them, so call that first"
        raise RuntimeError(
            f"gradients of experts were changed (clipped or scaled by hand) before those of replicas were added: {mend}"
        )


def _is_resizable(rows: Tensor) -> bool:
    """Return whether these rows are all of their storage, and torch may give it another size."""
    storage = rows.untyped_storage()
    return storage.resizable() and storage.nbytes() in (0, rows.nbytes)


def _shares_storage(parameter: Tensor, slots: Tensor) -> bool:
    return parameter.untyped_storage()._cdata == slots.untyped_storage()._cdata


def _free(rows: Tensor) -> int:
    nbytes = rows.untyped_storage().nbytes() if _is_resizable(rows) else 0
    if nbytes:
        rows.untyped_storage().resize_(0)
    return nbytes


def _take(rows: Tensor) -> None:
    if not rows.untyped_storage().nbytes():
        rows.untyped_storage().resize_(rows.nbytes)
        rows.zero_()


def _version(parameter: Tensor) -> tuple[int, ...] | None:
    """Changes whenever the gradient is written or replaced."""
    return None if parameter.grad is None else version(parameter.grad)


def are_accumulated(edges: Sequence[tuple[Any, int]]) -> bool:
    """Return whether the running backward pass adds to ``.grad`` of the parameters at ``edges`` (a node's
    ``next_functions``). RuntimeError: only to some of them, or the pass is `torch.autograd.grad` of them."""
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
    """Return the dtype in which gradients of replicas are summed: float32, or the weights' dtype if it is wider."""
    return torch.promote_types(parameter.dtype, torch.float32)
