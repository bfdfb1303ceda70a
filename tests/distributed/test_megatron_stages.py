"""Megatron-Core's own pipeline schedules, stages, DistributedDataParallel, optimizers and checkpoints, with experts
that move after each step: 4 ranks, 2 pipeline stages x 2 expert-parallel ranks.

On a CPU, by the answers of ``launch/examples/megatron_cpu.py`` to what it asks of CUDA. Tensors are read from
Megatron's own objects, and put in order by `Balancer.placement` alone.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples import FOLDER, load_example
from ranks import run_ranks
from torch import Tensor

import eplb_runtime as eplb
from eplb_runtime.hosts import AttachError
from eplb_runtime.planner.shuffle import plan_shuffle

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
STEPS, MICRO_BATCHES, LENGTH, EXPERTS, HIDDEN, VOCABULARY = 3, 4, 8, 8, 32, 64
INTERLEAVED = {"chunks": 2, "overlap_p2p_comm": True, "batch_p2p_comm": False}
CASES: dict[str, dict[str, Any]] = {
    "1F1B": {"clip_grad": 0.0},
    "interleaved": {**INTERLEAVED, "moe_router_topk": 3},
    "a stage without an MoE layer": {"moe_layer_freq": [0, 0, 1, 1], "share": True},
    "stages of several sizes": {
        "num_layers": 5,
        "num_layers_in_first_pipeline_stage": 3,
        "moe_layer_freq": [0, 1, 1, 1, 1],
        "distributed": False,
        "bf16": False,
    },
    "float16, a chunk without an MoE layer": {**INTERLEAVED, "moe_layer_freq": [0, 1, 1, 1], "distributed": False},
    "gradients and weights travel beside": {
        **INTERLEAVED,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "align": True,
    },
    "a layer that predicts a second token": {"num_layers": 2, "mtp_num_layers": 1, "overlap_grad_reduce": True},
}


def prepare() -> None:
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    load_example("megatron_gpt")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, expert_model_parallel_size=2)


class Job:
    """What Megatron's ``get_model`` and its training loop make of a case; ``stepped``: more of its OptimizerConfig."""

    def __init__(
        self,
        *,
        chunks: int = 1,
        distributed: bool = True,
        bf16: bool = True,
        overlap_grad_reduce: bool = False,
        overlap_param_gather: bool = False,
        align: bool = False,
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
            "pipeline_model_parallel_size": 2,
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
            bucket_size=4096 if overlap_grad_reduce else None,
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
        from megatron.core.pipeline_parallel import get_forward_backward_func

        seen = []
        for step in steps:
            for model in self.models:
                model.zero_grad_buffer()
            self.optimizer.zero_grad()
            batches = [batches_of(step) for _ in self.models]
            losses = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=batches if len(batches) > 1 else batches[0],
                model=self.models,
                num_microbatches=MICRO_BATCHES,
                seq_length=LENGTH,
                micro_batch_size=2,
                forward_only=False,
            )
            _, norm, _ = self.optimizer.step()
            seen.append((*(loss.item() for loss in losses), norm))
        return seen

    def tensors(self, placement: eplb.Placement | None) -> dict[Any, Tensor]:
        """All that this rank trains, experts by layer of the whole model and logical number.

        Args:
            placement: where experts are; None: as Megatron has put them.
        """
        from megatron.core import parallel_state
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        for model in self.models:
            if model.ddp_config.overlap_param_gather:  # weights of the last step are still to be gathered
                model.start_param_sync(force_sync=True)
        leaf_of = {
            id(parameter): leaf
            for leaf in self.optimizer.chained_optimizers
            if not leaf.is_stub_optimizer
            for parameter in held(leaf)
        }
        first = parallel_state.get_expert_model_parallel_rank() * EXPERTS // 2
        found: dict[Any, Tensor] = {}
        for row, module in self.layers().items():
            for slot, expert in enumerate(module.experts.local_experts, start=first):
                number = slot if placement is None else int(placement.physical_to_logical[row, slot])
                for name, parameter in expert.named_parameters():
                    found[(row, number, name, "weight")] = parameter
                    leaf = leaf_of[id(parameter)]
                    if isinstance(leaf, DistributedOptimizer):
                        state = leaf._get_main_param_and_optimizer_states(parameter)
                    else:
                        main = getattr(parameter, "main_param", parameter)
                        state = {"param": main, **leaf.optimizer.state[main]}
                    found.update({(row, number, name, what): value for what, value in state.items()})
        found |= self.dense()
        return {key: tensor.detach().clone() for key, tensor in found.items() if torch.is_tensor(tensor)}

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


