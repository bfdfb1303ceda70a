"""The ``eplb-runtime`` command: reads arguments, calls one room, prints a table or, with ``--json``, one JSON object.

No decisions here. Rooms are imported by the command that needs them, so that ``--help`` is quick. Bad input gets one
line on stderr that says what is wrong and how to mend it, and exit status 2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from .arguments import (
    BAD_INPUT,
    Parser,
    add_bench_count_arguments,
    add_bench_planner_arguments,
    add_bench_rank_arguments,
    add_bench_split_arguments,
    add_convert_arguments,
    add_plan_arguments,
    add_simulate_arguments,
    add_verify_arguments,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.status import Status

    from ..topology import Topology

PROGRAM = "eplb-runtime"
RANK_BENCHES = ("dispatch", "migrate", "train")
"""Files of ``bench/`` whose ``run(device, repeats)`` needs ranks."""


class InputError(ValueError):
    """Arguments that do not fit together; shown as one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        status: int | None = parsed.run(parsed)
        sys.stdout.flush()
        return status or 0
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except OSError as error:
        return _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error), BAD_INPUT)
    except ValueError as error:
        if not isinstance(error, _input_errors()):
            raise
        return _complain(str(error), BAD_INPUT)


def _input_errors() -> tuple[type[ValueError], ...]:
    from ..formats.convert import ConvertError
    from ..formats.loads import LoadFileError
    from ..placement import PlacementError
    from ..planner import PlanError

    known = [InputError, ConvertError, LoadFileError, PlacementError, PlanError]
    if "torch" in sys.modules:  # else none of these was raised
        from ..hosts import AttachError
        from ..hosts.transformers.models import ModelError
        from ..launching import LaunchError

        known += [AttachError, ModelError, LaunchError]
    return tuple(known)


def _complain(message: str, status: int) -> int:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return status


# -- plan ----------------------------------------------------------------------------------------------------------


def _plan(arguments: argparse.Namespace) -> None:
    from ..formats.convert import read_placement
    from ..planner import CostModel, plan

    topology, load = _topology(arguments), _load(arguments.load, arguments)
    current = None
    if arguments.current is not None:
        current = read_placement(arguments.current, arguments.ranks, arguments.dense_layers)
    parameters = arguments.expert_parameters
    planned = plan(
        load,
        topology,
        slots_per_rank=arguments.slots_per_rank,
        current=current,
        policy=arguments.policy,
        layout=arguments.layout,
        groups=arguments.groups,
        max_moves=arguments.max_moves,
        options=_policy_options(arguments),
        cost=None if parameters is None else CostModel(home_bytes=12 * parameters, replica_bytes=2 * parameters),
    )
    if arguments.output is not None:
        planned.placement.save(arguments.output)
    if not arguments.json:
        print(planned)
        if arguments.output is not None:
            print(f"placement written to {arguments.output}")
        return
    placement = planned.placement
    _print_json(
        {
            "policy": planned.policy,
            "layers": placement.num_layers,
            "experts": placement.num_experts,
            "ranks": placement.num_ranks,
            "slots_per_rank": placement.slots_per_rank,
            "imbalance": _mean_and_max(planned.imbalance_after),
            "lower_bound": _mean_and_max(planned.lower_bound),
            "moved_slots": planned.moved_slots,
            "moved_homes": planned.moved_homes,
            "seconds": planned.plan_seconds,
        }
    )


def _mean_and_max(values: NDArray[np.float64]) -> dict[str, float]:
    return {"mean": float(values.mean()), "max": float(values.max())}


# -- simulate ------------------------------------------------------------------------------------------------------


