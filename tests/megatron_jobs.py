"""Jobs of Megatron-Core on a CPU, by its own schedules, DistributedDataParallel, optimizers and checkpoints: how tests
make them, train them with experts that move after each step, and compare what came of it.

Tensors are read from Megatron's own objects, and put in order by `Balancer.placement` alone. What Megatron asks of CUDA
is answered by ``launch/examples/megatron_cpu.py``.
"""

from __future__ import annotations

import copy
import importlib.util
import multiprocessing
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples import FOLDER, load_example
from support.shuffle import plan_by, plan_shuffle, wait_until_compiled
from torch import Tensor

import eplb_runtime as eplb
from eplb_runtime.hosts import AttachError

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
long_megatron = [needs_megatron, pytest.mark.long]
"""Of files that repeat in another shape what `test_megatron` and `test_megatron_divided` show."""
STEPS, MICRO_BATCHES, LENGTH, EXPERTS, HIDDEN, VOCABULARY = 2, 2, 8, 8, 32, 64
"""Defaults: experts move after each step, and the last step is one after a move."""
INTERLEAVED = {"chunks": 2, "overlap_p2p_comm": True, "batch_p2p_comm": False}
SHARDING = {"singleton_local_shards": False, "distrib_optim_sharding_type": "fully_reshardable"}


def prepare(**parallel: int) -> None:
    """Initialize Megatron's parallel state, with 2 expert-parallel ranks."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    load_example("megatron_gpt")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, **parallel)


class Job:
    """What Megatron's ``get_model`` and its training loop make of a case.

    Args:
        chunks: virtual pipeline stages of a rank.
        distributed: ``use_distributed_optimizer``.
        align: gradients and weights travel when Megatron's schedule says so (``grad_sync_func``, ``param_sync_func``).
        bucket_size: of DistributedDataParallel, in elements.
        share: embeddings and output weights.
        stepped: more of its OptimizerConfig.
        options: of its TransformerConfig.
    """

    def __init__(
        self,
        *,
        chunks: int = 1,
        distributed: bool = True,
        bf16: bool = True,
        overlap_grad_reduce: bool = False,
        overlap_param_gather: bool = False,
        align: bool = False,
        bucket_size: int = 4096,
        clip_grad: float = 0.1,
        share: bool = False,
        grad_reduce_in_fp32: bool = False,
        stepped: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.transformer_config import TransformerConfig

        parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks if chunks > 1 else None)
        dtype = torch.bfloat16 if bf16 else torch.float32
        settings: dict[str, Any] = {
            "num_layers": 4,
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
            "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
            "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
            "pipeline_dtype": dtype,
            "params_dtype": dtype,
            "bf16": bf16,
            **options,
        }
        self.config = config = TransformerConfig(**settings)
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed,
            grad_reduce_in_fp32=grad_reduce_in_fp32,
            overlap_grad_reduce=overlap_grad_reduce,
            overlap_param_gather=overlap_param_gather,
            bucket_size=bucket_size if overlap_grad_reduce else None,
            delay_wgrad_compute=bool(options.get("delay_wgrad_compute")),
        )
        self.models = [self._chunk(number, chunks, ddp, share) for number in range(chunks)]
        if overlap_grad_reduce:
            self._use("no_sync_func", [chunk.no_sync for chunk in self.models])
        if align:
            self._use("grad_sync_func", [chunk.start_grad_sync for chunk in self.models])
            self._use("param_sync_func", [chunk.start_param_sync for chunk in self.models])
        config.finalize_model_grads_func = finalize_model_grads
        of_optimizer: dict[str, Any] = {
            "optimizer": "adam",
            "lr": 1e-2,
            "clip_grad": clip_grad,
            "bf16": bf16,
            "params_dtype": dtype,
            "use_distributed_optimizer": distributed,
            "overlap_param_gather": overlap_param_gather,
            **(stepped or {}),
        }
        optimizer_config = OptimizerConfig(**of_optimizer)
        self.optimizer = get_megatron_optimizer(optimizer_config, self.models)

    def _use(self, name: str, functions: list[Any]) -> None:
        setattr(self.config, name, functions if len(functions) > 1 else functions[0])

    def _chunk(self, number: int, chunks: int, ddp: Any, share: bool) -> Any:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
        from megatron.core.transformer.module import Float16Module

        config = self.config
        stage = number if chunks > 1 else None
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
            share_embeddings_and_output_weights=share,
            mtp_block_spec=mtp,
            vp_stage=stage,
        )
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                place = parallel_state.get_expert_model_parallel_rank()
                place += 2 * parallel_state.get_pipeline_model_parallel_rank()
                generator = torch.Generator().manual_seed(hash_of(name) + place)
                parameter.data.normal_(std=0.3, generator=generator)
        wrapped = Float16Module(config, model) if config.bf16 or config.fp16 else model
        return DistributedDataParallel(config, ddp, wrapped, disable_bucketing=number > 0)

    def train(self, steps: range) -> list[tuple[Any, ...]]:
        """Losses and the gradient norm of each step, by Megatron's own schedule."""
        return self.train_by(forward_step, steps)

    def train_by(self, forward_step: Callable[..., Any], steps: range) -> list[tuple[Any, ...]]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        chunks = len(self.models)
        count = MICRO_BATCHES * chunks  # of fewer the interleaved schedule has no steady phase
        seen = []
        for step in steps:
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
            seen.append((*(loss.item() for loss in losses), norm))
        return seen

    def tensors(self, placement: eplb.Placement | None) -> dict[Any, Any]:
        """All that this rank trains, experts by layer of the whole model and logical number.

        Args:
            placement: where experts are; None: as Megatron has put them.
        """
        self.gather_weights()
        leaf_of = self.leaf_of()
        found: dict[Any, Tensor] = self.dense()
        for key, parameter in self.experts(placement):
            found[(*key, "weight")] = parameter
            if leaf := leaf_of.get(id(parameter)):  # else it is frozen, or stepped on another rank
                found |= {(*key, what): value for what, value in self.state_of(leaf, parameter).items()}
        return {key: tensor.detach().clone() for key, tensor in found.items() if torch.is_tensor(tensor)}

    def gather_weights(self) -> None:
        """Let weights of the last step be gathered where the next forward pass would do it."""
        for model in self.models:
            if model.ddp_config.overlap_param_gather:
                model.start_param_sync(force_sync=True)

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

    def leaf_of(self) -> dict[int, Any]:
        """The optimizer that steps a parameter on this rank, by the parameter's `id`."""
        return {id(parameter): leaf for leaf in leaves_of(self.optimizer) for parameter in held(leaf)}

    def state_of(self, leaf: Any, parameter: Tensor) -> Mapping[str, Any]:
        """What an optimizer keeps of a parameter."""
        if hasattr(leaf, "_get_main_param_and_optimizer_states"):
            return dict(leaf._get_main_param_and_optimizer_states(parameter))
        main = getattr(parameter, "main_param", parameter)
        return {"param": main, **leaf.optimizer.state[main]}

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

    def dense(self) -> dict[Any, Tensor]:
        return {
            ("dense", stage_of(number), name): tensor
            for number, chunk in enumerate(self.models)
            for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]
            if ".experts." not in name and torch.is_tensor(tensor)
        }


