"""The ``eplb-runtime`` command: runs one command's file, and turns bad input into one line and exit status 2.

A command's file has its help as docstring, ``run``, and its ``OPTIONS``, or its ``ACTIONS`` with the options of each.
Rooms are imported by the command that needs them, so that ``--help`` is quick.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from .. import __version__
from . import assess, bench, bubbles, convert, doctor, plan, report, simulate, trace, verify, warmup
from .arguments import PROGRAM, Parser, add_command, complain, in_list

COMMANDS = (assess, plan, simulate, convert, verify, report, bench, bubbles, trace, doctor, warmup)  # as --help has it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; ``arguments`` None: those of the process. Bad input gives one line on
    stderr and status 2. Unknown options and ``--help`` raise SystemExit. ``-v`` sets up logging to stderr."""
    given = sys.argv[1:] if arguments is None else arguments
    parsed = _parser().parse_args(given, argparse.Namespace(given=given))
    if parsed.verbose:  # warnings are always shown
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
        logging.getLogger("eplb_runtime").setLevel(logging.INFO if parsed.verbose == 1 else logging.DEBUG)
    with suppress(AttributeError):
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a name may be no text
    try:
        status: int | None = parsed.run(parsed)
        print(end="", flush=True)
        return status or 0
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return complain("interrupted", 130)
    except MemoryError as error:
        return complain(f"not enough memory for this: {error or 'the load or the cluster is too large'}")
    except (OSError, ValueError) as error:
        is_ours = type(error).__module__.startswith("eplb_runtime.")
        if isinstance(error, ValueError) and not is_ours:  # of Python's or a library's own: a defect
            raise
        return complain(error)


def _parser() -> Parser:
    made = Parser(prog=PROGRAM, description="Expert-parallel load balancing for MoE models.")
    made.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = made.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        name, text = module.__name__.rpartition(".")[2], module.__doc__ or ""
        if not hasattr(module, "ACTIONS"):
            add_command(commands, name, text, module.run, getattr(module, "OPTIONS", ()))
            continue
        group = commands.add_parser(name, help=in_list(text))
        actions = group.add_subparsers(title="what to do", metavar="WHAT", required=True)
        for action, (summary, options) in module.ACTIONS.items():
            add_command(actions, action, summary + "".join(text.partition("\n")[1:]), module.run, options)
    return made
