"""Transformers' Trainer with a balancer, against the Trainer without: training, folders, resuming, evaluation."""

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.moe_models import VOCABULARY, make_model
from support.ranks import run_ranks
from support.seen import said_by, same
from support.shuffle import plan_by, plan_shuffle
from support.training import config_from_settings
from torch import Tensor
from torch.utils.data import Dataset

import eplb_runtime as eplb

pytest.importorskip("accelerate", reason="the Trainer needs Accelerate: pip install '.[trainer]'")

import transformers
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

STEPS, SAVED = 6, 2


class Texts(Dataset):
    """Of different lengths, padded; the loss leaves the padding out."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._tokens = torch.randint(1, VOCABULARY, (count, 12), generator=generator)
        self._lengths = torch.randint(4, 13, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        real = torch.arange(12) < self._lengths[index]
        tokens = self._tokens[index]
        return {
            "input_ids": tokens * real,
            "attention_mask": real.long(),
            "labels": torch.where(real, tokens, torch.full_like(tokens, -100)),
        }


class Moving(eplb.BalancedTrainer):
    """Every home moves at each decision."""

    def create_optimizer(self, *arguments: Any) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*arguments)
        plan_by(self.balancer, plan_shuffle)
        return optimizer


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    chosen = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "max_grad_norm": 0.3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
    }
    return TrainingArguments(**{**chosen, **options})


def trainer_of(
    kind: type[Trainer], folder: Path, config: dict[str, Any] | None = None, model: Any = None, **options: Any
) -> Trainer:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    transformers.utils.logging.set_verbosity_error()
    own = {}
    if kind is not Trainer:
        own["balancer_config"] = config_from_settings({"interval": 2, "gate": "always", **(config or {})})
    given = arguments(folder, **options)
    trainer = kind(
        model=model if model is not None else make_model("olmoe"),
        args=given,
        train_dataset=Texts(64),
        eval_dataset=Texts(5, seed=1),
        **own,
    )
    assert given.save_only_model == options.get("save_only_model", False), "another Trainer may take them, too"
    return trainer


def logged(trainer: Trainer, what: str = "loss") -> list[float]:
    return [entry[what] for entry in trainer.state.log_history if what in entry]


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    return eplb.logical_state_dict(trainer.model, trainer.optimizer.optimizer)


def train(kind: type[Trainer], folder: Path, config: dict[str, Any] | None = None, **options: Any) -> Trainer:
    trainer = trainer_of(kind, folder, config, **options)
    trainer.train()
    return trainer


def trained(rank: int, folder: Path) -> dict[str, Any]:
    """The Trainer, ours with everything fixed, moving, with copies, and without DistributedDataParallel."""
    saving = {"save_strategy": "steps", "save_steps": SAVED}
    plain = train(Trainer, folder / "plain", **saving)
    still = train(eplb.BalancedTrainer, folder / "still", {"policy": "static"})
    moving = train(Moving, folder / "moving", {"lag": 1}, **saving)
    copies = train(Moving, folder / "copies", {"replica_slots": 1})
    bare = train(Moving, folder / "bare", {"dense_gradients": "allreduce"})
    ways = {"plain": plain, "still": still, "moving": moving, "copies": copies, "bare": bare}
    found: dict[str, Any] = {
        way: (logged(one), logged(one, "grad_norm"), one.evaluate()["eval_loss"]) for way, one in ways.items()
    }
    found["balance"] = logged(moving, "moe/max_vio/mean"), logged(moving, "moe/avg_overload_factor")
    found["moved"] = moving.balancer.placement.epoch
    found["moving is still"] = same(state_of(moving), state_of(still))
    moving.save_model(str(folder / "final"))
    found["experts"] = {key: value for key, value in state_of(moving).items() if key.startswith("model.")}
    found["wrapped"] = [type(trainer.model_wrapped).__name__ for trainer in (still, bare)]
    # Killed while it saves for the second time, and started anew.
    found["resumed"] = resumed(Moving, folder, "moving")
    found["resumed is moving"] = same(found["resumed"].pop(), state_of(moving))
    found["from plain"] = resumed(eplb.BalancedTrainer, folder, "plain")[:1]
    return found


def resumed(kind: type[Trainer], folder: Path, name: str) -> list[Any]:
    """Losses and state of a run that goes on from the first checkpoint of another; the second one is not whole."""
    copy = folder / f"{name} again"
    if dist.get_rank() == 0:
        shutil.copytree(folder / name, copy)
        for step in range(2 * SAVED, STEPS + 1, SAVED):
            (copy / f"checkpoint-{step}" / "trainer_state.json").unlink()
    dist.barrier()
    trainer = trainer_of(kind, copy)
    trainer.train(resume_from_checkpoint=True)
    return [logged(trainer), state_of(trainer)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(2, trained, folder)


def test_lines_of_the_log_say_how_even_the_load_was(results: list[dict[str, Any]]) -> None:
    violations, factors = results[0]["balance"]  # rank 0 alone shows the job
    assert 0 < len(violations) == len(factors) < STEPS, "nothing is measured before the first decision"
    assert min(violations) > 0 and min(factors) >= 1
    assert results[1]["balance"] == ([], [])


@pytest.mark.parametrize("way", ["still", "moving", "copies", "bare"])
def test_losses_and_norms_are_those_of_the_trainer_without_us(results: list[dict[str, Any]], way: str) -> None:
    for found in results:
        (losses, norms, evaluated), (wanted, wanted_norms, wanted_evaluated) = found[way], found["plain"]
        assert len(losses) == STEPS and max(norms) > 0.3
        assert losses == pytest.approx(wanted, abs=2e-5) and norms == pytest.approx(wanted_norms, rel=1e-4)
        assert evaluated == pytest.approx(wanted_evaluated, abs=2e-5)


def test_moving_experts_changes_no_bit(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["moved"] > 1 and found["moving"] == found["still"] and found["moving is still"]


def test_a_resumed_run_goes_on_bit_for_bit_from_the_last_checkpoint_that_is_whole(
    results: list[dict[str, Any]],
) -> None:
    for found in results:
        assert found["resumed"][0] == found["moving"][0] and found["resumed is moving"]


def test_a_run_without_us_goes_on_with_us(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["from plain"][0] == pytest.approx(found["plain"][0], abs=2e-5)


@pytest.mark.parametrize("saved", ["final", f"moving/checkpoint-{STEPS}"])
def test_saved_folders_hold_all_experts_in_logical_order(
    results: list[dict[str, Any]], folder: Path, saved: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / saved)
    experts = results[0]["experts"]
    assert {f"model.{name}" for name in model.state_dict()} == experts.keys()
    assert all(torch.equal(value, experts[f"model.{name}"]) for name, value in model.state_dict().items())
    earlier = AutoModelForCausalLM.from_pretrained(folder / "moving" / f"checkpoint-{SAVED}").state_dict()
    assert not torch.equal(earlier["lm_head.weight"], experts["model.lm_head.weight"])


def test_the_wrapper_is_left_out_where_the_balancer_averages(results: list[dict[str, Any]]) -> None:
    assert results[0]["wrapped"] == ["DistributedDataParallel", "OlmoeForCausalLM"]


class LosesTheLast(Moving):
    """Remembers what it had before it loads the best model."""

    def _load_best_model(self) -> None:
        self.last = state_of(self)
        super()._load_best_model()


def around(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    scores = itertools.count()
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    best = trainer_of(
        LosesTheLast,
        folder / "best",
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=False,
        save_total_limit=1,
        **options,
    )
    best.compute_metrics = lambda prediction: {"score": float(next(scores))}
    before = best.evaluate()["eval_loss"]  # ahead of training each rank has the whole model
    best.train()
    found["before"], found["after"] = before, best.evaluate()["eval_loss"]
    found["last"] = best.last
    found["best"] = {key: value for key, value in state_of(best).items() if key.startswith("model.")}
    found["predictions"] = best.predict(Texts(5, seed=1)).predictions
    found["uneven"] = said_by(lambda: best.evaluate(Texts(4 + 8 * rank)))
    found["mistakes"] = mistakes(rank, folder)
    return found


class ClipsAlone(eplb.BalancedTrainer):
    """Control: each rank by its own norm, as the Trainer does."""

    _clip_grad_norm = Trainer._clip_grad_norm


class SavesAlone(eplb.BalancedTrainer):
    """Control: rank 0 alone, as the Trainer does."""

    _save = Trainer._save


class Wrapped(torch.nn.Module):
    """None that ``save_pretrained`` saves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model("olmoe")

    def forward(self, **batch: Tensor) -> Any:
        return self.inner(**batch)


