"""Two batches at once wait for the same copies: neither goes on before what is handed on has come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from eplb_runtime.moe.dispatch.channels import MicroBatchChannels
from eplb_runtime.replicas.plan import ReplicaPlan, RowStage
from eplb_runtime.replicas.sync import ReplicaSync


class Rows(RowStage):
    """``posted`` is called when they are posted, ``arrive`` when they are waited for."""

    def __init__(self, posted: Callable[[], None], arrive: Callable[[], None]) -> None:
        self._posted, self._arrive = posted, arrive

    def post(self) -> list[Any]:
        self._posted()
        return [SimpleNamespace(wait=self._arrive)]


def made(*weights: RowStage) -> ReplicaSync:
    """Of one layer without tensors, whose weights travel so."""
    bank: Any = SimpleNamespace(parameters=[])
    carrier: Any = SimpleNamespace(post=lambda stages: [stage.post() for stage in stages])
    channels: Any = MicroBatchChannels(None)  # type: ignore[arg-type]
    sync = ReplicaSync({0: bank}, carrier, 0, 1, 1, 1, channels)
    sync._plans[0] = ReplicaPlan(list(weights))
    return sync


def test_both_of_two_batches_wait_for_copies_that_are_handed_on() -> None:
    seen: list[str] = []
    gone_on = threading.Event()

    def other_waits() -> None:
        sync.wait(0)
        seen.append("the other goes on")
        gone_on.set()

    def arrive() -> None:
        gone_on.wait(0.2)  # in vain, but for one that does not wait for the rows
        seen.append("arrived")

    other = threading.Thread(target=other_waits)
    sync = made(Rows(lambda: None, lambda: None), Rows(other.start, arrive))
    sync.refresh()
    sync.wait(0)
    other.join()
    assert seen == ["arrived", "the other goes on"], "and they are posted once"
