"""From described models and optimizers to a running balancer, the same way for every framework.

A host answers where the experts are (`MoELayer`); everything else - groups, sharding, registry, hooks - is here. First
all that is expected to fail: connections, measurements, checks. Then the model is cut; what fails from there on, on any
rank, leaves models and optimizers on all ranks as they were.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...balancer.balancer import Balancer
from ...balancer.gradients.division import Divisors
from ...balancer.model_check import ModelCheck
from ...balancer.rebalancer import new_transport
from ...balancer.runtime import Barrier, Runtime
from ...checkpoint.exporter import Exporter
from ...checkpoint.weights import weights_of
from ...config import BalancerConfig, launcher_environment, take_trial
from ...distributed.bandwidth import measure
from ...distributed.process_groups import ProcessGroups, give_back_dropped, host_timeout
from ...distributed.ranks import Job, Ranks
from ...distributed.step_tag import ForwardTag
from ...distributed.transports.base import Transport
from ...load.counter import LoadCounter
from ...load.expert_clock import ExpertClock
from ...load.series import RecordedJob
from ...moe.dispatch import OVER_TORCH, DispatchChoice, choose_together, make_dispatcher, notes
from ...moe.dispatch.base import DispatchContext
from ...moe.dispatch.channels import MicroBatchChannel, MicroBatchChannels
from ...moe.dispatch.count_exchange import CountExchange
from ...moe.experts.registry import ExpertTensors
from ...moe.experts.slices import is_sliced
from ...moe.kernel_selection import Kernels, kernels_for
from ...moe.layer import ExpertParallelLayer, HostDispatchedLayer, LayerContext
from ...moe.routing.lookup import SlotTable
from ...moe.routing.splitter import BatchSplitter, SplitSettings
from ...observe.recording import Recorder
from ...observe.start import Shown
from ...placement import Placement
from ...replicas.bank import ReplicaBank, ReplicaPool
from ...replicas.placement_maps import Maps
from ...replicas.row_transport import RowTransport
from ...replicas.sharded import ReplicaGather
from ...replicas.sync import ReplicaSync
from ...topology import Topology
from ...utils.errors import one_line
from .checks import as_all_say, check, raise_on_all, wait_for_ranks
from .computing import local_experts, log_memory
from .copies import transport_of_copies
from .description import AnyOptimizer, AttachError, MoELayer, Stage, spread_of
from .forwards import Forwards
from .meta import make_buffers, make_parameters
from .optimizers import Optimizers, homes_of
from .self_test import try_layers
from .sharding import cut, install, note_of_odd_rows, rows_of_rank
from .state_hooks import Homes, PartialStateWarning, mark_state
from .trial import TrialRun, layout_of, why_not_single
from .undo import Before

logger = logging.getLogger("eplb_runtime")


def attach_stages(
    stages: Sequence[Stage],
    optimizers: Sequence[AnyOptimizer],
    *,
    config: BalancerConfig,
    ranks: Ranks,
    device: torch.device,
    container: torch.optim.Optimizer | None = None,
) -> Balancer:
    """``attach`` for models that their host has described; errors as there. Collective over the job.

    Args:
        stages: the models of this rank, in the order of ``ranks.stages``.
        optimizers: none: inference.
        device: where the experts are, or will be made.
        container: steps the optimizers, all in one step of its own; None: each steps by itself.
    """
    trial, given = take_trial(), config
    not_single = "" if trial is None else why_not_single(stages, ranks)
    if trial is not None:
        config, ranks = layout_of(trial, config, ranks)
    gc.collect()  # models that are gone, and attaches that failed, leave connections in cycles of references
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # nothing uses those groups any more, here and then on any rank
    try:
        groups = ProcessGroups(ranks, [len(stage.host.layers) for stage in stages], device, config.timeout_seconds)
    except Exception as error:
        raise AttachError(one_line(error, with_type=True)) from error
    transport: Transport | None = None
    try:
        give_back_dropped()
        seconds = groups.setup_seconds
        transport = new_transport(config, groups.migration, groups.backend, device, seconds)
        transport.warm_up(time.monotonic() + seconds)
        job = groups.job
        topology = Topology.from_launcher(launcher_environment(), job.ep_size, job.ep_sets)
        peers = [job.migration_ranks.index(rank) for rank in job.ep_ranks]
        topology = measure(topology, transport, job.ep_rank, groups.control, seconds, peers)
        placement = check(stages, optimizers, config, groups, device)
        problems, drawing = try_layers([layer for stage in stages for layer in stage.host.layers], config.guard)
        raise_on_all("" if config.guard == "warn" else next(iter(problems), ""), groups)
        dispatch = choose_together(config, groups.dispatch, topology, device, seconds)
        raise_on_all(dispatch.problem, groups)
        copies = transport_of_copies(config, groups, topology, device)
    except BaseException as error:
        said = as_all_say(error, groups)
        if transport is not None:
            transport.close()
        groups.close()
        if said is None:
            raise
        raise said from error
    attaching = _Attaching(
        stages, optimizers, config, groups, topology, transport, placement, device, container, dispatch, copies, drawing
    )
    before = Before(
        [stage.model for stage in stages], _of_torch([*optimizers, *([container] if container is not None else [])])
    )
    try:
        _on_all_or_none(attaching.cut, groups)
        attaching.balance()  # waits for others itself: a rank that fails in it must not come to another exchange
        for part in (attaching.hook, attaching.record):
            _on_all_or_none(part, groups)
        attaching.balancer._begin()
        for problem in problems:
            attaching.balancer._guard.report(problem)
    except BaseException as error:
        said = as_all_say(error, groups)
        before.restore()
        attaching.give_up()
        if said is None:
            raise
        raise said from error
    groups.settle()
    transport.wait_at_most(config.timeout_seconds)
    if job.is_planner:
        _log_attached(attaching.balancer)
    of_bits = attaching.notes()
    for line in of_bits if job.is_planner else ():
        logger.warning("%s", line)
    if trial is not None:
        attaching.balancer.config = replace(config, policy=given.policy)  # `declare` and the like are allowed as ever
        TrialRun(trial, attaching.balancer, stages, of_bits, not_single, given.replica_slots)
    return attaching.balancer


def _log_attached(balancer: Balancer) -> None:
    """A line that says how experts are spread."""
    config, placement, ranks = balancer.config, balancer.placement, balancer.topology.num_ranks
    decisions = "rebalance() decides" if config.interval is None else f"a decision every {config.interval} steps"
    logger.info(
        "attached: %d MoE %s of %d experts, %d on each of %d %s%s; %s",
        placement.num_layers,
        "layer" if placement.num_layers == 1 else "layers",
        placement.num_experts,
        placement.num_experts // ranks,
        ranks,
        "rank" if ranks == 1 else "ranks",
        f" and {config.replica_slots} replica slots" if config.replica_slots else "",
        "experts stay where they are (policy='static')" if config.policy == "static" else decisions,
    )


def _on_all_or_none(work: Callable[[], None], groups: ProcessGroups) -> None:
    """Where it fails on one rank, every rank raises. Collective."""
    problem = ""
    try:
        work()
    except Exception as error:
        problem = one_line(error, with_type=True)
    raise_on_all(problem, groups)


@dataclass
class _Attaching:
    """A balancer in the making: first the model is cut, then it is balanced."""

    stages: Sequence[Stage]
    optimizers: Sequence[AnyOptimizer]
    config: BalancerConfig
    groups: ProcessGroups
    topology: Topology
    transport: Transport
    placement: Placement
    device: torch.device
    container: torch.optim.Optimizer | None
    dispatch: DispatchChoice
    copies: RowTransport
    drawing: list[str]
    banks: dict[int, ReplicaBank] = field(default_factory=dict)
    layer_of_parameter: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    replaced: dict[str, weakref.ref[Tensor]] = field(default_factory=dict)

    def cut(self) -> None:
        """Leave this rank its experts, the rest its memory, and layers the expert-parallel way. Nothing here waits for
        other ranks."""
        for stage in self.stages:
            make_buffers(stage.model, self.device, stage.host.remake_buffers)
        self.registry = ExpertTensors(
            self.placement.num_layers,
            self.placement.num_experts // len(self._job.row_ranks),
            self.optimizers,
            self.config.migration.move_gradients,
        )
        self._cut_layers()
        for stage in self.stages:
            make_parameters(stage.model, self.device)
        placement = self.placement
        by_kernels = self.dispatch.name not in OVER_TORCH
        first = MicroBatchChannel(self.groups.dispatch, self.groups.counts)
        seconds = host_timeout(self.groups.backend).total_seconds()
        self.channels = MicroBatchChannels(first, self.device, in_order=by_kernels, seconds=seconds)
        self.kernels = kernels_for(self.device) if self.config.dispatch.kernels else Kernels()
        self.maps = self._maps()
        self.counter = LoadCounter(placement.num_layers, placement.num_experts, self.config.interval, self.device)
        self.expert_clock = ExpertClock(self.device)
        self.layers = self._install_layers(self.maps, self.counter)

    def balance(self) -> None:
        """Make the balancer. Collective."""
        self.copies.open()
        experts = {id(p) for p in self.registry.parameters()}
        self.balancer = Balancer(
            Runtime(
                config=self.config,
                groups=self.groups,
                topology=self.topology,
                placement=self.placement,
                registry=self.registry,
                counter=self.counter,
                expert_clock=self.expert_clock,
                maps=self.maps,
                dense_parameters={
                    stage.prefix + name: parameter
                    for stage in self.stages
                    for name, parameter in stage.model.named_parameters()
                    if id(parameter) not in experts and stage.host.dense_is_equal
                },
                device=self.device,
                layer_of_parameter=self.layer_of_parameter,
                parameters=self.parameters,
                layers=self.layers,
                host_dispatches=self._host_dispatches,
                channels=self.channels,
                model_check=ModelCheck(
                    {stage.prefix: stage.model for stage in self.stages},
                    [(name, layer.experts, layer.parameters) for _, name, layer in self._layers()],
                    self.replaced,
                ),
                kernels=self.kernels,
                divisors=self._divisors,
                barrier=self._barrier,
            ),
            self.transport,
            self._hook_optimizers,
            self._export_with(),
        )
        self.balancer._close_on_all_ranks_with(self.dispatcher.close)

    def hook(self) -> None:
        """Let models and optimizers reach the balancer, and people find it. Nothing here waits for other ranks."""
        for stage in self.stages:
            _mark(stage, self.balancer, self.layer_of_parameter)
            stage.host.save_together(self._barrier)
        saves_itself = any(stage.host.saves_itself for stage in self.stages)
        on_partial: Callable[[Homes], None] = (lambda homes: None) if saves_itself else PartialStateWarning()
        for index, name, layer in self._layers():
            homes = partial(homes_of, self.balancer, index)
            made_with = homes().here if layer.slots else None
            mark_state(layer.experts, name, homes, made_with=made_with, on_partial=on_partial)
        _watch_forwards(self.balancer, self.stages)
        if self.container is None:
            self.hooked.add(self.optimizers)
        else:
            self.hooked.add_container(self.container, _of_torch(self.optimizers))
        _forget_graphs()
        self.groups.go_with([stage.model for stage in self.stages])

    def record(self) -> None:
        """Rank 0 writes down and shows what is measured, as far as that is wished."""
        if not self._job.is_planner:
            return
        if self.config.run is not None:
            job = RecordedJob(
                ranks=len(self._job.ranks),
                ranks_per_node=self.topology.ranks_per_node,
                ep_size=self.topology.num_ranks,
                takes_no_replicas=int(self._host_dispatches),
                interval=self.config.interval or 0,
                device=self.device.type,
                **_expert_sizes(self.registry),
            )
            recorder = Recorder(Path(self.config.run), self.placement.num_layers, self.placement.num_experts, job)

            def write(load_TLE: NDArray[np.int64], steps: int, home_bytes: int, expert_seconds: float) -> None:
                """Optimizer state is there after the first step; 0, unknown, before."""
                state_bytes = max(0, home_bytes - job.expert_bytes)
                state = RecordedJob(optimizer_bytes=state_bytes, expert_seconds=expert_seconds)
                recorder.write(load_TLE, steps, state)

            self.balancer._record(write)
            self.balancer._close_with(recorder.close)
        shown = Shown(
            self.config,
            self.topology,
            self.placement,
            len(self._job.ranks),
            self.balancer._progress,
            self._job.layers_of_stage,
        )
        self.balancer._shown = shown
        shown.follow(self.balancer.events)
        self.balancer._close_with(shown.close)

    def _hook_optimizers(self, balancer: Balancer) -> Optimizers:
        named = {stage.prefix + name: p for stage in self.stages for name, p in stage.model.named_parameters()}
        self.hooked = Optimizers(balancer, named)
        return self.hooked

    def _export_with(self) -> Callable[[Balancer], Exporter]:
        """Return what makes the exports. It holds on to nothing else of the attaching."""
        listed = {
            stage.number: partial(stage.host.weights or weights_of, stage.model, self._job.first_layer(stage.number))
            for stage in self.stages
        }
        return lambda balancer: Exporter(balancer, listed)

    @property
    def _barrier(self) -> Barrier:
        """`wait_for_ranks`, for this job. It holds on to nothing of the model."""
        everyone, timeout = list(self._job.ranks), self.config.timeout_seconds
        return lambda what, seconds=None: wait_for_ranks(everyone, what, timeout if seconds is None else seconds)

    def give_up(self) -> None:
        """What was made is given back."""
        if hasattr(self, "balancer"):
            self.balancer.close()
        else:
            self.transport.close()
        self.groups.close()

    @property
    def _job(self) -> Job:
        return self.groups.job

    def notes(self) -> list[str]:
        """Lines that say what makes bits depend on where experts are."""
        of_hosts = [line for stage in self.stages for line in stage.host.notes]
        odd = note_of_odd_rows(self.parameters)
        drawing = (
            f"experts of {self.drawing[0]} ({len(self.drawing)} layers in all) draw random numbers in training "
            "(dropout): which ones they get depends on placement; without dropout in experts results do not"
            if self.drawing
            else ""
        )
        return list(dict.fromkeys(filter(None, [*of_hosts, *notes(self.config), odd, drawing])))

    @property
    def _divisors(self) -> Divisors:
        experts = {id(parameter) for parameter in self.registry.parameters()}
        rest = [p for stage in self.stages for p in stage.model.parameters() if id(p) not in experts]
        return Divisors.of(self._job, by_host=self._host_dispatches, dense_is_sharded=any(is_sliced(p) for p in rest))

    @property
    def _host_dispatches(self) -> bool:
        return any(stage.host.dispatches for stage in self.stages)

    def _layers(self) -> list[tuple[int, str, MoELayer]]:
        """``(layer, name, what the host says)`` of the layers that are here, numbered over the whole model."""
        return [
            (self._job.first_layer(stage.number) + position, stage.prefix + layer.name, layer)
            for stage in self.stages
            for position, layer in enumerate(stage.host.layers)
        ]

    def _cut_layers(self) -> None:
        """Leave this rank its experts, in the modules and the optimizers, and register them."""
        training = bool(self.optimizers)
        slots = self.config.replica_slots
        parts = self._job.row_division
        zeros = self.copies.zeros
        replica_gradients = ReplicaPool(slots, zeros, parts) if training else None
        rows_LH = rows_of_rank(self.placement, self._job.ep_rank)
        for index, name, layer in self._layers():
            if layer.slots:
                self._register_as_they_are(index, name, layer)
                continue
            spread, rows = spread_of(layer.experts) is not None, rows_LH[index]
            homes = [layer.parameter(n) if spread else cut(layer, n, rows, self.device) for n in layer.parameters]
            if self.config.replica_slots:
                self.banks[index] = ReplicaBank(homes, slots, zeros, replica_gradients, parts)
                homes = self.banks[index].parameters
            for own_name, parameter in zip(layer.parameters, homes, strict=True):
                if parameter is not (old := layer.parameter(own_name)):
                    self.replaced[f"{name}.{own_name}"] = weakref.ref(old)
                    install(layer, own_name, parameter, None if spread else rows, _of_torch(self.optimizers))
                self.registry.add(index, own_name, parameter)
                self.layer_of_parameter[f"{name}.{own_name}"] = index
                self.parameters[f"{name}.{own_name}"] = parameter

    def _register_as_they_are(self, index: int, name: str, layer: MoELayer) -> None:
        """A layer whose host has made nothing but this rank's experts."""
        for own_name, tensor in layer.tensors().items():
            self.registry.add(index, own_name, tensor)
        for own_name in layer.parameters:
            self.layer_of_parameter[f"{name}.{own_name}"] = index
            self.parameters[f"{name}.{own_name}"] = layer.parameter(own_name)

    def _maps(self) -> Maps:
        table = SlotTable(self.placement, self.device)
        if not self.config.replica_slots:
            return Maps(table, None, None)
        replicas = ReplicaSync(
            self.banks,
            self.copies,
            self._job.row_rank,
            self._job.gradient_divisor,
            self.topology.ranks_per_node,
            self._job.row_division,
        )
        splitter = BatchSplitter(
            self.placement,
            self.device,
            self._job.ep_rank,
            SplitSettings(
                self.topology.ranks_per_node,
                self.config.dispatch.split,
                self.config.dispatch.split_locality,
                self.config.dispatch.split_least_tokens,
                self.config.speed_R,
            ),
            count=self.kernels.count,
            deal=self.kernels.deal,
        )
        homes = [bank.parameters for bank in self.banks.values()]
        log_memory(self.config, homes, bool(self.optimizers), self._job.row_division)
        return Maps(table, splitter, replicas)

    def _install_layers(self, maps: Maps, counter: LoadCounter) -> list[ExpertParallelLayer | HostDispatchedLayer]:
        """Put the expert-parallel way in the place of each layer's own."""
        forward_tag = ForwardTag(self._job.ep_ranks, self._job.rank)
        if self._job.is_planner and self.config.dispatch.name != "all_to_all":
            logger.info("dispatch: %s (%s)", self.dispatch.name, self.dispatch.why)
        dispatching = DispatchContext(
            self.channels, self.placement.slots_per_rank, forward_tag, self.kernels.moves, self.expert_clock
        )
        self.dispatcher = make_dispatcher(self.config, self.dispatch, self.topology, dispatching)
        exchange_counts = CountExchange(self.channels, forward_tag)
        real_tokens = {id(layer): stage.host.real_tokens for stage in self.stages for layer in stage.host.layers}
        context = LayerContext(
            counter,
            maps.table,
            maps.splitter,
            self.dispatcher,
            exchange_counts,
            forward_tag,
            self.channels,
            count_and_map=self.kernels.count_and_map,
        )
        made: list[ExpertParallelLayer | HostDispatchedLayer] = []
        gather = ReplicaGather(self.groups.parts, self.groups.twins)
        for index, _, layer in self._layers():
            if layer.compute is None:
                made.append(
                    HostDispatchedLayer(
                        index,
                        layer.experts,
                        counter=counter,
                        table=maps.table,
                        forward_tag=forward_tag,
                        expert_clock=self.expert_clock,
                    )
                )
                layer.install(made[-1])
                continue
            parallel = ExpertParallelLayer(
                index,
                layer.experts,
                local_experts(
                    index,
                    layer,
                    self._job,
                    self._divisors,
                    maps.replicas,
                    self.banks.get(index),
                    gather,
                ),
                context,
                real_tokens[id(layer)],
            )
            layer.install(parallel)
            made.append(parallel)
        return made