def hash_of(name: str) -> int:
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(name))


def stage_of(chunk: int) -> int:
    from megatron.core import parallel_state

    return 2 * chunk + parallel_state.get_pipeline_model_parallel_rank()


def held(leaf: Any) -> list[Tensor]:
    if hasattr(leaf, "model_param_group_index_map"):
        return list(leaf.model_param_group_index_map)
    if hasattr(leaf, "float16_groups"):
        return [parameter for group in [*leaf.float16_groups, *leaf.fp32_from_fp32_groups] for parameter in group]
    return [parameter for group in leaf.optimizer.param_groups for parameter in group["params"]]


def batches_of(step: int) -> Iterator[Tensor]:
    from megatron.core import parallel_state

    for number in range(MICRO_BATCHES):
        seed = 1009 * step + 31 * number + parallel_state.get_data_parallel_rank()
        drawn = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(seed))
        yield (VOCABULARY * drawn**3).long()  # small numbers come often


def forward_step(batches: Iterator[Tensor], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    ids = next(batches)
    positions = torch.arange(LENGTH).expand_as(ids)
    causal = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    output = model(input_ids=ids, position_ids=positions, attention_mask=causal, labels=ids)

    def loss_of(output: Tensor) -> tuple[Tensor, Tensor]:
        loss = output.float().mean()
        return loss, loss.detach()

    return output, loss_of


def attached(job: Job, move: bool) -> eplb.Balancer:
    config = eplb.BalancerConfig(
        interval=1, gate="always", policy="incremental" if move else "static", migration=eplb.MigrationConfig(lag=0)
    )
    balancer = eplb.attach(job.models, job.optimizer, config=config)
    if move:
        balancer._wait_until_compiled()
        balancer._plan_with(plan_shuffle)
    return balancer


def trained(case: str, move: bool, spoil: Callable[[eplb.Balancer], None] = lambda _: None) -> dict[str, Any]:
    job = Job(**CASES[case])
    balancer = attached(job, move)
    spoil(balancer)
    seen = job.train(range(STEPS))
    result = {
        "seen": seen,
        "tensors": job.tensors(balancer.placement),
        "moved": sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts")),
        "layers": balancer.placement.num_layers,
        "sorted": balancer.placement.physical_to_logical.tolist(),
    }
    balancer.close()
    return result


def refused() -> dict[str, str]:
    """Lines of what does not attach, by what it is."""
    said = {}
    for what in ("vp_stage", "fp4"):
        job = Job(**INTERLEAVED)
        if what == "vp_stage":
            for model in job.models:
                for part in model.modules():
                    vars(part).pop("vp_stage", None)
        else:
            job.config.fp4 = "nvfp4"
        with pytest.raises(AttachError) as error:
            attached(job, move=False)
        said[what] = str(error.value)
    return said


def saved_and_read_back(folder: Path, make: Callable[[], Job]) -> dict[str, Any]:
    """Saved by Megatron after moves, and read by Megatron alone into a job that has trained something else."""
    from megatron.core import dist_checkpointing

    def state_of(job: Job, loading: bool) -> dict[str, Any]:
        metadata = {"singleton_local_shards": False}
        of_models = {
            f"model{number}": model.module.sharded_state_dict(metadata=metadata)
            for number, model in enumerate(job.models)
        }
        state = job.optimizer.sharded_state_dict(of_models, is_loading=loading, metadata=metadata)
        return {**of_models, "optimizer": state}

    job = make()
    balancer = attached(job, move=True)
    job.train(range(STEPS))
    save(state_of(job, loading=False), folder)
    saved = job.tensors(balancer.placement)
    moved = balancer.placement.physical_to_logical.tolist()
    balancer.close()
    job = make()
    job.train(range(STEPS, STEPS + 1))  # Megatron loads what has stepped; all of it is overwritten
    before = job.tensors(None)
    state = dist_checkpointing.load(state_of(job, loading=True), str(folder))
    for number, model in enumerate(job.models):
        model.load_state_dict(state[f"model{number}"])
    job.optimizer.load_state_dict(state["optimizer"])
    return {
        "saved": {"tensors": saved},
        "before": {"tensors": before},
        "read": {"tensors": job.tensors(None)},
        "placement": moved,
    }


def save(state: dict[str, Any], folder: Path) -> None:
    """Megatron writes by processes of its own, which ranks of these tests may not start otherwise."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    dist_checkpointing.save(state, str(folder))
    if filesystem_async._results_queue is not None:
        filesystem_async._results_queue._manager.shutdown()
        filesystem_async._results_queue = None


def forget_state(balancer: eplb.Balancer) -> None:
    """Weights move, and what their optimizer keeps stays."""
    balancer._runtime.registry._optimizers.clear()


def everything(rank: int, folder: str) -> dict[str, Any]:
    prepare()
    results: dict[str, Any] = {}
    for case in CASES:
        results[case] = {"static": trained(case, move=False), "moving": trained(case, move=True)}
    job = Job(**CASES["1F1B"])
    results["alone"] = {"seen": job.train(range(STEPS)), "tensors": job.tensors(None)}
    results["control"] = trained("interleaved", move=True, spoil=forget_state)
    results["refused"] = refused()
    # With the distributed optimizer 0.16.1 loads only what TransformerEngine's or Apex's Adam keeps, also without us.
    of_float16 = partial(Job, **CASES["float16, a chunk without an MoE layer"])
    results["checkpoint"] = saved_and_read_back(Path(folder), of_float16)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(4, everything, str(tmp_path_factory.mktemp("megatron stages")))


def whole(of_ranks: list[dict[str, Any]]) -> dict[Any, Tensor]:
    """All tensors of the job. Those that several ranks have must be the same on them."""
    found: dict[Any, Tensor] = {}
    for of_rank in of_ranks:
        for key, tensor in of_rank["tensors"].items():
            assert torch.equal(found.setdefault(key, tensor), tensor), key
    return found


def differing(some: dict[Any, Tensor], others: dict[Any, Tensor]) -> list[Any]:
    assert some.keys() == others.keys()
    return [key for key in some if not torch.equal(some[key], others[key])]


@pytest.mark.parametrize("case", CASES)
def test_experts_of_stages_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    static = whole([of_rank[case]["static"] for of_rank in results])
    moving = whole([of_rank[case]["moving"] for of_rank in results])
    for of_rank in results:
        assert of_rank[case]["moving"]["seen"] == of_rank[case]["static"]["seen"]
    moved = results[0][case]["moving"]["moved"]
    layers = results[0][case]["moving"]["layers"]
    assert results[0][case]["static"]["moved"] == 0 < moved
    experts = [key for key in static if key[0] != "dense"]
    print(f"{case}: {len(experts)} expert tensors of {layers} layers, {len(static)} in all, {moved} moves")
    assert {key[:2] for key in experts} == {(layer, expert) for layer in range(layers) for expert in range(EXPERTS)}
    kinds = {key[3] for key in experts}
    assert kinds >= {"weight", "param", "exp_avg", "exp_avg_sq"} and len(experts) == layers * EXPERTS * 2 * len(kinds)
    assert differing(static, moving) == []


def test_control_state_that_stays_shows(results: list[dict[str, Any]]) -> None:
    static = whole([of_rank["interleaved"]["static"] for of_rank in results])
    assert differing(static, whole([of_rank["control"] for of_rank in results])) != []


def test_without_clipping_megatron_alone_trains_the_same(results: list[dict[str, Any]]) -> None:
    alone = whole([of_rank["alone"] for of_rank in results])
    assert differing(alone, whole([of_rank["1F1B"]["moving"] for of_rank in results])) == []


def test_megatron_alone_reads_what_it_saved_after_moves(results: list[dict[str, Any]]) -> None:
    saved, before, read = (
        whole([of_rank["checkpoint"][when] for of_rank in results]) for when in ("saved", "before", "read")
    )
    placement = results[0]["checkpoint"]["placement"]
    assert all(row != sorted(row) for row in placement)
    assert differing(before, saved) != []
    assert differing(read, saved) == []


def test_what_megatron_cannot_follow_is_refused_on_all_stages(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert "virtual stages" in of_rank["refused"]["vp_stage"]
        assert "not supported yet" in of_rank["refused"]["fp4"]
