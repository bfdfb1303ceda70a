"""Faults put into the package on purpose, each with a test that must fail then (`test_mutants`).

A rank applies the one that `EPLB_TEST_MUTANT` names before it does anything else (`ranks`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from eplb_runtime.distributed.consensus import Verdict

Patch = Callable[[], None]


def other(where: str, make: Callable[[Any], Any]) -> Patch:
    """Put in the place of ``module:name`` or ``module:Class.name`` of the package what ``make`` makes of it."""
    module, _, path = where.partition(":")

    def patch() -> None:
        *owner, name = path.split(".")
        holder = import_module(f"eplb_runtime.{module}")
        for part in owner:
            holder = getattr(holder, part)
        setattr(holder, name, make(getattr(holder, name)))

    return patch


def nothing(where: str, result: Any = None) -> Patch:
    """Have a function do nothing, and return this."""
    return other(where, lambda own: lambda *_, **__: result)


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


def overlook_new_gradients() -> None:
    from eplb_runtime.balancer.gradients.reduction import Averaging, Gradients

    Averaging.has_new = False
    Gradients.arrives = lambda self, parameter: None


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


def save_what_is_trained() -> None:
    """A save in the background writes tensors as they are by then."""
    own = torch.Tensor.to
    torch.Tensor.to = lambda tensor, *given, copy=False, **named: own(tensor, *given, **named)  # type: ignore[assignment]


def leave_behind(*what: str) -> Patch:
    """Experts move without their tensors of these names."""
    return other(
        "moe.experts.registry:ExpertTensors.of_home",
        lambda own: lambda self, layer: [tensor for tensor in own(self, layer) if not tensor.name.endswith(what)],
    )


def of_the_next_slot(tensor: Any) -> Any:
    """Moments, of another slot than the one that an expert leaves."""
    rows = tensor.tensor
    return replace(tensor, tensor=rows[1:] + rows[:1]) if tensor.name.endswith("/exp_avg") else tensor


def summed(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """In the order that gloo adds in."""
    dist.all_reduce(flat, group=group)
    return flat


def on_their_edp_rank(own: Callable[..., Any]) -> Callable[..., Any]:
    """As if each EDP rank kept the same range of every slot."""

    def along(executor: Any, transfer: Any, record_format: Any) -> Any:
        holders = executor._home_rows.holders
        every = own(executor, transfer, record_format)
        yield from (one for one in every if one.source % holders == one.destination % holders)

    return along


def in_slots(own: Callable[..., Any]) -> Callable[..., Any]:
    """Squares of experts are added up in the order of ranks and their slots."""

    def powers(gradients: Any, rows_LH: Any, *more: Any) -> Any:
        places = [[dist.get_rank() * len(row) + slot for slot in range(len(row))] for row in rows_LH]
        return own(gradients, places, *more)

    return powers


def without_handing_on(own: Callable[..., Any]) -> Callable[..., Any]:
    def refresh(self: Any, layers: Any = None) -> None:
        own(self, layers)
        self._pending = {layer: (works, ()) for layer, (works, _) in self._pending.items()}

    return refresh


def rows_of_slots(view: Any, layer: int) -> list[int]:
    """The experts that would be in this rank's rows in logical order."""
    homes = view.balancer.placement.homes_per_rank
    return [view.balancer.runtime.job.ep_rank * homes + row for row in range(homes)]


