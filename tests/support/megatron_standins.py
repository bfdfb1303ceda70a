"""What stands in on a CPU for packages that Megatron-Core uses on a GPU: each function lets Megatron find one of them,
in this process and from then on. Larger ones are in files of their own: `cuda_graph_double`, `flex_dispatch_double`,
`fused_adam_double`, `fused_permutation_double`.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from examples import FOLDER, load_example
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
    """0.16.1 does not find the number of steps where torch's AdamW keeps it, also without us; TransformerEngine's and
    Apex's have no such tensor."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    own = DistributedOptimizer._set_main_param_and_optimizer_states

    def take(leaf: Any, parameter: Tensor, tensors: dict[str, Tensor]) -> None:
        own(leaf, parameter, {"step": torch.tensor(2.0), **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = take


# -- streams, graphs, dispatchers, permutations ------------------------------------------------------------------------


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


def graphs() -> None:
    import cuda_graph_double

    cuda_graph_double.install()


def capture(job: Any, length: int, micro_batches: int) -> bool:
    """Let Megatron capture the graphs of a job."""
    from megatron.core import num_microbatches_calculator
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    if num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        num_microbatches_calculator.init_num_microbatches_calculator(0, None, 2 * micro_batches * 2, 2, 2)
    helper = TECudaGraphHelper(job.models, job.config, length, 2, [job.optimizer])
    helper.create_cudagraphs()
    if job.models[0].ddp_config.overlap_param_gather:
        helper.cuda_graph_set_manual_hooks()
    return True


def flex() -> None:
    import flex_dispatch_double

    flex_dispatch_double.use()


def permutation() -> None:
    """TransformerEngine's fused permutations, and its linear layer, of a whole weight on each rank."""
    import fused_permutation_double
    import megatron.core.transformer.moe.moe_layer as moe_layer
    import megatron_on_cpu

    torch.arange = megatron_on_cpu._on_cpu(torch.arange)
    fused_permutation_double.use()
    moe_layer.HAVE_TE, moe_layer.TELinear = True, Linear


class Linear(nn.Linear):
    """Returns a bias beside."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **_: Any) -> None:
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(rows), None


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


class DelayedLinear(GroupedLinear):
    """Leaves its weights' gradients for `backward_dw`, in the order of the backward passes: it calls what Megatron's
    DistributedDataParallel has registered then."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.left: list[tuple[Tensor, Tensor, list[int]]] = []
        self.hooks: list[Callable[[], None]] = []
        for weight in self.parameters():
            weight.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self.hooks.append(hook)

    def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        return Later.apply(rows, counts, self), None

    def backward_dw(self) -> None:
        rows, gradient, counts = self.left.pop(0)
        for weight, mine, given in zip(self.parameters(), rows.split(counts), gradient.split(counts), strict=True):
            weight.grad = given.T @ mine
        for hook in self.hooks:
            hook()


class Later(torch.autograd.Function):
    """Rows of each expert by its weights, whose gradients are left for later."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], linear: DelayedLinear) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.counts, ctx.linear = counts, linear
        return GroupedLinear.forward(linear, rows, counts)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.linear.left.append((*ctx.saved_tensors, gradient.clone(), ctx.counts))
        pairs = zip(gradient.split(ctx.counts), ctx.linear.parameters(), strict=True)
        return torch.cat([mine @ weight for mine, weight in pairs]), None, None


LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantized(numbers: Tensor, recipe: str) -> Tensor:
    """What FP8 keeps of numbers, in float32; scales are of the tensor, or of blocks along the last dimension."""
    width = numbers.shape[-1]
    block = {"blockwise": 128, "mxfp8": 32}.get(recipe, max(1, width))
    padded = nn.functional.pad(numbers.float(), (0, -width % block)).unflatten(-1, (-1, block))
    if recipe == "tensorwise":
        largest = padded.abs().max() if padded.numel() else padded.new_ones(())
    else:
        largest = padded.abs().amax(dim=-1, keepdim=True) if padded.numel() else padded
    scale = (largest / LARGEST).clamp(min=1e-12)
    if recipe == "mxfp8":
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    kept = (padded / scale).to(torch.float8_e4m3fn).float() * scale
    return kept.flatten(-2)[..., :width]


class Product(torch.autograd.Function):
    """Rows of one expert by its weights; all three products are of FP8."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, kept: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(rows, kept)
        ctx.recipe, ctx.dtype = recipe, weight.dtype
        return (quantized(rows, recipe) @ kept.T).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        rows, kept = ctx.saved_tensors
        of_rows = quantized(gradient, ctx.recipe) @ kept
        of_weight = quantized(gradient.T.contiguous(), ctx.recipe) @ quantized(rows.T.contiguous(), ctx.recipe).T
        return of_rows.to(rows.dtype), of_weight.to(ctx.dtype), None, None


class QuantizedLinear(GroupedLinear):
    """Quantizes inputs, gradients and weights of each expert by themselves, and keeps the quantized weights from the
    first micro-batch to the last."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_first_microbatch, self.kept = True, [torch.empty(0)]

    def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        weights, recipe = list(self.parameters()), str(self.config.fp8_recipe)
        if self.is_first_microbatch:
            self.kept = [quantized(weight.detach(), recipe) for weight in weights]
        self.is_first_microbatch = False
        parts = zip(rows.split(counts), weights, self.kept, strict=True)
        return torch.cat([Product.apply(mine, weight, kept, recipe) for mine, weight, kept in parts]), None


class Padding(nn.Module):
    """Rows of each expert to a multiple of 32, by zeros."""

    def __init__(self, count: int, **_: Any) -> None:
        super().__init__()

    def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, list[int]]:
        parts = [nn.functional.pad(part, (0, 0, 0, -len(part) % 32)) for part in rows.split(counts)]
        return torch.cat(parts), [len(part) for part in parts]


class Unpadding(Padding):
    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:  # type: ignore[override]
        parts = rows.split([count + -count % 32 for count in counts])
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def grouped(linear: type[GroupedLinear] = GroupedLinear) -> None:
    """Let Megatron make experts of ``linear``, in its own `TEGroupedMLP`."""
    import megatron.core.models.gpt.gpt_layer_specs as specs
    import megatron.core.transformer.moe.experts as experts
    import megatron.core.transformer.transformer_config as configs
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    experts.HAVE_TE, experts.Fp8Padding, experts.Fp8Unpadding = True, Padding, Unpadding
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


def quantized_experts() -> None:
    grouped(QuantizedLinear)


def delayed_experts() -> None:
    grouped(DelayedLinear)


# -- optimizers --------------------------------------------------------------------------------------------------------


def fused_adam() -> None:
    import fused_adam_double

    fused_adam_double.install()


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
        model: Megatron's DistributedDataParallel.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._buffers = [*model.buffers, *model.expert_parallel_buffers]
        self._parameters = list(model.parameters())
        self._leaves = [leaf for leaf in optimizer.chained_optimizers if not leaf.is_stub_optimizer]
        self._kept: list[tuple[Tensor, Tensor]] = []

    def free(self) -> None:
        for buffer in self._buffers:
            for data in (buffer.param_data, buffer.grad_data):
                if data is not None and data.untyped_storage().size() > 0:
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
        if self._buffers[0].param_data is None:  # parameters of their own: `.data` is put elsewhere
            assert all(parameter.untyped_storage().resizable() for parameter in self._parameters)
            _elsewhere(self._parameters)
        for leaf in self._leaves:
            if hasattr(leaf.optimizer, "_move_new_state_to_right_device"):
                leaf.optimizer._move_new_state_to_right_device()
                continue
            masters = getattr(leaf, "shard_fp32_from_float16_groups", getattr(leaf, "fp32_from_float16_groups", []))
            _elsewhere([master for group in masters for master in group])
            for state in leaf.optimizer.state.values():
                for key in {"exp_avg", "exp_avg_sq"} & state.keys():
                    assert state[key].untyped_storage().resizable()
                    state[key] = state[key].clone()


def _elsewhere(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        old = tensor.data
        tensor.data = tensor.data.clone()
        old.fill_(float("nan"))  # who keeps the old memory trains with it


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
        return types.SimpleNamespace(wait=lambda: None) if async_op else None

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


# -- adapters, float64 -------------------------------------------------------------------------------------------------


def adapt(model: nn.Module) -> None:
    """Leave adapters of attention alone to be trained, as Megatron-Bridge's LoRA for ``linear_qkv`` and ``linear_proj``
    does, which needs TransformerEngine."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, part in list(model.named_modules()):
        if name.endswith(("linear_qkv", "linear_proj")):
            out, into = part.weight.shape  # type: ignore[misc, union-attr]
            part.linear_in = nn.Parameter(torch.randn(4, into, generator=generator).to(part.weight.dtype))  # type: ignore
            part.linear_out = nn.Parameter(torch.zeros(out, 4, dtype=part.weight.dtype))  # type: ignore
            part.forward = partial(_adapted, part, part.forward)


def _adapted(part: Any, own: Callable[..., Any], rows: Tensor, *args: Any, **kwargs: Any) -> Any:
    result, bias = own(rows, *args, **kwargs)
    return result + (rows @ part.linear_in.T) @ part.linear_out.T, bias


class _WideTorch:
    """``torch`` for a module that names narrow types."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32", "bfloat16") else getattr(torch, name)


def float64() -> None:
    """Where Megatron computes in float32 whatever its weights are: two trainings that differ by rounding alone differ
    by 1e-10 then, and not by a float32's last bit."""
    from megatron.core.optimizer import clip_grads
    from megatron.core.transformer import module
    from megatron.core.transformer.moe import moe_utils, router, token_dispatcher

    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[assignment]
    for one in (clip_grads, module, moe_utils, router, token_dispatcher):
        one.torch = _WideTorch()
    own = torch.Tensor.type

    def named(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = own(tensor, *args, **kwargs)
        return name.replace("Double", "Float") if isinstance(name, str) else name

    torch.Tensor.type = named  # type: ignore[assignment]
