"""``eplb-runtime report``: one file that shows a run in any browser."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .arguments import add_command, option
from .printing import print_json

EXAMPLES = """
  eplb-runtime report runs/first -o report.html
"""


def add(commands: Any) -> None:
    source = "the folder of BalancerConfig(run=...)"
    where = "where to write it, .html (default: report.html)"
    summary = "write one HTML file that shows a run, live page and summary"
    options = [option("source", "RUN", str, source), option("-o", "FILE", str, where, "report.html", dest="output")]
    add_command(commands, "report", _run, summary, EXAMPLES, options)


def _run(arguments: argparse.Namespace) -> None:
    from ..observe.page import report_of
    from ..utils.files import require_writable, write_file

    require_writable(Path(arguments.output), (".html", ".htm"))
    html, summary, text = report_of(Path(arguments.source))
    write_file(Path(arguments.output), html)
    if arguments.json:
        print_json({"report": arguments.output, "summary": summary})
    else:
        print(f"{text}\nwritten: {arguments.output}")
