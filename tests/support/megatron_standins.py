"""What stands in on a CPU for packages that Megatron-Core uses on a GPU: each function lets Megatron find one of them,
in this process and from then on. Larger ones are in files of their own: `flex_dispatch_double`, `fused_adam_double`.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from support.examples import FOLDER, load_example
from support.flex_dispatch_double import use as flex  # noqa: F401
from support.fused_adam_double import install as fused_adam  # noqa: F401
from torch import Tensor, nn


def cpu() -> None:
    """Let Megatron's modules of torch work, also under context and sequence parallelism. Before all others."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    load_example("megatron_gpt")
    import megatron.core.models.backends as backends
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    backends.DotProductAttention = _gathered_attention()
    own = WrappedTorchNorm.__new__

    def new(kind: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        """Gradients of its weights are added up, as of Apex's and TransformerEngine's norms."""
        alone = copy.copy(config)
        alone.sequence_parallel = False  # it takes no other
        norm = own(kind, alone, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = staticmethod(new)


def _gathered_attention() -> type:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class GatheredAttention(DotProductAttention):
        """Has keys and values of all context-parallel ranks, as TransformerEngine's with ``all_gather``."""

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            alone = copy.copy(config)
            alone.context_parallel_size = 1  # its constructor takes no other
            super().__init__(alone, *args, **kwargs)

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            group = parallel_state.get_context_parallel_group()
            if group.size() > 1:
                key, value = (gather_from_sequence_parallel_region(one, group=group) for one in (key, value))
            output: Tensor = super().forward(query, key, value, *args, **kwargs)
            return output

    return GatheredAttention


def adamw_steps() -> None:
    """0.16.1 does not find the number of steps where torch's AdamW keeps it, also without us."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    own = DistributedOptimizer._set_main_param_and_optimizer_states

    def take(leaf: Any, parameter: Tensor, tensors: dict[str, Tensor]) -> None:
        own(leaf, parameter, {"step": torch.tensor(2.0), **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = take


# -- streams, dispatchers ----------------------------------------------------------------------------------------------


class Event:
    """A CUDA event where everything is done when it returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    wait = synchronize = record


@contextlib.contextmanager
def span(*_: Any, **__: Any) -> Iterator[None]:
    yield


def streams() -> None:
    """What schedules that overlap ask of CUDA and TransformerEngine besides."""
    import megatron.core.tensor_parallel.random as random
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    torch.cuda.Event, torch.cuda.nvtx.range = Event, span  # type: ignore[misc]
    torch.cuda.Stream.wait_event = torch.Tensor.record_stream = lambda *_: None  # type: ignore[assignment]
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    random.activation_recompute_forward = random.fp8_autocast = span
    if not hasattr(RowParallelLinear, "backward_dw"):
        RowParallelLinear.backward_dw = lambda _: None  # as ColumnParallelLinear's


# -- experts -----------------------------------------------------------------------------------------------------------


class GroupedLinear(nn.Module):
    """TransformerEngine's parameters, and one product for each expert."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        self.config = config
        for number in range(num_gemms):
            weight = nn.Parameter(torch.zeros(output_size, input_size, dtype=config.params_dtype))
            weight.allreduce = False  # type: ignore[attr-defined]
            self.register_parameter(f"weight{number}", weight)

    def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        pairs = zip(rows.split(counts), self.parameters(), strict=True)
        return torch.cat([nn.functional.linear(mine, weight) for mine, weight in pairs]), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """As of Megatron's wrapper: experts by their numbers over all ranks."""
        from megatron.core import parallel_state
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        weights, found = list(self.parameters()), {}
        first = parallel_state.get_expert_model_parallel_rank() * len(weights)
        for number, weight in enumerate(weights):
            place = (len(sharded_offsets), first + number, 2 * len(weights))
            (entry,) = make_sharded_tensors_for_checkpoint(
                {"weight": weight}, prefix, {}, (*sharded_offsets, place), dp_cp_group=metadata["dp_cp_group"]
            ).values()
            holder = parallel_state.get_expert_data_parallel_rank()
            found[f"{prefix}weight{number}"] = replace(entry, replica_id=(*entry.replica_id[:2], holder))
        return found


class CachingLinear(GroupedLinear):
    """Computes with weights that it has rounded in the first micro-batch of a step, as TransformerEngine keeps FP8."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_first_microbatch, self.kept = True, [torch.empty(0)]

    def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        if self.is_first_microbatch:
            self.kept = [weight.detach().to(torch.float8_e4m3fn).to(weight.dtype) for weight in self.parameters()]
        self.is_first_microbatch = False
        parts = zip(rows.split(counts), self.parameters(), self.kept, strict=True)
        products = [nn.functional.linear(mine, weight + (kept - weight).detach()) for mine, weight, kept in parts]
        return torch.cat(products), None


def grouped(linear: type[GroupedLinear] = GroupedLinear) -> None:
    """Let Megatron make experts of ``linear``, in its own `TEGroupedMLP`."""
    import megatron.core.models.gpt.gpt_layer_specs as specs
    import megatron.core.transformer.moe.experts as experts
    import megatron.core.transformer.transformer_config as configs
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    experts.HAVE_TE = True
    experts.Fp8Padding = lambda *_, **__: lambda rows, counts: (rows, counts)
    experts.Fp8Unpadding = lambda *_, **__: lambda rows, counts: rows
    configs.is_te_min_version = lambda *_: True
    own = specs.get_gpt_decoder_block_spec

    def made(*args: Any, **kwargs: Any) -> Any:
        spec = own(*args, **kwargs)
        linears = MLPSubmodules(linear_fc1=linear, linear_fc2=linear)
        for layer in spec.layer_specs:
            mlp = layer.submodules.mlp
            if isinstance(mlp, partial):  # since 0.18 makers of modules are partial functions
                mlp.keywords["submodules"].experts = partial(experts.TEGroupedMLP, submodules=linears)
            else:
                mlp.submodules.experts = ModuleSpec(module=experts.TEGroupedMLP, submodules=linears)
        return spec

    specs.get_gpt_decoder_block_spec = made


def caching_experts() -> None:
    grouped(CachingLinear)


# -- optimizers --------------------------------------------------------------------------------------------------------


def device() -> None:
    """Tensors that HybridDeviceOptimizer is given are on a device for it, and so is what it makes of them there; on a
    CPU it finds nothing to copy into host memory."""
    import megatron_on_cpu
    from megatron.core.optimizer import optimizer_config
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    optimizer_config.is_te_min_version = lambda *_: True  # it compares the version of a TransformerEngine that is none
    megatron_on_cpu.NoStream.wait = lambda *_: None
    torch.cuda.is_current_stream_capturing = lambda: False
    divide = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def divided(optimizer: Any, fraction: float) -> Any:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.on_device = True
        return divide(optimizer, fraction)

    def staying(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result = own(tensor, *args, **kwargs)
            caller = sys._getframe(1).f_globals["__name__"]
            if getattr(tensor, "on_device", False) and caller.endswith("hybrid_optimizer"):
                result.on_device = True  # type: ignore[attr-defined]
            return result

        return made

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = divided
    torch.Tensor.is_cuda = property(lambda tensor: getattr(tensor, "on_device", False))  # type: ignore[assignment]
    for name in ("detach", "clone", "float"):
        setattr(torch.Tensor, name, staying(getattr(torch.Tensor, name)))
    torch.Tensor.cpu = lambda tensor: torch.empty_like(tensor).copy_(tensor)  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[assignment]
    own = torch.Tensor.to
    torch.Tensor.to = lambda tensor, *a, **k: tensor if a == ("cuda",) else own(tensor, *a, **k)  # type: ignore[assignment]


class Memory:
    """Weights, gradients and optimizer state of a job, freed and loaded as verl's functions do it around a rollout.

    Args:
        model: Megatron's DistributedDataParallel, with its distributed optimizer.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._buffers = [*model.buffers, *model.expert_parallel_buffers]
        self._leaves = [leaf for leaf in optimizer.chained_optimizers if not leaf.is_stub_optimizer]
        self._kept: list[tuple[Tensor, Tensor]] = []

    def free(self) -> None:
        for data in (data for buffer in self._buffers for data in (buffer.param_data, buffer.grad_data)):
            self._kept.append((data, data.clone()))
            data.untyped_storage().resize_(0)
        self._move_state()

    def load(self) -> None:
        taken = [torch.empty_like(copy) for _, copy in self._kept]  # loaded memory begins at another address
        for data, copied in self._kept:
            data.untyped_storage().resize_(copied.untyped_storage().size())
            data.copy_(copied)
        for buffer in self._buffers:
            buffer.grad_data.zero_()
        self._move_state()
        del taken

    def _move_state(self) -> None:
        """Who keeps the old memory trains with it."""
        for leaf in self._leaves:
            for master in (master for group in leaf.shard_fp32_from_float16_groups for master in group):
                old, master.data = master.data, master.data.clone()
                old.fill_(float("nan"))
            for state in leaf.optimizer.state.values():
                for key in {"exp_avg", "exp_avg_sq"} & state.keys():
                    state[key] = state[key].clone()


def gathers_of_any_sizes() -> None:
    """Let torch gather tensors of several sizes over gloo, as NCCL does and Megatron's layer-wise optimizer asks."""
    own = dist.all_gather

    def all_gather(of_all: list[Tensor], mine: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({tensor.numel() for tensor in of_all}) == 1:
            return own(of_all, mine, group=group, async_op=async_op)
        for number, tensor in enumerate(of_all):
            if number == dist.get_rank(group):
                tensor.copy_(mine)
            dist.broadcast(tensor, dist.get_process_group_ranks(group)[number], group=group)
        return SimpleNamespace(wait=lambda: None) if async_op else None

    dist.all_gather = all_gather


def with_a_layout(config: Any, ddp: Any, module: Any, **options: Any) -> Any:
    """DistributedDataParallel as Megatron-LM's `wrap_model_chunks_with_ddp` makes it for a layer-wise optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import distributed_data_parallel
    from megatron.core.optimizer import layer_wise_optimizer as layer_wise

    ddp.use_distributed_optimizer = True
    ranks = parallel_state.get_data_parallel_world_size()
    layer_wise.tag_params_for_buffer_routing([module])
    layout = layer_wise.LayerWiseDistributedOptimizer.compute_full_param_layout(
        list(module.parameters()), ddp.bucket_size, ranks, ddp, expert_data_parallel_world_size=1
    )
    return distributed_data_parallel.DistributedDataParallel(config, ddp, module, full_param_layout=layout, **options)