def _mark(stage: Stage, balancer: Balancer, layer_of_parameter: dict[str, int]) -> None:
    """Leave on a model what finds its balancer again, and keep DistributedDataParallel's hands off its experts."""
    own = [name.removeprefix(stage.prefix) for name in layer_of_parameter if name.startswith(stage.prefix)]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stage.model, own)
    object.__setattr__(stage.model, "_eplb_runtime_balancer", balancer)
    object.__setattr__(stage.model, "_eplb_runtime_stage", stage)
    # Copying and pickling ask the object before its class. A part of the model would compute with its experts, too.
    for module in (stage.model, *(layer.experts for layer in stage.host.layers)):
        object.__setattr__(module, "__reduce_ex__", balancer.__reduce_ex__)


def _forget_graphs() -> None:
    """Graphs that torch.compile has made by now do not look whether a module has been given hooks since."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _expert_sizes(registry: ExpertTensors) -> dict[str, Any]:
    """Return sizes of one expert of this rank's first layer, as fields of `RecordedJob`. By shapes alone: rank 0 is
    alone here, and a row of a DTensor is a collective."""
    weights = [one for layer in registry.layers[:1] for one in registry.by_expert(layer)]
    if not weights:
        return {}
    numels = [one[0].numel() if isinstance(one, tuple) else one.shape[1:].numel() for one in weights]
    dtypes = [(one[0] if isinstance(one, tuple) else one).dtype for one in weights]
    return {
        "expert_parameters": sum(numels),
        "expert_bytes": sum(numel * dtype.itemsize for numel, dtype in zip(numels, dtypes, strict=True)),
        "dtype": str(dtypes[0]).removeprefix("torch."),
    }


def _of_torch(optimizers: Sequence[AnyOptimizer]) -> list[torch.optim.Optimizer]:
    return [optimizer for optimizer in optimizers if isinstance(optimizer, torch.optim.Optimizer)]


def _watch_forwards(balancer: Balancer, stages: Sequence[Stage]) -> None:
    """Let batches and forwards reach the balancer."""
    for stage in stages:
        balancer._end_with(stage.host.watch_batches())
        names = balancer.layer_of_parameter
        layers = frozenset(layer for name, layer in names.items() if name.startswith(stage.prefix))
        balancer._forwards.append(Forwards(balancer, stage, layers))
