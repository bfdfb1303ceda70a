"""torchtitan's own Trainer with a balancer, against the same with experts that stay, and against torchtitan alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import load_example
from ranks import run_ranks
from titan import SAVED, STEPS, Run, different, get_ready, without_state

from eplb_runtime.hosts.attaching.description import AttachError

pytest.importorskip("torchtitan", reason="torchtitan's Trainer: pip install '.[torchtitan]'")

FAMILIES = ("qwen3", "deepseek_v3", "gpt_oss")
TENSOR_PARALLEL, REPLICAS = "tp 2, ep 2 x efsdp 2", "ep 2, two replicas of the model"
LAYOUTS = {"ep 4": 4, "ep 2 x efsdp 2": 2, TENSOR_PARALLEL: 2, REPLICAS: 2}
ONE_FAMILY = {TENSOR_PARALLEL: "deepseek_v3", REPLICAS: "qwen3"}
RUN = [(layout, family) for layout in LAYOUTS for family in FAMILIES if ONE_FAMILY.get(layout, family) == family]
DIVIDED = "ep 2 x efsdp 2"
RECOMPUTED = {
    "ep 4, deepseek_v3": "FullAC",
    "ep 4, gpt_oss": "SelectiveAC",
    "tp 2, ep 2 x efsdp 2, deepseek_v3": "FullAC",
}
"""Trainings with one of torchtitan's ways to compute activations again."""
NOT_TRIED = "full_dtensor" if torch.__version__ >= "2.14" else "spmd_types"
ALIGNED = "ep 4, qwen3"
"""Whose experts want rows of a multiple of 16, as torchtitan's quantised ones do."""


def trained(rank: int, folder: Path, layout: str) -> dict[str, Any]:
    """Each family, with experts that stay, and with experts that move after each step."""
    get_ready()
    ep, found = LAYOUTS[layout], {}
    for family in [family for of_layout, family in RUN if of_layout == layout]:
        name = f"{layout}, {family}"
        change = partial(set_up, RECOMPUTED.get(name), layout, 16 if name == ALIGNED else 0)
        still, moving = (Run(family, ep, folder, b, change=change) for b in (False, True))
        given = rows_of_experts(moving)
        for run in (still, moving):
            run.train()
        found[family] = {
            "different": different(still.state(), moving.state()),
            "logged": (still.logged, moving.logged),
            "moved": moving.moved,
            "order": in_order(moving),
            "given": given,
        }
        if family == "qwen3" and layout == DIVIDED:
            left = without_state(Run(family, ep, folder, True)).train()
            alone = Run(family, ep, folder, None).train()
            found["control"] = different(still.state(), left.state())
            found["alone"] = alone.logged
            left.close()
            alone.close()
        still.close()
        moving.close()
    return found


def rows_of_experts(run: Run) -> list[list[int]]:
    """How many rows each local expert is given from now on."""
    from torchtitan.models.common.moe import GroupedExperts

    given: list[list[int]] = []
    for module in run.trainer.model_parts[0].modules():
        if isinstance(module, GroupedExperts):
            module.register_forward_pre_hook(lambda module, inputs: given.append(inputs[1].tolist()))
    return given


def set_up(kind: str | None, layout: str, alignment: int, config: Any) -> None:
    from torchtitan.components.quantization.utils import swap_token_dispatcher
    from torchtitan.distributed import activation_checkpoint
    from torchtitan.models.common.moe import GroupedExperts

    config.parallelism.tensor_parallel_degree = 2 if layout == TENSOR_PARALLEL else 1
    config.parallelism.data_parallel_replicate_degree = 2 if layout == REPLICAS else 1
    config.activation_checkpoint = getattr(activation_checkpoint, kind).Config() if kind else None
    if alignment:
        for _, _, routed, _ in list(config.model_spec.model.traverse(GroupedExperts.Config)):
            swap_token_dispatcher(routed, alignment)


