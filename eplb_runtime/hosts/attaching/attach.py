"""From described models and optimizers to a running balancer, the same way for every framework.

A host answers where the experts are (`MoELayer`); everything else - groups, sharding, registry, hooks - is here: `join`
-> `check` -> `connect` -> `shard` -> `build_runtime`, and `install` lets models reach the balancer. Each returns a
frozen value. What fails, on any rank, leaves models and optimizers on all ranks as they were.
"""

import gc
import logging
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...balancer.balancer import Balancer
from ...balancer.runtime import Runtime, divisors_of
from ...checkpoint.stream import Exporter, weights_of
from ...config import launcher_environment, take_trial
from ...distributed.process_groups import ProcessGroups, host_timeout, release_dropped
from ...distributed.step_tag import ForwardTag
from ...distributed.transports import TRANSPORTS, measure
from ...distributed.transports.base import Transport
from ...distributed.transports.symmetric import NodeMemory, why_not
from ...load.clock import ExpertClock
from ...load.counter import LoadCounter
from ...load.series import RecordedJob
from ...moe.dispatch.base import DispatchContext
from ...moe.dispatch.channels import MicroBatchChannel, MicroBatchChannels
from ...moe.dispatch.choosing import DispatchChoice, choose_together, make_dispatcher, notes
from ...moe.experts.compute import Aligned, LocalExperts, live_tensors
from ...moe.experts.registry import ExpertTensors
from ...moe.experts.slices import is_sliced, local
from ...moe.kernel_selection import Kernels, kernels_for
from ...moe.layer import ExpertParallelLayer, HostDispatchedLayer, LayerContext
from ...moe.routing.slots import BatchSplitter, SlotTable
from ...observe.recording import Recorder
from ...observe.start import Observers
from ...replicas.bank import GradientPool, ReplicaBank
from ...replicas.compute import PersistentReplicas, ShardedReplicas
from ...replicas.copy_engine import CopyEngine
from ...replicas.plan import PointToPoint
from ...replicas.sync import Maps, ReplicaSync
from ...topology import Topology
from ...utils.text import counted, one_line
from .checks import Checked, check, raise_on_all, rollback
from .description import AttachError, Described, MoELayer, Request, ShardingMark, mark_spread, spread_of
from .optimizers import Optimizers, follow_forwards
from .sharding import ModelSnapshot, cut_rows, install_parameter, make_buffers, make_parameters
from .state_hooks import OF_ONE_RANK, keep_from_dcp, mark_state
from .trial import TrialRun, layout_of

logger = logging.getLogger("eplb_runtime")
_STEADY_ROW_BYTES = 128
"""Two of the widest vectors of a CPU (AVX-512). Elementwise loops take two at a time and compute what is left at the
end otherwise, with other last bits; with rows of this many bytes nothing is ever left, wherever a row is."""


def attach_stages(described: Described) -> Balancer:
    """Attach models that hosts have described, and return the running balancer. Collective over the job. What fails is
    undone on all ranks, and raises as ``attach`` does. Under ``eplb-runtime verify`` a `TrialRun` begins, too."""
    request, given = join(described), described.config
    groups, trial = request.groups, request.trial
    with rollback(groups) as undo:
        made = connect(check(request), undo)
        models, layers = [stage.model for stage in request.stages], [layer for *_, layer in request.layers]
        snapshot = ModelSnapshot(models, [*request.optimizers, request.container], layers)
        undo.callback(snapshot.restore)
        runtime = build_runtime(made, shard(made))
        raise_on_all(groups)
        made.copies.open()
        balancer = _balancer(made, runtime)
        undo.callback(balancer.close)
        undo.callback(balancer.optimizer_hooks.let_strangers_step)
        install(made, balancer)
        raise_on_all(groups)
        balancer.begin()
        for test in made.tests:
            balancer.guard.report(test.problem)
        of_bits = _notes(made, balancer)
        _record(made, balancer)
        raise_on_all(groups)  # a rank that fails any later is one that the others do not learn of
    groups.finalize()
    made.transport.wait_at_most(given.timeout_seconds)
    if groups.job.is_planner:
        _log_attached(balancer, of_bits)
    if trial is not None:
        balancer.config = replace(request.config, policy=given.policy)  # `declare` and the like are allowed as ever
        TrialRun(made, trial, balancer, {"notes": of_bits, "replica_slots": given.replica_slots})
    return balancer


