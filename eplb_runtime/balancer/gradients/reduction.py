"""Gradients of a model with spread experts: divided in backward passes, summed over ranks once a step, and clipped.

Tokens of all ranks reach an expert in its layer, so what a layer gives is divided there. What reaches a parameter past
its layer (a penalty over all parameters, a second head) comes from the ranks that hold the expert alone, where a
parameter outside the experts gets it from all ranks: so gradients of experts are divided at their parameters, too.

What arrives is scaled, so that what is reduced is a mean over ranks: it may be averaged again, with contributions that
came since. So a loop may look at gradients as often as it likes, go on adding to them, and never zero them.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed.consensus import gather_rows, maxima
from ...load.counter import in_recompute
from ...moe.experts.slices import is_sliced, local
from ...utils.spans import phase
from ..loop_state import LoopHooks, LoopState
from ..runtime import Runtime
from .norm import Gradient, RangesOfSlots, over_stages, powers_of_dense, powers_of_experts

BUCKET_BYTES = 32 << 20
"""Size up to which gradients of one dtype travel together."""
OLD, TAKEN, NEW = range(3)
"""Kinds of a parameter's gradient on a rank: none, or as the last reduction left it; none since the loop has taken it;
or one with contributions that the other ranks may not have."""


class Gradients(LoopHooks):
    """Gradients of one model: each contribution is reduced once, and all are clipped by one norm. Without an optimizer
    a backward pass through experts is refused. ``averaged``: what is averaged over ranks here, not by the host."""

    def __init__(self, runtime: Runtime, loop: LoopState) -> None:
        groups, tensors = runtime.groups, loop.tensors
        self._runtime, self._loop, self._groups, self._device = runtime, loop, groups, runtime.device
        self._registry, self._replicas, self._parameters = runtime.registry, runtime.maps.replicas, runtime.parameters
        self._dense_parameters, self._sliced = tensors.dense, tensors.sliced
        self.averaged: list[Averaging] = []
        if runtime.config.dense_gradients == "allreduce":
            scale = groups.data.size() / groups.job.gradient_divisor
            self.averaged.append(Averaging(tensors.dense, groups.data, scale))
        self._of_experts: Averaging | None = None
        if groups.expert_data is not None and runtime.averages_experts and not self._sliced:
            self._of_experts = Averaging(runtime.parameters, groups.expert_data, None, in_rank_order=True)
            self.averaged.append(self._of_experts)
        self._first = True
        self._new = True
        self._divisor = runtime.divisor
        self._trained_at_attach = {name for name, parameter in self._parameters.items() if parameter.requires_grad}
        self._divided: set[str] = set()
        self._divide_trained()

    def _divide_trained(self) -> None:
        """Divide gradients of parameters that are trained since the last call; slices are divided earlier."""
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and name not in self._divided and not is_sliced(parameter):
                parameter.register_hook(partial(self._divide, parameter))
                self._divided.add(name)

    @torch.compiler.disable
    def _divide(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        if not self._loop.has_optimizer:
            raise RuntimeError(
                "a backward pass through experts that were attached without an optimizer: their gradients would not be "
                "scaled nor reduced; give the optimizer to attach, or one that is made later to "
                "balancer.adopt(optimizer), on every rank"
            )
        self.arrives(parameter)
        return gradient if self._divisor == 1 else torch.div(gradient, self._divisor)

    def on_step_end(self) -> None:
        """Let the next reduction take gradients as new, also those that were written by hand."""
        self._first = True

    def on_forward_begin(self, trains: bool) -> None:
        """In training, hook parameters that are trained since the last time, to divide their gradients, and drop what
        replicas have under way of a backward pass that never ended. RuntimeError, with replicas: a parameter has hooks
        that replicas' gradients would pass by, or was frozen at attach and is trained now."""
        if not trains:
            return
        for name, parameter in self._parameters.items() if self._replicas is not None else ():
            if foreign_hooks(parameter):
                raise RuntimeError(
                    f"{name} has gradient hooks, and with replica slots they miss what replicas add to its gradient: "
                    "change gradients after balancer.reduce_gradients() instead, or set replica_slots=0"
                )
            if parameter.requires_grad and name not in self._trained_at_attach:
                raise RuntimeError(
                    f"{name} was frozen when the model was attached and is trained now, but its replicas return no "
                    "gradients: freeze it again, unfreeze it before attach, or set replica_slots=0"
                )
        self._divide_trained()
        for averaging in self.averaged:
            averaging.watch_all()
        if self._replicas is not None and not in_recompute() and not self._runtime.channels.busy:
            self._replicas.abandon()
        self._new = self._new or self._sliced  # of slices no hook sees them
        if self._sliced and self._registry.has_left_behind:
            self._registry.forget_zeroed()

    def arrives(self, parameter: Tensor) -> None:
        """Note that a backward pass, or a replica, is about to add to the gradient of an expert parameter.
        RuntimeError: the gradient there is of experts that have moved away, and was not zeroed."""
        self._new = True
        if self._registry.has_left_behind:
            self._registry.check_no_stale_gradients(parameter)
        if self._of_experts is not None:
            self._of_experts.arrives(parameter)

    def before_step(self) -> None:
        self.reduce()

    def reduce(self) -> None:
        """Add gradients of replicas to their homes', and average gradients over ranks in place; without new ones
        nothing happens. Collective. RuntimeError: a gradient is of experts that have moved away."""
        if self._registry.has_left_behind:
            self._registry.check_no_stale_gradients()
        if self._replicas is not None:  # replicas may have gradients that no home shows yet
            self._replicas.wait_all()
            self._replicas.reduce_gradients()
        if not (self._first or self._new or any(averaging.has_new for averaging in self.averaged)):
            return
        with phase("reduce gradients"):
            for averaging in self.averaged:
                averaging.reduce(first=self._first)
        self._first = self._new = False

    @torch.no_grad()
    def clip(self, max_norm: float, parameters: Iterable[Tensor] | None, norm_type: float) -> Tensor:
        """Reduce gradients, scale them in place so that their norm is at most ``max_norm``, and return the norm before,
        a float64 scalar. Collective; see `Balancer.clip_grad_norm_`."""
        if not norm_type > 0:
            raise ValueError(f"norm_type={norm_type}: give a number above 0, or math.inf")
        chosen = None if parameters is None else self._chosen(parameters)
        self.reduce()

        def gradient_of(parameter: Tensor) -> Tensor | None:
            return parameter.grad if chosen is None or parameter in chosen else None

        experts = [g for p in self._registry.parameters() if (g := gradient_of(p)) is not None]
        dense = [g for p in self._dense_parameters.values() if (g := gradient_of(p)) is not None]
        powers = [*self._powers_of_experts(gradient_of, norm_type), *powers_of_dense(dense, norm_type)]
        norm = over_stages(powers, self._groups, self._device, norm_type)
        norm = norm if math.isinf(norm_type) else norm.pow(1 / norm_type)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in [*experts, *dense]:
            local(gradient).mul_(scale.to(gradient.dtype))
        return norm

    def _chosen(self, parameters: Iterable[Tensor]) -> set[Tensor]:
        chosen = {parameters} if isinstance(parameters, Tensor) else set(parameters)
        known = {*self._registry.parameters(), *self._dense_parameters.values()}
        for parameter in chosen - known:
            raise ValueError(
                f"a tensor of shape {list(parameter.shape)} is no parameter of the attached model: give those of "
                "model.parameters() as they are since attach"
            )
        for layer in self._registry.layers:
            for separate in self._registry.by_expert(layer):
                if isinstance(separate, tuple) and 0 < len(chosen.intersection(separate)) < len(separate):
                    raise ValueError(
                        "parameters= has some experts of a layer and leaves others out, which are on other ranks after "
                        "a move: give all experts of a layer"
                    )
        return chosen

    @torch.no_grad()
    def square_of_experts(self, gradient_of: Callable[[Tensor], Tensor | None]) -> Tensor:
        """Return the squared norm over all experts of the model, for a host that clips by itself: a float64 scalar,
        equal on every rank and for every placement. ``gradient_of``: gives a parameter's gradient. Collective."""
        return over_stages(self._powers_of_experts(gradient_of, 2.0), self._groups, self._device, 2.0)

    def _powers_of_experts(self, gradient_of: Callable[[Tensor], Tensor | None], norm_type: float) -> list[Tensor]:
        gradients: list[tuple[int, Gradient]] = []
        for layer in self._registry.layers:
            for parameter in self._registry.by_expert(layer):
                if isinstance(parameter, tuple):
                    of_slots = [gradient_of(row) for row in parameter]
                    ranges = self._registry.ranges_of(parameter)
                    gradients.append((layer, RangesOfSlots(of_slots, ranges) if ranges else of_slots))
                    continue
                gradient = gradient_of(parameter)
                # Also where there is none: other ranks may have one, and all meet for each.
                gradients.append((layer, [] if gradient is None else local(gradient)))
        slices = self._groups.expert_data if self._sliced and not self._groups.job.divided_rows else None
        self._loop.end_broken_off()
        job, num_experts = self._groups.job, self._runtime.placement.num_experts
        # The logical expert of each row here; of divided rows [L, E/(R D)].
        rows_LH = self._runtime.maps.table.logical_of_rows(job.ep_rank).unflatten(1, (job.dp_shard_degree, -1))
        rows_LH = rows_LH[:, job.row_rank % job.dp_shard_degree]
        return powers_of_experts(gradients, rows_LH, num_experts, self._groups, slices, norm_type)


