"""What torchtitan 0.3.0 lacks for a CPU, each line with what it is for. Import it before torchtitan; where there is a
GPU leave it out. Nothing here has to do with balancing."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import sys
import types
from types import SimpleNamespace
from typing import Any

import torch
import torch._inductor.runtime.triton_compat  # looks whether there is a triton, before one is made up below
import torch._utils
import torch.distributed as dist
import torch.utils._triton
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.nn.functional import scaled_dot_product_attention


class _Triton(types.ModuleType):
    """Decorators that leave functions as they are, and words."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *given, **options: given[0] if given and callable(given[0]) else lambda function: function


if importlib.util.find_spec("triton") is None:  # torchtitan imports it for kernels that a CPU never runs
    torch.utils._triton.has_triton_package()  # remembers that there is none
    for name in ("triton", "triton.language"):
        module = sys.modules[name] = _Triton(name)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        module.__version__ = "0"  # somebody compares it
    sys.modules["triton"].language = sys.modules["triton.language"]

torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan asks for an accelerator, and takes "cuda" if none
for name, made_up in {  # it looks at the device's memory, for its metrics
    "get_device_name": lambda *device: "cpu",
    "get_device_properties": lambda *device: SimpleNamespace(total_memory=1 << 34, name="cpu"),
    "reset_peak_memory_stats": lambda *device: None,
    "memory_stats": lambda *device: {},
    "empty_cache": lambda: None,
}.items():
    if not hasattr(torch.cpu, name):
        setattr(torch.cpu, name, made_up)
torch.cpu.current_device = lambda: 0  # "cpu" in torch; torchtitan gives it to a barrier, which wants a number
if not hasattr(dist, "set_timeout"):  # torch 2.13 has none; after the first step torchtitan shortens timeouts by it
    dist.set_timeout = lambda timeout, group=None: None


def _take_micro_batches(schedule: type) -> None:
    """Of torch 2.13, not of CPUs: its schedules cut a batch themselves, and torchtitan gives them micro-batches."""
    own = schedule.step

    def step(
        self: Any, *args: Any, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, **options: Any
    ) -> Any:
        inputs = [torch.cat(parts) for parts in zip(*(arg_mbs or ()), strict=True)]
        named = {name: torch.cat([part[name] for part in kwarg_mbs]) for name in (kwarg_mbs or [{}])[0]}
        if target_mbs:
            options["target"] = torch.cat(target_mbs)
        return own(self, *args, *inputs, **named, **options)

    schedule.step = step


for schedule in (PipelineScheduleSingle, PipelineScheduleMulti):
    if "arg_mbs" not in inspect.signature(schedule.step).parameters:
        _take_micro_batches(schedule)

import torchtitan.distributed.fsdp as _fsdp  # noqa: E402 (only now it can be imported)

_without_division = _fsdp.disable_fsdp_gradient_division


def _summed_by_gloo(model: torch.nn.Module) -> None:
    """FSDP multiplies while it sums (PREMUL_SUM), which gloo cannot; the factor is one."""
    _without_division(model)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)


_fsdp.disable_fsdp_gradient_division = _summed_by_gloo


def _all_to_all(output: list[torch.Tensor], given: list[torch.Tensor], group: Any = None) -> None:
    """`torch.distributed.all_to_all` of tensors of unequal lengths, which gloo takes as parts of one alone."""
    received = torch.empty((sum(map(len, output)), *given[0].shape[1:]), dtype=given[0].dtype)
    dist.all_to_all_single(received, torch.cat(given), [*map(len, output)], [*map(len, given)], group=group)
    for part, came in zip(output, received.split([*map(len, output)]), strict=True):
        part.copy_(came)


dist.all_to_all = _all_to_all

BACKEND = "spmd_types" if torch.__version__ >= "2.14" else "partial_dtensor"
"""torchtitan's default where torch can run it."""


def on_cpu(config: Any) -> None:
    """What a config has to say on a CPU; changed in place."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    for layer in config.model_spec.model.layers:  # FlexAttention is for GPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.parallelism.spmd_backend = BACKEND
    config.optimizer.implementation = "for-loop"  # fused ones are for GPUs
    config.training.disable_cuda_graphs = True
    config.activation_checkpoint = None
    config.compile.enable = False


def with_context_parallelism(config: Any) -> None:
    """Let a config have context parallelism: torchtitan has it for FlexAttention, which has no backward on a CPU. The
    products under its mask are taken one by one here, and masks are made without a compiler. Changed in place."""
    from torch.distributed.tensor.experimental._context_parallel import _attention
    from torchtitan.models.common import attention

    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = attention.FlexAttention.Config()
    attention.FlexAttention._compiled_flex_attn = staticmethod(_attend)
    attention._compiled_create_block_mask = _attention._compiled_create_block_mask = create_block_mask


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, block_mask: Any, scale: float, **options: Any
) -> tuple[torch.Tensor, SimpleNamespace]:
    """Also the logarithm of each query's sum, where it is asked for: gpt-oss weighs its sinks by that."""
    mask = create_mask(block_mask.mask_mod, query.shape[0], 1, query.shape[2], key.shape[2], device="cpu")
    if options["enable_gqa"]:
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    if not options["return_aux"].lse:
        return output, SimpleNamespace(lse=None)
    products = (query.float() @ key.float().transpose(-1, -2)) * scale
    return output, SimpleNamespace(lse=products.masked_fill(~mask, float("-inf")).logsumexp(dim=-1))
