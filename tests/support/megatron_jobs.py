"""Jobs of Megatron-Core on a CPU, by its own model, schedules, DistributedDataParallel, optimizers and checkpoints: a
`Row` says what a job is made of, `traces` trains it with experts that stay and with experts that move after each step.

Tensors are read from Megatron's own objects, and put in order by `Balancer.placement` alone. What Megatron asks of CUDA
is answered by ``launch/examples/megatron_on_cpu.py``, what it asks of packages for a GPU by `megatron_standins`.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.newer_megatron import on_newer
from support.ranks import run_ranks
from torch import Tensor

import eplb_runtime as eplb
from eplb_runtime.hosts import AttachError

from . import megatron_standins as standins
from .seen import differing, furthest
from .shuffle import plan_by, plan_shuffle, wait_until_compiled

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
STEPS, MICRO_BATCHES, LENGTH, EXPERTS, HIDDEN, VOCABULARY = 2, 2, 8, 8, 32, 64
"""Defaults: experts move after each step, and the last step is one after a move."""
ADAM = frozenset({"weight", "param", "exp_avg", "exp_avg_sq", "step"})
OFFLOADED = frozenset({"weight", "given", "inner", "exp_avg", "exp_avg_sq", "step"})
OWN: dict[str, Any] = {
    "plain": False,
    "chunks": 1,
    "distributed": True,
    "bf16": True,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "align": False,
    "bucket_size": 4096,
    "clip_grad": 0.1,
    "share": False,
    "grad_reduce_in_fp32": False,
    "stepped": {},
    "frees": False,
    "adapts": False,
    "laid_out": False,
}
"""Options of a job that are none of Megatron's TransformerConfig.

