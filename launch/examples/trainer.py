"""Transformers' Trainer moves experts: torchrun --nproc-per-node 2 launch/examples/trainer.py [--static] [--resume]

Some tokens come often, so some experts get many. With --static nothing moves: the losses are the same to the bit. With
--resume it goes on from the last checkpoint that is whole, as a run does that was killed.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

import eplb_runtime as eplb

VOCABULARY, LENGTH = 256, 64


class Texts(Dataset):
    """Random; small numbers come often."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._tokens = (VOCABULARY * torch.rand(count, LENGTH, generator=generator) ** 4).long()

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def make_model() -> torch.nn.Module:
    """The same on every rank; here from a configuration, as a rule from_pretrained."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64}
    config = AutoConfig.for_model("olmoe", **sizes, **experts, num_key_value_heads=4, pad_token_id=None)
    return AutoModelForCausalLM.from_config(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--static", action="store_true", help="measure, and move nothing")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "eplb_runtime_trainer")
    chosen = parser.parse_args()
    arguments = TrainingArguments(
        output_dir=str(chosen.output),
        max_steps=chosen.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=max(1, chosen.steps // 4),
        eval_strategy="steps",
        eval_steps=max(1, chosen.steps // 2),
        save_strategy="steps",
        save_steps=max(1, chosen.steps // 2),
        save_total_limit=2,
        load_best_model_at_end=True,
        report_to=[],
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    policy = "static" if chosen.static else "incremental"
    trainer = eplb.BalancedTrainer(
        model=make_model(),
        args=arguments,
        train_dataset=Texts(512, seed=1),
        eval_dataset=Texts(30, seed=2),
        balancer_config=eplb.BalancerConfig(policy=policy, interval=5, gate="always"),
    )
    trainer.train(resume_from_checkpoint=chosen.resume)
    trainer.save_model()  # on every rank: all experts, in logical order
    loss = trainer.evaluate()["eval_loss"]
    moved = sum(event.moved_experts for event in trainer.balancer.events if hasattr(event, "moved_experts"))
    print(f"rank {dist.get_rank()}: loss {loss:.17g} after {trainer.state.global_step} steps, {moved} experts moved")
    trainer.end()


if __name__ == "__main__":
    main()
