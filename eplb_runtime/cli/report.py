"""Write one HTML file that shows a run in any browser: live page and summary.

examples:
  eplb-runtime report runs/first -o report.html
"""

import argparse
from pathlib import Path

from .arguments import option
from .printing import print_json

OPTIONS = [
    option("source", "RUN", Path, "the folder of BalancerConfig(run=...)"),
    option("-o", "FILE", str, "where to write it, .html (default: report.html)", "report.html", dest="output"),
]


def run(arguments: argparse.Namespace) -> None:
    from ..observe.page import report_of
    from ..utils.files import require_writable, write_file

    require_writable(Path(arguments.output), (".html", ".htm"))
    html, summary, text = report_of(arguments.source)
    write_file(Path(arguments.output), html)
    if arguments.json:
        print_json({"report": arguments.output, "summary": summary})
    else:
        print(f"{text}\nwritten: {arguments.output}")
