"""``eplb-runtime bench``: one command for each file of ``tools/bench/``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from .arguments import LOAD, InputError, add_command, adder, names, not_negative, positive, positive_float
from .inputs import require_extra
from .printing import note, print_json, print_lines, print_table, spinner

ON_RANKS = ("dispatch", "migrate", "beside", "train")
ON_GPUS = ("dispatch", "migrate")
"""Files of ``tools/bench/`` whose ``run(device, repeats)`` needs ranks."""
STEADY = 1.25
"""Blocks of equal work that take more than so many times as long as others were disturbed."""
WITH_MODELS = ("train", "beside")
"""Those of them that take a model from the library."""


def add(commands: Any) -> None:
    bench = commands.add_parser(
        "bench", help="measure on this machine: planners, splitters, counting, moving, training"
    )
    benches = bench.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    _add_planner(benches)
    _add_split(benches)
    _add_rollouts(benches)
    _add_count(benches)
    _add_kernels(benches)
    _add_scale(benches)
    _add_observe(benches)
    for what in ON_RANKS:
        _add_on_ranks(benches, what)
    _add_attached(benches)
    _add_overlap(benches)
    _add_two_batches(benches)
    _add_soak(benches)


def _add_planner(benches: Any) -> None:
    command = add_command(
        benches,
        "planner",
        _planner,
        "balance and time of the policies, beside other planners in the same run",
        """
  eplb-runtime bench planner
  eplb-runtime bench planner load.npz --peers vllm,sglang
  eplb-runtime bench planner --peers ./eplb.py --json
  eplb-runtime bench planner load.npz --table    # the tables of planner/README.md, and a suite of loads that drift
""",
    )
    _add_bench(command)
    command.add_argument(
        "--table",
        action="store_true",
        help="measure all tables of the planner's README and print them in Markdown, beside cited figures",
    )
    peers = "installed planners, vllm or sglang, or a file with DeepSeek's rebalance_experts"
    adder(command)("--peers", "A,B,...", names, peers, default=[])


def _add_split(benches: Any) -> None:
    command = add_command(
        benches,
        "split",
        _split,
        "balance and time of splitting tokens over copies",
        """
  eplb-runtime bench split
  eplb-runtime bench split load.npz --repeats 20 --json
""",
    )
    _add_bench(command)


def _add_rollouts(benches: Any) -> None:
    command = add_command(
        benches,
        "rollouts",
        _rollouts,
        "reinforcement learning on recorded loads: planned from the past, or from declared loads; nothing is trained",
        """
  eplb-runtime bench rollouts
  eplb-runtime bench rollouts load.npz --ranks 8 --micro-batches 4 --json
""",
    )
    loads = f"series of loads, a window is a micro-batch: {LOAD} (default: the sample, which was drawn)"
    command.add_argument("loads", metavar="LOAD", nargs="*", help=loads)
    add = adder(command)
    add("--ranks", "R", positive, "of the EP group (default: 8)", default=8)
    add("--micro-batches", "M", positive, "of a step (default: 4)", default=4)
    parameters = "of an expert, for the bytes that move (default: gpt-oss-20b's, 24.9 million)"
    add("--expert-parameters", "N", positive, parameters)


def _add_on_ranks(benches: Any, what: str) -> None:
    """A benchmark that needs ranks: ``dispatch``, ``migrate``, ``beside`` or ``train``."""
    summary, repeats, meaning = {
        "dispatch": ("carrying tokens between ranks, beside plain all-to-alls", 20, "timings taken, the median counts"),
        "migrate": ("moving experts between ranks, beside plain messages", 10, "timings taken, the median counts"),
        "beside": ("moving experts while training goes on, beside between steps", 6, "blocks of 16 steps that count"),
        "train": (
            "training steps, static, balanced and ideal; takes minutes",
            8,
            "blocks of ten steps of each variant",
        ),
    }[what]
    command = add_command(
        benches,
        what,
        _on_ranks,
        summary,
        f"""
  eplb-runtime bench {what}                                             # starts two ranks on this machine
  torchrun --nproc-per-node 4 -m eplb_runtime.cli bench {what} --json   # on these
