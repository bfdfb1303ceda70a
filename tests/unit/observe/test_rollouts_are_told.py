"""Page, metrics and summary tell a rollout, in which the balancer is suspended, from training."""

from __future__ import annotations

from observed import job, start

from eplb_runtime.events import Suspended, SuspensionEnded
from eplb_runtime.load.clock import Progress
from eplb_runtime.observe.metrics import scalars_of
from eplb_runtime.observe.page import view_of
from eplb_runtime.observe.records import Record, record_of
from eplb_runtime.observe.run_state import state_of
from eplb_runtime.observe.summary import summary_of


def phases(count: int, *, ended: bool) -> list[Record]:
    events = [event for number in range(count) for event in (Suspended(number, 3 << 20), SuspensionEnded(number, 2.5))]
    return [job(), *(record_of(event, start(), 1001.0) for event in (events if ended else events[:-1]))]


def test_a_rollout_under_way_is_no_job_without_news() -> None:
    view = view_of(state_of(phases(1, ended=False)))
    assert (view["standing"], view["cause"]) == ("suspended", "a rollout")
    assert view_of(state_of(phases(1, ended=True)))["standing"] == "balancing"


def test_rollouts_are_counted_and_timed() -> None:
    state = state_of(phases(3, ended=True))
    assert summary_of(state)["rollouts"] == {"count": 3, "seconds": 7.5}
    totals = view_of(state)["totals"]
    assert (totals["rollouts"], totals["rollout_seconds"]) == (3, 7.5)
    values = scalars_of(state, Progress(0, 0.0, 0.0))
    assert (values["rollouts"], values["rollout_seconds"]) == (3.0, 7.5)
