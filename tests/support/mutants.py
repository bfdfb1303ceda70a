"""Faults put into the package on purpose, each with a test that must fail then (`test_mutants`).

A rank applies the one that `EPLB_TEST_MUTANT` names before it does anything else (`ranks`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

Patch = Callable[[], None]


def leave_behind(*what: str) -> Patch:
    """Experts move without their tensors of these names."""

    def patch() -> None:
        from eplb_runtime.moe.experts.registry import ExpertTensors

        whole = ExpertTensors.of_home
        ExpertTensors.of_home = lambda self, layer: [t for t in whole(self, layer) if not t.name.endswith(what)]

    return patch


def combine_in_physical_order() -> None:
    """Each token's results are summed in the order of their slots, as a scatter-add over arriving rows would."""
    from eplb_runtime.moe.dispatch.all_to_all import AllToAll

    plan, dispatch = AllToAll.plan, AllToAll.dispatch

    def plan_by_slot(self: Any, slots: torch.Tensor, counts: Any = None) -> Any:
        order = slots.argsort(dim=1, stable=True)
        metadata = plan(self, slots.gather(1, order), counts)
        object.__setattr__(metadata, "order", order)
        return metadata

    def by_slot(self: Any, hidden: torch.Tensor, weights: torch.Tensor, metadata: Any) -> Any:
        return dispatch(self, hidden, weights.gather(1, metadata.order), metadata)

    AllToAll.plan, AllToAll.dispatch = plan_by_slot, by_slot


def nobody_compares_plans() -> None:
    from eplb_runtime.distributed.consensus import Agreement, Verdict

    Agreement.check_equal = lambda self, digest, what, problem="": Verdict(True)


