"""Hugging Face's Trainer on Accelerate, and TRL's trainers on it: the balancer is attached, clips, saves and resumes.

A callback would come too late, but for a model that the library has spread: others are in DistributedDataParallel. What
belongs to the Trainer (batches, losses, schedules, random numbers) stays its own; nothing here looks into a model.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..balancer.balancer import Balancer, GradScaler
from ..checkpoint import load, load_pretrained, save
from ..checkpoint.disk import MARKER
from ..checkpoint.state import CheckpointError, JointAccess, LogicalView
from ..config import BalancerConfig
from . import attach
from .attaching.description import AttachError, unwrapped

try:
    from transformers import PreTrainedModel, Trainer
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

    from .transformers.adapters import experts_of, is_saved_with_adapters
    from .transformers.settings import refusals
except ImportError as error:
    raise ImportError(
        f"BalancedTrainer needs Transformers with Accelerate: pip install 'eplb-runtime[trainer]' ({error})"
    ) from None

STATE = "eplb_runtime"
"""In a checkpoint of the Trainer: the folder with experts' optimizer state, in logical order."""
_NOT_HERE = {
    "auto_find_batch_size": "it starts again on the rank that ran out of memory alone: set per_device_train_batch_size",
    "enable_jit_checkpoint": "each rank would save when the signal reaches it: save by save_strategy",
}
_TrainerBase: Any = object  # the mixin is put in front of a class that has a Trainer's attributes


