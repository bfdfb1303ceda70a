"""A live Megatron job and its command line have the same settings, and attach names all that the rules refuse."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from examples import FOLDER, load_example
from ranks import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
COMMAND = """
torchrun --nnodes 1 --nproc-per-node 2 pretrain_gpt.py --num-experts 8 --moe-router-topk 3 --bf16 \\
  --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --use-distributed-optimizer --optimizer adam
"""


def live_job(rank: int, folder: str) -> dict[str, Any]:
    sys.path.insert(0, str(FOLDER))
    ours = load_example("megatron_gpt")
    from megatron.core import parallel_state

    import eplb_runtime as eplb
    from eplb_runtime.hosts import AttachError
    from eplb_runtime.hosts.megatron.describe import settings_of_job
    from eplb_runtime.hosts.megatron.settings import settings_of
    from eplb_runtime.tools.recipes import BY_FLAGS, read_recipe

    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    script = Path(folder) / f"run{rank}.sh"
    script.write_text(COMMAND)
    recipe = read_recipe(str(script))
    written = settings_of({**recipe.defaults, **recipe.options})
    model, optimizer = ours.wrapped(ours.model_of(moe_router_topk=3))
    live = settings_of_job(model, [optimizer])
    assert live is not None
    plain, plain_optimizer = ours.wrapped(ours.model_of(moe_router_topk=3), distributed=False)
    other = settings_of_job(plain, [plain_optimizer])
    assert other is not None
    for settings in (live, written, other):
        for name in BY_FLAGS:  # flags have other defaults than configs, and neither means anything in this job
            del settings.values[name]
    model.config.fp8, model.config.cuda_graph_impl = "e4m3", "local"
    try:
        eplb.attach([model], optimizer)
        said = ""
    except AttachError as error:
        said = str(error)
    return {
        "live": live.values,
        "written": written.values,
        "other": other.values,
        "said": said,
    }


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, live_job, str(tmp_path_factory.mktemp("settings")))


def test_a_live_job_and_its_command_line_have_the_same_settings(jobs: list[dict[str, Any]]) -> None:
    for job in jobs:
        assert job["live"] == job["written"]
        assert job["live"]["expert_data_parallel_size"] == 1 and job["live"]["use_distributed_optimizer"] is True


def test_attach_names_all_refused_settings_at_once(jobs: list[dict[str, Any]]) -> None:
    for job in jobs:
        for part in ("cuda_graph_impl=local", "fp8_recipe=delayed", "set fp8_recipe to tensorwise"):
            assert part in job["said"]