class SmallJob(Job):
    """A job without pipeline stages, whose ranks may share the sequence or parts of the dense weights."""

    def __init__(self, **options: Any) -> None:
        initialize(options)
        super().__init__(**{"num_layers": 2, "pipeline_model_parallel_size": 1, **options})

    def train(self, steps: range) -> list[tuple[Any, ...]]:
        return self.train_by(forward_part, steps)

    def dense(self) -> dict[Any, Tensor]:
        """As of `Job`, by tensor-parallel rank, too."""
        from megatron.core import parallel_state

        part = parallel_state.get_tensor_model_parallel_rank()
        return {(*key, part): tensor for key, tensor in super().dense().items()}


def initialize(options: Mapping[str, Any]) -> None:
    """Make Megatron's process groups, unless those that are there have these sizes."""
    from megatron.core import parallel_state

    sizes = {
        "tensor_model_parallel": options.get("tensor_model_parallel_size", 1),
        "pipeline_model_parallel": 1,
        "context_parallel": options.get("context_parallel_size", 1),
        "expert_model_parallel": 2,
    }
    sizes["expert_tensor_parallel"] = options.get("expert_tensor_parallel_size", sizes["tensor_model_parallel"])
    if parallel_state.is_initialized():
        there = {name: getattr(parallel_state, f"get_{name}_world_size")() for name in sizes}
        if there == sizes:
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**{f"{name}_size": size for name, size in sizes.items()})


def prepare_small() -> None:
    """Let Megatron's modules of torch work under context and sequence parallelism; for `SmallJob`."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    load_example("megatron_gpt")
    import megatron.core.models.backends as backends

    backends.DotProductAttention = gathered_attention()
    mark_norms_of_sequence_parts()


def gathered_attention() -> type:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class GatheredAttention(DotProductAttention):
        """Megatron's attention without TransformerEngine, which has keys and values of all context-parallel ranks:
        what TransformerEngine's does with ``cp_comm_type="all_gather"``."""

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


