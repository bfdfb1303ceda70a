"""What `eplb-runtime verify` makes of every wrong and every right job: ``python -m tests.support.misuse.table``.

Prints a line for each job, and at the end a table in Markdown. Exit status 1: a wrong job is "right" and nothing was
said, or a right one is not, or something was said.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import job  # noqa: E402
import loop  # noqa: E402
import own  # noqa: E402
import torch  # noqa: E402
from served import serve  # noqa: E402

from eplb_runtime.tools.verification import verify_command  # noqa: E402

SCRIPTS = {"loop": loop, "own": own}
SHOWN = 60


@contextmanager
def server() -> Iterator[str]:
    """Path of a socket behind which jobs are run."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path := f"{folder}/jobs")
        listener.listen()
        if not (child := os.fork()):
            torch.set_num_threads(1)
            serve(listener, {name: partial(job.main, script.make, script.CASES) for name, script in SCRIPTS.items()})
        try:
            yield path
        finally:
            os.kill(child, signal.SIGTERM)
            os.waitpid(child, 0)


def verified(path: str, script: str, arguments: list[str]) -> dict[str, Any]:
    """The report of one job, as ``verify --json`` prints it."""
    command = [sys.executable, "-S", str(HERE / "served.py"), path, script, "--ranks", "2", *arguments]
    with redirect_stderr(io.StringIO()):
        return verify_command(command, steps=8).to_dict()


def said_live(report: dict[str, Any]) -> str:
    """The first line that the job itself has said, or with which it ended; empty: none."""
    if report["said"]:
        return str(report["said"][0])
    _, failed, why = report["reason"].partition("exit status ")
    return why.split(" | ")[-1] if failed else ""


def first_difference(report: dict[str, Any]) -> str:
    """Where runs differ first, or what nobody has registered."""
    moved, single = report["moved"], report["single"]
    if moved["equal"] is False:
        return f"moved: step {moved['step']}, {moved['tensor']}"
    if single["equal"] is False:
        return f"single: step {single['step']}, {single['tensor']}, {single['worst']:.1g}"
    return str(report["unregistered"][0]["holder"]) if report["unregistered"] else report["reason"]


def group_of(line: dict[str, Any]) -> str:
    """What found a job, or that it was right."""
    report = line["report"]
    if report["verdict"] == "right" and not said_live(report):
        return "right, and nothing said"
    live = "said live" if said_live(report) else "not said live"
    if report["verdict"] != "wrong":
        return f"{live}; verify: {'unknown: unregistered' if report['unregistered'] else report['verdict']}"
    shown = next((name for name in ("moved", "single") if report[name]["equal"] is False), "the line said")
    return f"{live}; verify: wrong by {shown}"


def named(script: str, case: str) -> str:
    """The case as the table shows it; of models of one's own with the script."""
    return case if script == "loop" else f"{script}.{case}"


def table(lines: Iterable[dict[str, Any]]) -> str:
    """Jobs by what has found them, as Markdown; of one that was run more than once the last run."""
    last = {(line["kind"], line["script"], line["case"]): group_of(line) for line in lines}
    rows = ["| loops that are | found | |", "|---|---|---|"]
    for kind, group in sorted({(kind, group) for (kind, _, _), group in last.items()}, reverse=True):
        cases = [named(*of) for (of_kind, *of), found in last.items() if (of_kind, found) == (kind, group)]
        rows.append(f"| {kind} | {group} | {len(cases)}: {', '.join(cases)} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--script", choices=SCRIPTS, action="append", help="default: all")
    parser.add_argument("--case", action="append", metavar="NAME", help="wrong or right; default: all")
    parser.add_argument("--kind", choices=("wrong", "right"), action="append", help="default: both")
    parser.add_argument("--json", metavar="FILE", type=Path, help="append each report to a file, and show all in it")
    options, more = parser.parse_known_args()
    missed, lines = 0, []
    if options.json and options.json.exists():
        lines = [json.loads(line) for line in options.json.read_text().splitlines()]
    with server() as path:
        for name, script in SCRIPTS.items():
            cases = script.CASES
            chosen = [("wrong", case, what) for case, (_, what, _) in cases.wrong.items()]
            chosen += [("right", case, "nothing: " + str(function.__doc__)) for case, function in cases.right.items()]
            for kind, case, what in chosen:
                if (options.script and name not in options.script) or (options.case and case not in options.case):
                    continue
                if options.kind and kind not in options.kind:
                    continue
                report = verified(path, name, ["--right" if kind == "right" else "--case", case, *more])
                said = said_live(report)
                is_silent_right = report["verdict"] == "right" and not said
                missed += is_silent_right == (kind == "wrong")
                shown = f"said: {said[:SHOWN]}" if said else "nothing said"
                difference = first_difference(report)
                print(f"{name} {case} ({what}): {shown}; {report['verdict']}: {difference}", file=sys.stderr)
                lines.append({"script": name, "case": case, "kind": kind, "arguments": more, "report": report})
                if options.json:
                    with options.json.open("a") as file:
                        file.write(json.dumps(lines[-1]) + "\n")
    print(table(lines))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
