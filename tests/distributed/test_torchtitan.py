"""torchtitan's own Trainer with a balancer, a row for each job that differs in kind: every home moved after each step,
against the same with experts that stay, to the bit; with replicas, and where its dispatchers add up by place, against
torchtitan alone on the same ranks, in float64. Checkpoints, and what is refused.

FlexAttention's kernel has plain products in its place (``launch/examples``), DeepEP `titan_dispatch_double`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from support import titan_dispatch_double
from support.examples import load_example
from support.ranks import rows_of, run_ranks
from support.titan_jobs import STEPS, Row, Run, begin, compute_in_float64, found_of, with_settings

from eplb_runtime import DispatchConfig
from eplb_runtime.hosts import AttachError

pytest.importorskip("torchtitan", reason="torchtitan's Trainer: pip install '.[torchtitan]'")

CONTEXT, TENSOR = {"context_parallel_degree": 2}, {"tensor_parallel_degree": 2}
REPLICATED = {"data_parallel_replicate_degree": 2}
STAGES = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}
INTERLEAVED = {**STAGES, "pipeline_parallel_schedule": "Interleaved1F1B"}
DENSE_FIRST = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "norm", "lm_head"]]
"""Stages of DeepSeek-V3, whose first layer has no experts: nor has the first rank of its pipeline."""
ROWS = {
    "ep 4, biases, rows in sixteens": Row("gpt_oss", 4, multiple=16, checkpointing="SelectiveAC"),
    "ep 2 x efsdp 2": Row("qwen3", 2, saves=True),
    "tp 2, ep 2 x efsdp 2": Row("deepseek_v3", 2, TENSOR, checkpointing="FullAC"),
    "two replicas of the model": Row("qwen3", 2, REPLICATED),
    "stages, one without experts": Row(
        "deepseek_v3", 2, {**STAGES, "module_fqns_per_model_part": DENSE_FIRST}, saves=True
    ),
    "interleaved stages": Row("qwen3", 2, INTERLEAVED, validates=True),
    "dp 2 x cp 2, ep 4": Row("qwen3", 4, CONTEXT),
    "deepep": Row("qwen3", 4, backend="deepep", checkpointing="SelectiveAC", validates=True),
    # in float64, against torchtitan alone
    "deepep, three experts a token": Row("qwen3", 4, backend="deepep", top_k=3, close=1e-10),
    "copies, ep 4, expert bias": Row("deepseek_v3", 4, replica_slots=1, validates=True, close=1e-10),
    "copies in two slots, full recompute": Row("gpt_oss", 2, replica_slots=2, checkpointing="FullAC", close=1e-10),
    "copies, accumulated": Row("qwen3", 2, replica_slots=1, micro_batches=2, close=1e-10, saves=True),
    "copies, two replicas of the model": Row("gpt_oss", 2, REPLICATED, replica_slots=1, close=1e-10),
}
SHORT = ("tp 2, ep 2 x efsdp 2", "deepep")


def of_rows(rank: int, names: tuple[str, ...], folder: str) -> dict[str, dict[str, Any]]:
    begin()
    if ROWS[names[0]].backend != "standard":
        titan_dispatch_double.use()
    if ROWS[names[0]].close:
        compute_in_float64()
    return {name: found_of(ROWS[name], Path(folder) / str(number)) for number, name in enumerate(names)}


@cache
def of_group(names: tuple[str, ...]) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        return run_ranks(ROWS[names[0]].ranks, of_rows, names, folder)


def results_of(name: str) -> list[dict[str, Any]]:
    """What ranks found of a row, and of some of its kind in the same processes."""

    def kind(name: str) -> Any:
        row = ROWS[name]
        return row.ranks, row.close, row.backend != "standard", row.saves, row.family, name in SHORT

    group = tuple(other for other in ROWS if kind(other) == kind(name))
    return [found[name] for found in of_group(group)]


@pytest.mark.parametrize("name", rows_of(ROWS, *SHORT))
def test_training_with_every_home_moved_after_each_step_is_that_without(name: str) -> None:
    row = ROWS[name]
    for found in results_of(name):
        assert found["moved"] > 16 * (STEPS - 1)
        assert found["choices"] == {row.choices}
        other, moving = found["logged"]
        assert len(other) == len(moving) == STEPS
        assert all(norm > 0.3 for *_, norm in moving), "clipping was not active"
        if row.backend != "standard":
            assert found["calls"] > 4 * STEPS, "torchtitan's dispatcher did not carry the tokens"
        assert found["replicas"] >= 4 * row.replica_slots and not found["replicas"] > 0 == row.replica_slots
        if row.close:
            assert 0 < found["apart"] < row.close
            for ours, theirs in zip(moving, other, strict=True):
                assert ours == pytest.approx(theirs, rel=row.close, abs=row.close)
        else:
            assert moving == other and found["apart"] == []
        if row.saves:
            assert not any(found["kept"].values()), found["kept"]


# -- what is refused ---------------------------------------------------------------------------------------------------

NOT_TRIED = "full_dtensor" if torch.__version__ >= "2.14" else "spmd_types"
PLAIN = Row("qwen3", 2)
OWN = ROWS["deepep"]
Mistake = Callable[[Any], None]


def dispatchers_of(config: Any) -> list[Any]:
    return [layer.moe.routed_experts for layer in config.model_spec.model.layers if getattr(layer, "moe", None)]


def compiled(config: Any) -> None:
    config.compile.enable, config.compile.backend = True, "eager"


def copies_beside_tensor_parallelism(config: Any) -> None:
    config.parallelism.tensor_parallel_degree = 2
    with_settings(config, replica_slots=1)


def another_dispatcher(kind: str, config: Any) -> None:
    from torchtitan.models.common import token_dispatcher

    class Other(getattr(token_dispatcher, kind)):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(getattr(token_dispatcher, kind).Config):  # type: ignore[misc]
            pass

    for routed in dispatchers_of(config):
        before = routed.token_dispatcher
        routed.token_dispatcher = Other.Config(**{own.name: getattr(before, own.name) for own in fields(before)})


def two_experts(config: Any) -> None:
    for layer in config.model_spec.model.layers:
        load_example("torchtitan_moe")._make_small(layer.moe, num_experts=2, top_k=1, hidden_dim=64)


def stages_of_somebody_else(config: Any) -> None:
    config.model_spec.pipelining_fn = config.model_spec.pipelining_fn.args[0]


def setting(part: str, name: str, value: Any) -> Mistake:
    return lambda config: setattr(getattr(config, part) if part else config, name, value)


MISTAKES: list[tuple[str, Row, Mistake]] = [
    ("tensor_parallel_degree=2: copies of experts are not", PLAIN, copies_beside_tensor_parallelism),
    ("initial_placement", PLAIN, partial(with_settings, initial_placement="other.json")),
    ("every rank has all experts", PLAIN, setting("parallelism", "expert_parallel_degree", 1)),
    ("set parallelism.spmd_backend=", Row("qwen3", 2, {"spmd_backend": NOT_TRIED}), lambda config: None),
    ("leave 'model' out of compile.components", PLAIN, compiled),
    ("moe_comm_backend", PLAIN, partial(another_dispatcher, "AllToAllTokenDispatcher")),
    ("override did not replace", PLAIN, lambda config: config.override.imports.clear()),
    ("not whole experts", PLAIN, two_experts),
    ("balancer was never attached", PLAIN, setting("model_spec", "post_optimizer_build_fn", None)),
    (
        "leave config.model_spec.pipelining_fn as it sets it",
        ROWS["stages, one without experts"],
        stages_of_somebody_else,
    ),
    ("its dispatcher knows one place for an expert", OWN, partial(with_settings, replica_slots=1)),
    (
        "the framework's own dispatcher sends tokens; leave dispatch out",
        OWN,
        partial(with_settings, dispatch=DispatchConfig("hierarchical")),
    ),
    ("moe_comm_backend=Other: nothing has been run", OWN, partial(another_dispatcher, "DeepEPTokenDispatcher")),
]
"""What is said, of which job, and what a user does wrong to its config."""


def refused(rank: int, folder: Path) -> dict[str, Any]:
    begin()
    titan_dispatch_double.use()
    said = []
    for line, row, mistake in MISTAKES:
        with pytest.raises((AttachError, RuntimeError)) as error:
            Run(row, folder, False, mistake=mistake).train()
        said.append((line, str(error.value)))
    return {"refused": said, "only one": taken_by_one_rank(rank, folder)}


def taken_by_one_rank(rank: int, folder: Path) -> list[str]:
    """What it says when it takes the model's state, or loads it, and the others do not."""
    run = Run(PLAIN, folder / "one", False, mistake=partial(with_settings, timeout_seconds=1.0))
    part, said = run.trainer.model_parts[0], []
    state, store = part.state_dict(), torch.distributed.distributed_c10d._get_default_store()
    patience = store.timeout
    store.set_timeout(timedelta(seconds=2))
    for alone in (part.state_dict, lambda: part.load_state_dict(state)):
        if rank == 1:
            with pytest.raises(RuntimeError) as caught:
                alone()
            said.append(str(caught.value))
        torch.distributed.barrier()
    store.set_timeout(patience)
    run.close()
    return said


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(4, refused, tmp_path_factory.mktemp("refused"))


def test_what_would_go_wrong_is_refused_on_every_rank_in_one_line(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert [said for said in found["refused"] if said[0] not in said[1] or "\n" in said[1]] == []


@pytest.mark.long
def test_a_rank_that_takes_or_loads_state_alone_says_who_is_missing(results: list[dict[str, Any]]) -> None:
    taken, loaded = results[1]["only one"]
    assert "the state of the model" in taken and "the loading of the model's state" in loaded
    assert all("rank 0" in said and "did not come" in said for said in (taken, loaded))