def sum_in_any_order() -> None:
    from eplb_runtime.balancer.gradients import reduction

    def all_reduce(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        dist.all_reduce(flat, group=group)
        return flat

    reduction.sum_in_rank_order = all_reduce


def reduce_again_after_every_forward() -> None:
    from eplb_runtime.balancer.gradients.reduction import Averaging

    Averaging._leave_to_the_first = lambda self, parameter: None


def overlook_new_gradients() -> None:
    from eplb_runtime.balancer.gradients.reduction import Averaging, Gradients

    Averaging.has_new = Averaging.has_replaced = False
    Gradients.arrives = lambda self, parameter: None


def norm_of_one_stage() -> None:
    from eplb_runtime.balancer.gradients import norm, reduction

    reduction.over_stages = lambda powers, groups, device, p: norm.combined(torch.stack(powers), p)


def forget_gradients_of_copies() -> None:
    from eplb_runtime.replicas.sync import ReplicaSync

    ReplicaSync._add_to_homes = lambda *_: None


def lose_gradients_on_the_way() -> None:
    from eplb_runtime.replicas.bank import ReplicaBank

    rows = ReplicaBank.gradient_rows
    ReplicaBank.gradient_rows = lambda self, replica: [row * 0 for row in rows(self, replica)]


def average_copies() -> None:
    from eplb_runtime.replicas.sync import ReplicaSync

    add = ReplicaSync._add_to_homes
    ReplicaSync._add_to_homes = lambda self, children, trained: add(
        self, [child._replace(arrivals=[row / 2 for row in child.arrivals]) for child in children], trained
    )


def miss_a_refresh() -> None:
    """And take it for made: weights that were written without one are refused."""
    from eplb_runtime.replicas.sync import ReplicaSync

    refresh, calls = ReplicaSync.refresh, []

    def sometimes(self: Any, *layers: Any) -> None:
        calls.append(True)
        if len(calls) % 3:  # after attach and after each step
            refresh(self, *layers)
        else:
            self._versions = {layer: self._versions_now(layer) for layer in self._banks}

    ReplicaSync.refresh = sometimes


def let_copies_decay() -> None:
    from eplb_runtime.replicas.sync import ReplicaSync

    refresh = ReplicaSync.refresh

    def decayed(self: Any, *layers: Any) -> None:
        refresh(self, *layers)
        self.wait_all()
        for bank in self._banks.values():
            for replica in range(bank.replica_slots):
                for row in bank.replica_rows(replica):
                    row.data.mul_(1 - 1e-4)  # homes lie in the same piece, and are taken for written else

    ReplicaSync.refresh = decayed


def count_copies_in_the_norm() -> None:
    from eplb_runtime.balancer.balancer import Balancer

    clip = Balancer.clip_grad_norm_

    def counting(self: Any, *arguments: Any) -> torch.Tensor:
        copies = int((self.placement.copy_count - 1).sum())
        return clip(self, *arguments) * (1.0 + 1e-6 * copies)

    Balancer.clip_grad_norm_ = counting


def hand_nothing_on() -> None:
    from eplb_runtime.replicas.sync import ReplicaSync

    refresh = ReplicaSync.refresh

    def forgetful(self: Any, layers: Any = None) -> None:
        refresh(self, layers)
        self._to_hand_on.clear()

    ReplicaSync.refresh = forgetful


def add_nothing_on_the_way() -> None:
    from eplb_runtime.replicas.plan import ReplicaPlanner

    plan = ReplicaPlanner.plan
    ReplicaPlanner.plan = lambda self, *of: replace(plan(self, *of), additions=())


def forget_sums_of_sliced_copies() -> None:
    from eplb_runtime.replicas.compute import ShardedReplicas

    ShardedReplicas.collect = lambda self, gradients, edges: [None] * len(gradients)


def forget_other_edp_ranks() -> None:
    from eplb_runtime.replicas.compute import ReplicaGather

    ReplicaGather.slice_of_sum = lambda self, gradient, dtype: gradient.chunk(self._ranks, dim=1)[
        self._group.rank()
    ].to(dtype)


def undo_nothing() -> None:
    from eplb_runtime.hosts.attaching.sharding import Before

    Before.restore = lambda self: None


def pieces_stay_on_their_edp_rank() -> None:
    """As if each kept the same range of every slot."""
    from eplb_runtime.migration.exchange import RoundExecutor

    own = RoundExecutor._shipments

    def along(executor: Any, transfer: Any, record_format: Any) -> Any:
        holders = executor._home_rows.holders
        yield from (
            one for one in own(executor, transfer, record_format) if one.source % holders == one.destination % holders
        )

    RoundExecutor._shipments = along


def norm_of_each_rank_alone() -> None:
    """Squares are summed over what a rank has of an expert, wherever that is cut."""
    from eplb_runtime.balancer.gradients import norm

    norm.maxima = lambda values, group: values


def norm_by_rank() -> None:
    """Squares of experts are added up in the order of ranks and their slots."""
    from eplb_runtime.balancer.gradients import reduction

    own = reduction.powers_of_experts

    def in_slots(gradients: Any, rows_LH: Any, *more: Any) -> Any:
        places = [[dist.get_rank() * len(row) + slot for slot in range(len(row))] for row in rows_LH]
        return own(gradients, places, *more)

    reduction.powers_of_experts = in_slots


def move_moments_of_the_next_slot() -> None:
    """Instead of those of the slot that an expert leaves, into the slot after the one that it comes to."""
    from eplb_runtime.moe.experts.registry import ExpertTensors

    def turned(tensor: Any) -> Any:
        rows = tensor.tensor
        return replace(tensor, tensor=rows[1:] + rows[:1]) if tensor.name.endswith("/exp_avg") else tensor

    own = ExpertTensors.of_home
    ExpertTensors.of_home = lambda self, layer: [turned(tensor) for tensor in own(self, layer)]


def keep_weights_in_fp8() -> None:
    from eplb_runtime.hosts.megatron.layer import WeightCaches

    WeightCaches.follow = lambda caches: None


def leave_scales() -> None:
    """Only numbers move, and not what they are to be multiplied by."""
    from eplb_runtime.hosts.megatron import optimizers

    own = optimizers.raw_state
    optimizers.raw_state = lambda *args: {key: value for key, value in own(*args).items() if "scale" not in key}


def leave_copies_in_host_memory() -> None:
    from eplb_runtime.hosts.megatron import optimizers

    own = optimizers._offloaded
    optimizers._offloaded = lambda leaf, parameter: replace(own(leaf, parameter), copies={})


def rows_in_slot_order() -> None:
    """Every rank writes and reads its rows as those of the experts that would be there in logical order."""
    from eplb_runtime.checkpoint.state import LogicalView

    LogicalView.experts_here = lambda self, layer: [
        self.balancer.runtime.job.ep_rank * self.balancer.placement.homes_per_rank + row
        for row in range(self.balancer.placement.homes_per_rank)
    ]


def forget_columns() -> None:
    """A framework's dispatchers send tokens to where experts were at launch."""
    from eplb_runtime.moe.layer import HostDispatchedLayer

    own = HostDispatchedLayer.logical_of_slots.fget
    HostDispatchedLayer.logical_of_slots = property(lambda self: torch.arange(len(own(self))))


def exchange_as_the_library_does() -> None:
    """Transformers' all-to-all sorts rows and adds up their gradients by slots."""
    from eplb_runtime.hosts.transformers.expert_parallel import AllToAllEP, BalancedEP

    BalancedEP.__call__ = lambda self, hidden, ids, weights: AllToAllEP.__call__(
        self, hidden, ids if self.layer is None else self.layer.slots(hidden, ids), weights
    )


def save_what_is_trained() -> None:
    """A save in the background writes tensors as they are by then."""
    own = torch.Tensor.to
    torch.Tensor.to = lambda tensor, *given, copy=False, **named: own(tensor, *given, **named)  # type: ignore[assignment]


def overlook_what_is_written() -> None:
    from eplb_runtime.migration.overlapped import Overlapped

    Overlapped._written = lambda self: ""


def keep_groups() -> None:
    from eplb_runtime.distributed.process_groups import ProcessGroups

    ProcessGroups.give_back = lambda self, *groups: None


def read_on_the_host() -> None:
    """Once more in each batch."""
    from eplb_runtime.moe.dispatch.all_to_all import AllToAll

    plan = AllToAll.plan
    AllToAll.plan = lambda self, slots, counts=None: slots.max().cpu() >= 0 and plan(self, slots, counts)


def split_otherwise_in_recompute() -> None:
    """A forward that is repeated does not know where its tokens went."""
    from eplb_runtime.moe.dispatch.recompute import RecomputeCache

    RecomputeCache.repeated = lambda self, ids: None


BITS = "test_bits.py::test_no_bit_changes"
LOOPS = "test_loops.py::test_any_loop_trains_as_one_process[EDP 2, no divisor]"
PLACED = "test_loops.py::test_wherever_experts_are_they_train_as_in_one_process"
REPLICAS = f"{PLACED}[replicas, EP 2 x EDP 2]"
HANGING = f"{PLACED}[replicas that hang on replicas]"
SLICED = f"{PLACED}[replicas of slices]"
MEGATRON = "test_megatron_rows.py::test_experts_move_and_no_bit_changes"
DIVIDED, ALL_GATHER = f"{MEGATRON}[divided, an expert cut]", f"{MEGATRON}[distributed optimizer, all-gather]"
MUTANTS: dict[str, tuple[str, Patch]] = {
    "second moment left behind": (f"{BITS}[eager]", leave_behind("exp_avg_sq")),
    "combined in physical order": (f"{BITS}[eager]", combine_in_physical_order),
    "masters left behind": (f"{BITS}[float32 masters]", leave_behind("master")),
    "nobody compares plans": (
        "test_expert_data_parallel.py::test_a_group_with_another_plan_is_noticed",
        nobody_compares_plans,
    ),
    "sums in any order": (f"{BITS}_where_several_ranks_hold_an_expert[6]", sum_in_any_order),
    "gradients reduced again": (LOOPS, reduce_again_after_every_forward),
    "new gradients overlooked": (LOOPS, overlook_new_gradients),
    "checkpoints in slot order": ("test_checkpoint.py::test_it_loads_bit_equal_anywhere", rows_in_slot_order),
    "norm of one stage": ("test_pipelining.py::test_a_schedule_equals_the_whole_model", norm_of_one_stage),
    "gradients of copies forgotten": (REPLICAS, forget_gradients_of_copies),
    "gradients of copies lost": (REPLICAS, lose_gradients_on_the_way),
    "copies averaged": (REPLICAS, average_copies),
    "a refresh missed": (REPLICAS, miss_a_refresh),
    "copies decay": (REPLICAS, let_copies_decay),
    "copies in the norm": (REPLICAS, count_copies_in_the_norm),
    "nothing handed on": (HANGING, hand_nothing_on),
    "nothing added on the way": (HANGING, add_nothing_on_the_way),
    "sums of sliced copies forgotten": (SLICED, forget_sums_of_sliced_copies),
    "other EDP ranks forgotten": (SLICED, forget_other_edp_ranks),
    "a background save is torn": ("test_checkpoint_folder.py::test_a_save_in_the_background", save_what_is_trained),
    "a write during overlap": (
        "test_migration_beside_training.py::test_weights_that_a_user_writes",
        overlook_what_is_written,
    ),
    "groups are kept": ("test_attach.py::test_cycles_of_attach_and_close", keep_groups),
    "a read on the host": ("test_launches_of_a_layer.py::test_a_layer_takes", read_on_the_host),
    "a repeated forward finds its own way": (
        "test_recompute.py::test_a_repeated_forward_exchanges_no_counts",
        split_otherwise_in_recompute,
    ),
    "a failed attach undoes nothing": ("test_attach_fails.py::test_an_attach_that_fails", undo_nothing),
    "the library's own exchange": (
        "test_transformers_ep.py::test_no_bit_depends_on_where_experts_are[2]",
        exchange_as_the_library_does,
    ),
    "pieces stay on their EDP rank": (DIVIDED, pieces_stay_on_their_edp_rank),
    "norm by the cut": (DIVIDED, norm_of_each_rank_alone),
    "divided state left behind": (DIVIDED, leave_behind("exp_avg")),
    "columns of a routing map forgotten": (f"{MEGATRON}[grouped experts]", forget_columns),
    "weights kept in FP8": (f"{MEGATRON}[fp8, blockwise]", keep_weights_in_fp8),
    "scales left behind": (f"{MEGATRON}[moments in float16]", leave_scales),
    "copies in host memory left behind": (f"{MEGATRON}[masters, half in host memory]", leave_copies_in_host_memory),
    "main parameters left behind": (ALL_GATHER, leave_behind("param")),
    "moments of a neighbour": (f"{MEGATRON}[optimizer of float16, shared experts]", move_moments_of_the_next_slot),
    "norm by rank": (ALL_GATHER, norm_by_rank),
}
"""Name -> the test of `tests/distributed` (the beginning of its name) that fails then, and the fault."""


def apply(name: str) -> None:
    MUTANTS[name][1]()