""",
    )
    command.set_defaults(what=what)
    add = adder(command)
    add("--repeats", "N", positive, f"{meaning} (default: {repeats})", default=repeats)
    add("--ranks", "R", positive, "ranks to start when not under torchrun (default: 2)", default=2)
    if what in ON_GPUS:
        command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the ranks (default: cpu)")
    if what == "dispatch":
        add("--ranks-per-node", "G", positive, "ranks taken for a node (default: those of this machine)")
        add("--tokens", "T", positive, "of each rank, for the table of dispatchers (default: 256)")
        add("--hidden", "D", positive, "numbers in a row (default: 512)", default=512)
    if what == "train":
        add(
            "--width",
            "W",
            positive,
            "of an expert's hidden layer: more of it, more of a step is computing",
            default=1024,
        )
        command.add_argument("--brief", action="store_true", help="only experts fixed and experts moved: a minute")
        add("--profile", "DIR", Path, "write a profiler trace of each variant and rank there, for `trace compare`")


def _add_attached(benches: Any) -> None:
    command = add_command(
        benches,
        "attached",
        _attached,
        "a training step attached to a balancer that moves nothing, beside one that is not, on one rank",
        """
  eplb-runtime bench attached
  eplb-runtime bench attached --device cuda --json
""",
    )
    adder(command)("--repeats", "N", positive, "steps of each that count, in turns (default: 30)", default=30)
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where it trains (default: cpu)")


def _add_overlap(benches: Any) -> None:
    command = add_command(
        benches,
        "overlap",
        _overlap,
        "what DualPipeV hides when a forward and a backward run at once, over slow links",
        """
  eplb-runtime bench overlap --trace traces                             # starts four ranks on this machine
  torchrun --nproc-per-node 4 -m eplb_runtime.cli bench overlap --json
""",
    )
    add = adder(command)
    add("--repeats", "N", positive, "steps of each way that count (default: 5)", default=5)
    add("--micro-batches", "M", positive, "of a step, 4 at least (default: 16)", default=16)
    add("--trace", "DIR", Path, "write a Chrome trace of each rank's last steps there")
    add("--ranks", "R", positive, "ranks to start when not under torchrun, even, 4 at least (default: 4)", default=4)


def _add_two_batches(benches: Any) -> None:
    command = add_command(
        benches,
        "two-batches",
        _two_batches,
        "what two batches at once hide in evaluation, over slow links",
        """
  eplb-runtime bench two-batches --trace traces                         # starts two ranks on this machine
  torchrun --nproc-per-node 4 -m eplb_runtime.cli bench two-batches --json
""",
    )
    add = adder(command)
    add("--repeats", "N", positive, "of each way that count (default: 5)", default=5)
    add("--trace", "DIR", Path, "write a Chrome trace of each rank's last forwards there")
    add("--ranks", "R", positive, "ranks to start when not under torchrun, 2 at least (default: 2)", default=2)


def _add_soak(benches: Any) -> None:
    command = add_command(
        benches,
        "soak",
        _soak,
        "training under faults at each point of the protocol, beside a twin that nobody disturbs; exit status 1 if a "
        "bit differs, ranks part, a job ends but by a kill, or a thing hangs or grows",
        """
  eplb-runtime bench soak --minutes 60                                  # starts three ranks on this machine
  eplb-runtime bench soak --minutes 60 --settings overlap,overlap+copies --logs soak/
  torchrun --nproc-per-node 4 -m eplb_runtime.cli bench soak --minutes 2 --settings overlap    # nobody is killed
""",
    )
    add = adder(command)
    add("--minutes", "M", positive_float, "in which faults are made (default: 2)", default=2.0)
    add("--seed", "N", not_negative, "of the faults (default: 0)", default=0)
    add("--ranks", "R", positive, "ranks to start when not under torchrun (default: 3)", default=3)
    add("--bouts", "N", positive, "of faults before a rank is killed and the job begins anew (default: 20)", default=20)
    settings = "that lives of the job take in turn: overlap, plain, overlap+copies, copies (default: all)"
    add("--settings", "A,B,...", names, settings, default=[])
    add("--logs", "FOLDER", Path, "keep there what each rank logs and says")


def _add_count(benches: Any) -> None:
    command = add_command(
        benches, "count", _count, "counting tokens, beside torch.bincount", "\n  eplb-runtime bench count\n"
    )
    adder(command)("--repeats", "N", positive, "timings taken, the least counts (default: 20)", default=20)


def _add_kernels(benches: Any) -> None:
    command = add_command(
        benches,
        "kernels",
        _kernels,
        "our Triton kernels on this GPU, beside plain torch and a plain copy",
        """
  eplb-runtime bench kernels
  eplb-runtime bench kernels --tokens 64 --ranks 32 --json
  eplb-runtime bench kernels --compile-only    # without a GPU
