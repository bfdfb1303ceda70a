"""Shows DualPipeV over four stages, experts moving in each: torchrun --nproc-per-node 4 launch/examples/pipeline.py

Ranks 0 and 1 hold the first and the last stage, ranks 2 and 3 the two between; experts of a stage are spread over both
of its ranks. A forward and a backward that the schedule pairs run at once. With --static nothing moves, with --in-turn
nothing runs at once: the losses are the same to the bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV
from torch.nn import functional

import eplb_runtime as eplb
from eplb_runtime.hosts import pipelining
from eplb_runtime.moe.experts.compute import SlotCounts

HIDDEN, EXPERTS, TOP_K, VOCABULARY = 64, 8, 2, 256
STAGES, MICRO_BATCHES, TOKENS = 4, 8, 128


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 4 * HIDDEN) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 4 * HIDDEN, HIDDEN) / (4 * HIDDEN) ** 0.5)

    def run(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        raise NotImplementedError("the balancer runs the experts")


def compute(rows: Tensor, counts: SlotCounts, parameters: Mapping[str, Tensor]) -> Tensor:
    """Rows of this rank's experts, one expert's after the other's."""
    of_slots = rows.split(list(counts.known()))
    return torch.cat(
        [
            functional.gelu(mine @ up) @ down
            for mine, up, down in zip(of_slots, parameters["up"], parameters["down"], strict=True)
        ]
    )


class Stage(nn.Module):
    """One MoE layer, with the embedding before the first and the head behind the last."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN) if number == 0 else nn.Identity()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts()
        self.head = nn.Linear(HIDDEN, VOCABULARY) if number == STAGES - 1 else nn.Identity()

    def forward(self, incoming: Tensor) -> Tensor:
        hidden = self.embedding(incoming)
        normed = functional.rms_norm(hidden, (HIDDEN,))
        weights, ids = self.router(normed).softmax(-1).topk(TOP_K)
        return self.head(hidden + self.experts.run(normed, ids, weights))


def batch(column: int, step: int) -> tuple[Tensor, Tensor]:
    """int64 ``[N]`` each, of all micro-batches: small numbers come often."""
    generator = torch.Generator().manual_seed(step * 1009 + column)
    ids = (VOCABULARY * torch.rand(MICRO_BATCHES * TOKENS + 1, generator=generator) ** 4).long()
    return ids[:-1], ids[1:]


def make_schedule(position: int, pipeline: dist.ProcessGroup) -> ScheduleDualPipeV:
    """This rank's two stages, in a V. Examples of what goes in and out are needed: shapes are not found by running."""
    torch.manual_seed(0)
    modules = [Stage(number) for number in range(STAGES)]
    ids, hidden = torch.zeros(TOKENS, dtype=torch.int64), torch.zeros(TOKENS, HIDDEN, requires_grad=True)
    stages = [
        PipelineStage(
            modules[number],
            number,
            STAGES,
            torch.device("cpu"),
            input_args=hidden if number else ids,
            output_args=hidden if number < STAGES - 1 else torch.zeros(TOKENS, VOCABULARY, requires_grad=True),
            group=pipeline,
        )
        for number in (position, STAGES - 1 - position)
    ]
    return ScheduleDualPipeV(stages, MICRO_BATCHES, loss_fn=functional.cross_entropy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--static", action="store_true", help="measure, and move nothing")
    parser.add_argument(
        "--in-turn", action="store_true", help="each forward before the backward that it is paired with"
    )
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    position, column = divmod(rank, 2)
    pipelines = [dist.new_group([0, 2]), dist.new_group([1, 3])]

    schedule = make_schedule(position, pipelines[column])
    modules = [stage.submod for stage in schedule._stages]
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=1e-3)
    config = eplb.BalancerConfig(
        policy="static" if arguments.static else "incremental", interval=5, gate="always", dense_gradients="allreduce"
    )
    layers = [[eplb.MoE("experts", run="run", compute=compute)] for _ in modules]
    balancer = pipelining.attach(schedule, optimizer, layers=layers, config=config)
    if not arguments.in_turn:
        pipelining.overlap(schedule, balancer)

    for step in range(arguments.steps):
        ids, labels = batch(column, step)
        losses: list[Tensor] = []
        schedule.step(ids, target=labels, losses=losses)
        balancer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    moved = sum(event.moved_experts for event in balancer.events if type(event).__name__ == "RebalanceCommitted")
    if losses:
        loss = torch.stack(losses).mean().item()
        print(f"rank {rank}: loss {loss:.17g} after {arguments.steps} steps, {moved} experts moved")
    balancer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
