"""Everything that ``attach`` refuses, before it changes anything: one line each that says why and what would help."""

from __future__ import annotations

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..checksum import as_bytes, checksum
from ..config import BalancerConfig
from ..experts.optimizer_state import OptimizerStateError, check_element_wise
from ..experts.slices import why_not_slices
from ..placement import Placement, PlacementError
from ..ranks import ProcessGroups
from .description import AttachError, HostModel, MoELayer, spread_of
from .meta import has_meta


def device_of(model: nn.Module, host: HostModel, wanted: torch.device | str | None) -> torch.device:
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


def check(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    host: HostModel,
    config: BalancerConfig,
    groups: ProcessGroups,
    device: torch.device,
) -> Placement:
    """Everything that can be refused, before anything is changed. Returns the placement to start from."""
    spread = {spread_of(layer.experts) for layer in host.layers}
    if len(spread) > 1:
        raise AttachError("some MoE layers were spread by shard_experts and others were not: build the model anew")
    for layer in host.layers:
        _check_tensors(layer, groups)
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
    (before,) = spread
    if before is not None:
        _check_sharded(model, host, config)
        if (before.placement, before.ep_ranks) != (placement.digest(), tuple(groups.ep_ranks)):
            raise AttachError(
                "shard_experts was given another EP group or initial placement: give both the same config and ep_group"
            )
        return placement
    weights = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    shapes = " ".join(f"{name}{tuple(tensor.shape)}{tensor.dtype}" for name, tensor in weights.items())
    _same_everywhere(shapes, "model", groups, "build the same model on every rank")
    fingerprint = checksum([as_bytes(tensor.contiguous()) for tensor in weights.values() if not tensor.is_meta])
    hint = "seed all ranks equally, or load the same checkpoint"
    _same_everywhere(fingerprint.hex(), "set of weights", groups, hint)
    return placement


def _check_sharded(model: nn.Module, host: HostModel, config: BalancerConfig) -> None:
    """A model that was cut before, and perhaps wrapped by ``fully_shard``."""
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    if sharded and config.dense_gradients == "allreduce":
        raise AttachError("fully_shard averages gradients itself: leave dense_gradients='host'")
    sliced = any(
        isinstance(getattr(layer.experts, name), DTensor) for layer in host.layers for name in layer.parameters
    )
    if sliced and config.replica_slots:
        raise AttachError(
            "replica slots keep whole experts, and fully_shard slices them over EDP: leave the experts out of it "
            "(ignored_params), or set replica_slots=0"
        )


def _check_tensors(layer: MoELayer, groups: ProcessGroups) -> None:
    """Only plain tensors can be cut by expert: what wraps them says nothing of its rows."""
    for name in layer.parameters:
        parameter = getattr(layer.experts, name)
        kind = type(parameter.data)
        if isinstance(parameter, DTensor):
            _check_slices(layer, f"{layer.name}.{name}", parameter, groups)
            continue
        if kind is not Tensor or not parameter.is_floating_point() or parameter.element_size() < 2:
            raise AttachError(
                f"{layer.name}.{name} is a {kind.__name__} of {parameter.dtype}: quantised experts are not supported; "
                "load the model in bfloat16, float16 or float32"
            )


def _check_slices(layer: MoELayer, name: str, parameter: DTensor, groups: ProcessGroups) -> None:
    if spread_of(layer.experts) is None:
        raise AttachError(
            f"{name} is a DTensor of all experts: call eplb_runtime.shard_experts(model) first and fully_shard after "
            "it, or leave expert parameters out of fully_shard (ignored_params)"
        )
    wrong = why_not_slices(parameter, groups.edp_ranks)
    if not wrong and not isinstance(layer.experts, FSDPModule):
        wrong = f"belongs to an FSDP module around {layer.name}"
    if wrong:
        raise AttachError(
            f"{name} {wrong}: call fully_shard on the experts module itself, with the mesh of the ranks that hold the "
            "same experts and shard_placement_fn=lambda parameter: Shard(1)"
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
