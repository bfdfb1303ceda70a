"""Real optimizers, of torch and of packages that are installed: moved experts train as static ones, or one line says
why they do not move."""

from __future__ import annotations

from functools import cache

import pytest
from optimizer_table import Outcome, optimizers_of, outcomes
from ranks import run_ranks

MIXING = {"Adafactor": "mixes the experts", "LBFGS": "mixes the experts", "SparseAdam": "does not support dense"}
SCHEDULE_FREE = ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree", "AdamWScheduleFreeClosure")


@cache
def found(package: str, names: tuple[str, ...]) -> dict[str, Outcome]:
    first, second = run_ranks(2, outcomes, package, names)
    assert {name: one.way for name, one in first.items()} == {name: one.way for name, one in second.items()}
    return first


def test_optimizers_of_torchs_move_to_the_bit_or_are_refused_in_a_line() -> None:
    for name, one in found("torch.optim", tuple(optimizers_of("torch.optim"))).items():
        if name in MIXING:
            way = "not run" if name == "SparseAdam" else "refused"  # which refuses experts in its first step itself
            assert one.way == way and MIXING[name] in one.line, (name, one)
        else:
            assert one == Outcome("to the bit"), (name, one)


@pytest.mark.skipif(not optimizers_of("schedulefree"), reason="schedulefree is not installed")
@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_schedule_free_optimizers_move_to_the_bit(name: str) -> None:
    assert found("schedulefree", SCHEDULE_FREE)[name] == Outcome("to the bit")


def test_a_step_that_calls_the_step_of_its_base_is_one_step() -> None:
    assert found("optimizer_table", ("AroundAdamW",)) == {"AroundAdamW": Outcome("to the bit")}