``plain``: no DistributedDataParallel, and an optimizer of torch's. ``chunks``: virtual pipeline stages of a rank.
``distributed``: ``use_distributed_optimizer``. ``align``: gradients and weights travel when the schedule says so.
``bucket_size``: of DistributedDataParallel, in elements. ``share``: embeddings and output weights. ``stepped``: of its
OptimizerConfig. ``frees``: weights, gradients and state are freed after each step, and loaded again. ``adapts``:
attention alone is trained. ``laid_out``: matrices are whole in the shards of buffers, as Megatron-LM has it.
"""


class MegatronLoop:
    """What Megatron's ``get_model`` and its training loop make of options: `OWN`, and those of TransformerConfig."""

    balancer: eplb.Balancer | None = None

    def __init__(self, **options: Any) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.own = own = SimpleNamespace(**{name: options.pop(name, default) for name, default in OWN.items()})
        initialize(options)
        stages = own.chunks if own.chunks > 1 else None
        parallel_state.set_virtual_pipeline_model_parallel_world_size(stages)
        dtype = options.get("params_dtype", torch.bfloat16 if own.bf16 else torch.float32)
        settings: dict[str, Any] = {
            "num_layers": 2 * own.chunks,
            "hidden_size": HIDDEN,
            "num_attention_heads": 4,
            "ffn_hidden_size": HIDDEN,
            "moe_ffn_hidden_size": HIDDEN,
            "num_moe_experts": EXPERTS,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "use_cpu_initialization": True,
            "expert_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": stages,
            "pipeline_dtype": dtype,
            "params_dtype": dtype,
            "bf16": own.bf16,
            **options,
        }
        self.config = config = TransformerConfig(**settings)
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=own.distributed,
            grad_reduce_in_fp32=own.grad_reduce_in_fp32,
            overlap_grad_reduce=own.overlap_grad_reduce,
            overlap_param_gather=own.overlap_param_gather,
            bucket_size=own.bucket_size if own.overlap_grad_reduce else None,
        )
        self.models = [self._chunk(number, stages, ddp) for number in range(own.chunks)]
        self.optimizer: Any = None
        if own.plain:
            self.optimizer = torch.optim.AdamW(self.models[0].parameters(), lr=1e-2)
            return
        if own.overlap_grad_reduce:
            self._use("no_sync_func", [chunk.no_sync for chunk in self.models])
        if own.align:
            self._use("grad_sync_func", [chunk.start_grad_sync for chunk in self.models])
            self._use("param_sync_func", [chunk.start_param_sync for chunk in self.models])
        config.finalize_model_grads_func = finalize_model_grads
        of_optimizer: dict[str, Any] = {
            "optimizer": "adam",
            "lr": 1e-2,
            "clip_grad": own.clip_grad,
            "bf16": own.bf16,
            "fp16": config.fp16,
            "params_dtype": dtype,
            "use_distributed_optimizer": own.distributed,
            "overlap_param_gather": own.overlap_param_gather,
            **own.stepped,
        }
        self.optimizer = get_megatron_optimizer(OptimizerConfig(**of_optimizer), self.models)
        if config.fp16:
            config.grad_scale_func = self.optimizer.scale_loss

    def _use(self, name: str, functions: list[Any]) -> None:
        setattr(self.config, name, functions if len(functions) > 1 else functions[0])

    def _chunk(self, number: int, stages: int | None, ddp: Any) -> Any:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
        from megatron.core.transformer.module import Float16Module

        config, stage = self.config, number if stages else None
        where = {"ignore_virtual": False, "vp_stage": stage}
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="LayerNorm", vp_stage=stage
        )
        mtp = None
        if config.mtp_num_layers:
            mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=stage)
        torch.manual_seed(parallel_state.get_pipeline_model_parallel_rank() + 2 * number)
        model = GPTModel(
            config,
            spec,
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=self.own.share,
            mtp_block_spec=mtp,
            vp_stage=stage,
        )
        place = parallel_state.get_expert_model_parallel_rank() + 2 * parallel_state.get_pipeline_model_parallel_rank()
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                seed = sum(ord(letter) * (at + 1) for at, letter in enumerate(name)) + place
                parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(seed))
        if self.own.adapts:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("linear_qkv" in name or "linear_proj" in name)
        if self.own.plain:
            return model
        wrapped = Float16Module(config, model) if config.bf16 or config.fp16 else model
        wrap = standins.with_a_layout if self.own.laid_out else DistributedDataParallel
        return wrap(config, ddp, wrapped, disable_bucketing=number > 0)

    def train(self, steps: range) -> list[tuple[Any, ...]]:
        """Losses of each step, its gradient norm, and the loss scale where there is one."""
        seen = []
        for step in steps:
            seen.append(self._plain_step(step) if self.own.plain else self._step(step))
            if self.own.frees:
                memory = standins.Memory(self.models[0], self.optimizer)
                memory.free()
                memory.load()
        return seen

    def _step(self, step: int) -> tuple[Any, ...]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        chunks = len(self.models)
        count = MICRO_BATCHES * chunks  # of fewer the interleaved schedule has no steady phase
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = [batches_of(step, count) for _ in self.models]
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches if chunks > 1 else batches[0],
            model=self.models,
            num_microbatches=count,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        _, norm, _ = self.optimizer.step()
        scale = (float(self.optimizer.get_loss_scale()),) if self.config.fp16 else ()
        return (*(loss.item() for loss in losses), norm, *scale)

    def _plain_step(self, step: int) -> tuple[Any, ...]:
        assert self.balancer is not None
        batches = batches_of(step)
        losses = []
        for number in range(MICRO_BATCHES):
            deferred = self.balancer.no_sync() if number + 1 < MICRO_BATCHES else standins.span()
            with deferred:
                output, loss_of = forward_step(batches, self.models[0])
                loss = loss_of(output)[0] / MICRO_BATCHES
                loss.backward()
            losses.append(loss.item())
        norm = self.balancer.clip_grad_norm_(self.own.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return (*losses, norm.item())

    def tensors(self, placement: eplb.Placement | None) -> dict[str, dict[Any, Any]]:
        """All that this rank trains: whole tensors, and ranges of what optimizers keep of experts with where they
        begin; experts by layer of the whole model and logical number.

        Args:
            placement: where experts are; None: as Megatron has put them.
        """
        for model in self.models if self.own.overlap_param_gather else ():
            model.start_param_sync(force_sync=True)  # where the next forward pass would do it
        leaf_of = {id(parameter): leaf for leaf in leaves_of(self.optimizer) for parameter in held(leaf)}
        whole, ranges = self._dense(), {}
        for key, parameter in self.experts(placement):
            whole[(*key, "weight")] = parameter
            if leaf := leaf_of.get(id(parameter)):  # else it is frozen, or stepped on another rank
                begin = 0
                if hasattr(leaf, "_get_model_param_range_map"):
                    begin = leaf._get_model_param_range_map(parameter)["param"].start
                for what, value in state_of(leaf, parameter).items():
                    if torch.is_tensor(value):
                        ranges[(*key, what)] = (begin, value.detach().clone().flatten())
        return {"whole": {key: value.detach().clone().flatten() for key, value in whole.items()}, "ranges": ranges}

    def experts(self, placement: eplb.Placement | None) -> Iterator[tuple[tuple[int, int, str], Any]]:
        """This rank's expert parameters by layer of the whole model, logical number and name."""
        from megatron.core import parallel_state

        first = parallel_state.get_expert_model_parallel_rank() * self.config.num_moe_experts // 2
        for row, module in self.layers().items():
            for name, parameter in module.experts.named_parameters():
                # local_experts.3.linear_fc1.weight, or linear_fc1.weight3 of grouped experts
                before, what, after = re.fullmatch(r"(?:local_experts\.(\d+)\.)?(.*?)(\d*)", name).groups()  # type: ignore[union-attr]
                number = first + int(before or after)
                if placement is not None:
                    number = int(placement.physical_to_logical[row, number])
                yield (row, number, what), parameter

    def layers(self) -> dict[int, Any]:
        """This rank's MoE layers by their numbers over the whole model."""
        layers = {
            (stage_of(number), name): module
            for number, chunk in enumerate(self.models)
            for name, module in chunk.named_modules()
            if type(module).__name__ == "MoELayer"
        }
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [(key, position) for position, key in enumerate(layers)])
        order = sorted({(key[0], position, key[1]) for rows in everyone for key, position in rows})
        row_of = {(stage, name): row for row, (stage, _, name) in enumerate(order)}
        return {row_of[key]: module for key, module in layers.items()}

    def _dense(self) -> dict[Any, Tensor]:
        from megatron.core import parallel_state

        part = parallel_state.get_tensor_model_parallel_rank()
        return {
            ("dense", stage_of(number), name, part): tensor
            for number, chunk in enumerate(self.models)
            for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]
            if ".experts." not in name and torch.is_tensor(tensor)
        }


