"""Megatron-Core's distributed optimizer over several ranks that hold the same experts: 4 ranks, EP 2 x EDP 2, its own
model, schedule, DistributedDataParallel and optimizer, with every home moved after each step.

It divides a flat buffer over the two, so an expert's master and moments lie on one of them or are cut between both.
Ranges are read from Megatron's own objects, and put together and in order by `Balancer.placement` alone.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples import FOLDER, load_example
from ranks import run_ranks
from torch import Tensor

import eplb_runtime as eplb
from eplb_runtime.balancer.gradients import norm_of_ranges
from eplb_runtime.planner.shuffle import plan_shuffle

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
STEPS, MICRO_BATCHES, LENGTH, VOCABULARY = 3, 2, 16, 64
BLOCK = 256
"""Elements of a block of the norm: small, so that these experts have several."""
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}
CASES: dict[str, dict[str, Any]] = {
    "one bucket, an expert cut": {"experts": 6, "layers": 3},
    "experts whole": {"experts": 8, "layers": 1, "clip_grad": 0.0},
    "float32": {"experts": 6, "layers": 1, "bf16": False},
    "buckets, weights gathered in the next forward": {"experts": 8, "layers": 2, "bucket_size": 10_000, **OVERLAPPED},
}
CUT = "one bucket, an expert cut"
LATE = "buckets, weights gathered in the next forward"


def prepare() -> None:
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    load_example("megatron_gpt")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    norm_of_ranges.BLOCK = BLOCK


class Job:
    """What Megatron's training loop makes of a case."""

    def __init__(
        self,
        *,
        experts: int,
        layers: int,
        bf16: bool = True,
        bucket_size: int | None = None,
        clip_grad: float = 0.1,
        overlap_grad_reduce: bool = False,
        overlap_param_gather: bool = False,
        **options: Any,
    ) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.experts = experts
        bare = load_example("megatron_gpt").model_of(
            bf16=bf16,
            spec=get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False, normalization="LayerNorm"),
            moe_router_topk=3,
            calculate_per_token_loss=False,
            num_layers=layers,
            hidden_size=32,
            ffn_hidden_size=32,
            moe_ffn_hidden_size=40,
            num_moe_experts=experts,
        )
        config = bare.config
        config.finalize_model_grads_func = finalize_model_grads
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=overlap_grad_reduce,
            overlap_param_gather=overlap_param_gather,
            bucket_size=bucket_size,
        )
        self.model = DistributedDataParallel(config, ddp, bare)
        if overlap_grad_reduce:
            config.no_sync_func = self.model.no_sync
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            clip_grad=clip_grad,
            bf16=bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=overlap_param_gather,
            **options,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])

    def train(self, steps: range) -> list[tuple[Any, ...]]:
        """Losses and the gradient norm of each step, by Megatron's own schedule."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        seen = []
        for step in steps:
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=batches_of(step),
                model=[self.model],
                num_microbatches=MICRO_BATCHES,
                seq_length=LENGTH,
                micro_batch_size=2,
                forward_only=False,
            )
            _, norm, _ = self.optimizer.step()
            seen.append((*(loss.item() for loss in losses), norm))
        return seen

    def leaf(self) -> Any:
        """The optimizer that steps experts."""
        (experts,) = [
            leaf
            for leaf in self.optimizer.chained_optimizers
            if all(group["is_expert_parallel"] for group in leaf.optimizer.param_groups)
        ]
        return experts

    def tensors(self, placement: eplb.Placement | None) -> dict[str, dict[Any, Any]]:
        """`tensors_of` this rank."""
        from megatron.core import parallel_state

        if self.model.ddp_config.overlap_param_gather:  # weights of the last step are still to be gathered
            self.model.start_param_sync(force_sync=True)
        dense = {
            ("dense", name): tensor
            for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]
            if ".experts." not in name and torch.is_tensor(tensor)
        }
        first = parallel_state.get_expert_model_parallel_rank() * self.experts // 2
        return tensors_of(dict(enumerate(layers_of(self.model))), dense, [self.leaf()], first, placement)

    def kept_here(self) -> list[tuple[int, int]]:
        """For each expert tensor of this rank, how many of its elements are stepped here, and of all."""
        leaf = self.leaf()
        return [
            (
                leaf._get_model_param_range_map(parameter)["param"].size
                if parameter in leaf.model_param_group_index_map
                else 0,
                parameter.numel(),
            )
            for module in layers_of(self.model)
            for parameter in module.experts.parameters()
        ]


def tensors_of(
    layers: dict[int, Any], dense: dict[Any, Tensor], leaves: list[Any], first: int, placement: eplb.Placement | None
) -> dict[str, dict[Any, Any]]:
    """What a rank has: whole tensors, and ranges of an expert's state with where they begin.

    Args:
        leaves: the optimizers that step experts.
        first: slot of the rank.
    """
    whole, ranges = dict(dense), {}
    for row, module in layers.items():
        for slot, expert in enumerate(module.experts.local_experts, start=first):
            number = slot if placement is None else int(placement.physical_to_logical[row, slot])
            for name, parameter in expert.named_parameters():
                whole[(row, number, name, "weight")] = parameter
                for leaf in leaves:
                    if parameter not in leaf.model_param_group_index_map:
                        continue
                    begin = leaf._get_model_param_range_map(parameter)["param"].start
                    for what, value in leaf._get_main_param_and_optimizer_states(parameter).items():
                        ranges[(row, number, name, what)] = (begin, value.detach().clone().flatten())
    return {"whole": {key: value.detach().clone().flatten() for key, value in whole.items()}, "ranges": ranges}


def layers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ == "MoELayer"]


def batches_of(step: int) -> Iterator[Tensor]:
    for number in range(MICRO_BATCHES):
        seed = 1009 * step + 31 * number + dist.get_rank()
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


def attached(job: Job, move: bool, interval: int = 1) -> eplb.Balancer:
    config = eplb.BalancerConfig(
        interval=interval,
        gate="always",
        policy="incremental" if move else "static",
        migration=eplb.MigrationConfig(lag=0),
    )
    balancer = eplb.attach([job.model], job.optimizer, config=config)
    if move:
        balancer._wait_until_compiled()
        balancer._plan_with(plan_shuffle)
    return balancer


def trained(case: str, move: bool, spoil: Callable[[eplb.Balancer], None] = lambda _: None) -> dict[str, Any]:
    job = Job(**CASES[case])
    balancer = attached(job, move)
    spoil(balancer)
    result = {
        "seen": job.train(range(STEPS)),
        "tensors": job.tensors(balancer.placement),
        "moved": sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts")),
        "kept here": job.kept_here(),
    }
    balancer.close()
    return result


def forget_state(balancer: eplb.Balancer) -> None:
    """Weights move, and what their optimizer keeps stays."""
    balancer._runtime.registry._optimizers.clear()


def parts_stay(balancer: eplb.Balancer) -> None:
    """Pieces travel along their EDP rank alone, as if each kept the same range of every slot."""
    from eplb_runtime.migration import exchange

    own = exchange.RoundExecutor._shipments

    def along(executor: Any, transfer: Any, record_format: Any) -> Any:
        holders = executor._home_rows.holders
        for one in own(executor, transfer, record_format):
            if one.source % holders == one.destination % holders:
                yield one

    exchange.RoundExecutor._shipments = along
    balancer._end_with(Undo(lambda: setattr(exchange.RoundExecutor, "_shipments", own)))


class Undo:
    def __init__(self, remove: Callable[[], None]) -> None:
        self.remove = remove


def norm_of_each_rank_alone(balancer: eplb.Balancer) -> None:
    """Squares are summed over what a rank has of an expert, wherever that is cut."""
    norm_of_ranges.BLOCK = 1 << 20
    own = norm_of_ranges._cut_blocks
    norm_of_ranges._cut_blocks = lambda ranges: []
    balancer._end_with(Undo(lambda: setattr(norm_of_ranges, "_cut_blocks", own)))
    balancer._end_with(Undo(lambda: setattr(norm_of_ranges, "BLOCK", BLOCK)))


def weights_of_who_has_the_row(balancer: eplb.Balancer) -> None:
    """Weights come whole along an EDP rank, from one whose gather of what others have stepped is still to come."""
    from eplb_runtime.migration import exchange
    from eplb_runtime.moe.experts.record import RecordFormat
    from eplb_runtime.moe.experts.registry import ExpertTensor

    own = exchange.piece

    def piece(record_format: Any, source: Any, destination: Any, *, here: Any) -> Any:
        state = own(record_format, source, destination, here=here).fields
        kept = [field.source for field in state if field.source.kind != "parameter"]
        rows = [field.source for field in record_format.fields if field.source.part == "row"]
        whole = [ExpertTensor(one.name, (one.row(here.row).detach().view(-1),), one.kind) for one in rows]
        return RecordFormat.of([*(whole if source.part == destination.part else []), *kept])

    exchange.piece = piece
    balancer._end_with(Undo(lambda: setattr(exchange, "piece", own)))


CONTROLS: dict[str, tuple[str, Callable[[eplb.Balancer], None]]] = {
    "state stays": (CUT, forget_state),
    "pieces stay on their EDP rank": (CUT, parts_stay),
    "weights that are still to be gathered": (LATE, weights_of_who_has_the_row),
}


def saved_and_read_back(folder: Path) -> dict[str, Any]:
    """Saved by Megatron after moves, and read by Megatron alone into a job that has trained something else."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    def state_of(job: Job, loading: bool) -> dict[str, Any]:
        metadata = {"singleton_local_shards": False, "distrib_optim_sharding_type": "fully_reshardable"}
        of_model = job.model.module.sharded_state_dict(metadata=metadata)
        return {
            "model": of_model,
            "optimizer": job.optimizer.sharded_state_dict(of_model, is_loading=loading, metadata=metadata),
        }

    job = Job(**CASES[CUT])
    balancer = attached(job, move=True)
    job.train(range(STEPS))
    saving = state_of(job, loading=False)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it writes by processes
    dist_checkpointing.save(saving, str(folder))
    if filesystem_async._results_queue is not None:
        filesystem_async._results_queue._manager.shutdown()
    saved = job.tensors(balancer.placement)
    moved = balancer.placement.physical_to_logical.tolist()
    balancer.close()
    job = Job(**CASES[CUT])
    job.train(range(STEPS, 2 * STEPS))  # Megatron loads what has stepped; all of it is overwritten
    before = job.tensors(None)
    state = dist_checkpointing.load(state_of(job, loading=True), str(folder))
    job.model.load_state_dict(state["model"])
    give_steps()
    job.optimizer.load_state_dict(state["optimizer"])
    return {
        "saved": {"tensors": saved},
        "before": {"tensors": before},
        "read": {"tensors": job.tensors(None)},
        "placement": moved,
    }