def mark_norms_of_sequence_parts() -> None:
    """Let Megatron's norm of torch's stand under sequence parallelism: gradients of its weights are added up, as of
    Apex's and TransformerEngine's norms."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    own = WrappedTorchNorm.__new__

    def new(kind: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        alone = copy.copy(config)
        alone.sequence_parallel = False  # it takes no other
        norm = own(kind, alone, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = staticmethod(new)


def hash_of(name: str) -> int:
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(name))


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
    """The parameters that an optimizer steps."""
    if hasattr(leaf, "model_param_group_index_map"):
        return list(leaf.model_param_group_index_map)
    if hasattr(leaf, "float16_groups"):
        return [parameter for group in [*leaf.float16_groups, *leaf.fp32_from_fp32_groups] for parameter in group]
    return [parameter for group in leaf.optimizer.param_groups for parameter in group["params"]]


def batches_of(step: int, count: int = MICRO_BATCHES) -> Iterator[Tensor]:
    from megatron.core import parallel_state

    for number in range(count):
        seed = 1009 * step + 31 * number + parallel_state.get_data_parallel_rank()
        drawn = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(seed))
        yield (VOCABULARY * drawn**3).long()  # small numbers come often


def forward_step(
    batches: Iterator[Tensor], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[[Tensor], Any]]:
    """Losses of a micro-batch; asked for a plan, what Megatron's combined schedule runs piece by piece."""
    ids = next(batches)
    positions = torch.arange(LENGTH).expand_as(ids)
    causal = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    run = model.build_schedule_plan if return_schedule_plan else model
    return run(input_ids=ids, position_ids=positions, attention_mask=causal, labels=ids), loss_of


def forward_part(batches: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """As `forward_step`, of this context-parallel rank's part of the sequence; queries of later parts see all keys
    before them."""
    from megatron.core import parallel_state

    ids = next(batches)
    length = LENGTH // parallel_state.get_context_parallel_world_size()
    first = length * parallel_state.get_context_parallel_rank()
    mine = slice(first, first + length)
    positions = torch.arange(LENGTH).expand_as(ids)[:, mine]
    causal = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)[:, :, mine]
    output = model(input_ids=ids[:, mine], position_ids=positions, attention_mask=causal, labels=ids[:, mine])
    return output, loss_of


def loss_of(output: Tensor) -> tuple[Tensor, Tensor]:
    loss = output.float().mean()
    return loss, loss.detach()


def attached(job: Any, move: bool, interval: int = 1) -> eplb.Balancer:
    config = eplb.BalancerConfig(
        interval=interval,
        gate="always",
        policy="incremental" if move else "static",
        migration=eplb.MigrationConfig(lag=0),
    )
    balancer = eplb.attach(job.models, job.optimizer, config=config)
    if move:
        wait_until_compiled(balancer)
        plan_by(balancer, plan_shuffle)
    return balancer


def nothing(*_: Any) -> Mapping[str, Any]:
    return {}


def trained(
    make: Callable[[], Any],
    move: bool,
    spoil: Callable[[eplb.Balancer], None] = lambda _: None,
    steps: int = STEPS,
    also: Callable[[Any, eplb.Balancer], Mapping[str, Any]] = nothing,
) -> dict[str, Any]:
    """What came of a training.

    Args:
        make: the job.
        move: every expert after each step.
        spoil: called with the balancer before the first step.
        also: more of the result, of the job and its balancer after the last step.

    Returns:
        ``seen`` losses and norms, ``tensors``, ``moved`` experts, ``placement``, and ``counted`` tokens of each logical
        expert on this rank ``[steps][L][E]``.
    """
    job = make()
    balancer = attached(job, move)
    spoil(balancer)
    counted, advance = [], balancer._runtime.counter.advance

    def close_step() -> None:
        counted.append(balancer._runtime.counter.counts.tolist())
        advance()

    balancer._runtime.counter.advance = close_step
    result = {
        "seen": job.train(range(steps)),
        "tensors": job.tensors(balancer.placement),
        "moved": moved_by(balancer),
        "placement": balancer.placement.physical_to_logical.tolist(),
        "counted": counted,
        **also(job, balancer),
    }
    balancer.close()
    return result


def both(make: Callable[[], Any], **options: Any) -> dict[str, Any]:
    """Trainings without moves and with moves; options of `trained`."""
    return {"static": trained(make, move=False, **options), "moving": trained(make, move=True, **options)}


def moved_by(balancer: eplb.Balancer) -> int:
    return sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts"))


def save_into(folder: str | Path) -> Callable[[Any, eplb.Balancer], Mapping[str, Any]]:
    """Let Megatron save a job after its training; for `trained`."""

    def also(job: Any, _: eplb.Balancer) -> Mapping[str, Any]:
        save(_state_of(job, loading=False), Path(folder))
        return {}

    return also


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


