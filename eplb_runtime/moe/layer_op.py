"""A layer as graphs of torch.compile call it (`custom_ops.py`): a forward and a backward pass over this layer alone.

The forward is the one that runs without graphs, on stand-ins of what it is given; what it leaves to autograd waits for
the backward operator, which runs that pass within the graph's and gives the graph the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..load.counter import in_recompute
from .custom_ops import GraphLayer, experts
from .experts.compute import LocalExperts

Forward = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor] | None], Tensor]
"""Hidden states, choices, router weights, and what stands for the experts' parameters; None: they themselves."""


@dataclass(frozen=True, eq=False)
class _SavedForward:
    """Of one forward: its end, and what learns; the first ``own`` are no parameters."""

    end: GradientEdge
    leaves: list[Tensor]
    own: int


class LayerInGraph(GraphLayer):
    """One layer.

    Args:
        forward: the layer's own, without graphs.
        local: its experts here.
        parameters: theirs, in the order in which they are computed with.
    """

    def __init__(self, forward: Forward, local: LocalExperts, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self._forward = forward
        self._local = local
        self._parameters = tuple(parameters)
        self._draws = False

    def __call__(self, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """In the code that is being traced: the layer's output."""
        return experts(self.number, hidden_TD, topk_ids_TK, topk_weights_TK, self._parameters)

    def forward(
        self, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, learns: Sequence[bool]
    ) -> tuple[Tensor, Any]:
        if not any(learns):
            return self._forward(hidden_TD, topk_ids_TK, topk_weights_TK, None), None
        if self._draws and in_recompute():
            raise RuntimeError(
                "experts that draw random numbers (dropout) would draw others where a graph of torch.compile repeats "
                "their forward: leave them out of activation checkpointing, or compile without it"
            )
        random = _random_state(hidden_TD.device)
        hidden_learns, weights_learn, *_ = learns
        hidden, weights = _leaf(hidden_TD, hidden_learns), _leaf(topk_weights_TK, weights_learn)
        inputs = [p.detach().requires_grad_(need) for p, need in zip(self._parameters, learns[2:], strict=True)]
        combined_TD = self._forward(
            _Enter.apply(hidden, hidden_TD), topk_ids_TK, _Enter.apply(weights, topk_weights_TK), inputs
        )
        self._draws = not torch.equal(random, _random_state(hidden_TD.device))
        leaves = [leaf for leaf, need in zip((hidden, weights, *inputs), learns, strict=True) if need]
        return combined_TD.detach(), _SavedForward(
            get_gradient_edge(combined_TD), leaves, hidden_learns + weights_learn
        )

    def backward(self, saved: Any, grad_TD: Tensor) -> Sequence[Tensor]:
        if not in_recompute():
            raise RuntimeError(
                "compiled autograd (torch._dynamo.config.compiled_autograd) cannot run the backward pass of an "
                "attached model: compile the forward alone"
            )
        with self._local.within_a_graph() as trains:
            asked = saved.leaves if trains else saved.leaves[: saved.own]
            again = torch._C._autograd._get_current_graph_task_keep_graph()
            found = torch.autograd.grad([saved.end], asked, [grad_TD], again, allow_unused=True) if asked else ()
        gradients = [*found, *(None for _ in saved.leaves[len(asked) :])]
        return [
            torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device) if one is None else one.contiguous()
            for leaf, one in zip(saved.leaves, gradients, strict=True)
        ]


def _leaf(tensor: Tensor, learns: bool) -> Tensor:
    """What takes the gradient of a tensor, without memory: a graph may use the tensor's own again after the forward."""
    return tensor.detach().new_zeros(()).expand(tensor.shape).requires_grad_(learns)


def _random_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


class _Enter(torch.autograd.Function):
    """A tensor, whose gradient a leaf gets."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