def foreign_hooks(parameter: Tensor) -> list[Callable[..., Any]]:
    """Return the hooks on the gradient of a parameter (``register_hook``, ``register_post_accumulate_grad_hook``) that
    are neither this package's nor those of torch's own wrappers of models."""
    both = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)  # type: ignore[attr-defined]
    return [hook for hooks in both for hook in (hooks or {}).values() if not _is_known(hook)]


def _is_known(hook: Callable[..., Any]) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    owner = getattr(hook, "__self__", hook)
    made_in = str(getattr(hook, "__module__", None) or type(owner).__module__)
    return made_in.startswith((f"{__name__.partition('.')[0]}.", "torch.distributed."))


class Averaging:
    """Averages the gradients of some parameters, the same on every rank of a group; more may join. A mean stays what it
    is if it is averaged again, with new contributions or without. ``scale``: factor of what arrives from now on; None:
    the caller scales it, and calls `arrives`. ``in_rank_order``: elements are added in the order of the ranks."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        group: dist.ProcessGroup,
        scale: float | None,
        *,
        in_rank_order: bool = False,
    ) -> None:
        self._parameters, self._group, self._scale, self._in_rank_order = parameters, group, scale, in_rank_order
        self._watched: set[Tensor] = set()
        self._arrived: set[Tensor] = set()
        self._any_taken = False
        self._left: dict[Tensor, weakref.ref[Tensor]] = {}

    @property
    def has_new(self) -> bool:
        """Return whether gradients came, were replaced or taken away since the last reduction. Calls `watch_all`."""
        self.watch_all()
        return self._any_taken or any(self._kind(parameter) for parameter in self._parameters.values())

    def arrives(self, parameter: Tensor) -> None:
        """Note that a backward pass is about to add to this parameter's gradient."""
        self._arrived.add(parameter)

    @torch.no_grad()
    def reduce(self, *, first: bool) -> None:
        """Average new gradients in place. Collective over the group. A parameter without a gradient takes part with
        zeros, which become its ``.grad``, where another rank has one; else it is left out. ``first``: for the first
        time since a step ended, when gradients may have been written by hand."""
        self.watch_all()
        parameters = list(self._parameters.values())
        if not parameters:
            return
        here = [NEW if first and p.grad is not None else self._kind(p) for p in parameters]
        kinds = maxima(torch.tensor(here, dtype=torch.uint8).to(parameters[0].device), self._group).tolist()
        gradients = []
        for parameter, highest in zip(parameters, kinds, strict=True):
            if highest == NEW:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        self._average(gradients)
        self._any_taken = TAKEN in kinds  # on any rank: it may come back, and all ranks shall meet for it
        self._arrived = {p for p, own, most in zip(parameters, here, kinds, strict=True) if own == most == TAKEN}
        self._left = {p: weakref.ref(p.grad) for p in parameters if p.grad is not None}

    def _kind(self, parameter: Tensor) -> int:
        gradient, left = parameter.grad, self._left.get(parameter)
        if gradient is None:
            return TAKEN if parameter in self._arrived else OLD
        return NEW if parameter in self._arrived or left is None or left() is not gradient else OLD

    @torch.no_grad()
    def watch_all(self) -> None:
        """Hook parameters that have joined since the last call, or are trained since: gradients that arrive are scaled
        and noted. A gradient that is there already is scaled in place. Without ``scale`` the caller does both."""
        for parameter in self._parameters.values():
            if parameter in self._watched or not parameter.requires_grad:
                continue
            self._watched.add(parameter)
            if parameter.grad is not None:
                self._arrived.add(parameter)
                parameter.grad.mul_(self._scale or 1)
            if self._scale is not None:
                # Not when it has been added to .grad: a loop may add to that itself what torch.autograd.grad gives it.
                parameter.register_hook(partial(self._hook, parameter, self._scale))

    @torch.compiler.disable
    def _hook(self, parameter: Tensor, scale: float, gradient: Tensor) -> Tensor:
        self.arrives(parameter)
        return gradient if scale == 1 else gradient * scale

    def _average(self, gradients: Sequence[Tensor]) -> None:
        from torch._utils import _take_tensors

        for bucket in _take_tensors(gradients, BUCKET_BYTES):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            if self._in_rank_order and self._group.size() > 2:  # a + b is b + a
                flat = sum_in_rank_order(flat, self._group)
            else:
                dist.all_reduce(flat, group=self._group)
            flat.div_(self._group.size())
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))


