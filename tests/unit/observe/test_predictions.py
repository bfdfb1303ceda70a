"""A run says whether its plans keep what they predict, and how sure that is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from observed import decisions, job, records, start
from rich.console import Console

from eplb_runtime.events import RebalancePlanned
from eplb_runtime.observe.records import Record, record_of
from eplb_runtime.observe.state import state_of
from eplb_runtime.observe.summary import predictions_text, summary_of, summary_text
from eplb_runtime.observe.terminal import screen
from eplb_runtime.observe.view import view_of

SAID = "of 87 s that plans predicted, 5 s came true (17 plans judged at 40 decisions): raise interval or window"


def predicting(**judged: float) -> list[Record]:
    """Records of a job whose decisions say what became of earlier plans."""
    events = [event for heard in decisions(2) for event in heard]
    return [job()] + [
        record_of(replace(event, **judged) if isinstance(event, RebalancePlanned) else event, start(), 1001.0)
        for event in events
    ]


def test_predictions_that_fail_are_called_so_in_summary_page_and_terminal() -> None:
    found = predicting(judged_plans=17, judged_decisions=40, predicted_seconds=87.0, true_seconds=5.0)
    state, left_out = state_of(found)
    assert left_out == 0
    assert SAID in summary_text(summary_of(state))
    view = view_of(state)
    assert view["predictions"] == SAID
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screen(view, view["time"]))
    assert SAID in console.export_text()


def test_a_run_without_judged_plans_says_nothing_of_them() -> None:
    state, _ = state_of(records(2))
    assert summary_of(state)["predictions"] is None and view_of(state)["predictions"] is None
    assert "came true" not in summary_text(summary_of(state))


@pytest.mark.parametrize(
    "plans, decisions, predicted, true, ends",
    [
        (1, 1, 4.0, 0.0, "0 s came true (1 plan judged at 1 decision: too few to be sure)"),
        (9, 20, 4.0, 3.0, "3 s came true (9 plans judged at 20 decisions)"),
        (9, 20, 4.0, -1.0, "0 s came true (9 plans judged at 20 decisions, which lost 1 s): raise interval or window"),
    ],
)
def test_advice_is_given_where_it_is_sure(plans: int, decisions: int, predicted: float, true: float, ends: str) -> None:
    seconds = {"predicted_seconds": predicted, "true_seconds": true}
    text = predictions_text({"judged_plans": plans, "judged_decisions": decisions, **seconds})
    assert text is not None and text.endswith(ends)
