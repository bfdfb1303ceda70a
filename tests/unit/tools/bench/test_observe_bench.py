"""What showing a job costs is measured with all that shows it."""

from __future__ import annotations

from eplb_runtime.tools.bench.observe import run


def test_every_event_is_shown_and_the_result_has_the_documented_keys() -> None:
    result = run(1, layers=2, experts=8, ranks=2, interval=2, step_seconds=1e-3)
    assert list(result) == ["layers", "experts", "ranks", "interval", "repeats", "emit_ms", "threads_ms", "added_ms",
                            "step_ms", "left_out"]  # fmt: skip
    assert result["left_out"] == 0 < result["emit_ms"] and result["step_ms"] > 0