def read_back(folder: str | Path, make: Callable[[], Any]) -> dict[str, Any]:
    """Tensors of a job of Megatron alone that has trained something else, before it reads what was saved, and after."""
    job = make()
    job.train(range(7, 8))  # Megatron loads what has stepped; all of it is overwritten
    before = job.tensors(None)
    load(job, folder)
    return {"before": {"tensors": before}, "read": {"tensors": job.tensors(None)}}


def load(job: Any, folder: str | Path) -> None:
    from megatron.core import dist_checkpointing

    with torch.serialization.safe_globals([torch.optim.AdamW]):  # groups of a hybrid one name the classes inside it
        state = dist_checkpointing.load(_state_of(job, loading=True), str(folder))
    for number, model in enumerate(job.models):
        model.load_state_dict(state[f"model{number}"])
    job.optimizer.load_state_dict(state["optimizer"])


def _state_of(job: Any, loading: bool) -> dict[str, Any]:
    metadata = dict(SHARDING)  # Megatron adds this job's groups
    of_models = {
        f"model{number}": model.module.sharded_state_dict(metadata=metadata) for number, model in enumerate(job.models)
    }
    state = job.optimizer.sharded_state_dict(of_models, is_loading=loading, metadata=metadata)
    return {**of_models, "optimizer": state}


def whole(of_ranks: Iterable[Mapping[str, Any]]) -> dict[Any, Tensor]:
    """All tensors of the job. Those that several ranks have must be the same on them."""
    found: dict[Any, Tensor] = {}
    for of_rank in of_ranks:
        for key, tensor in of_rank["tensors"].items():
            assert torch.equal(found.setdefault(key, tensor), tensor), key
    return found


def differing(some: Mapping[Any, Tensor], others: Mapping[Any, Tensor]) -> list[Any]:
    assert some.keys() == others.keys()
    return [key for key in some if not torch.equal(some[key], others[key])]


def assert_moved_without_a_change(
    results: list[dict[str, Any]], case: str, whole: Callable[..., dict[Any, Tensor]] = whole
) -> set[str]:
    """A case of `three` on each rank: no bit differs between the training with moves and the one without.

    Returns:
        what is compared of an expert: its weight, and what the optimizer keeps.
    """
    of_case = [of_rank[case] for of_rank in results]
    static, moving = (whole([of_rank[which] for of_rank in of_case]) for which in ("static", "moving"))
    for of_rank in of_case:
        assert of_rank["moving"]["seen"] == of_rank["static"]["seen"]
        assert all(row != sorted(row) for row in of_rank["moving"]["placement"])
    moved = of_case[0]["moving"]["moved"]
    assert of_case[0]["static"]["moved"] == 0 < moved
    experts = [key for key in static if key[0] != "dense"]
    print(f"{case}: {len(experts)} expert tensors, {len(static)} in all, {moved} moves")
    rows = of_case[0]["static"]["placement"]
    assert {key[:2] for key in experts} == {(row, expert) for row, experts in enumerate(rows) for expert in experts}
    kinds = {key[3] for key in experts}
    assert len(experts) == 2 * sum(map(len, rows)) * len(kinds)
    assert differing(static, moving) == []
    return kinds


def assert_counted(results: list[dict[str, Any]], case: str, choices: int) -> None:
    """Each choice is counted once on a rank and layer, by logical expert.

    Args:
        choices: of a step on a rank.
    """
    for of_rank in results:
        counted = of_rank[case]["moving"]["counted"]
        assert counted == of_rank[case]["static"]["counted"]
        assert torch.tensor(counted).sum(dim=-1).unique().tolist() == [choices]


def refusal(make: Callable[[], Any], change: Callable[[Any], Any] = lambda job: None) -> str:
    """The line in which attach refuses a job."""
    job = make()
    change(job)
    with pytest.raises(AttachError) as error:
        attached(job, move=False)
    return str(error.value)


def assert_read_back(
    results: list[dict[str, Any]], saved: str, read: str, whole: Callable[..., dict[Any, Tensor]] = whole
) -> None:
    """`read_back` has found all that the training with moves of a case has saved.

    Args:
        saved: the case.
        read: where the results of `read_back` are.
    """
    assert all(row != sorted(row) for row in results[0][saved]["moving"]["placement"])
    tensors = whole([of_rank[saved]["moving"] for of_rank in results])
    before, found = (whole([of_rank[read][when] for of_rank in results]) for when in ("before", "read"))
    assert differing(before, tensors) != []
    assert differing(found, tensors) == []