""",
    )
    command.add_argument(
        "--compile-only",
        action="store_true",
        help="list registers and spilled bytes of all kernels for sm_80, sm_90 and sm_100: needs no GPU",
    )
    add = adder(command)
    add("--repeats", "N", positive, "timings taken, the least counts (default: 20)", default=20)
    add("--tokens", "T", positive, "of a batch (default: 4096)", default=4096)
    add("--top-k", "K", positive, "choices of each (default: 8)", default=8)
    add("--experts", "E", positive, "of a layer (default: 256)", default=256)
    add("--ranks", "R", positive, "of the EP group, with a replica slot each (default: 64)", default=64)
    add("--hidden", "D", positive, "columns of a row, in bfloat16 (default: 7168)", default=7168)


def _add_scale(benches: Any) -> None:
    command = add_command(
        benches,
        "scale",
        _scale,
        "what a rebalance costs as ranks grow, without a network",
        """
  eplb-runtime bench scale
  eplb-runtime bench scale --replica-slots 1 --json
""",
    )
    add = adder(command)
    add("--repeats", "N", positive, "timings taken, the least counts (default: 3)", default=3)
    add("--replica-slots", "K", not_negative, "copies that a rank can hold (default: 0)", default=0)


def _add_observe(benches: Any) -> None:
    command = add_command(
        benches,
        "observe",
        _observe,
        "what event log, metrics and live page cost the training thread, while somebody looks",
        """
  eplb-runtime bench observe
