"""What is taken for a load that somebody declares, or plans for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eplb_runtime.load.declared import DeclaredLoadError, checked_declaration
from eplb_runtime.planner.checks import checked_load


@pytest.mark.parametrize("load", [np.ones((1, 4)) * 1j, torch.ones(1, 4, dtype=torch.complex64), [["a"] * 4]])
def test_what_is_no_number_of_tokens_cannot_be_declared(load: object) -> None:
    with pytest.raises(DeclaredLoadError, match="an array of numbers"):
        checked_declaration(load, 1, 4)


def test_a_tensor_of_any_kind_can_be_declared_and_planned_for() -> None:
    load = torch.ones(1, 4, dtype=torch.bfloat16, requires_grad=True)
    assert (checked_declaration(load, 1, 4) == np.ones((1, 1, 4))).all()
    assert (checked_load(load.double()) == np.ones((1, 1, 4))).all()
