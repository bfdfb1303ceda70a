"""The thread that carries experts beside training has one stream of a GPU for good, after what training has queued."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eplb_runtime.migration.overlapped import Overlapped


def test_every_migration_works_on_one_stream_after_what_was_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch hands out 32 in turn: with one for each migration a later one would be the model's own."""
    made: list[Any] = []
    taken: list[Any] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.waits: list[str] = []
            made.append(self)

        def wait_event(self, event: Any) -> None:
            self.waits.append(event.of)

    class Event:
        of = ""

        def record(self, stream: str) -> None:
            self.of = stream

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "training's")
    monkeypatch.setattr(torch.cuda, "set_stream", taken.append)
    driver: Any = SimpleNamespace(_device=torch.device("cuda", 0), _stream=None)
    for _ in range(40):
        Overlapped._after_what_is_queued(driver)()
    assert len(made) == 1 and taken == made * 40
    assert made[0].waits == ["training's"] * 40
