"""Trainings by torchtitan's own Trainer: a `Row` says what one is made of, `found_of` trains it with experts that stay
and with experts that move after each step, or, in float64, with torchtitan alone."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support import titan_dispatch_double
from support.examples import FOLDER, load_example
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import eplb_runtime as eplb
from eplb_runtime.events import LoadMeasured

from .seen import differing, furthest
from .shuffle import plan_by, plan_shuffle

STEPS, SAVED, TEXTS, LENGTH = 3, 2, 2, 64
LONG = 256
"""Of texts that ranks share: torch cuts masks in blocks of 128, and each rank has whole ones."""


@dataclass(frozen=True)
class Row:
    """A training that differs in kind from the others.

    Args:
        ep: ranks of an EP group; torchtitan's FSDP divides the experts over those that are left.
        options: of ``config.parallelism`` besides.
        checkpointing: of activations, torchtitan's name for its way.
        backend: ``moe_comm_backend``; ``deepep`` runs on `titan_dispatch_double`.
        multiple: experts want rows of a multiple of so many, as torchtitan's quantised ones do.
        micro_batches: of a rank in a step.
        validates: between any two steps.
        close: how far it may be from torchtitan alone on the same ranks, relative, in float64; 0: not a bit from the
            training whose experts stay.
        saves: read back by torchtitan alone, and resumed; a checkpoint of torchtitan alone is taken over.
    """

    family: str
    ep: int
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 4
    checkpointing: str = ""
    backend: str = "standard"
    top_k: int = 2
    multiple: int = 0
    micro_batches: int = 1
    validates: bool = False
    replica_slots: int = 0
    close: float = 0.0
    saves: bool = False

    def degree(self, kind: str) -> int:
        return int(self.options.get(f"{kind}_parallel_degree", 1))

    @property
    def batch(self) -> int:
        """Texts of a rank; stages take one micro-batch each."""
        return 4 if self.degree("pipeline") > 1 else TEXTS

    @property
    def length(self) -> int:
        return LONG if self.degree("context") > 1 else LENGTH

    @property
    def choices(self) -> int:
        """Of a layer in a step, over all ranks."""
        data_ranks = self.ranks // (self.degree("pipeline") * self.degree("tensor") * self.degree("context"))
        return data_ranks * self.micro_batches * self.batch * self.length * self.top_k

    def change(self, config: Any) -> None:
        from torchtitan.components.quantization.utils import swap_token_dispatcher
        from torchtitan.components.validate import Validator
        from torchtitan.distributed import activation_checkpoint
        from torchtitan.models.common.config_utils import make_token_dispatcher_config
        from torchtitan.models.common.moe import GroupedExperts
        from torchtitan_on_cpu import with_context_parallelism

        for layer in config.model_spec.model.layers if self.backend != "standard" else ():
            if getattr(layer, "moe", None) is not None:
                layer.moe.router.top_k = self.top_k
                layer.moe.routed_experts.token_dispatcher = make_token_dispatcher_config(
                    num_experts=layer.moe.num_experts,
                    top_k=self.top_k,
                    comm_backend=self.backend,  # as the model's moe_comm_backend
                )
        if self.backend != "standard":
            titan_dispatch_double.forget_buffers()
            config.debug.deterministic = True
        if self.multiple:
            for _, _, routed, _ in list(config.model_spec.model.traverse(GroupedExperts.Config)):
                swap_token_dispatcher(routed, self.multiple)
        way = self.checkpointing
        config.activation_checkpoint = getattr(activation_checkpoint, way).Config() if way else None
        if self.validates:
            texts = load_example("torchtitan_moe").Texts.Config()
            config.validator = Validator.Config(enable=True, freq=1, steps=1, dataloader=texts)
        for name, value in self.options.items():
            setattr(config.parallelism, name, value)
        if self.micro_batches > 1:
            config.training.global_batch_size = TEXTS * self.ranks * self.micro_batches
        config.training.local_batch_size, config.training.seq_len = self.batch, self.length
        if self.degree("context") > 1:
            with_context_parallelism(config)


class Run:
    """One training by torchtitan's Trainer.

    Args:
        balanced: None: torchtitan alone; False: experts stay; True: every home moves after each step.
        saves: every `SAVED` steps; False: it loads ``load_step`` alone; None: neither.
        mistake: done to a config that is balanced.
    """

    def __init__(
        self,
        row: Row,
        folder: Path,
        balanced: bool | None,
        saves: bool | None = None,
        load_step: int = -1,
        mistake: Callable[[Any], None] = lambda config: None,
    ) -> None:
        from eplb_runtime.hosts.torchtitan import balance

        config = load_example("torchtitan_moe").training(row.family, row.ep, STEPS, folder)
        config.checkpoint.enable = saves is not None
        config.checkpoint.interval = SAVED
        config.checkpoint.load_only = saves is False
        config.checkpoint.load_step = load_step
        row.change(config)
        if balanced is not None:
            own: dict[str, Any] = {
                "policy": "incremental" if balanced else "static",
                "replica_slots": row.replica_slots,
            }
            later = eplb.MigrationConfig(lag=0)
            balance(config, eplb.BalancerConfig(interval=1, gate="always", migration=later, **own))
        mistake(config)
        _clear_sharding_prop_cache()  # it has meshes of the run before, and spmd_types asks for the same one
        self.trainer = config.build()
        self.logged: list[tuple[float, ...]] = []
        self.trainer.metrics_processor.log = lambda step, *numbers, **_: self.logged.append(numbers)
        self.balancer = self.trainer.model_parts[0].__dict__.get("_eplb_runtime_balancer")
        self.choices: set[int] = set()
        if self.balancer is not None:
            self.balancer.events.called_at_once.append(self._count)
        if balanced:
            plan_by(self.balancer, plan_shuffle)
        if row.multiple:
            self._check_rows(row.multiple)
        for part in self.trainer.model_parts if row.close else ():
            for name, parameter in part.named_parameters():
                fill(parameter, name.replace("_checkpoint_wrapped_module.", ""))

    def _count(self, event: Any) -> None:
        if isinstance(event, LoadMeasured) and event.load is not None:
            self.choices |= {*event.load.sum(axis=-1).reshape(-1).tolist()}

    def _check_rows(self, multiple: int) -> None:
        from torchtitan.models.common.moe import GroupedExperts

        def check(module: Any, inputs: Any) -> None:
            assert not any(rows % multiple for rows in inputs[1].tolist())

        for module in self.trainer.model_parts[0].modules():
            if isinstance(module, GroupedExperts):
                module.register_forward_pre_hook(check)

    def train(self) -> Run:
        self.trainer.train()
        return self

    @property
    def moved(self) -> int:
        return sum(event.moved_experts for event in self.balancer.events if hasattr(event, "moved_experts"))

    def state(self) -> dict[str, Tensor]:
        """Weights, buffers and optimizer state, whole, rows of experts by logical expert. Collective."""
        found: dict[str, Tensor] = {}
        layer_of = {} if self.balancer is None else self.balancer.layer_of_parameter
        for number, part in enumerate(self.trainer.model_parts):
            stage = "" if self.balancer is None else part.__dict__["_eplb_runtime_stage"].prefix
            for name, parameter in part.named_parameters():
                tensors = {"": parameter.detach()}
                for optimizer in self.trainer.optimizers.optimizers:
                    tensors |= {f" {key}": value for key, value in optimizer.state.get(parameter, {}).items()}
                for key, value in tensors.items():
                    whole = value.full_tensor() if isinstance(value, DTensor) else value
                    if stage + name in layer_of and whole.ndim:
                        experts_LRH = self.balancer.placement.homes_LRH  # in the order of the rows
                        rows = torch.tensor(experts_LRH[layer_of[stage + name]]).reshape(-1).long()
                        whole = torch.empty_like(whole).index_copy_(0, rows, whole)
                    found[f"{number}.{name.replace('_checkpoint_wrapped_module.', '')}{key}"] = whole.clone()
            for name, buffer in part.named_buffers():
                found[f"{number}.{name}"] = (buffer.full_tensor() if isinstance(buffer, DTensor) else buffer).clone()
        assert len(found) > 20
        return found

    def close(self) -> None:
        if self.balancer is not None:
            self.balancer.close()
        self.trainer.close()


def begin() -> None:
    """As torchrun does; and torchtitan's Trainer sleeps two seconds after each training."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    sys.path.insert(0, str(FOLDER))
    load_example("torchtitan_moe")
    import torchtitan.trainer

    torchtitan.trainer.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)


