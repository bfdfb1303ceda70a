"""Shows a model of your own move experts: torchrun --nproc-per-node 2 launch/examples/any_module.py [--static]

Some tokens come often, so some experts get many. With --static nothing moves: the losses are the same to the bit.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import eplb_runtime as eplb

HIDDEN, EXPERTS, TOP_K, LAYERS, VOCABULARY = 64, 8, 2, 2, 256


class MoE(nn.Module):
    """Residual. Everything here is the user's own; the runtime takes the place of ``run_experts``."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))
            for _ in range(EXPERTS)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        weights, ids = self.router(tokens).softmax(-1).topk(TOP_K)
        return tokens + self.run_experts(tokens, ids, weights)

    def run_experts(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        of_choices = tokens.unsqueeze(1).expand(-1, TOP_K, -1)
        results = torch.zeros_like(of_choices)
        for number, expert in enumerate(self.experts):
            chosen = ids == number
            results = results.masked_scatter(chosen.unsqueeze(-1), expert(of_choices[chosen]))
        return (results * weights.unsqueeze(-1)).sum(dim=1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(MoE() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


LAYERS_TO_BALANCE = [eplb.MoE(f"layers.{number}.experts", run="run_experts") for number in range(LAYERS)]


def batch(rank: int, step: int) -> Tensor:
    """int64 ``[513]``: small numbers come often."""
    generator = torch.Generator().manual_seed(step * 1009 + rank)
    return (VOCABULARY * torch.rand(513, generator=generator) ** 4).long()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same on every rank. Lists of experts become stacked tensors before the optimizer is made."""
    torch.manual_seed(0)
    model = Model()
    eplb.stack_experts(model, LAYERS_TO_BALANCE)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(config: eplb.BalancerConfig, steps: int, rank: int) -> tuple[list[float], eplb.Balancer, nn.Module]:
    model, optimizer = make()
    balancer = eplb.attach(model, optimizer, layers=LAYERS_TO_BALANCE, config=config)
    losses = []
    for step in range(steps):
        ids = batch(rank, step)
        loss = functional.cross_entropy(model(ids[:-1]), ids[1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, balancer, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--static", action="store_true", help="measure, and move nothing")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    config = eplb.BalancerConfig(
        policy="static" if arguments.static else "incremental", interval=5, gate="always", dense_gradients="allreduce"
    )
    losses, balancer, _ = train(config, arguments.steps, dist.get_rank())
    moved = sum(event.moved_experts for event in balancer.events if type(event).__name__ == "RebalanceCommitted")
    print(f"rank {dist.get_rank()}: loss {losses[-1]:.17g} after {len(losses)} steps, {moved} experts moved")
    balancer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
