"""Arguments that commands share: the parser, options, kinds of values, and the reading of the loads that they name."""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..observe.run_state import JobRecord

PROGRAM = "eplb-runtime"
BAD_INPUT = 2  # exit status of every refusal

LOAD = (
    "tokens per expert: .npz or .json with `load`, a run's folder, a serving engine's dump, Megatron's "
    "router trace, slime's rollouts, or the word `sample`"
)
POLICIES = ("static", "deepseek", "free", "hierarchical", "incremental")  # of `planner.policies`, slow to import
MOST = 2**53  # whole numbers stay below it: whatever is computed from one fits a float

Run = Callable[[argparse.Namespace], int | None]  # a command; returns its exit status, None for 0
Option = tuple[Sequence[str], dict[str, Any]]  # arguments of ``add_argument``


class InputError(ValueError):
    """Arguments that do not fit together; shown as one line."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line, as every other refusal."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_command(commands: Any, name: str, text: str, run: Run, options: Sequence[Option]) -> None:
    """Add a command to the subparsers ``commands``, with its options, ``--json`` and ``--verbose``. Parsed arguments
    get ``run`` and ``action=name``, too. ``text``: its help, of which the list of commands has one line."""
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=in_list(text), description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.set_defaults(run=run, action=name)
    for names, settings in (flag("--json", "print one JSON object instead of a table"), *options):
        command.add_argument(*names, **settings)
    command.add_argument("-v", "--verbose", action="count", default=0, help="say more on stderr; twice: everything")


def in_list(text: str) -> str:
    """Return the first line of a command's help for the list of commands: a small first letter, no full stop."""
    return text[:1].lower() + text.partition("\n")[0][1:].rstrip(".")


def option(name: str, metavar: str, kind: Callable[[str], Any], text: str, default: Any = None, **more: Any) -> Option:
    """Return the arguments of ``add_argument`` for an option with a value; positional, if ``name`` has no dash."""
    settings = {"metavar": metavar, "type": kind, "help": text, **more}
    return [name], settings if default is None else {**settings, "default": default}


def flag(name: str, text: str) -> Option:
    return [name], {"action": "store_true", "help": text}


def choice(name: str, choices: Sequence[str], text: str, default: str | None = None) -> Option:
    return [name], {"choices": choices, "help": text, "default": default}


def cluster(*, needed: bool = True) -> list[Option]:
    default = "" if needed else " (default: as recorded)"
    return [
        option("--ranks", "R", positive, f"ranks of the EP group{default}", required=needed),
        option("--ranks-per-node", "G", positive, f"ranks that share a node{default}", required=needed),
        option("--slots-per-rank", "S", positive, f"experts of a rank, copies included{default}", required=needed),
        option("--groups", "N", positive, "expert groups of group-limited routing (default: 1)", 1),
        option("--max-moves", "M", not_negative, "at most M slots move in a plan, over all layers"),
        option("--intra-node-bandwidth", "GB/S", positive_float, "of a rank, inside its node (default: 400)", 400.0),
        option("--inter-node-bandwidth", "GB/S", positive_float, "of a rank, to other nodes (default: 50)", 50.0),
        DENSE_LAYERS,
        MORE_EXPERTS,
    ]


def _number(kind: type, good: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:

    def number(text: str) -> Any:
        with suppress(ValueError):
            if good(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r}: give {wanted}")

    return number


positive = _number(int, lambda value: 0 < value < MOST, "a whole number above 0")
not_negative = _number(int, lambda value: 0 <= value < MOST, "a whole number, 0 or more")
two_or_more = _number(int, lambda value: 1 < value < MOST, "a whole number above 1")
positive_float = _number(float, lambda value: 1 / MOST < value < MOST, "a number above 0, from 2**-53 to 2**53")
at_least_one = _number(float, lambda value: 1 <= value < float("inf"), "max / mean rank load, 1 or more")
share = _number(float, lambda value: 0 < value <= 1, "a share above 0, up to 1")
DENSE = "leading layers without experts, which SGLang and TensorRT-LLM number too"
DENSE_LAYERS = option("--dense-layers", "N", not_negative, DENSE)
MORE_EXPERTS = option("--experts", "N", positive, "experts in a layer, if the last ones have no tokens in the file")


def several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a parser of comma-separated values, which calls ``kind`` for each: ``3,7`` -> [3, 7]."""
    return lambda text: [kind(part.strip()) for part in text.split(",")]


def policy(text: str) -> str:
    if text in POLICIES:
        return text
    raise argparse.ArgumentTypeError(f"policy {text!r} is unknown; choose one of: {', '.join(POLICIES)}")


def complain(why: Exception | str, status: int = BAD_INPUT) -> int:
    """Print a reason, an error or a note, as one line on stderr, and return ``status``."""
    text = f"{why.filename}: {why.strerror}" if isinstance(why, OSError) and why.filename else str(why)
    print(f"{PROGRAM}: {' '.join(text.splitlines())}", file=sys.stderr)
    return status


def read_job(path: str, arguments: argparse.Namespace) -> "JobRecord":
    """Return the record at ``path`` without its first ``arguments.dense_layers`` layers. ``arguments.experts`` adds
    experts without tokens up to that number (InputError: the file has more). Notes on stderr: layers without tokens,
    and counts that look like those of some ranks alone."""
    import numpy as np

    from ..tools.formats.loads import looks_partial, read_record

    dense = arguments.dense_layers or 0
    record = read_record(path, dense)
    load = record.load
    if 0 < len(empty := dense + np.flatnonzero(~load.any(axis=(0, 2)))) < load.shape[1]:
        few = ", ".join(map(str, empty[:8])) + (", ..." if len(empty) > 8 else "")
        complain(f"note: {path}: no tokens in layer {few}, counted from 0; --dense-layers N leaves out the first N")
    if said := looks_partial(load):
        complain(f"note: {path}: {said}")
    if arguments.experts is None:
        return record
    if (more := arguments.experts - load.shape[2]) < 0:
        raise InputError(f"--experts {arguments.experts}: {path} has tokens of {load.shape[2]}")
    return replace(record, load=np.pad(load, ((0, 0), (0, 0), (0, more))))


def counted_windows(load: "NDArray[np.float64]", path: str) -> "NDArray[np.float64]":
    """Return a load's windows [T, L, E] with tokens; stderr counts the other windows. InputError: no window has any."""
    counted_T = load.any(axis=(1, 2))
    if not counted_T.any():
        raise InputError(f"{path}: no token was counted; record a job that trains")
    if not counted_T.all():
        complain(f"note: {path}: {int((~counted_T).sum())} of {len(load)} windows have no tokens and are left out")
    return load[counted_T]
