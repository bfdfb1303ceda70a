"""What `eplb-runtime verify` makes of every wrong and every right job: ``python -m tests.support.misuse.table``.

Prints a table in Markdown. Exit status 1: a wrong job is "right" and nothing was said, or a right one is not, or
something was said.
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
from collections.abc import Iterator
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
        return verify_command(command, steps=12).to_dict()


def said_live(report: dict[str, Any]) -> str:
    """The first line that the job itself has said, or with which it ended; empty: none."""
    if report["said"]:
        return str(report["said"][0])
    _, failed, why = report["reason"].partition("failed: ")
    return why.split(" | ")[-1] if failed else ""


def first_difference(report: dict[str, Any]) -> str:
    """Where runs differ first, or what nobody has registered."""
    moved, single = report["moved"], report["single"]
    if moved["equal"] is False:
        return f"moved: step {moved['step']}, {moved['tensor']}"
    if single["equal"] is False:
        return f"single: step {single['step']}, {single['tensor']}, {single['worst']:.1g}"
    if report["unregistered"]:
        return str(report["unregistered"][0]["holder"])
    return f"none (single: {single['worst']:.1g})" if single["worst"] is not None else "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--script", choices=SCRIPTS, action="append", help="default: all")
    parser.add_argument("--case", action="append", metavar="NAME", help="wrong or right; default: all")
    parser.add_argument("--kind", choices=("wrong", "right"), action="append", help="default: both")
    parser.add_argument("--json", metavar="FILE", type=Path, help="append a line with each report to a file")
    options, more = parser.parse_known_args()
    print("| job | what is wrong | said live | verdict | first difference |\n|---|---|---|---|---|")
    missed = 0
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
                shown = f"yes: {said[:SHOWN]}" if said else "no"
                print(
                    f"| `{name}` {case} | {what} | {shown} | {report['verdict']} | {first_difference(report)} |",
                    flush=True,
                )
                if options.json:
                    line = {"script": name, "case": case, "kind": kind, "arguments": more, "report": report}
                    with options.json.open("a") as file:
                        file.write(json.dumps(line) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