def in_order(run: Run) -> list[str]:
    """Expert tensors whose part in the state dict is not what the balancer gathers in logical order."""
    from torchtitan.components.checkpointer.utils import canonical_fqn

    state, wrong = run.trainer.model_parts[0].state_dict(), []
    parameters = dict(run.trainer.model_parts[0].named_parameters())
    for name, layer in run.balancer.layer_of_parameter.items():
        if not torch.equal(
            state[canonical_fqn(name)].full_tensor(), run.balancer.gather_experts(layer, parameters[name])
        ):
            wrong.append(name)
    return wrong


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """What four ranks found, by layout."""
    return cache(lambda layout: run_ranks(4, trained, tmp_path_factory.mktemp("torchtitan"), layout))


@pytest.mark.parametrize(("layout", "family"), RUN)
def test_trajectories_are_equal_with_every_home_moved_after_each_step(ranks: Any, layout: str, family: str) -> None:
    for found in ranks(layout):
        seen = found[family]
        assert seen["moved"] > 16 * (STEPS - 1)
        assert seen["different"] == []
        still, moving = seen["logged"]
        assert len(still) == STEPS and still == moving
        assert all(norm > 0.3 for _, _, norm in still), "clipping was not active"
        assert seen["order"] == []
        assert seen["given"]
        unaligned = any(rows % 16 for layer in seen["given"] for rows in layer)
        assert unaligned == (f"{layout}, {family}" != ALIGNED)


def test_optimizer_state_that_stays_behind_is_noticed(ranks: Any) -> None:
    assert any(found["control"] for found in ranks(DIVIDED))


def test_the_trajectory_is_that_of_torchtitan_alone_to_rounding(ranks: Any) -> None:
    for found in ranks(DIVIDED):
        ours, alone = torch.tensor(found["qwen3"]["logged"][0]), torch.tensor(found["alone"])
        assert torch.allclose(ours[0], alone[0], rtol=1e-3)
        assert torch.allclose(ours[:, 0], alone[:, 0], rtol=1e-2)


def resumed(rank: int, folder: Path) -> dict[str, Any]:
    """Saved by torchtitan's checkpointer while homes move, resumed with and without us; and the other way round."""
    get_ready()
    ours, theirs = folder / "ours", folder / "theirs"
    first = Run("qwen3", 2, ours, True, saves=True).train()
    found: dict[str, Any] = {"at home": first.balancer.placement.with_epoch(0) == at_home(first), "first": first.logged}
    again = Run("qwen3", 2, ours, True, saves=False, load_step=SAVED).train()
    found["again"] = again.logged, different(first.state(), again.state())
    alone = Run("qwen3", 2, ours, None, saves=False, load_step=SAVED).train()
    found["alone"] = alone.logged
    loaded = Run("qwen3", 2, ours, None, saves=False, load_step=STEPS).train()
    found["loaded by torchtitan alone"] = different(first.state(), loaded.state())
    whole = Run("qwen3", 2, theirs, None, saves=True).train()
    still, moving = (Run("qwen3", 2, theirs, b, saves=False, load_step=SAVED).train() for b in (False, True))
    found["of torchtitan alone"] = still.logged, moving.logged, different(still.state(), moving.state())
    found["whole"] = whole.logged
    taken = Run("qwen3", 2, theirs, True, saves=False, load_step=STEPS).train()
    found["taken over"] = different(whole.state(), taken.state())
    found["refused"] = refused(folder)
    found["only one"] = taken_by_one_rank(rank, folder)
    return found


def taken_by_one_rank(rank: int, folder: Path) -> list[str]:
    """What it says when it takes the model's state, or loads it, and the others do not."""
    run = Run("qwen3", 2, folder / "one", False, mistake=lambda config: balance_of(config, timeout_seconds=1.0))
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


