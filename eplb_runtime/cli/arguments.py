"""The arguments of each command: names, kinds, help texts and examples; what they lead to is in ``commands.py``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

BAD_INPUT = 2
"""Exit status of every refusal."""

LOAD = "tokens per expert: .npz or .safetensors with `load`, .json, or a serving engine's dump"
POLICY = "static, deepseek, free, hierarchical or incremental"
GATE = "always: if the imbalance falls; payoff: if it pays for itself; off: as the policy says (default: always)"

Run = Callable[[argparse.Namespace], int | None]
"""A command; returns its exit status, None for 0."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line, as every other refusal."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_plan_arguments(commands: Any, run: Run) -> None:
    command = _command(
        commands,
        "plan",
        run,
        "plan a placement for a measured load",
        """
  eplb-runtime plan load.npz --ranks 64 --ranks-per-node 8 --slots-per-rank 5 -o placement.json
  eplb-runtime plan load.npz --ranks 64 --ranks-per-node 8 --slots-per-rank 5 --current placement.json --max-moves 100
  eplb-runtime plan dump.pt --dense-layers 3 --ranks 32 --ranks-per-node 8 --slots-per-rank 9 --policy free --json
""",
    )
    command.add_argument("load", metavar="LOAD", help=LOAD)
    _add_cluster(command)
    add = _adder(command)
    add("--policy", "NAME", str, f"{POLICY} (default: incremental)", default="incremental")
    command.add_argument("--layout", choices=("home", "free"), help="training or inference (default: the policy's own)")
    add("--current", "PLACEMENT", str, "the placement that stands now, ours or an engine's; moves are counted from it")
    add("--expert-parameters", "N", positive, "of one expert, to count bytes: 12 each with its state, 2 in a copy")
    add("-o", "FILE", str, "write the placement, .json or .safetensors", dest="output")


def add_simulate_arguments(commands: Any, run: Run) -> None:
    command = _command(
        commands,
        "simulate",
        run,
        "play a series of loads through several policies: plan on the past, judge on what came next",
        """
  eplb-runtime simulate series.npz --ranks 8 --ranks-per-node 8 --slots-per-rank 5 --every 5
  eplb-runtime simulate series.npz --ranks 8 --ranks-per-node 8 --slots-per-rank 5 --every 5 \\
      --policies static,deepseek,incremental --gate payoff -o windows.csv --plot balance.png
""",
    )
    command.add_argument("trace", metavar="TRACE", help="a series of windows; " + LOAD)
    _add_cluster(command)
    add = _adder(command)
    add("--every", "K", positive, "replan every K windows; the first K are only planned on", required=True)
    policies = "static,deepseek,incremental"
    add("--policies", "A,B,...", names, f"{POLICY} (default: {policies})", default=names(policies))
    add("--merge", "N", positive, "first merge every N windows of the series into one", default=1)
    add("--history", "N", positive, "windows of the past that a plan sees (default: 4 K)")
    command.add_argument("--gate", choices=("always", "payoff", "off"), default="always", help=GATE)
    add("-o", "FILE", str, "write every judged window, .csv or .json", dest="output")
    add("--plot", "FILE", str, "draw balance and moves over time, .png, .svg or .pdf (needs matplotlib)")
    add = _adder(command.add_argument_group("step times", "a model that compares policies, not one that predicts"))
    add("--steps-per-window", "N", positive, "training steps that a window stands for (default: 1)", default=1)
    add("--hidden-size", "N", positive, "of the model (default: 7168, DeepSeek-V3)", default=7168)
    add("--expert-hidden-size", "N", positive, "of one expert (default: 2048)", default=2048)
    add("--flops", "F", positive_float, "FLOP/s a rank sustains on expert GEMMs (default: 4e14)", default=400e12)
    add("--stall-seconds", "S", not_negative_float, "cost of a rebalance besides its bytes (default: 0)", default=0.0)
    command.add_argument("--inference", action="store_true", help="no backward pass, no optimizer state")


