"""The walks of `test_walks_of_frameworks` where each rank has one of two pipeline stages: 4 ranks, 2 stages x 2
expert-parallel ranks. A stage walks while the other waits for what it broadcasts, so nothing may wait for all ranks
once a walk has begun. By the frameworks' own code alone: stand-ins would prove nothing of their order."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from test_walks_of_frameworks import EXPERTS, FRAMEWORKS, INSTALLED, Answered, differing, experts_of

import eplb_runtime as eplb

pytestmark = pytest.mark.skipif(not INSTALLED, reason="no framework is installed: pip install mbridge verl")


def job_of() -> Any:
    import megatron_jobs as jobs
    import test_megatron
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel

    class Grouped(jobs.Job):
        def _chunk(self, number: int, chunks: int, ddp: Any, share: bool) -> Any:
            model = GPTModel(
                self.config,
                test_megatron.grouped_spec(),
                vocab_size=jobs.VOCABULARY,
                max_sequence_length=jobs.LENGTH,
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
                share_embeddings_and_output_weights=False,
            )
            generator = torch.Generator().manual_seed(torch.distributed.get_rank())
            for name, parameter in model.named_parameters():
                if ".experts." in name:
                    parameter.data.normal_(generator=generator)
                    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1
            return DistributedDataParallel(self.config, ddp, model)

    return Grouped()


def everything(rank: int) -> dict[str, Any]:
    import megatron_jobs as jobs
    import transformers.trainer_pt_utils  # noqa: F401

    jobs.prepare(pipeline_model_parallel_size=2)
    job = job_of()
    balancer = eplb.attach(job.models, job.optimizer, config=eplb.BalancerConfig(interval=None))
    sys.meta_path.append(Answered())
    walkers = {name: FRAMEWORKS[name](job.models[0]) for name in INSTALLED}
    found: dict[str, Any] = {name: {"at launch": walker.export()} for name, walker in walkers.items()}
    layers = balancer.placement.num_layers
    order = np.stack([np.roll(np.arange(EXPERTS), 3 + layer) for layer in range(layers)])
    placement = eplb.Placement(order, EXPERTS, 2, np.argsort(order, axis=1))
    balancer.load_state_dict({"step": 1, "placement": placement.to_json()})
    for name, walker in walkers.items():
        found[name]["without"] = walker.export()
        walker.follow(balancer)
        found[name]["with"] = walker.export()
    balancer.close()
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(4, everything)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_experts_of_both_stages_arrive_under_their_logical_ids(name: str, results: list[dict[str, Any]]) -> None:
    if name not in INSTALLED:
        pytest.skip(f"{FRAMEWORKS[name].needs} is not installed")
    for found in results:
        walked = found[name]
        experts = experts_of(walked["at launch"])
        assert len(experts) >= 4 * 2 * EXPERTS, "four layers of two tensors"
        assert set(differing(walked["without"], walked["at launch"])) == set(experts), "control: without the adapter"
        assert differing(walked["with"], walked["at launch"]) == []
