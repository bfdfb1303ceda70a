"""Which dispatcher carries a job's tokens: what each rank finds, one choice for all of an EP group, and why."""

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...config import BalancerConfig, ConfigError, DispatchConfig
from ...distributed.consensus import gather_bytes
from ...distributed.transports import deepep
from ...topology import Topology
from .all_to_all import AllToAll
from .base import DispatchContext, Dispatcher
from .deepep import DeepEPDispatcher
from .hierarchical import Hierarchical

OVER_TORCH = ("all_to_all", "hierarchical")
"""What every rank has."""
_MOST_SLOTS, _MOST_SLOTS_OF_A_NODE = 1024, 128
"""Slots a rank that DeepEP knows: in all (NUM_MAX_LOCAL_EXPERTS), and inside a node (threads of
`intranode::notify_dispatch`)."""

_NOTES = {
    "combine_order": "='by_rank': a token's results are summed on each rank first, rounded on their way, so its sum "
    "depends on where experts are: training with migrations equals training without to rounding only",
    "dtype": "='float8': hidden states are rounded to float8 on their way to the experts, alike wherever they go, so "
    "training is not what it is in bfloat16, and migrations change no more than they do without it",
    "low_latency_tokens": ": batches without gradients in evaluation are summed in another order and rounding than in "
    "training; outputs are equal to rounding only",
}
"""Losses of each setting of `DispatchConfig` that is not the default."""


class DispatchChoice(NamedTuple):
    """The dispatcher of one EP group, equal on all its ranks, why, and what of a wish cannot be had."""

    name: str
    why: str = "it was asked for"
    problem: str = ""


def why_not_deepep(config: BalancerConfig, topology: Topology, slots_per_rank: int, device: torch.device) -> str:
    """Return in one line why DeepEP cannot serve this rank with these settings; "": it can. May import deep_ep."""
    ranks, low_latency = topology.num_ranks, config.dispatch.low_latency_tokens > 0
    between_nodes = ranks > deepep.RANKS_OF_A_NODE
    most = _MOST_SLOTS if between_nodes else _MOST_SLOTS_OF_A_NODE
    if slots_per_rank > most:
        return f"it knows up to {most} slots a rank here, not {slots_per_rank}"
    if config.migration.transport == "nvshmem" and (low_latency or between_nodes):
        return (
            "transport='nvshmem' and DeepEP between nodes or with low_latency_tokens would each start NVSHMEM, and a "
            "process starts it once: take another transport"
        )
    why = deepep.why_not_between(ranks, topology.ranks_per_node) or deepep.why_not(device, low_latency=low_latency)
    if not why:
        try:
            deepep.settings(deepep.imported(), ranks)
        except ConfigError as error:
            return str(error)
    return why


def choose_together(
    config: BalancerConfig,
    group: dist.ProcessGroup,
    topology: Topology,
    slots_per_rank: int,
    device: torch.device,
    seconds: float,
) -> DispatchChoice:
    """Return one choice for all ranks of this EP group. ``"auto"``: DeepEP if every rank can use it, else all-to-all,
    where ``why`` names a rank that cannot. ``"deepep"``: DeepEP, where ``problem`` names that rank. For these two,
    ranks gather their reasons over ``group`` within ``seconds``; other names are returned as they are."""
    if (asked := config.dispatch.name) in OVER_TORCH:
        return DispatchChoice(asked)
    mine = why_not_deepep(config, topology, slots_per_rank, device).encode()
    said = gather_bytes(mine, group, device, time.monotonic() + seconds)
    why = next((f"rank {rank}: {word.decode()}" for rank, word in enumerate(said) if word), "")
    if asked != "auto":
        return DispatchChoice(asked, problem=f"dispatch={asked!r}: {why}" if why else "")
    if why:
        return DispatchChoice("all_to_all", f"no deepep: {why}")
    return DispatchChoice("deepep", "GPUs that it is for, and installed")


def notes(config: BalancerConfig) -> list[str]:
    """Return one line for each dispatch setting that is not its default and makes results less exact."""
    given = vars(config.dispatch)
    return [f"{name}{said}" for name, said in _NOTES.items() if given[name] != DispatchConfig.__dict__[name]]


def make_dispatcher(config: BalancerConfig, name: str, topology: Topology, context: DispatchContext) -> Dispatcher:
    """Return a new dispatcher of an EP group; ``name``: `DispatchChoice.name`. DeepEP's sets ``num_sms`` process-wide;
    under ``"auto"``, all-to-all takes batches that it refuses. ConfigError: DeepEP cannot serve this rank."""
    if name == "all_to_all":
        return AllToAll(context)
    if name == "hierarchical":
        return Hierarchical(context, topology.ranks_per_node, config.dispatch.combine_order)
    return DeepEPDispatcher(context, config.dispatch, AllToAll(context) if config.dispatch.name == "auto" else None)


def micro_batch_overlap_problem(config: BalancerConfig, device: torch.device, is_sharded: bool) -> str:
    """Return in one line why two batches at once cannot run on streams of their own, or "" if they can."""
    if device.type == "cpu":
        return ""
    if config.overlap:
        return (
            "with overlap=True experts that arrive are written on one batch's stream while the other may compute with "
            "them: set overlap=False"
        )
    if is_sharded:
        return "fully_shard gathers weights for one batch at a time: leave it out"
    there = torch.get_device_module(device).get_device_properties(device).multi_processor_count
    if config.dispatch.name not in OVER_TORCH and 2 * config.dispatch.num_sms >= there:
        return (
            f"the kernels of each take num_sms={config.dispatch.num_sms} multiprocessors while they wait for other "
            f"ranks, and {device} has {there}: lower DispatchConfig.num_sms"
        )
    return ""
