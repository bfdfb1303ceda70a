"""Exports by frameworks that walk the modules of each rank and take its expert ``i`` for ``ep_rank * E/R + i``.

Such a walk is made right here: in the place of an expert's parameter it gets the weights of the expert that was there
at launch, from the rank that has it now. `launch/examples/rl_weights.py` puts that where frameworks read parameters.
Nothing moves. A rank holds the weights of one layer's experts on top of its model, for a moment three times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..balancer.balancer import Balancer
from ..checkpoint.stream import ExportError
from ..distributed.consensus import first_problem
from ..migration.overlapped import sampled
from ..moe.experts.slices import is_sliced, rearranged
from ..placement import Placement

Key = TypeVar("Key")


class Walk:
    """One walk over the expert parameters of this rank. Collective over the job when it begins, between steps; from
    then on over each EP group, whose ranks walk the same parameters in the same order."""

    def __init__(self, balancer: Balancer, what: str) -> None:
        balancer.begin_export(what, None)
        self._balancer = balancer
        self._epoch = balancer.rebalancer.epoch_on_this_rank
        self._kinds: list[tuple[int, tuple[Tensor, ...]]] = []
        self._place_of: dict[int, tuple[int, int]] = {}
        self._arrived: dict[tuple[int, int], Tensor] = {}
        problem = balancer.tensors.memory.why_freed() or self._list()
        if found := balancer.rebalancer.run(lambda group, _: first_problem(problem, group)):
            raise ExportError(f"{what}: {found}")

    def _list(self) -> str:
        """List expert parameters; returns what is wrong with them."""
        registry = self._balancer.runtime.registry
        for layer in registry.layers:
            for rows in registry.by_expert(layer):
                if not isinstance(rows, tuple) or any(map(is_sliced, rows)):
                    return (
                        f"experts of MoE layer {layer} are stacked or sliced, and a walk is followed where each is a "
                        "tensor of its own, as in Megatron: take balancer.named_logical_tensors()"
                    )
                for row, parameter in enumerate(rows):
                    self._place_of[id(parameter)] = len(self._kinds), row
                self._kinds.append((layer, rows))
        return ""

    def pairs(
        self, walked: Iterable[tuple[Key, Tensor]], name_of: Callable[[Key], str]
    ) -> Iterator[tuple[Key, Tensor]]:
        """Yield what is walked, with copies of the experts that were there at launch, which must not be written to."""
        for key, tensor in walked:
            here = self._at_launch(name_of(key), tensor)
            if here is tensor:
                yield key, tensor
                continue
            before = _as_handed_out(here)
            yield key, here
            now = _as_handed_out(here)
            if before[:2] != now[:2] or not torch.equal(before[2], now[2]):
                raise RuntimeError(
                    f"{name_of(key)} was written to, and it is a copy of an expert of another rank: load weights "
                    "(another model's, a backup) inside balancer.logical_order()"
                )

    def without_data(self, value: Any) -> Any:
        """Return an expert's parameter on the meta device, anything else detached."""
        if not isinstance(value, Tensor):
            return value
        return value.detach().to("meta") if id(value) in self._place_of else value.detach()

    def _at_launch(self, name: str, tensor: Tensor) -> Tensor:
        """The weights of the expert that was in this place at launch; what is no expert, as it is."""
        place = self._place_of.get(id(tensor))
        if place is None:
            if ".experts." in name and any(
                self._has_moved(layer) for layer, _ in self._kinds
            ):  # as all of Megatron's are named
                raise ExportError(
                    f"{name} is no parameter of the attached model (a copy, or made from several), so the expert that "
                    "it should be is not known: export inside balancer.logical_order()"
                )
            return tensor
        if self._epoch != self._balancer.rebalancer.epoch_on_this_rank:
            raise RuntimeError("experts have moved since this export began, so its tensors are mixed: repeat it")
        kind, _ = place
        if not self._has_moved(self._kinds[kind][0]):
            return tensor
        if place not in self._arrived:
            self._bring(kind)
        return _like(tensor, self._arrived.pop(place))

    def _has_moved(self, layer: int) -> bool:
        """Return whether experts of a layer have moved since launch; equal on all ranks."""
        return not np.array_equal(*self._experts_of_rows(layer))

    def _experts_of_rows(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """The logical expert of each row over all ranks, now and at launch."""
        now = self._balancer.placement
        launch = Placement.initial(now.num_layers, now.num_experts, now.num_ranks, now.replica_slots)
        return now.homes_LRH[layer].ravel(), launch.homes_LRH[layer].ravel()

    @torch.no_grad()
    def _bring(self, kind: int) -> None:
        """Bring one kind of tensor of a layer's experts to where they were at launch. Collective over the EP group."""
        layer, parameters = self._kinds[kind]
        with torch.inference_mode(False):
            rows = torch.stack([parameter.detach() for parameter in parameters])
            rows = rearranged(rows, *self._experts_of_rows(layer), self._balancer.runtime.groups)
        for row, expert in enumerate(rows):
            self._arrived[kind, row] = expert


def _as_handed_out(copy: Tensor) -> tuple[int, int, Tensor]:
    """Return what shows that a copy was written to, also through ``.data``, or is in other memory."""
    return 0 if copy.is_inference() else copy._version, copy.data_ptr(), sampled(copy)


def _like(parameter: Tensor, values: Tensor) -> Tensor:
    """The values with what Megatron notes on a parameter (how tensor parallelism cuts it)."""
    for name, noted in vars(parameter).items():
        if noted is None or isinstance(noted, bool | int | float | str):
            setattr(values, name, noted)
    return values