def mistakes(rank: int, folder: Path) -> list[str]:
    said = []

    def noticed(kind: type[Trainer], **options: Any) -> None:
        try:
            trainer = train(kind, folder / "mistakes", {"timeout_seconds": 2}, max_steps=1, **options)
            trainer.save_model(str(folder / "alone"))
            said.append("nothing")
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
        dist.barrier()

    noticed(ClipsAlone)
    noticed(SavesAlone)
    noticed(eplb.BalancedTrainer, auto_find_batch_size=True)
    noticed(eplb.BalancedTrainer, optim="adafactor")
    noticed(eplb.BalancedTrainer, model=Wrapped())
    noticed(eplb.BalancedTrainer, accelerator_config={"even_batches": False})
    return said


@pytest.fixture(scope="module")
def others(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(2, around, folder)


@pytest.mark.long
def test_the_best_model_is_loaded_at_the_end(others: list[dict[str, Any]], folder: Path) -> None:
    saved = AutoModelForCausalLM.from_pretrained(folder / "best" / "checkpoint-2").state_dict()
    assert not (folder / "best" / "checkpoint-4").exists()  # save_total_limit
    for found in others:
        assert all(torch.equal(value, found["best"][f"model.{name}"]) for name, value in saved.items())
        assert not any(torch.equal(value, found["last"][f"model.{name}"]) for name, value in saved.items())
        assert found["before"] != pytest.approx(found["after"], abs=1e-4)


@pytest.mark.long
def test_ranks_predict_together_and_unequally_many_batches_are_refused(others: list[dict[str, Any]]) -> None:
    for found in others:
        assert found["predictions"].shape == (5, 12, VOCABULARY)
        assert found["uneven"] == "ranks have [1, 3] batches to evaluate: all take part in each forward"


def test_mistakes_are_noticed_on_every_rank(others: list[dict[str, Any]]) -> None:
    clipped, saved, found, optimizer, model, uneven = zip(*(found["mistakes"] for found in others), strict=True)
    assert clipped[0] == clipped[1] and "clip_grad_norm_" in clipped[0]
    assert "rank 1 did not come to save_pretrained" in saved[0] and saved[1] == "nothing"
    assert all("does not take auto_find_batch_size" in line and "\n" not in line for line in found)
    assert all("Wrapped is none" in line and "\n" not in line for line in model)
    assert all("does not take even_batches=False" in line for line in uneven)
    assert all("Adafactor" in line and "\n" not in line for line in optimizer)


def adapted_experts(rank: int, folder: Path) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

    def model() -> Any:
        base = make_model("olmoe")
        torch.manual_seed(3)
        return get_peft_model(base, LoraConfig(r=32, target_parameters=targets, init_lora_weights=False))

    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    try:
        trainer_of(Moving, folder / "each", model=model(), save_on_each_node=True)
        refused = "nothing"
    except ValueError as error:
        refused = str(error)
    plain = train(Trainer, folder / "plain", model=model(), **saving)
    ours = train(Moving, folder / "ours", model=model(), **saving)
    again = trainer_of(Moving, folder / "ours", model=model(), **saving)
    again.train(resume_from_checkpoint=str(folder / "ours" / "checkpoint-2"))
    again.model.requires_grad_(False)
    again.save_model(str(folder / "frozen"))
    return {
        "refused": refused,
        "losses": [logged(trainer) for trainer in (plain, ours, again)],
        "same": same(state_of(again), state_of(ours)),
        "moved": ours.balancer.placement.epoch,
    }


def test_adapters_on_experts_train_and_resume_and_are_saved_as_peft_saves_them(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="PEFT is not installed")
    from safetensors.torch import load_file

    for found in run_ranks(2, adapted_experts, tmp_path):
        plain, ours, again = found["losses"]
        assert "does not take save_on_each_node with adapters of experts" in found["refused"]
        assert ours == pytest.approx(plain, abs=2e-4) and again == ours
        assert found["moved"] > 0 and found["same"]
    plain, ours = (
        load_file(tmp_path / kind / "checkpoint-4" / "adapter_model.safetensors") for kind in ("plain", "ours")
    )
    assert plain.keys() == ours.keys()
    for name in plain:
        torch.testing.assert_close(ours[name], plain[name], atol=2e-3, rtol=0)