def initialize(options: Mapping[str, Any]) -> None:
    """Make Megatron's process groups, unless those that are there have these sizes."""
    from megatron.core import parallel_state

    kinds = ("tensor", "pipeline", "context")
    sizes = {f"{kind}_model_parallel": options.get(f"{kind}_model_parallel_size", 1) for kind in kinds[:2]}
    sizes["context_parallel"] = options.get("context_parallel_size", 1)
    sizes["expert_model_parallel"] = 2
    sizes["expert_tensor_parallel"] = options.get("expert_tensor_parallel_size", sizes["tensor_model_parallel"])
    if parallel_state.is_initialized():
        if {name: getattr(parallel_state, f"get_{name}_world_size")() for name in sizes} == sizes:
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**{f"{name}_size": size for name, size in sizes.items()})


def stage_of(chunk: int) -> int:
    from megatron.core import parallel_state

    return 2 * chunk + parallel_state.get_pipeline_model_parallel_rank()


def leaves_of(optimizer: Any) -> list[Any]:
    """The optimizers in a chain that step something."""
    inside = getattr(optimizer, "chained_optimizers", None)
    if inside is not None:
        return [leaf for one in inside for leaf in leaves_of(one)]
    return [] if getattr(optimizer, "is_stub_optimizer", False) else [optimizer]


def held(leaf: Any) -> list[Tensor]:
    """The parameters that an optimizer steps on this rank."""
    if hasattr(leaf, "model_param_group_index_map"):
        return list(leaf.model_param_group_index_map)
    if hasattr(leaf, "float16_groups"):
        return [parameter for group in [*leaf.float16_groups, *leaf.fp32_from_fp32_groups] for parameter in group]
    groups = leaf.param_groups if isinstance(leaf, torch.optim.Optimizer) else leaf.optimizer.param_groups
    return [parameter for group in groups for parameter in group["params"]]


