"""A model's forwards, as the balancer is told of them: each that begins, and each that ends or fails."""

from __future__ import annotations

from threading import get_ident

import torch

from ...balancer.balancer import Balancer
from .description import Stage


class Forwards:
    """Forwards of one stage. A graph of torch.compile that fails tells nobody, nor does a forward that is interrupted
    (Ctrl-C): such a forward has ended by the time that its thread begins another, or asks where experts are."""

    def __init__(self, balancer: Balancer, stage: Stage, layers: frozenset[int]) -> None:
        self._balancer = balancer
        self._layers = layers
        self._running: set[int] = set()
        stage.model.register_forward_pre_hook(lambda *_: self._begin())
        stage.model.register_forward_hook(lambda *_: self._end(), always_call=True)

    def end_what_broke_off(self) -> None:
        """End this thread's forward; the rest of its layers wait for the next step."""
        if get_ident() in self._running:
            self._balancer._after_forward(self._layers)

    @torch.compiler.disable
    def _begin(self) -> None:
        self.end_what_broke_off()
        self._running.add(get_ident())
        self._balancer._before_forward()

    @torch.compiler.disable
    def _end(self) -> None:
        self._running.discard(get_ident())
        self._balancer._after_forward(self._layers)