def sum_in_rank_order(flat_N: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks of a group, each element added in the order of the ranks. Collective. An all-reduce
    adds in an order that depends on an element's place, so an expert's gradient would depend on its slot."""
    padded = torch.nn.functional.pad(flat_N, (0, -flat_N.numel() % group.size()))
    return gather_rows(part_of_sum(padded, group), group).view(-1)[: flat_N.numel()]


def part_of_sum(padded_N: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's share of the elements of a sum over a group's ranks, each added in rank order. Collective."""
    shards_N = torch.empty_like(padded_N)
    dist.all_to_all_single(shards_N, padded_N, group=group)
    first, *others = shards_N.view(group.size(), -1)
    for other in others:
        first.add_(other)
    return first


def bit_words(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's elements as integers of their size; a complex element is two."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def bit_sums(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Return the sum of all bits of each tensor as whole numbers, int64 ``[N]``, which a change of any element changes;
    0 for None. Computed on their device without a sync; each tensor is read once."""
    sums = [torch.zeros((), dtype=torch.int64, device=device)] * len(tensors)
    for place, tensor in enumerate(tensors):
        if tensor is not None:
            words = bit_words(tensor.detach())
            if tensor.is_contiguous() and tensor.nbytes % 8 == 0 and words.storage_offset() * words.itemsize % 8 == 0:
                words = words.reshape(-1).view(torch.int64)  # the longest: fewer to add
            sums[place] = torch.sum(words, dtype=torch.int64)
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64, device=device)