def state_of(leaf: Any, parameter: Tensor) -> Mapping[str, Any]:
    """What an optimizer keeps of a parameter, from its own dictionaries."""
    inner = leaf if isinstance(leaf, torch.optim.Optimizer) else leaf.optimizer
    given = parameter
    if hasattr(leaf, "model_param_group_index_map"):
        group, place = leaf.model_param_group_index_map[parameter]
        given = inner.param_groups[group]["params"][place]
    if hasattr(inner, "param_to_inner_param"):  # HybridDeviceOptimizer
        stepped = inner.param_to_inner_param[given]
        (state,) = (one.state[stepped] for one in inner.sub_optimizers if stepped in one.state)
        return {"given": given, "inner": stepped, **{key: state[key] for key in state if key != "master_param"}}
    if hasattr(inner, "_scales"):  # TransformerEngine's FusedAdam
        scales = inner._scales.get(given, {})
        return {**inner.state[given], **{f"scale of {key}": scale for key, scale in scales.items()}}
    if hasattr(leaf, "_get_main_param_and_optimizer_states"):
        return dict(leaf._get_main_param_and_optimizer_states(parameter))
    main = getattr(parameter, "main_param", parameter)
    return {"param": main, **inner.state[main]}


def batches_of(step: int, count: int = MICRO_BATCHES) -> Iterator[Tensor]:
    from megatron.core import parallel_state

    for number in range(count):
        seed = 1009 * step + 31 * number + parallel_state.get_data_parallel_rank()
        drawn = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(seed))
        yield (VOCABULARY * drawn**3).long()  # small numbers come often


def forward_step(
    batches: Iterator[Tensor], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[[Tensor], Any]]:
    """Losses of a micro-batch, of this context-parallel rank's part of the sequence, whose queries see all keys before
    them; asked for a plan, what Megatron's combined schedule runs piece by piece."""
    from megatron.core import parallel_state

    ids = next(batches)
    length = LENGTH // parallel_state.get_context_parallel_world_size()
    first = length * parallel_state.get_context_parallel_rank()
    mine = slice(first, first + length)
    positions = torch.arange(LENGTH).expand_as(ids)[:, mine]
    causal = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)[:, :, mine]
    run = model.build_schedule_plan if return_schedule_plan else model
    return run(input_ids=ids[:, mine], position_ids=positions, attention_mask=causal, labels=ids[:, mine]), loss_of


def loss_of(output: Tensor) -> tuple[Tensor, Tensor]:
    loss = output.float().mean()
    return loss, loss.detach()


# -- rows, and what comes of them --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    """What came of a training on a rank.

    Args:
        seen: losses and norms of each step.
        load: of each decision, ``[steps][L][E]`` over all ranks.
        sources: where shares of expert work in a step were from.
    """

    seen: list[tuple[Any, ...]]
    tensors: dict[str, Any]
    moved: int = 0
    placement: list[list[int]] = field(default_factory=list)
    load: list[Any] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)
    more: Any = None


@dataclass(frozen=True)
class Row:
    """A job that differs in kind from the others.

    Args:
        options: of `MegatronLoop`.
        standins: functions of `megatron_standins` that a rank calls before anything is made.
        alone: how far Megatron without us is from the training with moves in the first step, relative; later 1e-2; 0:
            no bit in any tensor; None: not compared.
        close: how far moves may change what is trained, relative; 0: not by a bit.
        saves: Megatron saves the training with moves; read back by Megatron alone, and where experts stand elsewhere.
        refused: a change of the job -> what attach says in one line then.
        more: looks at a job after its last step; the same with moves and without.
    """

    options: Mapping[str, Any]
    standins: tuple[str, ...] = ()
    ranks: int = 2
    steps: int = STEPS
    kinds: frozenset[str] = ADAM
    alone: float | None = None
    close: float = 0.0
    saves: bool = False
    short: bool = False
    newer: bool = False
    refused: Mapping[Callable[[MegatronLoop], Any], str] = field(default_factory=dict)
    more: Callable[[MegatronLoop, eplb.Balancer], Any] = lambda job, balancer: None

    def make(self) -> MegatronLoop:
        return MegatronLoop(**self.options)


def attached(job: MegatronLoop, move: bool, interval: int = 1) -> eplb.Balancer:
    config = eplb.BalancerConfig(
        interval=interval,
        gate="always",
        policy="incremental" if move else "static",
        migration=eplb.MigrationConfig(lag=0),
        dense_gradients="allreduce" if job.own.plain else "host",
    )
    job.balancer = eplb.attach(job.models, job.optimizer, config=config)
    if move:
        wait_until_compiled(job.balancer)
        plan_by(job.balancer, plan_shuffle)
    return job.balancer


def trained(row: Row, move: bool, folder: Path | None = None) -> Trace:
    """Train a row's job, with every expert moved after each step or none, and let Megatron save it."""
    job = row.make()
    balancer, measured = attached(job, move), []
    balancer.events.called_at_once.append(lambda event: measured.append(event) if hasattr(event, "load") else None)
    seen = job.train(range(row.steps))
    trace = Trace(
        seen,
        job.tensors(balancer.placement),
        moved_by(balancer),
        balancer.placement.physical_to_logical.tolist(),
        [rows.tolist() for event in measured if event.load is not None for rows in event.load],
        {event.moe_share_source for event in measured},
        row.more(job, balancer),
    )
    if folder is not None:
        save(sharded(job, loading=False), folder)
    balancer.close()
    return trace