def found_of(row: Row, folder: Path) -> dict[str, Any]:
    """What a rank finds of a row. ``kept``: names of tensors that a checkpoint has not brought, by who has read it."""
    other = Run(row, folder, None if row.close else False).train()
    moving = Run(row, folder / "ours", True, row.saves or None)
    titan_dispatch_double.CALLS.clear()
    moving.train()
    state, theirs = moving.state(), other.state()
    found = {
        "logged": (other.logged, moving.logged),
        "moved": moving.moved,
        "choices": moving.choices,
        "calls": len(titan_dispatch_double.CALLS),
        "replicas": int((moving.balancer.placement.copy_count > 1).sum()),
        "apart": furthest(state, theirs) if row.close else differing(state, theirs),
    }
    for run in (other, moving):
        run.close()
    if row.saves:
        found["kept"] = read_back(row, folder, state, moving.logged)
    return found


def read_back(row: Row, folder: Path, state: dict[str, Tensor], logged: list[Any]) -> dict[str, Any]:
    """What differs after checkpoints are read: with us and without, of us and of torchtitan alone."""

    def apart(run: Run, wanted: dict[str, Tensor], close: float = row.close) -> Any:
        run.train()
        ours = run.state()
        run.close()
        if close:
            return [] if furthest(ours, wanted) < close else ["far"]
        return differing(ours, wanted)

    found = {"resumed": apart(Run(row, folder / "ours", True, False, SAVED), state)}
    if row.close:
        found["resumed with other ranks"] = apart(Run(replace(row, ep=4), folder / "ours", True, False, SAVED), state)
    found["read by torchtitan alone"] = apart(Run(row, folder / "ours", None, False, STEPS), state, 0.0)
    alone = Run(row, folder / "theirs", None, True).train()
    whole = alone.state()
    alone.close()
    found["taken over"] = apart(Run(row, folder / "theirs", True, False, STEPS), whole, 0.0)
    return found


