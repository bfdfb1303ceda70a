"""Megatron-Core: what attach and a balancer refuse, state by place that is not taken for other experts', a recording
without a balancer, and settings of a live job. `test_megatron_rows` has the trainings."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist
from support import megatron_standins as standins
from support.megatron_jobs import (
    MICRO_BATCHES,
    MegatronLoop,
    assert_moved_without_a_change,
    attached,
    batches_of,
    forward_step,
    needs_megatron,
    sharded,
    trained,
)
from support.ranks import run_ranks
from test_megatron_rows import ROWS

import eplb_runtime as eplb
from eplb_runtime.hosts.attaching import attach as attaching
from eplb_runtime.load.series import read_series
from eplb_runtime.tools.formats.loads import read_load

pytestmark = needs_megatron
COMPILED = "distributed optimizer, all-gather"
Said = list[tuple[str, str]]
COMMAND = """
torchrun --nnodes 1 --nproc-per-node 2 pretrain_gpt.py --num-experts 8 --moe-router-topk 3 --bf16 \\
  --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --use-distributed-optimizer --optimizer adam
"""


def everything(rank: int, folder: str) -> dict[str, Any]:
    standins.cpu()
    return {
        "refused": [*refused_at_attach(), *refused_later(), *refused_by_place(Path(folder) / "places")],
        "recorded": recorded(Path(folder) / "recorded"),
        **settings(rank, folder),
    }


def said_by(call: Callable[[], Any]) -> str:
    with pytest.raises((RuntimeError, ValueError)) as error:
        call()
    return str(error.value)


def refused_at_attach() -> Said:
    """What is said of jobs, after what must be in it."""

    def attach(options: dict[str, Any], optimizer: Any = None, inside: bool = False, **settings: Any) -> str:
        job = MegatronLoop(**options)
        model = job.models[0].module if inside else job.models[0]
        return said_by(lambda: eplb.attach(model, optimizer or job.optimizer, config=eplb.BalancerConfig(**settings)))

    bare = {"plain": True, "bf16": False}
    padded = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    other = torch.optim.SGD(MegatronLoop().models[0].parameters(), lr=1.0)
    several = MegatronLoop()
    several.config.fp8, several.config.cuda_graph_impl = "e4m3", "local"
    at_once = said_by(lambda: attached(several, move=False))
    late = MegatronLoop()
    dispatchers = (getattr(module, "token_dispatcher", None) for module in late.models[0].modules())
    patched = [late.optimizer, *filter(None, dispatchers)]
    before = [sorted(vars(one)) for one in patched]
    with patch.object(attaching, "_record", side_effect=MemoryError("made to fail")):
        failed = said_by(lambda: attached(late, move=True))
    assert [sorted(vars(one)) for one in patched] == before
    return [
        ("MemoryError: made to fail", failed),
        ("replica_slots", attach(bare, replica_slots=1)),
        ("the framework's own dispatcher sends tokens", attach(bare, dispatch=eplb.DispatchConfig("hierarchical"))),
        ("nothing to balance", attach({**bare, **padded})),
        ("averages gradients itself", attach({}, dense_gradients="allreduce")),
        ("get_megatron_optimizer", attach({}, other)),
        ("attach the DistributedDataParallel", attach({}, inside=True)),
        *((part, at_once) for part in ("cuda_graph_impl=local", "fp8_recipe=delayed", "set fp8_recipe to tensorwise")),
    ]


def refused_later() -> Said:
    """What is said of calls of a balancer, and of a wrapper that is made after attach."""
    job = MegatronLoop()
    found = [("call step()", said_by(lambda: eplb.record(job.models[0], "", job.optimizer)))]
    balancer = attached(job, move=True)
    found += [
        ("optimizer", said_by(lambda: balancer.clip_grad_norm_(1.0))),
        ("need eplb's dispatch", said_by(lambda: balancer.at_once(lambda: 1, lambda: 2))),
        ("its own checkpoints", said_by(lambda: eplb.logical_state_dict(job.models[0]))),
    ]
    forward_step(batches_of(0), job.models[0])[0].float().mean().backward()
    found.append(("optimizer's step", said_by(balancer.rebalance)))
    balancer.close()
    for is_trained, line in ((True, "was made after attach"), (False, "is no torch.optim.Optimizer")):
        bare, other = MegatronLoop(plain=True, bf16=False), MegatronLoop(bf16=False)
        if not is_trained:
            bare.optimizer = None
        balancer = attached(bare, move=False)
        if is_trained:
            from megatron.core.distributed import DistributedDataParallel

            model = DistributedDataParallel(bare.config, other.models[0].ddp_config, bare.models[0])
            found.append((line, said_by(lambda model=model: forward_step(batches_of(0), model))))
        else:
            found.append((line, said_by(lambda balancer=balancer, other=other: balancer.adopt(other.optimizer))))
        balancer.close()
    return found


def refused_by_place(folder: Path) -> Said:
    """Once experts have moved, also after close, state by place is no state of other experts."""
    row = ROWS["optimizer of float16, shared experts"]
    job = row.make()
    balancer = attached(job, move=True)
    job.train(range(2))
    model, optimizer = job.models[0].state_dict(), job.optimizer.state_dict()
    balancer.close()
    alone = row.make()
    found = [("eplb_runtime_experts", said_by(lambda: alone.models[0].load_state_dict(model)))]
    job = row.make()
    balancer = attached(job, move=True)
    job.train(range(1))
    loads = (partial(job.models[0].load_state_dict, model), partial(job.models[0].load_state_dict, dict(model)))
    for load in (*loads, partial(job.optimizer.load_state_dict, optimizer)):
        said = said_by(load)
        found += [("than this rank has now", said), ("sharded_state_dict", said)]
    job.models[0].load_state_dict(job.models[0].state_dict())
    job.optimizer.load_state_dict(job.optimizer.state_dict())
    balancer.close()
    job = MegatronLoop()
    balancer = attached(job, move=True)
    job.train(range(1))
    sharded(job, loading=False)
    balancer.close()
    places = str(folder)
    for what, call in {
        "dp_reshardable": lambda: sharded(job, loading=False, way="dp_reshardable"),
        "dp_zero_gather_scatter": lambda: sharded(job, loading=False, way="dp_zero_gather_scatter"),
        "save_parameter_state": lambda: job.optimizer.save_parameter_state(places),
        "load_parameter_state": lambda: job.optimizer.load_parameter_state(places),
    }.items():
        found.append((f"by place ({what})", said_by(call)))
    return found


def recorded(run: Path) -> dict[str, Any]:
    """What is written of a job without a balancer, and what one with a balancer counts of it in its first step."""
    row = ROWS["no wrapper, torch's optimizer, three experts a token"]
    job = row.make()
    with eplb.record(job.models[0], run, interval=1) as recording:
        for step in range(row.steps):
            job.models[0].eval()  # which is no load of a model that is trained, ahead of its first step, too
            with torch.no_grad():
                forward_step(batches_of(9), job.models[0])
            job.models[0].train()
            batches = batches_of(step)
            for _ in range(MICRO_BATCHES):
                forward_step(batches, job.models[0])
            recording.step()
    assert all(vars(layer).keys().isdisjoint({"route", "preprocess"}) for layer in job.layers().values())
    dist.barrier()
    return {
        "read": read_load(run).tolist(),
        "seconds": read_series(run)[2].expert_seconds,
        "counted": trained(row, False).load,
    }


def settings(rank: int, folder: str) -> dict[str, Any]:
    """Those of a live job, of its command line, and of another job."""
    from eplb_runtime.hosts.megatron.describe import settings_of_job
    from eplb_runtime.hosts.megatron.settings import settings_of
    from eplb_runtime.tools.recipes import BY_FLAGS, read_recipe

    script = Path(folder) / f"run{rank}.sh"
    script.write_text(COMMAND)
    recipe = read_recipe(str(script))
    found = {"written": settings_of({**recipe.defaults, **recipe.options}).values}
    for name, distributed in (("live", True), ("other", False)):
        job = MegatronLoop(moe_router_topk=3, distributed=distributed)
        of_job = settings_of_job(job.models[0], [job.optimizer])
        assert of_job is not None
        found[name] = of_job.values
    for values in found.values():
        for name in BY_FLAGS:  # flags have other defaults than configs, and neither means anything in this job
            del values[name]
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, everything, str(tmp_path_factory.mktemp("megatron")))


def test_what_megatron_cannot_follow_is_refused(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert len(found["refused"]) == 28
        assert [(line, said) for line, said in found["refused"] if line not in said] == []


def test_a_model_without_a_balancer_is_recorded(results: list[dict[str, Any]]) -> None:
    found = results[0]["recorded"]
    assert found["read"][0] == found["counted"][0], "nobody has trained yet"
    assert found["seconds"] > 0, "of expert work"


def test_a_live_job_and_its_command_line_have_the_same_settings(results: list[dict[str, Any]]) -> None:
    assert_same_settings(results)


def assert_same_settings(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["live"] == found["written"] != found["other"]
        assert found["live"]["expert_data_parallel_size"] == 1 and found["live"]["use_distributed_optimizer"] is True


def compiled(rank: int) -> tuple[dict[str, Any], int]:
    """What both give where moved experts are trained by functions that Megatron compiles, and how many graphs those
    have; in other tests they run as they are."""
    standins.cpu()
    row = ROWS[COMPILED]
    found: dict[str, Any] = {"static": trained(row, False), "refused": []}
    with torch._dynamo.config.patch(disable=False):
        found["moving"] = trained(row, True)
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.long
def test_no_bit_changes_where_megatron_compiles_functions_of_its_own() -> None:
    results, graphs = zip(*run_ranks(2, compiled), strict=True)
    assert_moved_without_a_change(ROWS[COMPILED], list(results))
    assert min(graphs) > 0