def add_convert_arguments(commands: Any, run: Run) -> None:
    command = _command(
        commands,
        "convert",
        run,
        "convert placements and loads to and from the serving engines' formats",
        """
  eplb-runtime convert placement.json sglang.json --to sglang --dense-layers 3   # for --init-expert-location
  eplb-runtime convert placement.json eplb.yaml --dense-layers 3                 # for TensorRT-LLM's load_balancer
  eplb-runtime convert sglang.json placement.json --ranks 32 --dense-layers 3
  eplb-runtime convert expert_distribution_recorder_1.pt load.npz --dense-layers 3
""",
    )
    command.add_argument("source", metavar="IN", help="a placement or a load; known by its content")
    command.add_argument("destination", metavar="OUT", help="the file to write")
    add = _adder(command)
    formats = "eplb-runtime, sglang, vllm, vllm-ascend or tensorrt-llm"
    add("--to", "FORMAT", str, f"{formats} (default by ending: .yaml tensorrt-llm, .pt sglang, others eplb-runtime)")
    add("--ranks", "R", positive, "EP size, which most engines' maps do not say")
    _add_dense_layers(command)


def add_bench_planner_arguments(commands: Any, run: Run) -> None:
    command = _command(
        commands,
        "planner",
        run,
        "balance and time of the policies, beside other planners in the same run",
        """
  eplb-runtime bench planner
  eplb-runtime bench planner load.npz --peers vllm,sglang
  eplb-runtime bench planner --peers ./eplb.py --json
""",
    )
    _add_bench(command)
    peers = "installed planners, vllm or sglang, or a file with DeepSeek's rebalance_experts"
    _adder(command)("--peers", "A,B,...", names, peers, default=[])


def add_bench_split_arguments(commands: Any, run: Run) -> None:
    command = _command(
        commands,
        "split",
        run,
        "balance and time of splitting tokens over copies",
        """
  eplb-runtime bench split
  eplb-runtime bench split load.npz --repeats 20 --json
""",
    )
    _add_bench(command)


