"""The harness of the benchmarks: options and ranks of a command, and its result as Markdown tables or JSON."""

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from eplb_runtime.cli.printing import spinner
from eplb_runtime.tools.launch import is_first, launched, process_group, start_ranks


def command(measure: Callable[..., Mapping[str, Any]], ranks: int = 0) -> None:
    """Run a benchmark as a command: the arguments of ``measure`` are its options, but ``device`` and ``on_progress``;
    ``ranks`` to start where no launcher did; 0: it needs none. SystemExit: the result's ``passed`` is False."""
    parameters = inspect.signature(measure).parameters
    parser = _parser(measure, ranks)
    given = vars(parser.parse_args())
    as_json, started = given.pop("json"), given.pop("ranks_to_start", 0)
    on = given.pop("on", "cpu")
    if ranks and not launched():
        module = sys.modules["__main__"].__spec__
        assert module is not None, "start it with python -m"
        raise SystemExit(start_ranks(sys.argv[1:], started, module.name))
    with process_group(on) if ranks else nullcontext() as device, spinner() if is_first() else nullcontext() as shown:
        if shown is not None and "on_progress" in parameters:
            given["on_progress"] = shown.update
        result = measure(device, **given) if ranks else measure(**given)
    if is_first():
        print(json.dumps(result) if as_json else markdown(result))
    if not result.get("passed", True):
        raise SystemExit(1)


def _parser(measure: Callable[..., Mapping[str, Any]], ranks: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=sys.modules[measure.__module__].__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    if ranks:
        parser.add_argument("--ranks", dest="ranks_to_start", type=int, default=ranks, help="without a launcher")
        parser.add_argument("--device", dest="on", choices=("cpu", "cuda"), default="cpu")
    for name, parameter in inspect.signature(measure).parameters.items():
        default = parameter.default
        if name in ("device", "on_progress"):  # for tests, which are smaller
            continue
        if name == "loads":
            parser.add_argument(name, nargs="*", help="load files")
        elif isinstance(default, tuple):
            parser.add_argument(f"--{name}", type=lambda text: tuple(text.split(",")), default=default, metavar="A,B")
        else:
            kind = str if default is None else type(default)
            parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    return parser


def markdown(result: Mapping[str, Any]) -> str:
    """Lists of rows as tables under their titles, single values as lines."""
    return "\n".join(
        f"\n{name}:\n\n{table(value)}\n" if isinstance(value, list) else f"{name}: {_shown(value)}"
        for name, value in result.items()
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table with a column for each key."""
    heads = list(dict.fromkeys(name for row in rows for name in row))
    lines = [heads, ["---"] * len(heads), *([_shown(row.get(head, "")) for head in heads] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