def _simulate(arguments: argparse.Namespace) -> None:
    from ..simulate import StepModel, merge_windows, num_replans, plot, simulate, write_windows

    topology = _topology(arguments)
    load = merge_windows(_load(arguments.trace, arguments), arguments.merge)
    total = len(arguments.policies) * num_replans(len(load), arguments.every)
    with _progress("plans", total) as advance:
        runs = simulate(
            load,
            topology,
            slots_per_rank=arguments.slots_per_rank,
            every=arguments.every,
            policies=arguments.policies,
            history=arguments.history,
            groups=arguments.groups,
            max_moves=arguments.max_moves,
            gate=arguments.gate,
            options=_policy_options(arguments),
            steps_per_window=arguments.steps_per_window,
            step_model=StepModel(
                hidden_size=arguments.hidden_size,
                expert_hidden_size=arguments.expert_hidden_size,
                flops=arguments.flops,
                training=not arguments.inference,
                stall_seconds=arguments.stall_seconds,
            ),
            on_progress=advance,
        )
    if arguments.output is not None:
        write_windows(runs, arguments.output)
    if arguments.plot is not None:
        plot(runs, arguments.plot)
    summaries = [run.summary() for run in runs]
    if arguments.json:
        _print_json({"policies": summaries})
        return
    _print_table(
        f"{len(load) - arguments.every} windows of {load.shape[1]} layers judged, replanned every {arguments.every}",
        [
            {
                "policy": summary["policy"],
                "layout": run.layout,
                "balancedness mean": f"{summary['balancedness']['mean']:.4f}",
                "p5": f"{summary['balancedness']['p5']:.4f}",
                "imbalance mean": f"{summary['imbalance']['mean']:.4f}",
                "p95": f"{summary['imbalance']['p95']:.4f}",
                "max": f"{summary['imbalance']['max']:.4f}",
                "slots moved a replan": f"{summary['moved_slots_share']:.2%}",
                "rebalances": f"{summary['rebalances']} of {len(run.replans)}",
                "GB moved": f"{run.moved_bytes / 1e9:.1f}",
                "plan ms": f"{summary['plan_seconds'] * 1e3:.2f}",
                "step ms": f"{summary['step_seconds'] * 1e3:.3f}",
            }
            for run, summary in zip(runs, summaries, strict=True)
        ],
    )


# -- convert -------------------------------------------------------------------------------------------------------


def _convert(arguments: argparse.Namespace) -> None:
    from dataclasses import asdict

    from ..formats.convert import convert

    done = convert(
        arguments.source,
        arguments.destination,
        to=arguments.to,
        num_ranks=arguments.ranks,
        dense_layers=arguments.dense_layers,
    )
    if arguments.json:
        _print_json(asdict(done))
        return
    axes = ("layers", "slots") if done.kind == "placement" else ("windows", "layers", "experts")
    shape = " x ".join(f"{size} {axis}" for size, axis in zip(done.shape, axes, strict=True))
    print(f"{done.kind} of {shape}: {done.source_format} -> {done.format}, written to {arguments.destination}")
    if done.filled_slots:
        print(f"{done.filled_slots} empty replica slots were given a copy: {done.format} knows no empty slots")


# -- verify --------------------------------------------------------------------------------------------------------


def _verify(arguments: argparse.Namespace) -> int:
    from ..launching import is_first, launched
    from ..verification.job import run

    if not launched() and arguments.replica_slots:
        raise InputError(
            "verify --replica-slots needs ranks: torchrun --nproc-per-node 2 -m eplb_runtime.cli verify ..."
        )
    report = run(
        family=arguments.family,
        model_config=arguments.model_config,
        device=arguments.device,
        dtype=arguments.dtype,
        steps=arguments.steps,
        replica_slots=arguments.replica_slots,
        batch=arguments.batch,
        length=arguments.length,
    )
    if is_first():
        if arguments.json:
            _print_json(report.to_dict())
        else:
            print(report)
    return 0 if report.passed else 1


# -- bench ---------------------------------------------------------------------------------------------------------


def _bench_planner(arguments: argparse.Namespace) -> None:
    from ..bench.planner import run

    with _spinner() as spinner:
        result = run(arguments.loads, arguments.peers, arguments.repeats, on_progress=spinner.update)
    _print_bench(result, arguments.json)