MISTAKES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "copies, and tensor parallelism": (
        "replica_slots=1 with parallelism.tensor_parallel_degree=2",
        lambda config: copies_beside_tensor_parallelism(config),
    ),
    "a start elsewhere": ("initial_placement", lambda config: balance_of(config, initial_placement="other.json")),
    "every expert everywhere": (
        "expert_parallel_degree=1: every rank has all experts",
        lambda config: setattr(config.parallelism, "expert_parallel_degree", 1),
    ),
    "a backend that was not tried": (
        "set parallelism.spmd_backend=",
        lambda config: setattr(config.parallelism, "spmd_backend", NOT_TRIED),
    ),
    "compiled blocks": ("leave 'model' out of compile.components", lambda config: compiled(config)),
    "another dispatcher": ("moe_comm_backend", lambda config: set_dispatcher(config)),
    "imports of the command line": ("override did not replace", lambda config: config.override.imports.clear()),
    "one import left out": ("saved in another order", lambda config: config.override.imports.pop()),
    "more ranks than experts": ("not whole experts", lambda config: set_experts(config, 2)),
    "never attached": (
        "balancer was never attached",
        lambda config: setattr(config.model_spec, "post_optimizer_build_fn", None),
    ),
}
"""What a user can do wrong -> what is said, and how to do it to a config that is balanced."""


def refused(folder: Path) -> dict[str, str]:
    """What each mistake ends with."""
    said = {}
    for mistake, (_, make) in MISTAKES.items():
        try:
            Run("qwen3", 2, folder / "refused", False, mistake=make).train()
            said[mistake] = "nothing"
        except (AttachError, RuntimeError) as error:
            said[mistake] = str(error)
    return said


def balance_of(config: Any, **options: Any) -> None:
    """Other settings of the balancer."""
    function = config.model_spec.post_optimizer_build_fn
    config.model_spec.post_optimizer_build_fn = partial(
        function.func, function.args[0], replace(function.args[1], **options), **function.keywords
    )


def copies_beside_tensor_parallelism(config: Any) -> None:
    config.parallelism.tensor_parallel_degree = 2
    balance_of(config, replica_slots=1)


def compiled(config: Any) -> None:
    config.compile.enable, config.compile.backend = True, "eager"


def set_dispatcher(config: Any) -> None:
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    class Other(AllToAllTokenDispatcher):
        @dataclass(kw_only=True, slots=True)
        class Config(AllToAllTokenDispatcher.Config):
            pass

    for layer in config.model_spec.model.layers:
        before = layer.moe.routed_experts.token_dispatcher
        layer.moe.routed_experts.token_dispatcher = Other.Config(num_experts=before.num_experts, top_k=before.top_k)


def set_experts(config: Any, count: int) -> None:
    for layer in config.model_spec.model.layers:
        load_example("torchtitan_moe")._make_small(layer.moe, num_experts=count, top_k=1, hidden_dim=64)


def at_home(run: Run) -> Any:
    here = run.balancer.placement
    return type(here).initial(here.num_layers, here.num_experts, here.num_ranks)


@pytest.fixture(scope="module")
def saving_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(4, resumed, tmp_path_factory.mktemp("saved"))


def test_a_rank_that_takes_or_loads_state_alone_says_who_is_missing(saving_ranks: list[dict[str, Any]]) -> None:
    taken, loaded = saving_ranks[1]["only one"]
    assert "the state of the model" in taken and "the loading of the model's state" in loaded
    assert all("rank 0" in said and "did not come" in said for said in (taken, loaded))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_would_go_wrong_is_refused_on_every_rank(saving_ranks: list[dict[str, Any]], mistake: str) -> None:
    for found in saving_ranks:
        assert MISTAKES[mistake][0] in found["refused"][mistake]


def test_torchtitans_checkpoints_are_in_logical_order(saving_ranks: list[dict[str, Any]]) -> None:
    for found in saving_ranks:
        assert not found["at home"], "experts stood in logical order anyway"
        first = found["first"]
        assert found["again"] == (first[SAVED:], [])
        assert found["loaded by torchtitan alone"] == []
        assert found["taken over"] == []
        still, moving, odd = found["of torchtitan alone"]
        assert still == moving and odd == []
        for one, other in ((found["alone"], first[SAVED:]), (still, found["whole"][SAVED:])):
            assert torch.allclose(torch.tensor(one)[:, 0], torch.tensor(other)[:, 0], rtol=1e-3)
