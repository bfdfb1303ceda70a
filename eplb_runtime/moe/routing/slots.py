"""From logical expert ids to physical slots: a table, changed in place, where every expert has one copy, else a split
of the batch over the copies.

The split is a function of the placement and of the counts that all ranks gathered, so that every rank comes to the same
one. Numba splits on the host (`water_filling.py`), and the device deals its choices out. No torch.distributed here.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...placement import Placement
from .water_filling import RowCounts, Speeds, SplitTables, split_for_rank


def record_use(*tensors: Tensor) -> None:
    """Make the allocator keep the memory of tensors on a device until this thread's stream has read them."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))


class SlotTable:
    """int64 ``[L, E]`` on the device: the home slot of each logical expert, under the active placement.

    Attributes:
        epoch: of that placement.
        changes_L: int64, on the host: how often each layer's has changed.
    """

    def __init__(self, placement: Placement, device: torch.device) -> None:
        layers, experts = placement.num_layers, placement.num_experts
        self.epoch, self.changes_L = placement.epoch, np.zeros(layers, dtype=np.int64)
        # Both maps in one piece: a commit copies both to the device at once.
        self._both_L2E = torch.empty(layers, 2 * experts, dtype=torch.int64, device=device)
        self._home_LE = self._both_L2E[:, :experts]
        self._logical_LRH = self._both_L2E[:, experts:].unflatten(1, (placement.num_ranks, placement.homes_per_rank))
        self.prepare(placement, range(placement.num_layers))()

    def prepare(self, placement: Placement, layers: Sequence[int]) -> Callable[[], None]:
        """Return a function that puts these layers of a placement into the table, in place, takes over its ``epoch``,
        and adds 1 to their ``changes_L``. Calling it allocates nothing."""
        rows = np.asarray(layers, dtype=np.int64)
        homes = placement.homes_LRH[rows].reshape(len(rows), -1)
        new = np.concatenate([placement.require_homes()[rows], homes], axis=1, dtype=np.int64)
        new_L2E, index = (torch.from_numpy(one).to(self._both_L2E.device) for one in (new, rows))

        def take_over() -> None:
            record_use(new_L2E, index)
            self._both_L2E.index_copy_(0, index, new_L2E)
            self.epoch = placement.epoch
            self.changes_L[rows] += 1

        return take_over

    def slots(self, layer: int, topk_ids_TK: Tensor) -> Tensor:
        """Return int64 ``[T, K]``: the home slot of each choice."""
        # Plain indexing would take -1 for the last expert without a word.
        return self.home_of_experts(layer).index_select(0, topk_ids_TK.reshape(-1)).view(topk_ids_TK.shape)

    def home_of_experts(self, layer: int) -> Tensor:
        """Return int64 ``[E]``, the slot of each expert's home: live memory, changed in place by a commit."""
        return self._home_LE[layer]

    def require_known(self, layer: int, topk_ids_TK: Tensor) -> None:
        """Raise ValueError if ids on a CPU are of no expert. Ids on a device are not looked at (no host sync)."""
        if topk_ids_TK.device.type != "cpu" or not topk_ids_TK.numel():
            return
        ids_TK, experts = topk_ids_TK.detach().numpy(), self._home_LE.shape[1]
        lowest, highest = ids_TK.min(), ids_TK.max()
        if lowest < 0 or highest >= experts:
            raise ValueError(
                f"MoE layer {layer} was given expert ids from {lowest} to {highest}, and its experts are 0 to "
                f"{experts - 1}: a choice that is none (-1 for padding) takes any expert and a router weight of 0"
            )

    def logical_of_slots(self, layer: int) -> Tensor:
        """Return int64 ``[E]``, the logical expert in each home slot, in the order of slots: live memory."""
        return self._logical_LRH[layer].flatten()

    def logical_of_rows(self, rank: int) -> Tensor:
        """Return int64 ``[L, E/R]``, the logical expert in each home slot of an EP rank: live memory."""
        return self._logical_LRH[:, rank]


