"""``eplb-runtime report``: one file that shows a run, or what was simulated, in any browser."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .arguments import add_command, adder
from .inputs import require_output
from .printing import note, print_json


def add(commands: Any) -> None:
    command = add_command(
        commands,
        "report",
        _run,
        "write one HTML file that shows a run, live page and summary, or what `simulate -o FILE.json` has written",
        """
  eplb-runtime report runs/first -o report.html
  eplb-runtime simulate series.npz --ranks 8 --ranks-per-node 8 --slots-per-rank 5 --every 5 -o windows.json
  eplb-runtime report windows.json -o simulated.html
""",
    )
    command.add_argument(
        "source", metavar="RUN", help="the folder of BalancerConfig(run=...) or of eplb.record, or simulate's .json"
    )
    adder(command)(
        "-o", "FILE", str, "where to write it, .html (default: report.html)", dest="output", default="report.html"
    )


def _run(arguments: argparse.Namespace) -> None:
    from ..observe.page import holds_recorded_load, recorded_load, report_of
    from ..observe.run_folder import state_of_run
    from ..observe.summary import summary_of, summary_text
    from ..utils.files import write_file

    require_output(arguments.output, (".html", ".htm"))
    source = Path(arguments.source)
    summary: dict[str, Any] | None = None
    recorded = recorded_load(source) if holds_recorded_load(source) else None
    if recorded is not None:
        summary = recorded.fields()
    elif source.is_dir():
        state, left_out = state_of_run(source)
        summary = summary_of(state)
        if left_out:
            note(f"{left_out} events of {source} contradict its job and are left out")
    write_file(Path(arguments.output), report_of(source))
    if arguments.json:
        print_json({"report": arguments.output, "summary": summary})
        return
    if recorded is not None:
        imbalance = recorded.fields()["imbalance"]
        print(
            f"{recorded.steps} steps recorded; imbalance on {recorded.ranks} ranks {imbalance['mean']:.3f} mean, "
            f"{imbalance['max']:.3f} at most; would balancing pay? eplb-runtime assess {source}"
        )
    elif summary is not None:
        print(summary_text(summary))
    print(f"written: {arguments.output}")
