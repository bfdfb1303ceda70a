"""What a run asks of a GPU that is to repeat every bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from eplb_runtime.tools.launch import repeat_every_bit


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    attention = torch.backends.cuda
    names = ("flash", "mem_efficient", "cudnn", "math")
    before = {name: getattr(attention, f"{name}_sdp_enabled")() for name in names}
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    yield
    torch.use_deterministic_algorithms(False)
    for name, enabled in before.items():
        getattr(attention, f"enable_{name}_sdp")(enabled)


@pytest.mark.usefixtures("as_before")
def test_attention_is_computed_in_one_order() -> None:
    """Deterministic algorithms that only warn leave the others' backward passes as they are."""
    assert torch.backends.cuda.flash_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    repeat_every_bit()
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cuda.math_sdp_enabled()
    assert not torch.backends.cuda.flash_sdp_enabled()
    assert not torch.backends.cuda.mem_efficient_sdp_enabled()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