Counted = tuple[Tensor, Tensor | None]
"""int64 ``[E]``, how often each expert is chosen; and what whoever deals out need not find out again."""


def count_choices(topk_ids_TK: Tensor, num_experts: int) -> Counted:
    """Return int64 ``[E]``, how often each expert is chosen, and None. No host sync."""
    ids_N = topk_ids_TK.reshape(-1)
    return ids_N.new_zeros(num_experts).scatter_add_(0, ids_N, torch.ones_like(ids_N)), None


def assign_slots(topk_ids_TK: Tensor, sent_EC: Tensor, copy_slot_EC: Tensor, begins: Tensor | None = None) -> Tensor:
    """Return int64 ``[T, K]``, the slot of each choice: the first ``sent_EC[e, 0]`` choices of an expert, in order, go
    to its first copy, the next ``sent_EC[e, 1]`` to its second. ``begins`` is not used here; kernels take it."""
    ids = topk_ids_TK.reshape(-1)
    by_expert = torch.repeat_interleave(copy_slot_EC.reshape(-1), sent_EC.reshape(-1), output_size=ids.shape[0])
    order = torch.argsort(ids, stable=True)
    return torch.empty_like(by_expert).index_copy_(0, order, by_expert).view(topk_ids_TK.shape)


class BatchSplitter:
    """Splits batches under one placement; `prepare` takes over the next one. ``count`` and ``deal`` are kernels with
    the results of `count_choices` and `assign_slots`."""

    def __init__(
        self,
        placement: Placement,
        device: torch.device,
        ep_rank: int,
        ranks_per_node: int,
        speed_R: Speeds = None,
        *,
        count: Callable[[Tensor, int], Counted] = count_choices,
        deal: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = assign_slots,
    ) -> None:
        self._device, self._count, self._deal = device, count, deal
        self._split = partial(split_for_rank, rank=ep_rank, ranks_per_node=ranks_per_node, speed_R=speed_R)
        self._num_experts = placement.num_experts
        self._layers: dict[int, tuple[SplitTables, Tensor]] = {}  # and on the device the slots of each expert's copies
        self.prepare(placement, range(placement.num_layers))()

    def prepare(self, placement: Placement, layers: Sequence[int]) -> Callable[[], None]:
        """Return a function that makes the splitter use these layers of a placement. Calling it allocates nothing."""
        changed, homes = list(layers), placement.require_homes()
        shape = placement.num_experts, placement.num_ranks
        tables = SplitTables.of(Placement(placement.physical_to_logical[changed], *shape, homes[changed]))
        slots_LEC = torch.from_numpy(tables.copy_slot_LEC.astype(np.int64)).to(self._device)
        new = {layer: (tables.of_layer(index), slots_LEC[index]) for index, layer in enumerate(changed)}

        def take_over() -> None:
            record_use(slots_LEC)
            self._layers.update(new)

        return take_over

    def splits(self, layer: int) -> bool:
        """Return whether any expert of the layer has replicas; if not, every token goes to a home."""
        return self._layers[layer][0].has_replicas

    def counts(self, topk_ids_TK: Tensor) -> Counted:
        """Return int64 ``[E]``, this rank's choices of each expert, with padding; and ``begins`` for `route`."""
        return self._count(topk_ids_TK, self._num_experts)

    def route(
        self, layer: int, topk_ids_TK: Tensor, counts_RE: NDArray[np.int64], begins: Tensor | None = None
    ) -> tuple[Tensor, RowCounts]:
        """Return int64 ``[T, K]``, the slot of each choice of a batch, and how many rows go where. An expert's choices
        go to its copies in the order of tokens. ``counts_RE``: of all ranks, on the host. ``begins``: from `counts`."""
        tables, copy_slot_EC = self._layers[layer]
        sent_EC, counts = self._split(counts_RE, tables)
        sent = torch.from_numpy(sent_EC).to(topk_ids_TK.device, non_blocking=True)
        return self._deal(topk_ids_TK, sent, copy_slot_EC, begins), counts
