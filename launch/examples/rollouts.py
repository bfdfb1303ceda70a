"""Shows generating and training in turn, with experts moved ahead of a training step by what the rollout routed:

    torchrun --nproc-per-node 2 launch/examples/rollouts.py [--static]

What the router chose while tokens were generated is what it will choose when they are trained on. So it is declared as
the load to come, and experts move before the training step. With --static nothing moves, and nothing else changes.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import eplb_runtime as eplb

EXPERTS, LAYERS, PROMPTS, PROMPT, NEW = 8, 2, 16, 8, 24


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model, the same on every rank; routers that prefer some experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        attn_implementation="eager",
        pad_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_(std=0.3)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


class Routing:
    """Tokens of each expert in each layer, counted where the experts are called."""

    def __init__(self, model: nn.Module) -> None:
        self.load_LE = torch.zeros(LAYERS, EXPERTS, dtype=torch.int64)
        for number, layer in enumerate(model.model.layers):
            layer.mlp.experts.register_forward_pre_hook(lambda _, arguments, n=number: self._count(n, arguments[1]))

    def _count(self, layer: int, topk_ids: Tensor) -> None:
        self.load_LE[layer] += torch.bincount(topk_ids.flatten(), minlength=EXPERTS)

    def take(self) -> Tensor:
        """What was counted since the last call."""
        taken, self.load_LE = self.load_LE, torch.zeros_like(self.load_LE)
        return taken


def reward(tokens: Tensor) -> Tensor:
    """Something to learn: even numbers. ``[B]``, mean 0."""
    even = (tokens[:, PROMPT:] % 2 == 0).float().mean(dim=1)
    return even - even.mean()


def train(config: eplb.BalancerConfig, rounds: int, rank: int) -> tuple[list[float], eplb.Balancer, nn.Module]:
    model, optimizer = make()
    routing = Routing(model)
    balancer = eplb.attach(model, optimizer, config=config)
    losses = []
    for number in range(rounds):
        torch.manual_seed(1000 * number + rank)
        prompts = torch.randint(0, 16, (PROMPTS, PROMPT))
        model.eval()
        routing.take()
        # Every forward is collective: all ranks generate equally many tokens. (synced_gpus=True: else, too.)
        tokens = model.generate(prompts, do_sample=True, max_new_tokens=NEW, min_new_tokens=NEW)
        if config.policy != "static":
            balancer.declare(routing.take())
            balancer.rebalance()
        model.train()
        logits = model(input_ids=tokens[:, :-1]).logits[:, PROMPT - 1 :]
        chosen = logits.log_softmax(-1).gather(-1, tokens[:, PROMPT:].unsqueeze(-1)).squeeze(-1)
        loss = -(reward(tokens).unsqueeze(1) * chosen).mean()
        loss.backward()
        balancer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, balancer, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="of generating and training (default: 6)")
    parser.add_argument("--static", action="store_true", help="measure, and move nothing")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    config = eplb.BalancerConfig(
        policy="static" if arguments.static else "incremental",
        interval=None,  # decisions come from rebalance() alone
        gate="always",
        dense_gradients="allreduce",
    )
    losses, balancer, _ = train(config, arguments.rounds, dist.get_rank())
    moved = sum(event.moved_experts for event in balancer.events if type(event).__name__ == "RebalanceCommitted")
    print(f"rank {dist.get_rank()}: loss {losses[-1]:.17g} after {len(losses)} rounds, {moved} experts moved")
    balancer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
