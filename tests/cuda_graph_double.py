"""A stand-in for CUDA graphs, and for TransformerEngine's ``make_graphed_callables``, on a CPU.

What is captured is the list of operators of a forward and of its backward pass, with the very tensors that they have
read and written. A replay runs these operators again on this memory, and no Python of the module: what Python has read
while it was captured stays as it was, what a tensor holds is read anew. Reading a number from a tensor breaks a
capture, as on a GPU. (`masked_select`, which waits for the device there, is let through: Megatron's permutation without
TransformerEngine has it.)
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WARM_UPS = 2
_MAKES_MEMORY = ("aten.empty", "aten.new_empty")
_READS_A_NUMBER = ("aten._local_scalar_dense", "aten.nonzero")


class Tape(TorchDispatchMode):
    """Records the operators that run inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(operator).startswith(_READS_A_NUMBER):
            raise RuntimeError(f"{operator} waits for the device: not permitted while a graph is captured")
        results = operator(*args, **(kwargs or {}))
        self._calls.append((operator, args, kwargs or {}, results))
        return results

    def replay(self) -> None:
        with torch.no_grad():
            for operator, args, kwargs, results in self._calls:
                _repeat(operator, args, kwargs, results)


def _repeat(operator: Any, args: Any, kwargs: Any, results: Any) -> None:
    if operator.namespace == "c10d":
        for one in tree_leaves(operator(*args, **kwargs)):
            if isinstance(one, torch.ScriptObject):
                one.wait()
        return
    made, given = _tensors(results), _tensors((args, kwargs))
    if str(operator).startswith(_MAKES_MEMORY):
        return
    if operator._schema.is_mutable:
        operator(*args, **kwargs)
        return
    known = {tensor.untyped_storage().data_ptr() for tensor in given if tensor.numel()}
    if made and all(tensor.numel() and tensor.untyped_storage().data_ptr() in known for tensor in made):
        return  # a view of memory that is read anew
    for tensor, new in zip(made, _tensors(operator(*args, **kwargs)), strict=True):
        tensor.copy_(new)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Graphed:
    """A module's captured forward and backward pass.

    Args:
        module: called with the arguments, in training mode.
        args, kwargs: tensors that stay where they are; a replay copies its own into them.
    """

    def __init__(self, module: torch.nn.Module, args: Sequence[Tensor], kwargs: Mapping[str, Tensor]) -> None:
        self._static = [*args, *kwargs.values()]
        self._names = list(kwargs)
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for _ in range(WARM_UPS):
            outputs = _tensors(module(*args, **kwargs))
            self._gradients_of(outputs, [torch.zeros_like(one) for one in outputs if one.requires_grad])
        self._forward, self._backward = Tape(), Tape()
        with self._forward:
            self._outputs = _tensors(module(*args, **kwargs))
        self._given = [torch.zeros_like(one) for one in self._outputs if one.requires_grad]
        with self._backward:
            self._gradients = self._gradients_of(self._outputs, self._given)

    def _gradients_of(self, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor | None]:
        wanted = [tensor for tensor in [*self._static, *self._parameters] if tensor.requires_grad]
        followed = [one for one in outputs if one.requires_grad]
        found = iter(torch.autograd.grad(followed, wanted, given, allow_unused=True))
        return [next(found) if one.requires_grad else None for one in [*self._static, *self._parameters]]

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        del kwargs["is_first_microbatch"]
        unknown = [name for name, value in kwargs.items() if value is not None and name not in self._names]
        assert not unknown, f"a graph takes {self._names}, not {unknown}"
        graph = self

        class Replay(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
                with torch.no_grad():
                    for static, tensor in zip(graph._static, tensors, strict=False):  # parameters follow
                        static.copy_(tensor)
                graph._forward.replay()
                outputs = tuple(output.detach() for output in graph._outputs)
                ctx.mark_non_differentiable(
                    *(new for new, one in zip(outputs, graph._outputs, strict=True) if not one.requires_grad)
                )
                return outputs

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
                followed = [one.requires_grad for one in graph._outputs]
                mine = [gradient for gradient, is_mine in zip(gradients, followed, strict=True) if is_mine]
                for static, gradient in zip(graph._given, mine, strict=True):
                    static.zero_() if gradient is None else static.copy_(gradient)
                graph._backward.replay()
                return tuple(None if one is None else one.detach() for one in graph._gradients)

        results: tuple[Tensor, ...] = Replay.apply(*args, *(kwargs[name] for name in self._names), *self._parameters)
        return results


def make_graphed_callables(
    modules: Sequence[torch.nn.Module], sample_args: Sequence[Any], sample_kwargs: Sequence[Any] = (), **options: Any
) -> tuple[Graphed, ...]:
    """As of TransformerEngine: a graph for each micro-batch of each chunk's layers, in this order.

    Args:
        options: of them ``_order`` and ``_num_layers_per_chunk`` count here.
    """
    order, layers = options["_order"], options["_num_layers_per_chunk"]
    batches = len(order) // 2 // len(layers)
    of_sample, first = [], 0
    for number in layers:
        of_sample += [*modules[first : first + number]] * batches
        first += number
    given = sample_kwargs or [{}] * len(of_sample)
    return tuple(
        Graphed(module, args, kwargs) for module, args, kwargs in zip(of_sample, sample_args, given, strict=True)
    )


def install() -> None:
    """Let Megatron-Core find this in the place of TransformerEngine's; after Megatron is imported."""
    import megatron.core.transformer.cuda_graphs as graphs
    import megatron.core.transformer.transformer_layer as layers

    for name in ("transformer_engine", "transformer_engine.pytorch"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["transformer_engine"].pytorch = sys.modules["transformer_engine.pytorch"]  # type: ignore[attr-defined]
    graphs.gc = types.SimpleNamespace(collect=lambda: None)  # it frees GPU memory; a second each time
    graphs.HAVE_TE_GRAPHS = True
    graphs.make_graphed_callables = make_graphed_callables
    for module in (graphs, layers):
        module.is_te_min_version = lambda version: tuple(map(int, version.split("."))) <= (2, 8, 0)