def add_verify_arguments(commands: Any, run: Run) -> None:
    command = _command(
        commands,
        "verify",
        run,
        "train with and without migrations on this very cluster and say whether it makes any difference",
        """
  torchrun --nproc-per-node 4 -m eplb_runtime.cli verify
  torchrun --nproc-per-node 8 -m eplb_runtime.cli verify --device cuda --model-config ./my-model --dtype bfloat16
  torchrun --nproc-per-node 4 -m eplb_runtime.cli verify --replica-slots 1 --dtype float64 --json

exit status: 0 passed, 1 a difference or nothing proved, 2 bad input (torchrun itself makes 1 of both)
""",
    )
    model = command.add_mutually_exclusive_group()
    families = ("olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
    model.add_argument("--family", choices=families, default="olmoe", help="a small model of it (default: olmoe)")
    model.add_argument("--model-config", metavar="PATH", help="a folder with config.json, or that file; random weights")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    command.add_argument(
        "--dtype", choices=("float32", "float64", "bfloat16"), default="float32", help="default: float32"
    )
    add = _adder(command)
    add("--steps", "N", positive, "of each run (default: 12)", default=12)
    add("--replica-slots", "K", not_negative, "a further run with K copies a rank, held against a bound", default=0)
    add("--batch", "N", positive, "sequences per rank and step (default: 4)", default=4)
    add("--length", "N", positive, "tokens of a sequence (default: 32)", default=32)


def add_bench_rank_arguments(commands: Any, what: str, run: Run) -> None:
    """A benchmark that needs ranks: ``dispatch``, ``migrate`` or ``train``."""
    summary, repeats, meaning = {
        "dispatch": ("carrying tokens between ranks, beside plain all-to-alls", 20, "timings taken, the median counts"),
        "migrate": ("moving experts between ranks, beside plain messages", 10, "timings taken, the median counts"),
        "train": (
            "training steps, static, balanced and ideal; takes minutes",
            8,
            "blocks of ten steps of each variant",
        ),
    }[what]
    command = _command(
        commands,
        what,
        run,
        summary,
        f"""
  eplb-runtime bench {what}                                             # starts two ranks on this machine
  torchrun --nproc-per-node 4 -m eplb_runtime.cli bench {what} --json   # on these
""",
    )
    command.set_defaults(what=what)
    add = _adder(command)
    add("--repeats", "N", positive, f"{meaning} (default: {repeats})", default=repeats)
    add("--ranks", "R", positive, "ranks to start when not under torchrun (default: 2)", default=2)


def add_bench_count_arguments(commands: Any, run: Run) -> None:
    command = _command(
        commands, "count", run, "counting tokens, beside torch.bincount", "\n  eplb-runtime bench count\n"
    )
    _adder(command)("--repeats", "N", positive, "timings taken, the least counts (default: 20)", default=20)


# -- what commands share -------------------------------------------------------------------------------------------


def _command(commands: Any, name: str, run: Run, summary: str, examples: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog="examples:" + examples.rstrip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return command


def _adder(command: Any) -> Callable[..., None]:
    def add(flag: str, metavar: str, kind: Callable[[str], Any], text: str, **more: Any) -> None:
        command.add_argument(flag, metavar=metavar, type=kind, help=text, **more)

    return add


def _add_cluster(command: argparse.ArgumentParser) -> None:
    add = _adder(command)
    add("--ranks", "R", positive, "ranks of the EP group", required=True)
    add("--ranks-per-node", "G", positive, "ranks that share a node", required=True)
    add("--slots-per-rank", "S", positive, "experts that each rank holds, copies included", required=True)
    add("--groups", "N", positive, "expert groups of group-limited routing (default: 1)", default=1)
    spilled = "hierarchical: so many experts a layer may leave their group's node (default: 0)"
    add("--spilled-experts", "N", not_negative, spilled, default=0)
    above = "hierarchical: a layer drops the group rule where it costs more than this share of imbalance, as 0.1"
    add("--global-above", "X", not_negative_float, above)
    add("--max-moves", "M", not_negative, "at most M slots move in a plan, over all layers")
    add(
        "--windows",
        "A:B",
        windows,
        "of the file, only these: 3, 0:5, or --windows=-5: for the last",
        default=slice(None),
    )
    add("--intra-node-bandwidth", "GB/S", positive_float, "of a rank, inside its node (default: 400)", default=400.0)
    add("--inter-node-bandwidth", "GB/S", positive_float, "of a rank, to other nodes (default: 50)", default=50.0)
    _add_dense_layers(command)


def _add_dense_layers(command: argparse.ArgumentParser) -> None:
    text = "leading layers without experts, which SGLang and TensorRT-LLM number too (default: 0)"
    _adder(command)("--dense-layers", "N", not_negative, text, default=0)


def _add_bench(command: argparse.ArgumentParser) -> None:
    command.add_argument("loads", metavar="LOAD", nargs="*", help=f"{LOAD} (default: generated loads)")
    _adder(command)("--repeats", "N", positive, "timings taken, the median counts (default: 5)", default=5)


# -- kinds of values -----------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    return int(_number(text, int, lambda value: value > 0, "a whole number above 0"))


def not_negative(text: str) -> int:
    return int(_number(text, int, lambda value: value >= 0, "a whole number, 0 or more"))


def positive_float(text: str) -> float:
    return float(_number(text, float, lambda value: 0 < value < float("inf"), "a number above 0"))


def not_negative_float(text: str) -> float:
    return float(_number(text, float, lambda value: 0 <= value < float("inf"), "a number, 0 or more"))


def names(text: str) -> list[str]:
    """``a,b`` -> ["a", "b"]."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: give names with commas between")
    return found


def windows(text: str) -> slice:
    """``3`` -> the fourth window, ``0:5`` -> the first five, ``-5:`` -> the last five."""
    try:
        first, colon, last = text.partition(":")
        if colon:
            return slice(int(first) if first else None, int(last) if last else None)
        return slice(int(first), int(first) + 1 or None)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give a window, as 3, or a range, as 0:5") from None


def _number(text: str, kind: Callable[[str], Any], good: Callable[[Any], bool], wanted: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not good(value):
        raise argparse.ArgumentTypeError(f"{text!r}: give {wanted}")
    return value
