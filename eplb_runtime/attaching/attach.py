"""From a described model and an optimizer to a running balancer, the same way for every framework.

A host answers where the experts are (`MoELayer`); everything else - groups, sharding, registry, hooks - is here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..balancer import Balancer
from ..config import BalancerConfig, launcher_environment
from ..dispatch.all_to_all import AllToAllDispatcher
from ..experts.compute import LocalExperts
from ..experts.registry import ExpertTensors
from ..experts.slices import DividedGradient, is_sliced
from ..layer import ExpertParallelLayer
from ..load.counter import LoadCounter
from ..placement import Placement
from ..ranks import ProcessGroups
from ..replicas.bank import ReplicaBank, ReplicaPool, replica_bytes
from ..replicas.kept import KeptReplicas
from ..replicas.shared import SharedReplicas
from ..replicas.sync import ReplicaSync
from ..routing.lookup import SlotTable
from ..routing.splitter import BatchSplitter
from ..topology import Topology
from .checks import check, device_of
from .description import AttachError, HostModel, MoELayer, spread_of
from .meta import MetaError, make_buffers, make_parameters
from .sharding import cut, install, rows_of_rank, warn_of_odd_rows

logger = logging.getLogger("eplb_runtime")


def attach_host(
    model: nn.Module,
    host: HostModel,
    optimizer: torch.optim.Optimizer | None,
    *,
    config: BalancerConfig | None,
    ep_group: dist.ProcessGroup | None,
    device: torch.device | str | None,
) -> Balancer:
    """``attach`` for a model whose host has described it; arguments and errors as there."""
    config = config if config is not None else BalancerConfig()
    device = device_of(model, host, device)
    try:
        groups = ProcessGroups(ep_group, device, config.timeout_seconds)
    except ValueError as error:
        raise AttachError(str(error)) from None
    try:
        placement = check(model, optimizer, host, config, groups, device)
        make_buffers(model, device, host.remake_buffers)
    except MetaError as error:
        groups.close()
        raise AttachError(str(error)) from None
    except BaseException:
        groups.close()
        raise
    return _build(model, optimizer, host, config, groups, placement, device)


def _build(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    host: HostModel,
    config: BalancerConfig,
    groups: ProcessGroups,
    placement: Placement,
    device: torch.device,
) -> Balancer:
    training = optimizer is not None
    registry = ExpertTensors(len(host.layers), placement.homes_per_rank, optimizer, config.move_gradients)
    counter = LoadCounter(len(host.layers), placement.num_experts, config.interval, device)
    table = SlotTable(placement, device)
    topology = Topology.from_launcher(launcher_environment(), groups.ep_size, groups.ep_sets)
    dispatcher = AllToAllDispatcher(groups.dispatch, placement.slots_per_rank)
    pool = ReplicaPool(config.replica_slots) if config.shared_between_layers else None
    banks, layer_of_parameter = [], {}
    for index, (layer, rows) in enumerate(zip(host.layers, rows_of_rank(placement, groups.ep_rank), strict=True)):
        spread = spread_of(layer.experts) is not None
        homes = [getattr(layer.experts, n) if spread else cut(layer, n, rows, device) for n in layer.parameters]
        if config.replica_slots:
            banks.append(ReplicaBank(homes, config.replica_slots, training, pool))
            homes = banks[index].parameters
        for name, parameter in zip(layer.parameters, homes, strict=True):
            if parameter is not getattr(layer.experts, name):
                install(layer.experts, name, parameter, None if spread else rows, optimizer)
            if training and parameter.requires_grad and not is_sliced(parameter):
                parameter.register_hook(lambda gradient: gradient / groups.world_size)
            registry.add(index, name, parameter)
            layer_of_parameter[f"{layer.name}.{name}"] = index
            warn_of_odd_rows(f"{layer.name}.{name}", parameter)
    make_parameters(model, device)
    replicas = splitter = None
    if config.replica_slots:
        replicas = ReplicaSync(banks, groups.replicas, groups.ep_rank, groups.world_size, config.shared_between_layers)
        splitter = BatchSplitter(
            placement,
            device,
            ep_rank=groups.ep_rank,
            ranks_per_node=topology.ranks_per_node,
            mode=config.split,
            locality=config.split_locality,
            least_tokens=config.split_least_tokens,
        )
        _log_memory(config, [bank.parameters for bank in banks], training)
    for index, layer in enumerate(host.layers):
        layer.install(
            ExpertParallelLayer(
                index,
                layer.experts,
                _local_experts(index, layer, banks, replicas, config, groups.ep_size),
                counter=counter,
                table=table,
                splitter=splitter,
                dispatcher=dispatcher,
                counts_in_evaluation=not training,
                real_tokens=host.real_tokens,
            )
        )
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(layer_of_parameter))
    experts = {id(p) for p in registry.parameters()}
    balancer = Balancer(
        config=config,
        groups=groups,
        topology=topology,
        placement=placement,
        registry=registry,
        counter=counter,
        table=table,
        splitter=splitter,
        replicas=replicas,
        dense_parameters=[p for p in model.parameters() if id(p) not in experts],
        device=device,
        layer_of_parameter=layer_of_parameter,
        training=training,
    )
    balancer.own_hook(host.watch_batches())
    if optimizer is not None:
        balancer.own_hook(model.register_forward_pre_hook(lambda *_: balancer.before_forward()))
        balancer.own_hook(optimizer.register_step_pre_hook(lambda *_: balancer.reduce_gradients()))
        balancer.own_hook(optimizer.register_step_post_hook(lambda *_: balancer.step()))
    object.__setattr__(model, "_eplb_runtime_balancer", balancer)
    object.__setattr__(model, "_eplb_runtime_host", host)
    return balancer


def _local_experts(
    index: int,
    layer: MoELayer,
    banks: Sequence[ReplicaBank],
    replicas: ReplicaSync | None,
    config: BalancerConfig,
    ep_size: int,
) -> LocalExperts:
    if replicas is None:
        return LocalExperts(layer.compute, _parameters_of(layer, ep_size))
    kind = SharedReplicas if config.shared_between_layers else KeptReplicas
    return kind(layer.compute, index, banks[index], replicas)


def _parameters_of(layer: MoELayer, ep_size: int) -> Callable[[], Sequence[Tensor]]:
    """What stands in the module when it computes. FSDP averages over EDP; the rest of the division is done before."""
    sliced = any(is_sliced(getattr(layer.experts, name)) for name in layer.parameters)

    def parameters() -> Sequence[Tensor]:
        now = [getattr(layer.experts, name) for name in layer.parameters]
        return [DividedGradient.apply(parameter, ep_size) for parameter in now] if sliced else now

    return parameters


def _log_memory(config: BalancerConfig, homes: Sequence[Sequence[Tensor]], training: bool) -> None:
    """Say what replica slots take, and what the other choice would."""
    sizes = [replica_bytes(parameters, config.replica_slots, training) for parameters in homes]
    shapes = [tuple(p.shape for p in parameters) for parameters in homes]
    kept, shared = sum(sizes) / 2**20, sum(dict(zip(shapes, sizes, strict=True)).values()) / 2**20
    logger.info(
        "replica slots: %d per rank and layer, %s; memory per rank: %.3g MiB kept, %.3g MiB shared between layers",
        config.replica_slots,
        "shared between layers" if config.shared_between_layers else "kept",
        kept,
        shared,
    )