# -- float64 -----------------------------------------------------------------------------------------------------------


class _WideTorch:
    """``torch`` for a module that names narrow types."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, "float64" if name in ("float32", "bfloat16") else name)


def compute_in_float64() -> None:
    """In this process, from now on: what torchtitan computes in bfloat16 and float32. Two trainings that differ by
    rounding alone differ by 1e-10 then."""
    import torchtitan.config
    from torchtitan.models.common import moe, rope, token_dispatcher
    from torchtitan.models.gpt_oss import moe as gpt_oss

    torch.Tensor.float = torch.Tensor.bfloat16 = torch.Tensor.double  # type: ignore[assignment]
    torchtitan.config.TORCH_DTYPE_MAP.update(dict.fromkeys(("float32", "bfloat16"), torch.float64))
    for module in (moe, rope, token_dispatcher, gpt_oss):
        module.torch = _WideTorch()
    for experts in (moe.GroupedExperts, gpt_oss.GptOssGroupedExperts):
        experts._grouped_mm = staticmethod(_one_after_the_other)


def _one_after_the_other(*, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    """``torch._grouped_mm``, which has no float64."""
    ends = offs.tolist()
    parts = [A[first:end] @ weight for first, end, weight in zip([0, *ends[:-1]], ends, B_t, strict=True)]
    return torch.cat([*parts, A.new_zeros(A.shape[0] - ends[-1], B_t.shape[-1])])


@torch.no_grad()
def fill(parameter: Tensor, name: str) -> None:
    """Give a parameter numbers that depend on its name alone, all of them far enough from 0 that no gradient is."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = 1 + 0.1 * values if "norm" in name else 0.2 * values / max(1, parameter.shape[-1] / 64) ** 0.5
    if isinstance(parameter, DTensor):
        of_mesh = parameter.device_mesh, parameter.placements
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, *of_mesh)
        values = values[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]
        parameter = parameter.to_local()
    parameter.copy_(values)


def with_settings(config: Any, **options: Any) -> None:
    """Give a config that is balanced other settings of the balancer."""
    function = config.model_spec.post_optimizer_build_fn
    config.model_spec.post_optimizer_build_fn = partial(
        function.func, function.args[0], replace(function.args[1], **options), **function.keywords
    )
