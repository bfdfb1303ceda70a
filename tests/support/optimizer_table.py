"""Real optimizers in an attached job: either moved experts train as static ones, to the bit, or one line says why not.

    PYTHONPATH=tests python tests/support/optimizer_table.py [PACKAGE ...]

runs all that the named packages (default: those that are installed) have, and prints a line for each.
"""

import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from typing import Any

import torch
from support import ranks, training
from support.moe_models import batch_of, make_model
from support.ranks import run_ranks
from support.seen import heard, same
from torch import Tensor, nn

import eplb_runtime as eplb
from eplb_runtime.hosts.attaching.description import AttachError

PACKAGES = ("torch.optim", "pytorch_optimizer", "schedulefree", "bitsandbytes.optim", "timm.optim")
STEPS = 5
OPTIONS: dict[str, dict[str, Any]] = {
    "torch.optim.SGD": {"lr": 1e-2, "momentum": 0.9},
    "pytorch_optimizer.BSAM": {"num_data": 100},
    "pytorch_optimizer.Ranger21": {"num_iterations": 100},
    "pytorch_optimizer.SAM": {"base_optimizer": torch.optim.SGD, "lr": 1e-2},
    "pytorch_optimizer.WSAM": {"base_optimizer": torch.optim.SGD, "lr": 1e-2},
    **{f"bitsandbytes.optim.{name}": {"lr": 1e-2, "momentum": 0.9} for name in ("SGD", "SGD32bit", "SGD8bit")},
    **{f"bitsandbytes.optim.{name}": {"lr": 1e-2, "momentum": 0.9} for name in ("LARS", "LARS32bit", "LARS8bit")},
}
"""Where an optimizer cannot be made without, or would do little."""
BY_MODEL = {"LOMO", "AdaLOMO", "AdamMini"}
"""Those that take a model in the place of parameters."""
ARE_NONE = {"Optimizer", "BaseOptimizer", "Optimizer8bit", "Optimizer1State", "Optimizer2State", "GlobalOptimManager"}


class AroundAdamW(torch.optim.AdamW):
    """Goes on, after its base's step, with rows that it has kept before: torch calls hooks for both steps."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        torch.optim.AdamW([torch.zeros(1)])  # from now on the base's step has hooks, too

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in parameters]
        loss = super().step(closure)
        for parameter, old in zip(parameters, before, strict=True):
            parameter.lerp_(old, 0.25)
        return loss


@dataclass(frozen=True)
class Outcome:
    """What came of one optimizer: ``"to the bit"``, ``"refused"``, ``"stays"``, ``"differs"``, ``"random"`` or ``"not
    run"``, and the line that says why, of ours or, where it does not run, its own."""

    way: str
    line: str = ""


def optimizers_of(package: str) -> list[str]:
    """Names of all optimizers that a package offers; none: it is not installed."""
    if importlib.util.find_spec(package.split(".")[0]) is None:
        return []
    return sorted(
        name
        for name, kind in vars(import_module(package)).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in ARE_NONE
    )


def made(package: str, name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """As a user makes it; matrices' optimizers beside AdamW for experts."""
    kind = getattr(import_module(package), name)
    options = OPTIONS.get(f"{package}.{name}", {})
    parameters: Any = list(model.parameters())
    if name in BY_MODEL:
        return [kind(model, **options)]
    if "Muon" in name or name == "AdaGO":
        matrices = [p for p in parameters if p.ndim == 2]
        rest = [p for p in parameters if p.ndim != 2]
        if package == "pytorch_optimizer":
            return [kind([{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}], **options)]
        return [kind(matrices, **options), torch.optim.AdamW(rest)]
    ways: list[Callable[[], torch.optim.Optimizer]] = [
        lambda: kind(parameters, **options),
        lambda: kind(parameters, lr=1e-3, **options),
        lambda: kind(torch.optim.SGD(parameters, lr=1e-2), **options),
    ]
    first: Exception | None = None
    for way in ways:
        try:
            return [way()]
        except Exception as error:
            first = first or error
    assert first is not None
    raise first


def tried(rank: int, package: str, name: str, *, move: bool) -> tuple[dict[str, Tensor], int, list[str]]:
    """Weights and state at the end, the epoch, and what was said."""
    torch.manual_seed(rank)
    model = make_model("olmoe", experts=8, layers=1)
    optimizers = made(package, name, model)
    policy = "incremental" if move else "static"
    with heard() as said:
        balancer = training.attach(model, optimizers, moving=True, policy=policy, interval=2, gate="always")
        try:
            for optimizer in optimizers:
                if callable(begin := getattr(optimizer, "train", None)):
                    begin()
            for step in range(STEPS):
                ids = batch_of(rank, step)

                def passed() -> Tensor:
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                    loss: Tensor = model(input_ids=ids, labels=ids).loss  # noqa: B023
                    loss.backward()
                    return loss

                passed()
                for optimizer in optimizers:
                    closes = name.endswith("Closure") or name in {"LBFGS", "SAM", "WSAM", "BSAM", "AliG"}
                    optimizer.step(passed) if closes else optimizer.step()
            try:
                state = eplb.logical_state_dict(model, optimizers[0] if len(optimizers) == 1 else None)
            except Exception:
                state = eplb.logical_state_dict(model)
            tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            return tensors, balancer.placement.epoch, said
        finally:
            balancer.close()


def outcome(rank: int, package: str, name: str) -> Outcome:
    """Of one optimizer, in a job of two ranks."""
    try:
        made(package, name, make_model("olmoe", experts=8))
    except Exception as error:
        return Outcome("not run", _line(error))
    try:
        moved, epoch, said = tried(rank, package, name, move=True)
    except AttachError as error:
        return Outcome("refused", _line(error))
    except Exception as error:
        return Outcome("not run", _line(error))
    stays = [line for line in said if "OptimizerStateError" in line]
    if stays:
        return Outcome("stays", stays[0])
    static, _, _ = tried(rank, package, name, move=False)
    random = [line for line in said if "gives something else when it is repeated" in line]
    if epoch < 2:
        return Outcome("not run", f"experts have moved {epoch} times: {said[-1:]}")
    if same(moved, static):
        return Outcome("to the bit")
    return Outcome("random", random[0]) if random else Outcome("differs", "; ".join(said))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


def outcomes(rank: int, package: str, names: Iterable[str]) -> dict[str, Outcome]:
    """In one job, one after the other."""
    warnings.simplefilter("ignore")
    found: dict[str, Outcome] = {}
    for name in names:
        with redirect_stdout(StringIO()):
            found[name] = outcome(rank, package, name)
        if rank == 0:
            print(f"{package}.{name}: {found[name].way} {found[name].line}", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    ranks.FINISH_SECONDS = 7200
    for package in sys.argv[1:] or PACKAGES:
        if names := optimizers_of(package):
            run_ranks(2, outcomes, package, names)
