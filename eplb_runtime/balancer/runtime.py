"""Parts of a running balancer, in one frozen object; the tensors of a rank's model, and whether they are as attached.

Frameworks replace parameters (sharding), put modules around others (adapters) and add trained parameters. All of this
is right before attach. After it, experts would be computed, averaged or moved without it.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..config import BalancerConfig
from ..distributed.consensus import barrier
from ..distributed.process_groups import ProcessGroups
from ..distributed.ranks import Job
from ..load.clock import ExpertClock
from ..load.counter import LoadCounter
from ..moe.dispatch.channels import MicroBatchChannels
from ..moe.experts.optimizer_state import arrays_in
from ..moe.experts.registry import MARK, ExpertTensors, RegistryError, matched, why_not_written
from ..moe.experts.slices import WeightMemory, is_sliced, unreduced
from ..moe.layer import ExpertParallelLayer, HostDispatchedLayer
from ..placement import Placement
from ..replicas.sync import Maps
from ..topology import Topology


class StructureError(RuntimeError):
    """A model was changed after ``attach`` in a way that the balancer cannot follow."""


def divisors_of(job: Job, *, by_host: bool, host_sums: bool, dense_is_sharded: bool) -> tuple[float, float]:
    """Return two divisors of gradients of whole experts: inside each layer, and when they reach a parameter. Their
    product, times the ranks over which means are taken, is `distributed.ranks.Job.gradient_divisor`. ``by_host``: the
    host dispatches, so layers divide by 1. ``host_sums``: the host sums over ranks too, so both are 1; read with
    ``by_host`` alone. ``dense_is_sharded``: other parameters are DTensors, so layers divide by the whole product."""
    divisor, owners = job.gradient_divisor, len(job.edp_ranks)
    if by_host:
        return 1, 1 if host_sums else divisor / owners
    in_layers = (divisor if dense_is_sharded else len(job.data_ranks)) / owners
    return in_layers, divisor / owners / in_layers


@dataclass(frozen=True)
class Runtime:
    """A model's experts, ranks and settings, as attaching has made them; but the transport, which may be replaced.

    Args:
        topology: of one EP group, with measured bandwidths.
        placement: of the experts at attach.
        maps: everything that follows the placement.
        dense_parameters: all parameters outside the experts, by name.
        layer_of_parameter: MoE layer index of each expert parameter, by its name in the model.
        parameters: the expert parameters by these names.
        layers: the MoE layers of this rank.
        host_dispatches: whether the framework dispatches tokens and saves experts; equal on all ranks, also where
            ``layers`` is empty.
        channels: channels on which this rank exchanges tokens.
        models: of this rank, by the prefix of their parameters' names.
        experts: the experts module of each MoE layer, in the order of layers, with its name and its parameters'.
        replaced: parameters that attach has replaced, by name.
        divisor: of every gradient that reaches a parameter of whole experts.
        averages_experts: whether the balancer averages over the ranks that hold the same experts.
    """

    config: BalancerConfig
    groups: ProcessGroups
    topology: Topology
    placement: Placement
    registry: ExpertTensors
    counter: LoadCounter
    expert_clock: ExpertClock
    maps: Maps
    dense_parameters: Mapping[str, Tensor]
    device: torch.device
    layer_of_parameter: Mapping[str, int]
    parameters: Mapping[str, Tensor]
    layers: Sequence[ExpertParallelLayer | HostDispatchedLayer]
    host_dispatches: bool
    channels: MicroBatchChannels
    models: Mapping[str, nn.Module]
    experts: Sequence[tuple[str, nn.Module, Sequence[str]]]
    replaced: Mapping[str, weakref.ref[Tensor]]
    divisor: float
    averages_experts: bool

    @property
    def job(self) -> Job:
        """The ranks of the job, and which of them share experts, stages and data."""
        return self.groups.job

    def barrier(self, what: str, seconds: float | None = None) -> None:
        """Wait until every rank has reached the call ``what``. RuntimeError, which names the others: one has not come
        within ``seconds`` (None: the config's ``timeout_seconds``)."""
        barrier(self.job.ranks, what, self.config.timeout_seconds if seconds is None else seconds)


class ModelTensors:
    """The tensors of one attached model on one rank, and whether it is as it was attached.

    Attributes:
        dense: parameters outside the experts, by name; more may join.
        optimizers: that step the model.
        registered: MoE layer and tensor of what moves with experts, by parameter and name.
        memory: of all weights, which a job may free and take again.
        sliced: whether ``fully_shard`` slices experts.
        is_sharded: whether it slices any parameter.
        seen_in_ddp: whether the model was seen to run in DistributedDataParallel.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.dense = dict(runtime.dense_parameters)
        self.optimizers: list[Any] = []
        self.registered: dict[str, tuple[int, Tensor]] = {}
        self.memory = WeightMemory()
        for name, weight in {**runtime.dense_parameters, **runtime.parameters}.items():
            self.memory.add(name, weight)
        self.sliced = any(is_sliced(parameter) for parameter in runtime.registry.parameters())
        self._marks: list[tuple[int, Tensor]] = []
        self._not_by_row: list[weakref.ref[Any]] = []
        modules = [module for model in runtime.models.values() for module in model.modules()]
        self._fsdp = [module for module in modules if isinstance(module, FSDPModule)]
        parameters = [parameter for model in runtime.models.values() for parameter in model.parameters()]
        self._known, self._of_this_rank = set(map(id, parameters)), set[int]()
        self.is_sharded, self.seen_in_ddp = any(isinstance(parameter, DTensor) for parameter in parameters), False
        self._held: list[tuple[str, nn.Module, str, nn.Parameter | None]] = []
        for name, module, keys in () if self.is_sharded else runtime.experts:  # FSDP2 puts others there meanwhile
            for key in keys:
                inside, _, own = key.rpartition(".")
                inner = module.get_submodule(inside)
                self._held.append((f"{name}.{key}", inner, own, inner._parameters[own]))

    @property
    def host_steps(self) -> bool:
        """Return whether an optimizer is the framework's own: it alone knows where gradients are."""
        return any(not isinstance(optimizer, torch.optim.Optimizer) for optimizer in self.optimizers)

    def have_gradients(self) -> bool:
        """Return whether experts may have gradients that no optimizer has used; with `host_steps` always True."""
        experts = set(self._runtime.registry.parameters())
        found = self.host_steps or any(parameter.grad is not None for parameter in experts)
        return found or any(not experts.isdisjoint(unreduced(module)) for module in self._fsdp)

    def train(self, optimizer: Any, outside: Mapping[str, Tensor]) -> None:
        """Add an optimizer, whose state of experts moves along from now on. ``outside``: its parameters that no model
        has, as for `train_outside`. Layers count no tokens in evaluation mode any more."""
        self.optimizers.append(optimizer)
        self._runtime.registry.stepped_by(optimizer)
        self.train_outside(outside)
        for layer in self._runtime.layers:
            layer.counts_in_evaluation = False

    def forget(self, optimizer: Any, outside: Mapping[str, Tensor]) -> None:
        """Remove an optimizer that was let go, and its parameters outside the model, given as for `train`."""
        self.optimizers[:] = [other for other in self.optimizers if other is not optimizer]
        self._runtime.registry.no_longer_stepped_by(optimizer)
        for name in outside:
            del self.dense[name]
            self.memory.add(name)  # of no tensor: none is missed

    def train_outside(self, parameters: Mapping[str, Tensor]) -> None:
        """Add parameters, the same on every rank, by names for messages to `dense` and `memory`; `check` knows them."""
        self.dense.update(parameters)
        for name, parameter in parameters.items():
            self.memory.add(name, parameter)
        self._known.update(map(id, parameters.values()))

    def register(self, parameter: str, name: str, tensor: Tensor) -> None:
        """Check a tensor, and register it to move with the experts of a parameter, as `Balancer.register` says."""
        layers, device = self._runtime.layer_of_parameter, self._runtime.device
        if parameter not in layers:
            raise RegistryError(f"{str(parameter)[:80]!r} is no key of balancer.layer_of_parameter")
        if tensor.device != device or tensor.requires_grad:
            raise RegistryError(
                f"{name} of {parameter}: give a tensor on {device} without gradients (detach it); this one is on "
                f"{tensor.device}, requires_grad={tensor.requires_grad}"
            )
        if problem := why_not_written(tensor):
            raise RegistryError(f"{name} of {parameter}: {problem}")
        if self.sliced and not is_sliced(tensor):
            raise RegistryError(f"{name} of {parameter}: give a DTensor placed as the parameter (torch.zeros_like(it))")
        self._runtime.registry.add(layers[parameter], f"{parameter}/{name}", tensor, "buffer")
        self.keep_from_ddp([tensor])
        self.registered[f"{parameter}/{name}"] = (layers[parameter], tensor)

    def register_all(self, name: str, tensors: Any, moves: bool) -> None:
        """Do what `Balancer.register_all` says. ``moves`` False: register none; `known` yields ``tensors`` anyway."""
        of_parameter = self._runtime.layer_of_parameter
        if moves:
            parameters = {
                prefix + own: parameter
                for prefix, model in self._runtime.models.items()
                for own, parameter in model.named_parameters()
            }
            for parameter, tensor in matched(tensors, parameters, list(of_parameter)).items():
                self.register(parameter, name, tensor)
        self._not_by_row += map(weakref.ref, arrays_in(tensors))  # the rest belongs to other parameters
        if moves and isinstance(tensors, Mapping):
            # A copied state dict carries a mark of its placement.
            layers = {parameter.rpartition(".")[0]: layer for parameter, layer in of_parameter.items()}
            marks = [(layers.get(str(key).removesuffix(f".{MARK}")), mark) for key, mark in tensors.items()]
            self._marks += [(layer, mark) for layer, mark in marks if layer is not None]

    def mark(self, placement: Callable[[], Placement]) -> None:
        """Write the ids of this rank's home experts into the placement marks that `register_all` was given."""
        for layer, mark in self._marks:
            mark.copy_(torch.from_numpy(placement().homes_LRH[layer][self._runtime.job.ep_rank]))

    def known(self) -> Iterator[Tensor]:
        """Yield the tensors that `register` and `register_all` were given, and the optimizers' parameters and state."""
        yield from (tensor for _, tensor in self.registered.values())
        yield from (torch.as_tensor(one) for ref in self._not_by_row if (one := ref()) is not None)
        for optimizer in self.optimizers:
            yield from arrays_in(getattr(optimizer, "state", None))
            yield from (parameter for group in optimizer.param_groups for parameter in group["params"])

    # -- whether the model is as it was attached -----------------------------------------------------------------------

    def keep_from_ddp(self, tensors: Iterable[Tensor]) -> None:
        """Mark these tensors on each model as parameters and buffers that DistributedDataParallel, put around it later,
        leaves alone: each rank's are of its own experts, and DDP would set buffers to rank 0's."""
        ours = set(map(id, tensors))
        self._of_this_rank |= ours
        for model in self._runtime.models.values():
            own = [*model.named_parameters(), *model.named_buffers()]
            names = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *(n for n, t in own if id(t) in ours)}
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(names))

    def replaced(self) -> dict[str, Tensor]:
        """Return the parameters that attach has replaced and that somebody still references, by name."""
        return {name: tensor for name, ref in self._runtime.replaced.items() if (tensor := ref()) is not None}

    def keep_slices(self) -> None:
        """Put FSDP2's slices back where an evaluation has left whole tensors, which no step or move writes."""
        for module in self._fsdp:
            module.reshard()

    def check(self, *, thoroughly: bool) -> None:
        """Raise StructureError if a parameter of experts was replaced since attach; cheap enough for each forward.
        ``thoroughly``: also if DistributedDataParallel averages experts, or a trained parameter was added that no
        optimizer is known to hold; notes in `seen_in_ddp` that the model runs in it."""
        for name, module, own, parameter in self._held:
            if module._parameters.get(own) is not parameter:
                raise StructureError(
                    f"{name} was replaced after attach: do that first (shard_experts and fully_shard, adapters), then "
                    "make the optimizer and attach; for an evaluation copy other weights into the parameters"
                )
        wrapped = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None) if thoroughly else None
        self.seen_in_ddp |= wrapped is not None
        if wrapped is not None and wrapped.process_group.size() > 1:
            shared = {id(tensor) for tensor in (*wrapped._module_parameters, *wrapped.modules_buffers)}
            if not shared.isdisjoint(self._of_this_rank | set(map(id, self.replaced().values()))):
                raise StructureError(
                    "DistributedDataParallel would average experts, which differ between ranks, or parameters from "
                    "before attach: attach, call balancer.register, and then wrap the attached module in "
                    "DistributedDataParallel; or leave it out and set dense_gradients='allreduce'"
                )
        for prefix, model in self._runtime.models.items() if thoroughly and not self.is_sharded else ():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and id(parameter) not in self._known:
                    raise StructureError(
                        f"{prefix}{name} was added after attach and is trained, but no optimizer that the balancer "
                        "knows holds it: add it (adapters, heads) and make the optimizer first, then attach, or call "
                        "balancer.adopt(optimizer)"
                    )