def _bench_split(arguments: argparse.Namespace) -> None:
    from ..bench.split import run

    with _spinner() as spinner:
        result = run(arguments.loads, arguments.repeats, on_progress=spinner.update)
    _print_bench(result, arguments.json)


def _bench_count(arguments: argparse.Namespace) -> None:
    from ..bench.count import run

    with _spinner():
        result = run(arguments.repeats)
    _print_bench(result, arguments.json)


def _bench_on_ranks(arguments: argparse.Namespace) -> int:
    """Measure on the ranks that are there, or start some that run this same command."""
    from importlib import import_module

    from ..launching import is_first, launched, process_group, start_ranks

    if not launched():
        options = ["--repeats", str(arguments.repeats), *(["--json"] if arguments.json else [])]
        return start_ranks(["bench", arguments.what, *options], arguments.ranks)
    with process_group("cpu") as device, _spinner() if is_first() else nullcontext():
        result = import_module(f"..bench.{arguments.what}", __package__).run(device, arguments.repeats)
    if is_first():
        _print_bench(result, arguments.json)
    return 0


def _print_bench(result: Mapping[str, Any], as_json: bool) -> None:
    """A benchmark's result: its lists of rows as tables, its single values as lines."""
    if as_json:
        _print_json(result)
        return
    for name, value in result.items():
        if isinstance(value, list):
            _print_table(name, value)
        else:
            print(f"{name}: {value}")


# -- what commands share -------------------------------------------------------------------------------------------


def _topology(arguments: argparse.Namespace) -> Topology:
    from ..topology import Topology

    try:
        return Topology(
            arguments.ranks,
            arguments.ranks_per_node,
            arguments.intra_node_bandwidth * 1e9,
            arguments.inter_node_bandwidth * 1e9,
        )
    except ValueError as error:
        raise InputError(str(error)) from None


def _policy_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"spilled_experts": arguments.spilled_experts, "global_above": arguments.global_above}


def _load(path: str, arguments: argparse.Namespace) -> NDArray[np.float64]:
    from ..formats.loads import layers_without_tokens, read_load

    load = read_load(path, arguments.dense_layers)
    chosen: NDArray[np.float64] = load[arguments.windows]
    if not len(chosen):
        raise InputError(f"{path}: --windows leaves none of its {len(load)} windows")
    empty = layers_without_tokens(chosen)
    if empty:
        counted = f"--dense-layers {arguments.dense_layers + empty}"
        print(
            f"{PROGRAM}: note: {path}: the first {empty} layers carry no tokens; {counted} leaves them out",
            file=sys.stderr,
        )
    return chosen


class _progress:
    """A bar on stderr; entering gives the function that advances it by one."""

    def __init__(self, what: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> Callable[[], None]:
        self._bar.start()
        return lambda: self._bar.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _spinner() -> Status:
    """A sign of life on stderr, for work whose length is not known."""
    from rich.console import Console

    return Console(stderr=True).status("measuring")


def _print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name.replace("_", " "), justify="right" if index else "left")
    for row in rows:
        table.add_row(*(_shown(row.get(name, "")) for name in columns))
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a pipe has no width: do not wrap at 80
    console.print(table)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _print_json(fields: Mapping[str, Any]) -> None:
    print(json.dumps(fields))


# -- the parser ----------------------------------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser(prog=PROGRAM, description="Expert-parallel load balancing for MoE models.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_plan_arguments(commands, _plan)
    add_simulate_arguments(commands, _simulate)
    add_convert_arguments(commands, _convert)
    add_verify_arguments(commands, _verify)
    bench = commands.add_parser(
        "bench", help="measure on this machine: planners, splitters, counting, moving, training"
    )
    benches = bench.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    add_bench_planner_arguments(benches, _bench_planner)
    add_bench_split_arguments(benches, _bench_split)
    add_bench_count_arguments(benches, _bench_count)
    for what in RANK_BENCHES:
        add_bench_rank_arguments(benches, what, _bench_on_ranks)
    return parser


if __name__ == "__main__":
    sys.exit(main())