""",
    )
    add = adder(command)
    add("--repeats", "N", positive, "blocks of 50 steps, shown and not shown in turn (default: 8)", default=8)
    add("--layers", "L", positive, "MoE layers of the job (default: 61)", default=61)
    add("--experts", "E", positive, "experts of a layer (default: 256)", default=256)
    add("--ranks", "R", positive, "ranks of the EP group (default: 32)", default=32)


def _add_bench(command: argparse.ArgumentParser) -> None:
    command.add_argument("loads", metavar="LOAD", nargs="*", help=f"{LOAD} (default: generated loads)")
    adder(command)("--repeats", "N", positive, "timings taken, the median counts (default: 5)", default=5)


def _planner(arguments: argparse.Namespace) -> None:
    from ..tools.bench import planner, tables

    run = tables.run if arguments.table else planner.run
    with spinner() as shown:
        result = run(arguments.loads, arguments.peers, arguments.repeats, on_progress=shown.update)
    if arguments.table and not arguments.json:
        print_lines(tables.markdown(result))
        return
    _print(result, arguments.json)


def _split(arguments: argparse.Namespace) -> None:
    from ..tools.bench.split import run

    with spinner() as shown:
        result = run(arguments.loads, arguments.repeats, on_progress=shown.update)
    _print(result, arguments.json)


def _rollouts(arguments: argparse.Namespace) -> None:
    from ..tools.bench.rollouts import EXPERT_PARAMETERS, Rules, run

    parameters = arguments.expert_parameters or EXPERT_PARAMETERS
    with spinner() as shown:
        rules = Rules(arguments.ranks, arguments.micro_batches, parameters)
        result = run(arguments.loads, rules, on_progress=shown.update)
    if arguments.json:
        print_json(result)
        return
    headings = {"micro_batch": "batch", "at_most": "bound", "moved_gib": "GiB"}
    columns = ("policy", "step", "micro_batch", "share", "at_most", "of_oracle", "moved_gib")
    for load in dict.fromkeys(row["load"] for row in result["rollouts"]):
        of_load = [row for row in result["rollouts"] if row["load"] == load]
        rows = [{headings.get(name, name): row[name] for name in columns} for row in of_load]
        print_table(f"{load}: {arguments.ranks} ranks, {arguments.micro_batches} micro-batches a step", rows)


def _count(arguments: argparse.Namespace) -> None:
    from ..tools.bench.count import run

    with spinner() as shown:
        result = run(arguments.repeats, on_progress=shown.update)
    _print(result, arguments.json)


def _kernels(arguments: argparse.Namespace) -> None:
    import torch

    from ..utils.triton import triton

    if arguments.compile_only:
        if triton is None:
            raise InputError("bench kernels --compile-only needs Triton (pip install triton): nothing was compiled")
        from ..tools.bench import compiled_kernels

        with spinner() as shown:
            result = compiled_kernels.run(on_progress=shown.update)
        _print(result, arguments.json)
        return
    if triton is None or not torch.cuda.is_available():
        what = "a GPU" if triton is not None else "Triton (pip install triton), and a GPU"
        raise InputError(f"bench kernels needs {what}: nothing was measured")
    if arguments.experts % arguments.ranks or arguments.top_k > arguments.experts:
        raise InputError(
            f"--ranks {arguments.ranks} must divide --experts {arguments.experts}, which are more than "
            f"--top-k {arguments.top_k}"
        )
    from ..tools.bench.kernels import run

    sizes = {name: getattr(arguments, name) for name in ("tokens", "top_k", "experts", "ranks", "hidden")}
    with spinner() as shown:
        result = run(torch.device("cuda"), arguments.repeats, **sizes, on_progress=shown.update)
    _print(result, arguments.json)


def _observe(arguments: argparse.Namespace) -> None:
    from ..tools.bench.observe import run

    if arguments.experts % arguments.ranks:
        raise InputError(f"--ranks {arguments.ranks} does not divide --experts {arguments.experts}")
    sizes = {"layers": arguments.layers, "experts": arguments.experts, "ranks": arguments.ranks}
    with nullcontext() if arguments.json else spinner():
        result = run(arguments.repeats, **sizes)
    if arguments.json:
        print_json(result)
        return
    print_table(f"{arguments.repeats} blocks of {result['interval']} steps, milliseconds a step", [result])


def _scale(arguments: argparse.Namespace) -> None:
    from ..tools.bench.scale import run

    with spinner() as shown:
        result = run(arguments.repeats, replica_slots=arguments.replica_slots, on_progress=shown.update)
    if arguments.json:
        print_json(result)
        return
    rows = [
        {name: _with_growth(value, (row["growth"] or {}).get(name)) for name, value in row.items() if name != "growth"}
        for row in result["scale"]
    ]
    print_table("scale; in brackets: how many times the row before, over how many times its R x L", rows)


def _with_growth(value: float, growth: float | None) -> str:
    shown = f"{value:.4g}"
    return shown if growth is None else f"{shown} ({growth:.2f})"


def _on_ranks(arguments: argparse.Namespace) -> int:
    """Measure on the ranks that are there, or start some that run this same command."""
    brief = "brief" in arguments and arguments.brief
    if brief and arguments.profile:
        raise InputError("--profile goes without --brief")
    if "profile" in arguments and arguments.profile and arguments.profile.exists() and not arguments.profile.is_dir():
        raise InputError(f"--profile {arguments.profile}: this is a file; give a folder")
    if arguments.what in WITH_MODELS:
        require_extra("transformers", f"bench {arguments.what}")
    from importlib import import_module

    from ..tools.launch import is_first, launched, launcher_environment, process_group, start_ranks

    per_node = arguments.ranks_per_node if "ranks_per_node" in arguments else None
    on = arguments.device if "device" in arguments else "cpu"
    ranks = int(launcher_environment()["WORLD_SIZE"]) if launched() else arguments.ranks
    if per_node and ranks % per_node:
        raise InputError(f"--ranks-per-node {per_node} does not divide {ranks} ranks")
    if not launched():
        options = ["--repeats", str(arguments.repeats), *(["--json"] if arguments.json else [])]
        options += ["--brief"] if brief else []
        options += ["--device", on] if on != "cpu" else []
        options += ["--ranks-per-node", str(per_node)] if per_node else []
        if "hidden" in arguments:
            options += ["--hidden", str(arguments.hidden)]
            options += ["--tokens", str(arguments.tokens)] if arguments.tokens else []
        if "width" in arguments:
            options += ["--width", str(arguments.width)]
            options += ["--profile", str(arguments.profile)] if arguments.profile else []
        return start_ranks(["bench", arguments.what, *options], arguments.ranks)
    sizes = {"width": arguments.width} if "width" in arguments else {}
    sizes |= {"profile": arguments.profile} if sizes and not brief else {}
    sizes |= {"ranks_per_node": per_node} if per_node else {}
    if "hidden" in arguments:
        sizes |= {"hidden": arguments.hidden, **({"tokens": (arguments.tokens,)} if arguments.tokens else {})}
    with process_group(on) as device, spinner() if is_first() else nullcontext() as shown:
        if shown is not None and arguments.what in WITH_MODELS:
            sizes["on_progress"] = shown.update
        bench = import_module(f"..tools.bench.{arguments.what}", __package__)
        result = (bench.run_brief if brief else bench.run)(device, arguments.repeats, **sizes)
    if is_first():
        _print(result, arguments.json)
        if brief and max(row["slowest_over_fastest"] for row in result["train"]) > STEADY:
            note("other processes use these cores: the times say little; try again on a quiet machine")
    return 0


def _attached(arguments: argparse.Namespace) -> int:
    require_extra("transformers", "bench attached")
    from ..tools.bench.attached import run
    from ..tools.launch import launched, launcher_environment, process_group, start_ranks

    if not launched():
        options = ["--repeats", str(arguments.repeats), "--device", arguments.device]
        return start_ranks(["bench", "attached", *options, *(["--json"] if arguments.json else [])], 1)
    if int(launcher_environment()["WORLD_SIZE"]) > 1:
        raise InputError("bench attached compares with a whole model: start it on one rank")
    with process_group(arguments.device) as device, spinner() as shown:
        result = run(device, arguments.repeats, on_progress=shown.update)
    _print(result, arguments.json)
    return 0


def _overlap(arguments: argparse.Namespace) -> int:
    from ..tools.bench.overlap import run
    from ..tools.launch import is_first, launched, process_group, start_ranks

    if not launched():
        options = ["--repeats", str(arguments.repeats), "--micro-batches", str(arguments.micro_batches)]
        options += [*(["--trace", str(arguments.trace)] if arguments.trace else [])]
        return start_ranks(["bench", "overlap", *options, *(["--json"] if arguments.json else [])], arguments.ranks)
    with process_group("cpu") as device, spinner() if is_first() else nullcontext():
        result = run(device, arguments.repeats, micro_batches=arguments.micro_batches, trace=arguments.trace)
    if is_first():
        _print(result, arguments.json)
    return 0


def _two_batches(arguments: argparse.Namespace) -> int:
    from ..tools.bench.two_batches import run
    from ..tools.launch import is_first, launched, process_group, start_ranks

    if not launched():
        options = ["--repeats", str(arguments.repeats), *(["--trace", str(arguments.trace)] if arguments.trace else [])]
        return start_ranks(["bench", "two-batches", *options, *(["--json"] if arguments.json else [])], arguments.ranks)
    with process_group("cpu") as device, spinner() if is_first() else nullcontext():
        result = run(device, arguments.repeats, trace=arguments.trace)
    if is_first():
        _print(result, arguments.json)
    return 0


def _soak(arguments: argparse.Namespace) -> int:
    require_extra("transformers", "bench soak")
    from ..tools.bench.soak import SETTINGS
    from ..tools.bench.soak_lives import run, run_one
    from ..tools.launch import is_first, launched, process_group

    settings = arguments.settings or list(SETTINGS)
    if unknown := [name for name in settings if name not in SETTINGS]:
        raise InputError(f"--settings {unknown[0]} is unknown; choose of: {', '.join(SETTINGS)}")
    if launched():
        with process_group("cpu"):
            result = run_one(arguments.minutes, arguments.seed, settings[0])
    else:
        result = run(
            arguments.minutes,
            ranks=arguments.ranks,
            seed=arguments.seed,
            bouts=arguments.bouts,
            settings=settings,
            logs=arguments.logs,
        )
    if is_first():
        _print(result, arguments.json)
    return 0 if result["passed"] else 1


def _print(result: Mapping[str, Any], as_json: bool) -> None:
    """A benchmark's result: its lists of rows as tables, its single values as lines."""
    if as_json:
        print_json(result)
        return
    for name, value in result.items():
        if isinstance(value, list):
            print_table(name, value)
        else:
            print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