def moved_by(balancer: eplb.Balancer) -> int:
    return sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts"))


def of_rows(rank: int, module: str, names: list[str], folder: str) -> dict[str, dict[str, Any]]:
    """All that a rank finds of rows that are prepared in the same way."""
    rows: Mapping[str, Row] = importlib.import_module(module).ROWS
    for prepare in rows[names[0]].standins:
        getattr(standins, prepare)()
    found: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(names):
        row, where = rows[name], Path(folder) / str(number)
        found[name] = {
            "static": trained(row, False),
            "moving": trained(row, True, where if row.saves else None),
            "refused": [(line, refusal(row, change)) for change, line in row.refused.items()],
        }
        if row.alone is not None:
            job = row.make()
            found[name]["alone"] = Trace(job.train(range(row.steps)), job.tensors(None))
        if row.saves:
            found[name] |= read_back(row, where)
    return found


def traces(module: str, name: str) -> list[dict[str, Any]]:
    """What each rank has found of a row of a module's ``ROWS``: ``static``, ``moving``, and what else it asks for."""
    rows: Mapping[str, Row] = importlib.import_module(module).ROWS

    def kind(row: Row) -> Any:
        return row.standins, row.ranks, row.short, row.newer

    return [
        found[name] for found in _of_group(module, tuple(key for key in rows if kind(rows[key]) == kind(rows[name])))
    ]