class BalancedTrainerMixin(_TrainerBase):
    """Put it in front of a Trainer: ``class BalancedSFTTrainer(BalancedTrainerMixin, SFTTrainer): pass``.

    Args:
        balancer_config: settings, the same on every rank. ``dense_gradients="host"``, the default: Accelerate puts the
            model into DistributedDataParallel, which leaves the experts out; ``"allreduce"``: no wrapper.
        ep_group: as for ``attach``.
        arguments, options: of the Trainer.

    Attributes:
        balancer: from the first ``train()`` on; None before. Until then every rank holds the whole model.

    Raises:
        AttachError: a setting of the Trainer that cannot be used here; on every rank.
    """

    balancer: Balancer | None = None

    def __init__(
        self, *arguments: Any, balancer_config: BalancerConfig | None = None, ep_group: Any = None, **options: Any
    ) -> None:
        self._balancer_config, self._ep_group = balancer_config, ep_group
        self._taken: Path | None = None
        self._resumes_from: Path | None = None
        super().__init__(*arguments, **options)
        if self._is_spread:  # the Trainer, which cannot save the optimizer of such a model, insists on True
            self.args: Any = copy.copy(self.args)
            self.args.save_only_model = False
        _refuse(self)

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **options: Any) -> Any:
        """Train as the Trainer does. ``resume_from_checkpoint=True``: from the last complete checkpoint of
        ``output_dir``, which all ranks must see (else ValueError, also where there is none)."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(self._last_whole_checkpoint())
        self._resumes_from = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        return super().train(resume_from_checkpoint, *arguments, **options)

    def create_optimizer(self, *arguments: Any, **options: Any) -> torch.optim.Optimizer:
        """Make the optimizer as the Trainer does, and return it. A model that is not attached yet is attached with it:
        that sets ``balancer``, closes one of an earlier model, and replaces Accelerate's gradient scaler by ours. On
        resuming, an optimizer state that was saved without the balancer is loaded first."""
        super().create_optimizer(*arguments, **options)
        if self.model.__dict__.get("_eplb_runtime_balancer") is None or self.balancer is None:
            self._attach()
        return self.optimizer

    def _attach(self) -> None:
        if self.balancer is not None:  # with model_init the model is a new one
            self.balancer.close()
        if not isinstance(self.model, PreTrainedModel) and not hasattr(self.model, "peft_config"):
            raise AttachError(
                f"BalancedTrainer saves Transformers' models (and PEFT's), and {type(self.model).__name__} is none: "
                "attach in a training loop of your own"
            )
        folder = self._resumes_from
        if folder is not None and not self._is_spread and (folder / OPTIMIZER_NAME).is_file():
            # Of a run without us: whole on every rank, until attaching takes over what belongs here.
            self._read_whole_optimizer(folder)
            self._taken = folder
        self.balancer = attach(self.model, self.optimizer, config=self._balancer_config, ep_group=self._ep_group)
        if not self._exports and any(".lora_" not in name for name in self._trained_experts):
            self.balancer.close()
            raise AttachError(
                "PEFT saves adapters alone, and experts are trained, too: freeze them, or train without adapters"
            )
        if self.accelerator.scaler is not None:
            handler = self.accelerator.scaler_handler
            self.accelerator.scaler = GradScaler(self.balancer, **(handler.to_kwargs() if handler is not None else {}))

    def _wrap_model(self, model: nn.Module, training: bool = True, *arguments: Any, **options: Any) -> nn.Module:
        """Wrap it as Accelerate does, but leave it where it is: moving gives parameters new memory, even on a CPU."""
        if self.balancer is None or not training or self._is_spread:
            return super()._wrap_model(model, training, *arguments, **options)
        if model is self.model:
            model._is_accelerate_prepared = False  # type: ignore[assignment]  # an evaluation ahead of training says so
        # DistributedDataParallel refuses a model in which adapters of experts are all that is trained.
        trained = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        alone = self.balancer.config.dense_gradients == "allreduce" or trained <= self._trained_experts
        return self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=alone)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if model.__dict__.get("_eplb_runtime_balancer") is None:
            super()._move_model_to_device(model, device)

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        """Run the Trainer's step and return its loss. Only a step's last micro-batch runs outside of ``no_sync()``."""
        if self.balancer is None or self.accelerator.sync_gradients:
            return super().training_step(*arguments, **options)
        with self.balancer.no_sync():
            return super().training_step(*arguments, **options)

    def _clip_grad_norm(self, model: nn.Module, max_norm: float | None = None) -> Tensor:
        """By the norm over all ranks' experts."""
        assert self.balancer is not None
        self.accelerator.unscale_gradients()
        return self.balancer.clip_grad_norm_(self.args.max_grad_norm if max_norm is None else max_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return grad_norm if grad_norm is not None else self._clip_grad_norm(model, float("inf"))

    def end(self) -> None:
        """Close the balancer, then end the Trainer, which destroys the process groups. Collective."""
        if self.balancer is not None:
            self.balancer.close()
        super().end()

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Log as the Trainer does. If ``logs`` have a loss, first add ``moe/...`` to them, the balance of the last
        measured load by the field's names."""
        if self.balancer is not None and self.balancer.shown is not None and "loss" in logs:
            logs.update({f"moe/{name}": round(value, 4) for name, value in self.balancer.shown.balance().items()})
        super().log(logs, *arguments, **options)

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **options: Any) -> Any:
        """Evaluate as the Trainer does. RuntimeError: ranks (asked first) have different numbers of batches."""
        if self.balancer is not None:
            here = [len(dataloader) if has_length(dataloader) else 0]
            batches = self.accelerator.gather(torch.tensor(here, device=self.args.device)).tolist()
            if len(set(batches)) > 1:
                raise RuntimeError(f"ranks have {batches} batches to evaluate: all take part in each forward")
        return super().evaluation_loop(dataloader, *arguments, **options)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save all experts, or adapters of them, in logical order, from all ranks."""
        if self.balancer is None or self._is_spread or self.args.should_save:
            super()._save(output_dir, None if self._exports else state_dict)
        else:
            self.model.save_pretrained(output_dir or self.args.output_dir, is_main_process=False)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The Trainer's state is what makes a checkpoint whole: the old one goes first, the new one is written last."""
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.balancer is None or not self._trained_experts:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        if self._is_spread:
            from transformers.distributed.checkpoint import save_optimizer_distributed

            save_optimizer_distributed(self.model, unwrapped(self.optimizer), str(Path(output_dir) / STATE))
        else:
            save(Path(output_dir) / STATE, self.model, unwrapped(self.optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _save_rng_state(self, output_dir: str) -> None:
        """Every rank's own, ahead of what makes the checkpoint whole."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Only adapters here: experts are read when they are spread, by the rank that gets them."""
        if is_saved_with_adapters(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_weights(self, folder: str | Path) -> None:
        if not self._is_spread:
            load_pretrained(self.model, folder)
            return
        # By the library, which makes another model for a moment.
        config = self.model.config
        ways = {"dtype": self.model.dtype, "experts_implementation": config._experts_implementation}
        other = type(self.model).from_pretrained(folder, distributed_config=config.distributed_config, **ways)
        self.model.load_state_dict(other.state_dict())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Weights, too: when this is called, experts are spread and the optimizer is the one that will step."""
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if (folder / SCHEDULER_NAME).is_file():
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))
        if self._is_spread:
            from transformers.distributed.checkpoint import load_optimizer_distributed

            if not (folder / STATE).is_dir():
                raise ValueError(f"{folder} has no {STATE} with the optimizer's state: resume from another checkpoint")
            if self._exports:
                self._load_weights(folder)
            load_optimizer_distributed(self.model, unwrapped(self.optimizer), str(folder / STATE))
            return
        joint = JointAccess.of(LogicalView(self.model))
        if joint.folder_has(folder / STATE / MARKER):
            load(folder / STATE, self.model, unwrapped(self.optimizer))
            return
        if self._exports:
            self._load_weights(folder)
        has_plain = joint.folder_has(folder / OPTIMIZER_NAME)
        if has_plain and self._taken == folder:
            # The schedule that was made meanwhile has set the learning rates of its first step.
            for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
        elif has_plain and self._trained_experts:
            raise CheckpointError(
                f"{folder} was saved without the balancer, and its optimizer is for whole experts: make a new "
                "BalancedTrainer to resume from it"
            )
        elif has_plain:
            self._read_whole_optimizer(folder)

    def _read_whole_optimizer(self, folder: Path) -> None:
        self.optimizer.load_state_dict(torch.load(folder / OPTIMIZER_NAME, map_location="cpu", weights_only=True))

    def _load_best_model(self) -> None:
        if self._exports:
            self._load_weights(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def _last_whole_checkpoint(self) -> Path:
        """Return that of the output folder; ValueError: there is none, or ranks see different ones."""
        output = Path(self.args.output_dir)
        last = max(map(_step_of, output.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")), default=-1)
        seen = self.accelerator.gather(torch.tensor([last], device=self.args.device)).tolist()
        if len(set(seen)) > 1:
            raise ValueError(f"the last checkpoint in {output} is of step {seen} on the ranks: give a folder all see")
        if last < 0:
            raise ValueError(f"no checkpoint in {output} is whole")
        return output / f"{PREFIX_CHECKPOINT_DIR}-{last}"

    @property
    def _is_spread(self) -> bool:
        """Return whether the library has spread the model itself, and saves it."""
        return bool(getattr(self, "is_distributed_loading_by_transformers", False))

    @property
    def _exports(self) -> bool:
        """Whether saved folders hold the whole model, which all ranks write; adapters are whole on every rank."""
        return self.balancer is not None and not is_saved_with_adapters(self.model)

    @property
    def _trained_experts(self) -> set[str]:
        """Names of what is trained and moves with experts: their own weights, or adapters of these."""
        assert self.balancer is not None
        experts = self.balancer.layer_of_parameter
        return {name for name, p in self.model.named_parameters() if name in experts and p.requires_grad}


def _step_of(state: Path) -> int:
    """Return the step of a checkpoint by the Trainer's state in it; -1: it is not whole."""
    try:
        return int(json.loads(state.read_text())["global_step"])
    except (OSError, ValueError, LookupError, TypeError):
        return -1


def _refuse(trainer: Any) -> None:
    args = trainer.args
    for name, mend in _NOT_HERE.items():
        if getattr(args, name, False):
            raise AttachError(f"BalancedTrainer does not take {name}: {mend}")
    if not trainer.accelerator.even_batches:
        raise AttachError("BalancedTrainer does not take even_batches=False: all ranks take part in every forward")
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    spreads = not trainer._is_spread and parallel is not None and parallel.total_size > 1
    accelerate = {"distributed_type": trainer.accelerator.distributed_type.value}
    for one in refusals({**accelerate, "parallelism_config": parallel if spreads else None}):
        raise AttachError(f"BalancedTrainer does not run with {one}")
    if args.save_on_each_node and any(one.low_rank for *_, one in experts_of(trainer.model)):
        raise AttachError(
            "BalancedTrainer does not take save_on_each_node with adapters of experts: the job's first rank alone "
            "writes them, so give a folder that all nodes see"
        )
    if args.n_gpu > 1 or not dist.is_initialized():
        raise AttachError("BalancedTrainer needs a process for each device: start it with torchrun")


class BalancedTrainer(BalancedTrainerMixin, Trainer):
    """Transformers' Trainer with the experts of the model spread over all ranks and balanced.

    It is used as the Trainer is, in a script that torchrun starts, on every rank alike (`save_model`, too)::

        trainer = eplb.BalancedTrainer(model=model, args=arguments, train_dataset=data, balancer_config=config)
        trainer.train(resume_from_checkpoint=True)

    Every saved folder holds all experts in logical order; checkpoints have the optimizer's state in a folder of ours.
    """