@dataclass(frozen=True, kw_only=True)
class Connected(Checked):
    """The same with what carries its tokens, experts and copies; nothing of the model is changed."""

    topology: Topology
    dispatch: DispatchChoice
    transport: Transport
    copies: PointToPoint


class Shards(NamedTuple):
    """Experts that are left on this rank, and weak references to the parameters that they replace, by name."""

    registry: ExpertTensors
    banks: dict[int, ReplicaBank]
    replaced: dict[str, weakref.ref[Tensor]]


def shard_stage(described: Described) -> None:
    """Cut the experts of a described model to this rank's, in the model, and mark them as spread. Collective over the
    job; errors as of ``shard_experts``. Findings of the layers' tests are logged as warnings."""
    request = join(described, keeps_trial=True)
    (stage,), job = request.stages, request.job
    with rollback(request.groups) as undo:
        placement = (checked := check(request)).placement
        for problem in filter(None, (test.problem for test in checked.tests)):
            logger.warning("%s", problem)
        undo.callback(ModelSnapshot([stage.model], [], []).restore)
        for layer, rows in zip(stage.host.layers, placement.homes_LRH[:, job.ep_rank].tolist(), strict=True):
            for name in layer.parameters:
                layer.put(name, cut_rows(layer, name, rows, request.device, request.single))
            mark_spread(layer.experts, ShardingMark(len(rows), placement.digest(), job.ep_ranks))
        raise_on_all(request.groups)
    request.groups.close()


def join(described: Described, *, keeps_trial: bool = False) -> Request:
    """Make the job's control group, and return the description with the groups. Collective. AttachError: they cannot be
    made. Under ``eplb-runtime verify``, take its trial, whose layout replaces config and ranks; ``keeps_trial``: leave
    the trial to a later `attach`, too."""
    config, ranks, device = described.config, described.ranks, described.device
    if (trial := take_trial(keep=keeps_trial)) is not None:
        config, ranks = layout_of(trial, config, ranks)
    gc.collect()  # models that are gone, and attaches that failed, leave connections in cycles of references
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # nothing uses those groups any more, here and then on any rank
    try:
        layers = [len(stage.host.layers) for stage in described.stages]
        groups = ProcessGroups(ranks, layers, device, config.timeout_seconds)
    except Exception as error:
        raise AttachError(one_line(error, with_type=True)) from error
    return Request(**{**vars(described), "config": config, "ranks": ranks}, groups=groups, trial=trial)


def connect(checked: Checked, undo: ExitStack) -> Connected:
    """Make the other process groups and measure the links. Return the request with what carries tokens, experts and
    replicas. Collective; all ranks raise, or none. ``undo`` gets what closes the transport."""
    config, groups, job, device = checked.config, checked.groups, checked.job, checked.device
    groups.make()
    release_dropped()
    seconds = groups.setup_seconds
    transport = TRANSPORTS[config.migration.transport](groups.migration, groups.backend, device, seconds)
    undo.callback(transport.close)
    transport.warm_up(time.monotonic() + seconds)
    topology = Topology.from_launcher(launcher_environment(), job.ep_size, job.ep_sets)
    peers = [job.migration_ranks.index(rank) for rank in job.ep_ranks]
    topology = measure(topology, transport, job.ep_rank, groups.control, seconds, peers)
    slots = checked.placement.slots_per_rank
    dispatch = choose_together(config, groups.dispatch, topology, slots, device, seconds)
    raise_on_all(groups, dispatch.problem)
    if job.is_planner and config.dispatch.name != "all_to_all":
        logger.info("dispatch: %s (%s)", dispatch.name, dispatch.why)
    copies = _transport_of_copies(checked, topology)
    return Connected(**vars(checked), topology=topology, dispatch=dispatch, transport=transport, copies=copies)


