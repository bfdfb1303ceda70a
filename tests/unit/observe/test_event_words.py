"""What an event says of itself is what happened."""

from __future__ import annotations

import pytest

from eplb_runtime.events import RebalanceCommitted, brief


@pytest.mark.parametrize(
    "experts, said",
    [(0, "replicas changed, no expert moved"), (1, "1 expert moved"), (4, "4 experts moved")],
)
def test_a_commit_that_changed_replicas_alone_is_not_told_as_no_change(experts: int, said: str) -> None:
    event = RebalanceCommitted(10, 3, "00", experts, 0, 0.067)
    assert brief(event) == f"epoch 3: {said}, 0.0 MiB came here, 67.0 ms pause"
