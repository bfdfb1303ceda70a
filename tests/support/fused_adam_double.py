"""An optimizer in torch with the state, scales and accessors of TransformerEngine's FusedAdam, on a CPU.

As there: state in dtypes of its own, one float32 scale for each tensor that is not float32, masters kept by the
optimizer, or only the 16 bits of them that a weight in bfloat16 lacks. Moments in FP8 are left out.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import Tensor

KEYS = ("exp_avg", "exp_avg_sq", "master_param")
LARGEST = torch.finfo(torch.float16).max / 2


def joined(weight: Tensor, remainder: Tensor) -> Tensor:
    """float32 of a bfloat16, rounded to nearest, and the lower half of its bits."""
    low = remainder.to(torch.int32)
    high = weight.view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
    return ((high << 16) | (low & 0xFFFF)).view(torch.float32)


def split(number: Tensor) -> tuple[Tensor, Tensor]:
    bits = number.view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int16)
    high = (bits >> 16) + (low < 0).to(torch.int32)
    return high.to(torch.int16).view(torch.bfloat16), low


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.name_to_dtype_map = dict(zip(KEYS, (exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype), strict=True))
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype == torch.float32
        self._scales: dict[Tensor, dict[str, Tensor]] = {}

    def _has_remainders(self, param: Tensor) -> bool:
        return self.store_param_remainders and param.dtype == torch.bfloat16

    def _initialize(self, param: Tensor, name: str) -> None:
        dtype = self.name_to_dtype_map[name]
        kept = torch.int16 if name == "master_param" and self._has_remainders(param) else dtype
        self.state[param][name] = torch.zeros_like(param, dtype=kept)
        if dtype != torch.float32:
            self._scales.setdefault(param, {})[name] = torch.ones(1)

    def initialize_state(self, param: Tensor, store_param_remainders: bool = False) -> None:
        for name in KEYS[: 3 if self.master_weights else 2]:
            self._initialize(param, name)
        if self.master_weights and not self._has_remainders(param):
            self.set_scaled_state(param, "master_param", param.detach().float())

    def get_unscaled_state(self, param: Tensor, name: str) -> Tensor:
        value = self.state[param][name]
        if value.dtype in (torch.float32, torch.int16):
            return value
        return value.float() * self._scales[param][name] if value.dtype == torch.float16 else value.float()

    def set_scaled_state(self, param: Tensor, name: str, value: Tensor) -> None:
        if name not in self.state[param]:
            self._initialize(param, name)
        kept = self.state[param][name]
        if kept.dtype == torch.float16:
            scale = value.abs().max() / LARGEST
            self._scales[param][name].copy_(scale)
            value = value * torch.where(scale > 0, scale.reciprocal(), 0.0)
        assert kept.dtype != torch.int16 or value.dtype == torch.int16
        kept.copy_(value)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.decoupled_grad = param.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + (1 if group["params"] else 0)
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param)
                gradient = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
                if gradient is not None:
                    self._step(param, gradient.float(), group)

    def _step(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        first = self.get_unscaled_state(param, "exp_avg").mul(beta1).add(gradient, alpha=1 - beta1)
        second = self.get_unscaled_state(param, "exp_avg_sq").mul(beta2).add(gradient.square(), alpha=1 - beta2)
        if self._has_remainders(param):
            main = joined(param, self.state[param]["master_param"])
        else:
            main = self.get_unscaled_state(param, "master_param") if self.master_weights else param
        corrected = second.div(1 - beta2 ** group["step"]).sqrt().add(group["eps"])
        update = first.div(1 - beta1 ** group["step"]).div(corrected).add(main, alpha=group["weight_decay"])
        main = main - group["lr"] * update
        self.set_scaled_state(param, "exp_avg", first)
        self.set_scaled_state(param, "exp_avg_sq", second)
        weight, kept = split(main) if self._has_remainders(param) else (main, main)
        param.copy_(weight)
        if self.master_weights:
            self.set_scaled_state(param, "master_param", kept)


def install() -> None:
    """Let Megatron-Core find this in the place of TransformerEngine's; after Megatron is imported."""
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["transformer_engine.pytorch.optimizers"].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    for module in (optimizers, distrib_optimizer):
        module.Adam = FusedAdam
    optimizers.USING_PYTORCH_OPTIMIZER = False
    for module in (optimizers, optimizer_config):
        module.is_te_min_version = lambda *_: True