def give_steps() -> None:
    """0.16.1 does not find the number of steps where torch's AdamW keeps it, also without us; TransformerEngine's and
    Apex's have no such tensor."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    own = DistributedOptimizer._set_main_param_and_optimizer_states

    def take(leaf: Any, parameter: Tensor, tensors: dict[str, Tensor]) -> None:
        own(leaf, parameter, {"step": torch.tensor(float(STEPS)), **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = take


def everything(rank: int, folder: str) -> dict[str, Any]:
    prepare()
    results: dict[str, Any] = {}
    for case in CASES:
        results[case] = {"static": trained(case, move=False), "moving": trained(case, move=True)}
    for name, (case, spoil) in CONTROLS.items():
        results[name] = trained(case, move=True, spoil=spoil)
    results["other norm"] = trained(CUT, move=True, spoil=norm_of_each_rank_alone)["seen"]
    results["checkpoint"] = saved_and_read_back(Path(folder))
    job = Job(**CASES["experts whole"])
    results["alone"] = {"seen": job.train(range(STEPS)), "tensors": job.tensors(None)}
    return results


def moved_once(rank: int) -> dict[str, Any]:
    """EDP 3: what is there before a move, and after it."""
    prepare()
    job = Job(**CASES[LATE])
    balancer = attached(job, move=True, interval=100)
    job.train(range(2))
    before = job.tensors(balancer.placement)
    balancer.rebalance()
    after = job.tensors(balancer.placement)
    kept, places = job.kept_here(), balancer.placement.physical_to_logical.tolist()
    losses = job.train(range(2, 3))
    balancer.close()
    return {
        "before": {"tensors": before},
        "after": {"tensors": after},
        "kept here": kept,
        "placement": places,
        "seen": losses,
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(4, everything, str(tmp_path_factory.mktemp("megatron divided")))


def whole(of_ranks: list[dict[str, Any]]) -> dict[Any, Tensor]:
    """All tensors of the job. Those that several ranks have must be the same on them; ranges must meet end to end."""
    found: dict[Any, Tensor] = {}
    ranges: dict[Any, list[tuple[int, Tensor]]] = {}
    for of_rank in of_ranks:
        for key, tensor in of_rank["tensors"]["whole"].items():
            assert torch.equal(found.setdefault(key, tensor), tensor), key
        for key, one in of_rank["tensors"]["ranges"].items():
            ranges.setdefault(key, []).append(one)
    for key, of_key in ranges.items():
        if key[3] == "step":
            assert len({float(value) for _, value in of_key}) == 1
            found[key] = of_key[0][1]
            continue
        of_key.sort(key=lambda one: one[0])
        assert [begin for begin, _ in of_key] == [sum(len(one) for _, one in of_key[:n]) for n in range(len(of_key))]
        found[key] = torch.cat([one for _, one in of_key])
        assert len(found[key]) == len(found[(*key[:3], "weight")])
    return found


def differing(some: dict[Any, Tensor], others: dict[Any, Tensor]) -> list[Any]:
    assert some.keys() == others.keys()
    return [key for key in some if not torch.equal(some[key], others[key])]


@pytest.mark.parametrize("case", CASES)
def test_experts_with_divided_state_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    static = whole([of_rank[case]["static"] for of_rank in results])
    moving = whole([of_rank[case]["moving"] for of_rank in results])
    for of_rank in results:
        assert of_rank[case]["moving"]["seen"] == of_rank[case]["static"]["seen"]
    moved = results[0][case]["moving"]["moved"]
    assert results[0][case]["static"]["moved"] == 0 < moved
    experts = [key for key in static if key[0] != "dense"]
    cut = sum(0 < kept < of_all for kept, of_all in results[0][case]["static"]["kept here"])
    print(f"{case}: {len(experts)} expert tensors, {len(static)} in all, {moved} moves, {cut} cut on a rank")
    layers, number = CASES[case]["layers"], CASES[case]["experts"]
    assert {key[:2] for key in experts} == {(layer, expert) for layer in range(layers) for expert in range(number)}
    assert len(experts) == layers * number * 2 * len({key[3] for key in experts})
    assert {key[3] for key in experts} == {"weight", "param", "exp_avg", "exp_avg_sq", "step"}
    assert differing(static, moving) == []


@pytest.mark.parametrize("control", CONTROLS)
def test_control_what_is_left_behind_shows(results: list[dict[str, Any]], control: str) -> None:
    static = [of_rank[CONTROLS[control][0]]["static"] for of_rank in results]
    broken = [of_rank[control] for of_rank in results]
    names, of_broken = ({key for one in of_each for key in one["tensors"]["ranges"]} for of_each in (static, broken))
    assert names == of_broken and broken[0]["moved"] > 0
    assert [one["seen"] for one in broken] != [one["seen"] for one in static]


def test_control_a_norm_that_depends_on_the_cut_is_another(results: list[dict[str, Any]]) -> None:
    right = [norm for *_, norm in results[0][CUT]["moving"]["seen"]]
    wrong = [norm for *_, norm in results[0]["other norm"]]
    assert right != wrong and right == pytest.approx(wrong, rel=1e-3)


def test_megatron_alone_reads_what_it_saved_after_moves(results: list[dict[str, Any]]) -> None:
    saved, before, read = (
        whole([of_rank["checkpoint"][when] for of_rank in results]) for when in ("saved", "before", "read")
    )
    placement = results[0]["checkpoint"]["placement"]
    assert all(row != sorted(row) for row in placement)
    assert differing(before, saved) != []
    assert differing(read, saved) == []


def test_experts_are_whole_or_cut_as_the_cases_say(results: list[dict[str, Any]]) -> None:
    for case in CASES:
        for of_rank in results:
            kept = of_rank[case]["static"]["kept here"]
            assert 0 < sum(here for here, _ in kept) < sum(of_all for _, of_all in kept)
            is_cut = any(0 < here < of_all for here, of_all in kept)
            assert is_cut == (case != "experts whole")


def test_without_clipping_megatron_alone_trains_the_same(results: list[dict[str, Any]]) -> None:
    alone = whole([of_rank["alone"] for of_rank in results])
    assert differing(alone, whole([of_rank["experts whole"]["moving"] for of_rank in results])) == []


def test_three_ranks_that_hold_the_same_have_what_they_had_after_a_move() -> None:
    results = run_ranks(6, moved_once)
    before, after = (whole([of_rank[when] for of_rank in results]) for when in ("before", "after"))
    assert all(row != sorted(row) for row in results[0]["placement"])
    assert any(0 < here < of_all for of_rank in results for here, of_all in of_rank["kept here"])
    assert differing(before, after) == []
    assert all(loss > 0 for of_rank in results for of_step in of_rank["seen"] for loss in of_step)
