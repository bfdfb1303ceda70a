"""``attach``: from a model and an optimizer to a running balancer, the same way for every framework.

A host file answers where the experts are (`MoELayer`); everything else - groups, sharding, registry, hooks - is here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ..balancer import Balancer
from ..config import BalancerConfig, launcher_environment
from ..dispatch.all_to_all import AllToAllDispatcher
from ..dispatch.layer import ExpertParallelLayer
from ..experts.layout import ALIGNMENT
from ..experts.local import Compute, LocalExperts
from ..experts.optimizer_state import OptimizerStateError, check_element_wise, replace_parameter
from ..experts.registry import ExpertTensors
from ..experts.replica_sync import ReplicaSync
from ..experts.replicas import KeptReplicas, ReplicaBank, ReplicaPool, replica_bytes
from ..experts.shared_replicas import SharedReplicas
from ..load.recorder import LoadRecorder
from ..migration.groups import ProcessGroups
from ..migration.staging import as_bytes, checksum
from ..placement import Placement, PlacementError
from ..routing.lookup import SlotTable
from ..routing.splitter import BatchSplitter
from ..topology import Topology
from .meta import MetaError, blank, has_meta, make_buffers, make_parameters

logger = logging.getLogger("eplb_runtime")


class AttachError(ValueError):
    """The model, optimizer or job cannot be balanced as it is; one line that says why and what would help."""


@dataclass(frozen=True)
class MoELayer:
    """One MoE layer as its host describes it.

    Args:
        name: of the experts module within the model.
        experts: the module that holds the expert weights; its parameters are replaced by the local ones.
        num_experts: E.
        parameters: names (within ``experts``) of the tensors whose first dimension is E.
        compute: runs rows through local slots with the module's own code.
        install: puts the expert-parallel way in the place of the module's own forward.
    """

    name: str
    experts: nn.Module
    num_experts: int
    parameters: tuple[str, ...]
    compute: Compute
    install: Callable[[ExpertParallelLayer], None]


@dataclass(frozen=True)
class HostModel:
    """What a host knows of a model.

    Args:
        layers: in model order.
        real_tokens: ``T -> bool [T]``, the real tokens of the running batch (the others are padding), or None.
        watch_batches: hooks into the model what ``real_tokens`` needs.
        remake_buffers: fills the non-persistent buffers of one module, as the framework does when it makes a model.
    """

    layers: tuple[MoELayer, ...]
    real_tokens: Callable[[int], Tensor | None]
    watch_batches: Callable[[], RemovableHandle]
    remake_buffers: Callable[[nn.Module], None]


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    config: BalancerConfig | None = None,
    ep_group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> Balancer:
    """Spread a model's experts over the EP group and keep them balanced. Collective: every rank calls it once.

    The model must be the same on every rank (same seed or checkpoint; checked). Afterwards each rank holds E/R experts
    of every MoE layer; the rest of the model is untouched. An optimizer made before keeps its groups, options and
    state: full expert parameters are replaced by local ones. Wrap the model in DistributedDataParallel after this call
    (expert parameters are excluded from it), or set ``dense_gradients="allreduce"`` and use no wrapper.

    Gradients of experts are divided by the number of ranks, so that they match what data parallelism's averaging gives
    the dense parameters: both are the gradient of the mean over ranks of each rank's loss.

    Args:
        model: a Hugging Face Transformers (>= 5) model whose MoE layers follow the library's experts interface.
        optimizer: holds the model's parameters; element-wise (SGD, Adam, AdamW, ...). None: inference, load counts in
            evaluation too.
        config: settings, the same on every rank.
        ep_group: ranks among which experts are spread; None: all. With several EP groups (EDP) all hold the same
            placement, and expert gradients are averaged over them.
        device: for a model on the meta device, where to make it: this rank's experts and the rest, nothing more. Its
            weights are NaN until you load them, with ``eplb_runtime.checkpoint.load`` or ``load_pretrained``.

    Returns:
        The balancer, hooked to the optimizer's step.

    Raises:
        AttachError: there is nothing to balance, or it cannot be done; the model and optimizer are as they were.
    """
    config = config if config is not None else BalancerConfig()
    host = _describe(model)
    device = _device_of(model, host, device)
    try:
        groups = ProcessGroups(ep_group, device, config.timeout_seconds)
    except ValueError as error:
        raise AttachError(str(error)) from None
    try:
        placement = _check(model, optimizer, host, config, groups, device)
        make_buffers(model, device, host.remake_buffers)
    except MetaError as error:
        groups.close()
        raise AttachError(str(error)) from None
    except BaseException:
        groups.close()
        raise
    return _build(model, optimizer, host, config, groups, placement, device)


def _describe(model: nn.Module) -> HostModel:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise AttachError("the model is wrapped in DistributedDataParallel: attach first, then wrap")
    if hasattr(model, "_eplb_runtime_balancer"):
        raise AttachError("the model is attached already: close() does not undo sharding; build the model anew")
    try:
        from .transformers import describe
    except ImportError:
        raise AttachError("no supported framework is installed: pip install 'eplb-runtime[transformers]'") from None
    host = describe(model)
    if not host.layers:
        raise AttachError(
            f"{type(model).__name__} has no MoE layer that follows the Transformers experts interface: nothing to "
            "balance"
        )
    return host


def _device_of(model: nn.Module, host: HostModel, wanted: torch.device | str | None) -> torch.device:
    """Where the experts are, or will be made."""
    # An empty tensor knows the index of "cuda".
    given = torch.empty(0, device=wanted).device if wanted is not None else None
    devices = {getattr(layer.experts, name).device for layer in host.layers for name in layer.parameters}
    if len(devices) > 1:
        raise AttachError(f"the experts are on several devices ({', '.join(sorted(map(str, devices)))}): one per rank")
    device = devices.pop()
    if has_meta(model):
        if given is None or given.type == "meta":
            raise AttachError(
                "the model is on the meta device: name the one to make it on, attach(..., device='cuda'), and load its "
                "weights afterwards"
            )
        return given
    if given is not None and given != device:
        raise AttachError(
            f"device={str(given)!r}, but the experts are on {device}: move the model there, or leave it out"
        )
    return device


def _check(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    host: HostModel,
    config: BalancerConfig,
    groups: ProcessGroups,
    device: torch.device,
) -> Placement:
    """Everything that can be refused, before anything is changed. Returns the placement to start from."""
    for layer in host.layers:
        _check_tensors(layer)
    counts = {layer.num_experts for layer in host.layers}
    if len(counts) > 1:
        raise AttachError(f"the MoE layers have different numbers of experts ({sorted(counts)}); they must be equal")
    num_experts = counts.pop()
    if num_experts % groups.ep_size:
        raise AttachError(
            f"{num_experts} experts cannot be spread evenly over {groups.ep_size} ranks: choose an EP size that "
            f"divides {num_experts}"
        )
    if config.replica_slots > num_experts - num_experts // groups.ep_size:
        raise AttachError(
            f"replica_slots={config.replica_slots}: a rank has only {num_experts - num_experts // groups.ep_size} "
            "experts of other ranks to copy"
        )
    if config.replica_slots and device.type != "cpu" and groups.backend == "gloo":
        raise AttachError("replica slots on a GPU need a backend for it: init_process_group('cpu:gloo,cuda:nccl')")
    if optimizer is not None:
        _check_optimizer(optimizer, host)
    try:
        placement = _initial_placement(config, len(host.layers), num_experts, groups.ep_size)
    except PlacementError as error:
        raise AttachError(f"initial_placement: {error}") from None
    _same_everywhere(config.describe(), "configuration", groups, "give all ranks the same config")
    _same_everywhere(
        placement.digest(), "initial placement", groups, "give all ranks the same one, or copies of one file"
    )
    weights = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    shapes = " ".join(f"{name}{tuple(tensor.shape)}{tensor.dtype}" for name, tensor in weights.items())
    _same_everywhere(shapes, "model", groups, "build the same model on every rank")
    fingerprint = checksum([as_bytes(tensor.contiguous()) for tensor in weights.values() if not tensor.is_meta])
    hint = "seed all ranks equally, or load the same checkpoint"
    _same_everywhere(fingerprint.hex(), "set of weights", groups, hint)
    return placement


def _check_tensors(layer: MoELayer) -> None:
    """Only plain tensors can be cut by expert: what wraps them says nothing of its rows."""
    for name in layer.parameters:
        parameter = getattr(layer.experts, name)
        kind = type(parameter.data)
        if isinstance(parameter, DTensor):
            raise AttachError(
                f"{layer.name}.{name} is a DTensor: leave expert parameters out of fully_shard (ignored_params)"
            )
        if kind is not Tensor or not parameter.is_floating_point() or parameter.element_size() < 2:
            raise AttachError(
                f"{layer.name}.{name} is a {kind.__name__} of {parameter.dtype}: quantised experts are not supported; "
                "load the model in bfloat16, float16 or float32"
            )


def _check_optimizer(optimizer: torch.optim.Optimizer, host: HostModel) -> None:
    try:
        check_element_wise(optimizer)
    except OptimizerStateError as error:
        raise AttachError(str(error)) from None
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(
        isinstance(value, Tensor) and value.is_meta for state in optimizer.state.values() for value in state.values()
    ):
        raise AttachError(
            f"{type(optimizer).__name__} has made its state on the meta device already, where it has no values: use an "
            "optimizer that makes it at its first step, or build the model with memory"
        )
    for layer in host.layers:
        for name in layer.parameters:
            parameter = getattr(layer.experts, name)
            if parameter.requires_grad and id(parameter) not in held:
                raise AttachError(
                    f"the optimizer does not hold {layer.name}.{name}: build it from model.parameters() (with float32 "
                    "masters in its state, not in the place of parameters), or freeze that parameter"
                )


def _initial_placement(config: BalancerConfig, layers: int, experts: int, ranks: int) -> Placement:
    given = config.initial_placement
    if given is None:
        return Placement.initial(layers, experts, ranks, config.replica_slots)
    placement = given if isinstance(given, Placement) else Placement.load(given)
    placement.require_model(layers, experts, ranks, config.replica_slots)
    return placement.with_epoch(0)


def _same_everywhere(text: str, what: str, groups: ProcessGroups, hint: str) -> None:
    mine = torch.frombuffer(bytearray(xxhash.xxh3_128(text.encode()).digest()), dtype=torch.uint8)
    all_ = [torch.empty_like(mine) for _ in range(groups.world_size)]
    dist.all_gather(all_, mine, group=groups.control)
    odd = [rank for rank, theirs in enumerate(all_) if not torch.equal(theirs, all_[0])]
    if odd:
        raise AttachError(f"rank {', '.join(map(str, odd))} has another {what} than rank 0: {hint}")


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
    recorder = LoadRecorder(len(host.layers), placement.num_experts, config.interval, device)
    table = SlotTable(placement, device)
    topology = Topology.from_launcher(launcher_environment(), groups.ep_size, groups.ep_sets)
    dispatcher = AllToAllDispatcher(groups.dispatch, placement.slots_per_rank)
    pool = ReplicaPool(config.replica_slots) if config.shared_between_layers else None
    banks, layer_of_parameter = [], {}
    for index, layer in enumerate(host.layers):
        rows = table.logical_of_rows(groups.ep_rank)[index]
        homes = [_cut(layer, name, rows, device) for name in layer.parameters]
        if config.replica_slots:
            banks.append(ReplicaBank(homes, config.replica_slots, training, pool))
            homes = banks[index].parameters
        for name, parameter in zip(layer.parameters, homes, strict=True):
            _install(layer.experts, name, parameter, rows, groups.world_size, optimizer)
            registry.add(index, name, parameter)
            layer_of_parameter[f"{layer.name}.{name}"] = index
            _warn_of_odd_rows(f"{layer.name}.{name}", parameter)
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
                _local_experts(index, layer, banks, replicas, config),
                recorder=recorder,
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
        recorder=recorder,
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
    return balancer


def _local_experts(
    index: int, layer: MoELayer, banks: Sequence[ReplicaBank], replicas: ReplicaSync | None, config: BalancerConfig
) -> LocalExperts:
    if replicas is None:
        return LocalExperts(layer.compute, lambda: [getattr(layer.experts, name) for name in layer.parameters])
    kind = SharedReplicas if config.shared_between_layers else KeptReplicas
    return kind(layer.compute, index, banks[index], replicas)


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


def _cut(layer: MoELayer, name: str, rows: Tensor, device: torch.device) -> nn.Parameter:
    full = getattr(layer.experts, name)
    if full.is_meta:
        local = blank(torch.Size([len(rows), *full.shape[1:]]), full.dtype, device)
        return nn.Parameter(local, requires_grad=full.requires_grad)
    return nn.Parameter(full.detach()[rows], requires_grad=full.requires_grad)


def _install(
    experts: nn.Module,
    name: str,
    local: nn.Parameter,
    rows: Tensor,
    world_size: int,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Put this rank's rows in the place of a full expert parameter, in the module and in the optimizer."""
    full = getattr(experts, name)
    if optimizer is not None and full.requires_grad:
        replace_parameter(optimizer, full, local, lambda state: state.detach()[rows.to(state.device)])
        local.register_hook(lambda gradient: gradient / world_size)
    setattr(experts, name, local)


def _warn_of_odd_rows(name: str, tensor: Tensor) -> None:
    """On a CPU the last bits of a matrix product depend on how its rows are aligned; say so where they are odd."""
    row_bytes = tensor.shape[-1] * tensor.element_size()
    if tensor.device.type == "cpu" and tensor.ndim > 2 and row_bytes % ALIGNMENT:
        logger.warning(
            "%s has rows of %d bytes: on a CPU results may differ in the last bits by placement; widths that are "
            "multiples of %d bytes avoid it",
            name,
            row_bytes,
            ALIGNMENT,
        )
