"""torchtitan's Trainer in float64: what it computes in bfloat16 and float32 is computed in float64 in this process, so
that two trainings which differ by rounding alone differ by 1e-10 and not by a bfloat16's last bit."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from examples import load_example
from titan import Run
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

NARROW = ("float32", "bfloat16")


class _WideTorch:
    """``torch`` for a module that names narrow types."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, "float64" if name in NARROW else name)


def compute_in_float64() -> None:
    """In this process, from now on."""
    import torchtitan.config
    from torchtitan.models.common import moe, rope, token_dispatcher
    from torchtitan.models.gpt_oss import moe as gpt_oss

    torch.Tensor.float = torch.Tensor.bfloat16 = torch.Tensor.double
    torchtitan.config.TORCH_DTYPE_MAP.update(dict.fromkeys(NARROW, torch.float64))
    for module in (moe, rope, token_dispatcher, gpt_oss):
        module.torch = _WideTorch()
    for experts in (moe.GroupedExperts, gpt_oss.GptOssGroupedExperts):
        experts._grouped_mm = staticmethod(_one_after_the_other)


def _one_after_the_other(*, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    """``torch._grouped_mm``, which has no float64."""
    ends = offs.tolist()
    parts = [A[first:end] @ weight for first, end, weight in zip([0, *ends[:-1]], ends, B_t, strict=True)]
    return torch.cat([*parts, A.new_zeros(A.shape[0] - ends[-1], B_t.shape[-1])])


@dataclass(frozen=True)
class OnRanks:
    """How batches and ranks go together.

    Args:
        ranks: data-parallel ones, each with batches of its own.
        micro_batches: of a rank in a step.
        together: all of them in one process, which trains with the batches of all ranks.
    """

    ranks: int = 4
    micro_batches: int = 1
    together: bool = False

    def change(self, config: Any) -> None:
        here = self.ranks if self.together else 1
        config.training.local_batch_size *= here
        config.training.global_batch_size = 2 * self.ranks * self.micro_batches
        config.activation_checkpoint = None
        if self.together:
            config.dataloader = _all_texts(self.ranks)


def _all_texts(ranks: int) -> Any:
    texts = load_example("torchtitan_moe").Texts

    class AllTexts(texts):
        @dataclass(kw_only=True, slots=True)
        class Config(texts.Config):
            pass

        def __init__(self, config: Any, *, local_batch_size: int, dp_rank: int, **options: Any) -> None:
            self._parts = [
                texts(config, dp_rank=rank, local_batch_size=local_batch_size // ranks, **options)
                for rank in range(ranks)
            ]

        def __iter__(self) -> Any:
            for batches in zip(*self._parts, strict=True):
                inputs = {name: torch.cat([batch[0][name] for batch in batches]) for name in batches[0][0]}
                yield inputs, torch.cat([labels for _, labels in batches])

        def state_dict(self) -> dict[str, Any]:
            return self._parts[0].state_dict()

    return AllTexts.Config()


class DoubleRun(Run):
    """A `Run` whose weights depend on their names alone, and not on how they lie on ranks."""

    def __init__(self, family: str, ep: int, folder: Path, balanced: bool | None, job: OnRanks, **options: Any) -> None:
        change = options.pop("change", lambda config: None)
        super().__init__(family, ep, folder, balanced, change=partial(_both, job.change, change), **options)
        for part in self.trainer.model_parts:
            for name, parameter in part.named_parameters():
                _fill(parameter, name.replace("_checkpoint_wrapped_module.", ""))

    def whole_state(self) -> dict[str, Tensor]:
        """Weights and optimizer state, whole, experts in logical order. Collective."""
        both: dict[str, Any] = dict(self.trainer.optimizers.state_dict())
        for part in self.trainer.model_parts:
            both |= part.state_dict()
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
            for name, value in both.items()
            if isinstance(value, Tensor)
        }


def _both(first: Any, second: Any, config: Any) -> None:
    first(config)
    second(config)


@torch.no_grad()
def _fill(parameter: Tensor, name: str) -> None:
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = 1 + 0.1 * values if "norm" in name else 0.2 * values / max(1, parameter.shape[-1] / 64) ** 0.5
    if not isinstance(parameter, DTensor):
        parameter.copy_(values)
        return
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    here = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
    parameter.to_local().copy_(values[here])


def distance(ours: dict[str, Tensor], whole: dict[str, Tensor]) -> float:
    """The largest difference of any tensor, relative to its largest number."""
    assert ours.keys() == whole.keys() and len(ours) > 20, ours.keys() ^ whole.keys()
    found = 0.0
    for name, tensor in whole.items():
        largest = tensor.double().abs().max().clamp(min=1e-30)
        found = max(found, float((ours[name].double() - tensor.double()).abs().max() / largest))
    return found