def exchange_as_the_library_does() -> None:
    """Transformers' all-to-all sorts rows and adds up their gradients by slots."""
    from eplb_runtime.hosts.transformers.expert_parallel import AllToAllEP, BalancedEP

    BalancedEP.__call__ = lambda self, hidden, ids, weights: AllToAllEP.__call__(
        self, hidden, ids if self.layer is None else self.layer.slots(hidden, ids), weights
    )


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
        "test_bits.py::test_a_group_with_another_plan_is_noticed",
        nothing("distributed.consensus:Agreement.check_equal", Verdict(True)),
    ),
    "sums in any order": (
        f"{BITS}_where_several_ranks_hold_an_expert[6]",
        other("balancer.gradients.reduction:sum_in_rank_order", lambda own: summed),
    ),
    "contributions not scaled": (LOOPS, nothing("balancer.gradients.reduction:Averaging._hook")),
    "new gradients overlooked": (LOOPS, overlook_new_gradients),
    "checkpoints in slot order": (
        "test_checkpoint.py::test_it_loads_bit_equal_anywhere",
        other("checkpoint.state:LogicalView.experts_here", lambda own: rows_of_slots),
    ),
    "norm of one stage": (
        "test_pipelining.py::test_a_schedule_equals_the_whole_model",
        other(
            "balancer.gradients.reduction:over_stages",
            lambda own: lambda squares, groups, device: torch.stack(squares).sum(dim=0),
        ),
    ),
    "gradients of copies forgotten": (REPLICAS, nothing("replicas.sync:ReplicaSync._add_to_homes")),
    "a refresh missed": (REPLICAS, miss_a_refresh),
    "nothing handed on": (HANGING, other("replicas.sync:ReplicaSync.refresh", without_handing_on)),
    "nothing added on the way": (
        HANGING,
        other("replicas.plan:ReplicaPlanner.plan", lambda own: lambda self, *of: replace(own(self, *of), additions=())),
    ),
    "other EDP ranks forgotten": (
        SLICED,
        other(
            "replicas.compute:ShardedReplicas.slice_of_sum",
            lambda own: lambda self, gradient, dtype: gradient.chunk(self._ranks, dim=1)[self._group.rank()].to(dtype),
        ),
    ),
    "a background save is torn": ("test_checkpoint_folder.py::test_a_save_in_the_background", save_what_is_trained),
    "a write during overlap": (
        "test_migration_beside_training.py::test_weights_that_a_user_writes",
        nothing("migration.overlapped:Overlapped._written", ""),
    ),
    "groups are kept": (
        "test_attach.py::test_cycles_of_attach_and_close",
        nothing("distributed.process_groups:ProcessGroups.release"),
    ),
    "a read on the host": (
        "test_launches_of_a_layer.py::test_a_layer_takes",
        other(
            "moe.dispatch.all_to_all:AllToAll.plan",
            lambda own: lambda self, slots, counts=None: slots.max().cpu() >= 0 and own(self, slots, counts),
        ),
    ),
    "a repeated forward finds its own way": (
        "test_recompute.py::test_a_repeated_forward_exchanges_no_counts",
        nothing("moe.dispatch.recompute:RecomputeCache.repeated"),
    ),
    "a failed attach undoes nothing": (
        "test_attach.py::test_an_attach_that_fails",
        nothing("hosts.attaching.sharding:ModelSnapshot.restore"),
    ),
    "the library's own exchange": (
        "test_transformers_ep.py::test_no_bit_depends_on_where_experts_are[2]",
        exchange_as_the_library_does,
    ),
    "pieces stay on their EDP rank": (DIVIDED, other("migration.exchange:RoundExecutor._shipments", on_their_edp_rank)),
    "norm by the cut": (DIVIDED, other("balancer.gradients.norm:maxima", lambda own: lambda values, group: values)),
    "divided state left behind": (DIVIDED, leave_behind("exp_avg")),
    "columns of a routing map forgotten": (
        f"{MEGATRON}[grouped experts]",
        other(
            "moe.layer:HostDispatchedLayer.logical_of_slots",
            lambda own: property(lambda self: torch.arange(len(own.fget(self)))),
        ),
    ),
    "weights kept in FP8": (f"{MEGATRON}[fp8, blockwise]", nothing("hosts.megatron.layer:WeightCaches.follow")),
    "scales left behind": (
        f"{MEGATRON}[masters and moments in float16]",
        other(
            "hosts.megatron.optimizers:raw_state",
            lambda own: lambda *args: {key: value for key, value in own(*args).items() if "scale" not in key},
        ),
    ),
    "copies in host memory left behind": (
        f"{MEGATRON}[masters in host memory]",
        other("hosts.megatron.optimizers:_offloaded", lambda own: lambda *args: replace(own(*args), copies={})),
    ),
    "main parameters left behind": (ALL_GATHER, leave_behind("param")),
    "moments of a neighbour": (
        f"{MEGATRON}[optimizer of float16, shared experts]",
        other(
            "moe.experts.registry:ExpertTensors.of_home",
            lambda own: lambda self, layer: [of_the_next_slot(tensor) for tensor in own(self, layer)],
        ),
    ),
    "norm by rank": (ALL_GATHER, other("balancer.gradients.reduction:powers_of_experts", in_slots)),
}
"""Name -> the test of `tests/distributed` (the beginning of its name) that fails then, and the fault."""


def apply(name: str) -> None:
    MUTANTS[name][1]()