def shard(made: Connected) -> Shards:
    """Replace expert parameters, in modules and optimizers, by those of this rank (with replica slots), and give meta
    tensors memory. Return a registry and replica banks of the new tensors, and weak references to the replaced."""
    for stage in made.stages:
        make_buffers(stage.model, made.device, stage.host.remake_buffers)
    config, job, placement, zeros = made.config, made.job, made.placement, made.copies.zeros
    slots, parts = config.replica_slots, job.dp_shard_degree
    registry = ExpertTensors(placement.num_layers, placement.num_experts // len(job.row_ranks), made.optimizers)
    shards, rows_LH = Shards(registry, {}, {}), placement.homes_LRH[:, job.ep_rank].tolist()
    gradients: GradientPool | None = {} if made.optimizers else None
    for index, name, layer in made.layers:
        if layer.slots:  # its host has made nothing but this rank's experts
            for own, of_slots in layer.slots.items():
                registry.add(index, own, tuple(map(layer.parameter, of_slots)))
            continue
        rows = rows_LH[index] if spread_of(layer.experts) is None else None
        homes = [
            layer.parameter(own) if rows is None else cut_rows(layer, own, rows, made.device, made.single)
            for own in layer.parameters
        ]
        if slots:
            shards.banks[index] = ReplicaBank(homes, slots, zeros, gradients, parts)
            homes = shards.banks[index].parameters
        for own, parameter in zip(layer.parameters, homes, strict=True):
            if parameter is not (old := layer.parameter(own)):
                shards.replaced[f"{name}.{own}"] = weakref.ref(old)
                install_parameter(layer, own, parameter, rows, made.optimizers)
            registry.add(index, own, parameter)
        shards.replaced.update(layer.replaced)
    for stage in made.stages:
        make_parameters(stage.model, made.device)
    return shards


def build_runtime(made: Connected, shards: Shards) -> Runtime:
    """Make counter, slot tables, dispatcher and replica exchange, put a layer of ours in the place of each MoE layer's
    forward, and return all that as a `Runtime`. In ``verify``'s layout ``single`` forwards stay and are watched."""
    groups, job, config, placement, device = made.groups, made.job, made.config, made.placement, made.device
    seconds = host_timeout(groups.backend).total_seconds()
    channels = MicroBatchChannels(MicroBatchChannel(groups.dispatch, groups.counts), device, seconds=seconds)
    kernels = kernels_for(device) if config.dispatch.kernels else Kernels()
    maps = _maps(made, shards, kernels, channels)
    counter = LoadCounter(placement.num_layers, placement.num_experts, config.interval, device)
    clock, forward_tag = ExpertClock(device), ForwardTag(job.ep_ranks, job.rank)
    dispatching = DispatchContext(channels, placement.slots_per_rank, forward_tag, kernels, clock)
    dispatcher = make_dispatcher(config, made.dispatch.name, made.topology, dispatching)
    context = LayerContext(counter, maps.table, maps.splitter, dispatcher)
    experts = {id(parameter) for parameter in shards.registry.parameters()}
    named = [(stage, name, p) for stage in made.stages for name, p in stage.model.named_parameters()]
    dense = [(stage, stage.prefix + name, p) for stage, name, p in named if id(p) not in experts]
    is_sharded = any(is_sliced(p) for *_, p in dense)
    sums = job.gradient_divisor == 1 and all(s.host.ranks is None or s.host.ranks.gradient_divisor for s in made.stages)
    in_layers, divisor = divisors_of(job, by_host=made.host_dispatches, host_sums=sums, dense_is_sharded=is_sharded)
    real_tokens = {id(layer): stage.host.real_tokens for stage in made.stages for layer in stage.host.layers}
    layers: list[ExpertParallelLayer | HostDispatchedLayer] = []
    for (index, _, layer), test in zip(made.layers, made.tests, strict=True):
        if layer.compute is None:
            layers.append(HostDispatchedLayer(index, layer.experts, context))
        else:
            here = _local_experts(made, index, layer, in_layers, maps, shards.banks.get(index))
            layers.append(ExpertParallelLayer(index, layer.experts, here, context, real_tokens[id(layer)]))
        watch = layer.watch if made.single and test.has_own_way else None
        if watch is not None and isinstance(layers[-1], ExpertParallelLayer):
            watch(layers[-1].see, clock)
        else:
            layer.install(layers[-1])
    return Runtime(
        config=config,
        groups=groups,
        topology=made.topology,
        placement=placement,
        registry=shards.registry,
        counter=counter,
        expert_clock=clock,
        maps=maps,
        dense_parameters={name: p for stage, name, p in dense if stage.host.dense_is_equal},
        device=device,
        layer_of_parameter={f"{name}.{own}": index for index, name, layer in made.layers for own in layer.parameters},
        parameters={name: parameter for name, _, parameter in made.experts},
        layers=layers,
        host_dispatches=made.host_dispatches,
        channels=channels,
        models={stage.prefix: stage.model for stage in made.stages},
        experts=[(name, layer.experts, layer.parameters) for _, name, layer in made.layers],
        replaced=shards.replaced,
        divisor=divisor,
        averages_experts=not (made.host_dispatches and sums),
    )


def _maps(made: Connected, shards: Shards, kernels: Kernels, channels: MicroBatchChannels) -> Maps:
    config, job, nodes = made.config, made.job, made.topology.ranks_per_node
    table = SlotTable(made.placement, made.device)
    if not config.replica_slots:
        return Maps(table, None, None)
    divisor = job.gradient_divisor / (1 if any(b.is_sliced for b in shards.banks.values()) else len(job.edp_ranks))
    replicas = ReplicaSync(shards.banks, made.copies, job.row_rank, divisor, nodes, job.dp_shard_degree, channels)
    here = made.placement, made.device, job.ep_rank
    splitter = BatchSplitter(*here, nodes, config.speed_R, count=kernels.count, deal=kernels.deal)
    if job.is_planner:
        rows = sum(local(one)[0].nbytes for bank in shards.banks.values() for one in bank.parameters)
        size = config.replica_slots * rows / job.dp_shard_degree / 2**20
        logger.info("replica slots: %d per rank and layer, %.3g MiB of weights on a rank", config.replica_slots, size)
    return Maps(table, splitter, replicas)


def _balancer(made: Connected, runtime: Runtime) -> Balancer:
    """Make the balancer. Collective: ranks wait in it, so one that fails in it must come to no other exchange."""
    named = {stage.prefix + name: p for stage in made.stages for name, p in stage.model.named_parameters()}
    # What makes the exports holds on to nothing else of the attaching.
    listed = {
        stage.number: partial(stage.host.weights or weights_of, stage.model, made.job.first_layer(stage.number))
        for stage in made.stages
    }
    return Balancer(
        runtime, made.transport, partial(Optimizers, parameters=named), partial(Exporter, weights_of_stages=listed)
    )


def install(made: Connected, balancer: Balancer) -> None:
    """Set the balancer as an attribute of the models, and hook it into their forwards, state dicts, ways of saving and
    optimizers. Keep experts out of DistributedDataParallel and copies. Reset torch.compile's graphs. No collective."""
    balancer.tensors.keep_from_ddp(balancer.runtime.parameters.values())
    for stage in made.stages:
        object.__setattr__(stage.model, "_eplb_runtime_balancer", balancer)
        object.__setattr__(stage.model, "_eplb_runtime_stage", stage)
        # Copying and pickling ask the object before its class. A part of the model would compute with its experts, too.
        for module in (stage.model, *(layer.experts for layer in stage.host.layers)):
            object.__setattr__(module, "__reduce_ex__", balancer.__reduce_ex__)
        stage.host.save_together(balancer)
    saves_itself = any(stage.host.saves_itself for stage in made.stages)
    of_part = (lambda *_: None) if saves_itself else cache(partial(logger.warning, OF_ONE_RANK))
    for index, name, layer in made.layers:
        mark_state(layer.experts, name, balancer, index, None if layer.slots else of_part)
        for own_name in layer.parameters if made.job.ep_size > 1 and not layer.slots else ():
            keep_from_dcp(layer.parameter(own_name))
    for stage in made.stages:
        balancer.closing.callback(stage.host.watch_batches())
        here = frozenset(index for index, name, _ in made.layers if name.startswith(stage.prefix))
        follow_forwards(stage.model, balancer.loop, here)
    balancer.optimizer_hooks.add(made.optimizers, made.container)
    if "torch._dynamo" in sys.modules:  # graphs made by now do not look whether a module has been given hooks since
        torch.compiler.reset()
    made.groups.go_with([stage.model for stage in made.stages])


def _record(made: Connected, balancer: Balancer) -> None:
    """Let rank 0 write down and show what is measured, as far as that is wished."""
    config, topology, placement, job = made.config, made.topology, made.placement, made.job
    if not job.is_planner:
        return
    if config.run is not None:
        registry = balancer.runtime.registry
        weights = [one for layer in registry.layers[:1] for one in registry.by_expert(layer)]
        # By shapes alone: rank 0 is alone here, and a row of a DTensor is a collective.
        rows = [(one[0], one[0].shape) if isinstance(one, tuple) else (one, one.shape[1:]) for one in weights]
        recorded = RecordedJob(
            ranks=len(job.ranks),
            ranks_per_node=topology.ranks_per_node,
            ep_size=topology.num_ranks,
            takes_no_replicas=int(made.host_dispatches),
            interval=config.interval or 0,
            device=made.device.type,
            # A class of links that the job does not have was not measured.
            intra_node_bandwidth=topology.intra_node_bandwidth / 1e9 * (topology.ranks_per_node > 1),
            inter_node_bandwidth=topology.inter_node_bandwidth / 1e9 * (len(job.ranks) > topology.ranks_per_node),
            expert_parameters=sum(shape.numel() for _, shape in rows),
            expert_bytes=sum(shape.numel() * one.element_size() for one, shape in rows),
            dtype=next((str(one.dtype).removeprefix("torch.") for one, _ in rows), ""),
        )
        recorder = Recorder(Path(config.run), placement.num_layers, placement.num_experts, recorded)
        balancer.events.subscribe(recorder.hear)
        balancer.close_with(recorder.close)
    clock, loop = balancer.rebalancer.clock, weakref.proxy(balancer.loop)  # the page's thread may keep no model
    progress = lambda: clock.progress(loop.step)  # noqa: E731
    balancer.show_on(Observers(config, topology, placement, len(job.ranks), progress, job.layers_of_stage))


def _notes(made: Connected, balancer: Balancer) -> list[str]:
    """Lines that say what makes bits depend on where experts are."""
    found = [*(line for stage in made.stages for line in stage.host.notes), *notes(made.config)]
    on_cpu = ((name, one) for name, one in balancer.runtime.parameters.items() if one.device.type == "cpu")
    widths = {name: [width * one.element_size() for width in one.shape[1:]] for name, one in on_cpu if one.ndim > 2}
    if odd := [name for name, of_one in widths.items() if any(width % _STEADY_ROW_BYTES for width in of_one)]:
        rows = " and ".join(map(str, widths[odd[0]]))
        found.append(
            f"{len(odd)} expert tensors, such as {odd[0]}, make rows of {rows} bytes: on a CPU last bits of results "
            f"may differ by placement; widths that are multiples of {_STEADY_ROW_BYTES} bytes avoid it"
        )
    if drawing := [name for (_, name, _), test in zip(made.layers, made.tests, strict=True) if test.draws]:
        found.append(
            f"experts of {drawing[0]} ({len(drawing)} layers in all) draw random numbers in training "
            "(dropout): which ones they get depends on placement; without dropout in experts results do not"
        )
    return list(dict.fromkeys(found))


def _log_attached(balancer: Balancer, of_bits: Sequence[str]) -> None:
    config, placement = balancer.config, balancer.placement
    decisions = "rebalance() decides" if config.interval is None else f"a decision every {config.interval} steps"
    if config.policy == "static":
        decisions = "experts stay where they are (policy='static')"
    slots = f" and {config.replica_slots} replica slots" if config.replica_slots else ""
    layers, ranks = counted(placement.num_layers, "MoE layer"), counted(placement.num_ranks, "rank")
    spread = f"{placement.num_experts // placement.num_ranks} on each of {ranks}{slots}"
    logger.info("attached: %s of %d experts, %s; %s", layers, placement.num_experts, spread, decisions)
    for line in of_bits:
        logger.warning("%s", line)


def _transport_of_copies(asked: Checked, topology: Topology) -> PointToPoint:
    """Return what carries rows of replicas, or raise AttachError on all ranks. Collective over the job."""
    config, groups, device = asked.config, asked.groups, asked.device
    between = groups.replicas if config.replica_slots else groups.rows, groups.job.row_ranks
    if config.replica_transport == "torch":
        return PointToPoint(*between)
    what, problem = "replica_transport='copy_engine': ", ""
    # What can be seen before ranks meet.
    why = "each rank has a node of its own" if topology.ranks_per_node == 1 else why_not(device)
    raise_on_all(groups, what + why if why else "")
    try:
        node = groups.of_nodes(topology.ranks_per_node)
        # As long as any wait for a lost rank.
        host_seconds = dist.distributed_c10d._get_default_store().timeout.total_seconds()  # type: ignore[attr-defined]
        memory = NodeMemory(node, device, host_seconds)
        memory.connect(time.monotonic() + groups.setup_seconds)
        size = topology.ranks_per_node * groups.job.dp_shard_degree
        carrier = CopyEngine(memory, groups.job.row_rank // size * size, device, *between)
    except Exception as error:
        problem = what + one_line(error)
    raise_on_all(groups, problem)
    return carrier


def _local_experts(
    made: Connected, index: int, layer: MoELayer, in_layers: float, maps: Maps, bank: ReplicaBank | None
) -> LocalExperts:
    assert layer.compute is not None
    compute = layer.compute if layer.alignment == 1 else Aligned(layer.compute, layer.alignment)
    sliced = any(is_sliced(layer.parameter(name)) for name in layer.parameters)
    live_weights = layer.live_weights or live_tensors(layer.experts, layer.parameters)
    # FSDP averages over EDP; the rest of the division is done before. A host that divides rows reduces by itself.
    of_slices = 1.0 if made.job.divided_rows else made.job.gradient_divisor / len(made.job.edp_ranks)
    divisor = of_slices if sliced else in_layers
    if maps.replicas is None or bank is None:
        return LocalExperts(compute, live_weights, 1.0 if sliced and layer.live_weights is not None else divisor)
    of_layer: dict[str, Any] = {"layer": index, "bank": bank, "sync": maps.replicas}
    if bank.is_sliced:
        of_layer |= {"group": made.groups.shards, "replica_group": made.groups.edp_replicas}
        return ShardedReplicas(compute, live_weights, divisor, **of_layer)
    return PersistentReplicas(compute, live_weights, divisor, **of_layer)
