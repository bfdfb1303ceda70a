"""``eplb-runtime top``: a running job, or a finished one, in the terminal."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from .arguments import add_command, adder, positive_float
from .inputs import require_output
from .printing import COLUMNS, print_json


def add(commands: Any) -> None:
    command = add_command(
        commands,
        "top",
        _run,
        "show a job in the terminal as it runs: load, rebalances, what they cost",
        """
  eplb-runtime top runs/first                     # the folder of BalancerConfig(run=...), or of eplb.record
  eplb-runtime top http://127.0.0.1:8265          # the live page of BalancerConfig(listen=...)
  eplb-runtime top runs/first --once
  eplb-runtime top runs/first -o top.svg          # a picture of it
""",
    )
    command.add_argument("job", metavar="URL|RUN", help="a run's folder, or the address of its page")
    command.add_argument("--once", action="store_true", help="show it once, as where there is no terminal")
    command.add_argument("-o", "--output", metavar="FILE", help="show it once, and draw what was shown: .svg")
    add = adder(command)
    add("--every", "S", positive_float, "seconds between two looks (default: 2)", default=2.0)
    add("--token", "T", str, "that the page wants")


def _run(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from ..observe.reading import source_of
    from ..observe.recorded import holds_recorded_load, recorded_load
    from ..observe.terminal import recorded_screen, screen

    require_output(arguments.output, (".svg",))
    console = Console()
    if not console.is_terminal:
        console = Console(width=COLUMNS)
    if holds_recorded_load(Path(arguments.job)):
        recorded = recorded_load(Path(arguments.job))
        _show(arguments, console, recorded.fields(), recorded_screen(arguments.job, recorded))
        return
    source = source_of(arguments.job, arguments.token)
    view = source.view()
    shown = screen(view, time.time())
    once = arguments.once or arguments.output is not None or not console.is_terminal or not sys.stdin
    if once or arguments.json:
        _show(arguments, console, view, shown)
        return
    _follow(console, source, shown, arguments.every)


def _show(arguments: argparse.Namespace, console: Any, view: dict[str, Any], shown: Any) -> None:
    """Once, and as a picture where one is wanted."""
    from ..observe.terminal import picture
    from ..utils.files import write_file

    if arguments.json:
        print_json(view)
        return
    if arguments.output is not None:
        write_file(Path(arguments.output), picture(shown, COLUMNS))
    console.print(shown)


def _follow(console: Any, source: Any, shown: Any, every: float) -> None:
    """Until somebody stops it."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from ..observe.reading import ViewError
    from ..observe.terminal import screen

    with Live(shown, console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                try:
                    shown = screen(source.view(), time.time())
                    live.update(shown, refresh=True)
                except ViewError as error:  # the job has ended, or its page is slow: what was seen last stays
                    live.update(Group(shown, Text(str(error), "red")), refresh=True)
        except KeyboardInterrupt:
            return