@cache
def _of_group(module: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
    row = importlib.import_module(module).ROWS[names[0]]
    with TemporaryDirectory() as folder:
        given = (module, list(names), folder)
        return run_ranks(row.ranks, on_newer, of_rows, *given) if row.newer else run_ranks(row.ranks, of_rows, *given)


def refusal(row: Row, change: Callable[[MegatronLoop], Any]) -> str:
    """The line in which attach refuses a job."""
    job = row.make()
    change(job)
    with pytest.raises((AttachError, RuntimeError)) as error:
        attached(job, move=False)
    return str(error.value)


def save(state: dict[str, Any], folder: Path) -> None:
    """Megatron writes by processes of its own, which ranks of these tests may not start otherwise."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
    dist.barrier()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    dist_checkpointing.save(state, str(folder))
    if filesystem_async._results_queue is not None:
        filesystem_async._results_queue._manager.shutdown()
        filesystem_async._results_queue = None


def read_back(row: Row, folder: Path) -> dict[str, Trace]:
    """Tensors of jobs that have trained something else, before they read what was saved, and after: Megatron alone, and
    one whose experts stand elsewhere."""
    job = row.make()
    job.train(range(7, 8))  # Megatron loads what has stepped; all of it is overwritten
    before = job.tensors(None)
    load(job, folder)
    other = row.make()
    balancer = attached(other, move=True)
    other.train(range(7, 8))
    load(other, folder)
    after = other.tensors(balancer.placement)
    balancer.close()
    return {"before": Trace([], before), "read": Trace([], job.tensors(None)), "read elsewhere": Trace([], after)}


def load(job: MegatronLoop, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    with torch.serialization.safe_globals([torch.optim.AdamW]):  # groups of a hybrid one name the classes inside it
        state = dist_checkpointing.load(sharded(job, loading=True), str(folder))
    for number, model in enumerate(job.models):
        model.load_state_dict(state[f"model{number}"])
    job.optimizer.load_state_dict(state["optimizer"])


def sharded(job: MegatronLoop, loading: bool, way: str = "fully_reshardable") -> dict[str, Any]:
    # Megatron adds this job's groups.
    metadata: dict[str, Any] = {"singleton_local_shards": False, "distrib_optim_sharding_type": way}
    of_models = {
        f"model{number}": model.module.sharded_state_dict(metadata=metadata) for number, model in enumerate(job.models)
    }
    state = job.optimizer.sharded_state_dict(of_models, is_loading=loading, metadata=metadata)
    return {**of_models, "optimizer": state}


def whole(of_ranks: list[Trace]) -> dict[Any, Tensor]:
    """All tensors of the job. Those that several ranks have must be the same on them; ranges must meet end to end."""
    found: dict[Any, Tensor] = {}
    ranges: dict[Any, dict[int, Tensor]] = {}
    for trace in of_ranks:
        for key, tensor in trace.tensors["whole"].items():
            assert torch.equal(found.setdefault(key, tensor), tensor), key
        for key, (begin, tensor) in trace.tensors["ranges"].items():
            begin = 0 if tensor.numel() == 1 else begin  # a number of steps, or a scale
            assert torch.equal(ranges.setdefault(key, {}).setdefault(begin, tensor), tensor), key
    for key, of_key in ranges.items():
        parts = [of_key[begin] for begin in sorted(of_key)]
        assert sorted(of_key) == [sum(map(len, parts[:number])) for number in range(len(parts))], key
        found[key] = torch.cat(parts)
        assert len(found[key]) in (1, len(found[(*key[:3], "weight")])), key
    return found


def assert_moved_without_a_change(row: Row, of_ranks: list[dict[str, Any]]) -> None:
    """A row's training with moves is the one without, and what else the row says of it is so."""
    static, moving = ([found[which] for found in of_ranks] for which in ("static", "moving"))
    assert static[0].moved == 0 < moving[0].moved
    assert all(of_layer != sorted(of_layer) for trace in moving for of_layer in trace.placement)
    some, others = whole(static), whole(moving)
    experts = [key for key in some if key[0] != "dense"]
    places = static[0].placement
    assert {key[:2] for key in experts} == {(at, expert) for at, of_layer in enumerate(places) for expert in of_layer}
    kinds = {key[3] for key in experts}
    assert kinds == row.kinds and len(experts) == 2 * sum(map(len, places)) * len(kinds)
    for of_static, of_moving in zip(static, moving, strict=True):
        assert of_moving.more == of_static.more and (row.close or of_moving.load == of_static.load)
        assert_close(of_moving.seen, of_static.seen, row.close)
    if row.close:
        assert 0 < furthest(some, others) < row.close
    else:
        assert differing(some, others) == []
    if choices := choices_of(row):
        assert {total for of_step in moving[0].load for total in map(sum, of_step)} == {choices}
    if row.alone is not None:
        alone = [found["alone"] for found in of_ranks]
        assert row.alone or differing(whole(alone), others) == []
        for of_alone, of_moving in zip(alone, moving, strict=True):  # Megatron's own norm is one sum in float32
            assert_close(of_moving.seen[:1], of_alone.seen[:1], row.alone or 1e-6)
            assert_close(of_moving.seen[1:], of_alone.seen[1:], 1e-2 if row.alone else 1e-6)
    if row.saves:
        before, read, elsewhere = (
            whole([found[w] for found in of_ranks]) for w in ("before", "read", "read elsewhere")
        )
        assert differing(before, others) != []
        assert differing(read, others) == [] and differing(elsewhere, others) == []
    for found in of_ranks:
        assert all(line in said and "\n" not in said for line, said in found["refused"]), found["refused"]


def assert_close(ours: list[tuple[Any, ...]], theirs: list[tuple[Any, ...]], most: float) -> None:
    """Of losses and norms; None is the norm of a step that was skipped."""
    numbers = [[-1.0 if number is None else number for step in seen for number in step] for seen in (ours, theirs)]
    assert numbers[0] == pytest.approx(numbers[1], rel=most, abs=0.0)


def choices_of(row: Row) -> int:
    """Choices of experts of a layer in a step, of all ranks; 0: some are made twice, or dropped."""
    options = row.options
    if options.get("mtp_use_repeated_layer") or "moe_expert_capacity_factor" in options:
        return 0
    share = 1
    for kind in ("tensor_model", "pipeline_model", "context"):
        share *= options.get(f"{kind}_parallel_size", 1)
    batches = row.ranks // share * MICRO_BATCHES * options.get("chunks", 1)
    return int(batches * 2 * LENGTH * options.get("moe_router_topk", 2))
