"""The first three calls on a GPU, of at most ten minutes each: what runs there, what does not, and how fast.

    python launch/gpu_check.py 1 --out shared_folder

Each stage is a process with a limit of its own. After each, a line is appended to ``result.md``, so a call that is cut
leaves what it found. A call that is repeated goes on with the stages that have no line yet, or were cut by the end of
a call, and its exit status says whether there are any. ``--dry-run`` runs on a CPU the stages that can run there, into
``dry_run.md``, and lists the others with their limits. Ranks share the GPU where there is only one.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module, util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CALL_SECONDS = 570.0
"""Of one call: ten minutes, less what it takes to start and to bring files back."""
LEAST_SECONDS = 10.0
"""A stage that would have less is left to the next call."""
FAILED_LINES, BENCH_LINES = 12, 40
UNFINISHED = "unfinished"
"""Cut by the end of a call and not by its own limit: the next call runs it again."""
NO_TIME = "no time left"
"""Not begun before the end of a call: the next call runs it."""
STATUSES = {"failed": 1, "cut": 1, UNFINISHED: 3, NO_TIME: 4}
"""Exit statuses, the first that fits; 2 is a wrong command."""
PACKAGES = ("torch", "triton", "deep_ep", "nvshmem.core", "nixl", "transformers", "eplb_runtime")


@dataclass(frozen=True)
class Stage:
    """One process of a call.

    Args:
        call: 1, 2 or 3.
        name: unique.
        seconds: its limit.
        command: after ``python``.
        on_cpu: whether it runs without a GPU, too.
        lines: of its output that are reported if it passes.
    """

    call: int
    name: str
    seconds: float
    command: tuple[str, ...]
    on_cpu: bool = False
    lines: int = 1


def _check(call: int, name: str, seconds: float) -> Stage:
    return Stage(call, name, seconds, (str(Path(__file__).resolve()), "--check", name), on_cpu=True, lines=BENCH_LINES)


def _tests(call: int, name: str, seconds: float, *arguments: str) -> Stage:
    files = tuple(f"tests/gpu/{one}" if one.endswith(".py") else one for one in arguments)
    return Stage(call, name, seconds, ("-m", "pytest", "-q", "-rs", f"--timeout={seconds:g}", *files))


def _bench(name: str, seconds: float, *arguments: str) -> Stage:
    return Stage(3, f"bench {name}", seconds, ("-m", "eplb_runtime.cli", "bench", name, *arguments), lines=BENCH_LINES)


STAGES = (
    _check(1, "imports and symbols", 60),
    _check(1, "rows of a grouped product", 60),
    _tests(1, "kernels against plain torch", 150, "test_kernels_on_cuda.py"),
    _tests(1, "counting and routing", 90, "test_counting_and_routing.py"),
    _tests(1, "expert kernels", 90, "test_expert_kernels.py"),
    _tests(1, "CUDA graphs", 90, "test_cuda_graphs.py"),
    _tests(1, "records", 60, "test_records.py"),
    _tests(2, "CUDA IPC", 60, "test_cuda_ipc_on_cuda.py"),
    _tests(2, "training", 180, "test_training_on_cuda.py"),
    _tests(2, "transports", 120, "test_transports_on_cuda.py"),
    _tests(2, "DeepEP", 180, "test_deepep_on_cuda.py"),
    _tests(2, "two micro-batches at once", 120, "test_two_batches_on_cuda.py"),
    _tests(2, "copies", 60, "test_copies_on_cuda.py"),
    _bench("kernels", 120),
    _bench("attached", 120),
    _bench("dispatch", 90),
    _bench("migrate", 90),
    _tests(3, "three ranks", 120, "test_three_ranks_on_cuda.py"),
    _tests(3, "Megatron", 90, "test_megatron_on_cuda.py"),
)


# -- stages that are written here --------------------------------------------------------------------------------------


def imports_and_symbols() -> None:
    """Import each package, which resolves its symbols; one that is not installed is no failure.

    Raises:
        SystemExit: one that is installed cannot be loaded.
    """
    broken = []
    for name in PACKAGES:
        if util.find_spec(name.partition(".")[0]) is None:
            print(f"{name}: not installed")
            continue
        try:
            module = import_module(name)
        except Exception as error:
            broken.append(name)
            print(f"{name}: {type(error).__name__}: {error}")
        else:
            print(f"{name}: {getattr(module, '__version__', 'loaded')}")
    if broken:
        raise SystemExit(f"cannot be loaded: {', '.join(broken)}")


def rows_of_a_grouped_product() -> None:
    """Is a row's result the same bits wherever its group stands, and however long its neighbours are?

    Raises:
        SystemExit: it is not, so training is not bit-identical when experts move.
    """
    import torch
    from torch.nn import functional

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    rows, width, experts = 37, 256, 8
    mine = torch.randn(rows, width, generator=generator).bfloat16().to(device)
    weights = torch.randn(experts, width, width, generator=generator).bfloat16().to(device)
    expected = None
    for place in range(experts):
        for others in (0, 1, 16, 129):
            lengths = [others] * experts
            lengths[place] = rows
            around = torch.randn(sum(lengths), width, generator=generator).bfloat16().to(device)
            first = sum(lengths[:place])
            around[first : first + rows] = mine
            at_place = weights.roll(place, 0)  # the first expert stands there
            ends = torch.tensor(lengths, device=device).cumsum(0, dtype=torch.int32)
            found = functional.grouped_mm(around, at_place, offs=ends)[first : first + rows]
            expected = found if expected is None else expected
            if not torch.equal(expected, found):
                raise SystemExit(f"other bits in place {place} beside groups of {others} rows on {device}")
    print(f"the same bits in {experts} places beside groups of 0, 1, 16 and 129 rows on {device}")


CHECKS: dict[str, Callable[[], None]] = {
    "imports and symbols": imports_and_symbols,
    "rows of a grouped product": rows_of_a_grouped_product,
}


# -- running them ------------------------------------------------------------------------------------------------------


def run(stage: Stage, seconds: float) -> tuple[str, list[str]]:
    """``"passed"``, ``"skipped"`` (all its tests), ``"failed"``, ``"cut"`` or ``UNFINISHED``, and its last lines.

    A stage that is cut ends with all its processes.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, *stage.command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        return "cut" if seconds >= stage.seconds else UNFINISHED, said.splitlines()[-FAILED_LINES:]
    lines = [line for line in said.splitlines() if line.strip()]
    if process.returncode:
        return "failed", lines[-FAILED_LINES:]
    if "pytest" in stage.command and " passed" not in lines[-1]:
        return "skipped", lines[-FAILED_LINES:]
    return "passed", lines[-stage.lines :]


def have_run(result: Path) -> set[str]:
    """Names of the stages that have a line, and were not cut by the end of a call."""
    lines = result.read_text().splitlines() if result.exists() else []
    rows = [line.split("|") for line in lines if line.startswith("| ") and line.count("|") >= 5]
    return {row[2].strip() for row in rows if row[3].strip() != UNFINISHED}


def append(result: Path, stage: Stage, how: str, seconds: float, lines: Iterable[str]) -> None:
    """A line of the table, and what the stage said below it."""
    with result.open("a") as file:
        file.write(f"| {stage.call} | {stage.name} | {how} | {seconds:.0f} s |\n\n")
        file.writelines(f"    {line}\n" for line in lines)
        file.write("\n")


def run_call(stages: Iterable[Stage], result: Path, seconds: float = CALL_SECONDS) -> set[str]:
    """Run what has no line yet, as far as the time goes. Words of ``STATUSES`` for what did not pass in this call."""
    end, ran, wrong = time.monotonic() + seconds, have_run(result), set[str]()
    for stage in stages:
        if stage.name in ran:
            continue
        left = end - time.monotonic()
        if left < min(LEAST_SECONDS, stage.seconds):
            print(f"{NO_TIME} for: {stage.name}; call again")
            wrong.add(NO_TIME)
            break
        begin = time.monotonic()
        how, lines = run(stage, min(stage.seconds, left))
        append(result, stage, how, time.monotonic() - begin, lines)
        print(f"{stage.name}: {how}", *lines, sep="\n  ")
        wrong |= {how} & STATUSES.keys()
    return wrong


def dry_run(stages: Iterable[Stage], result: Path) -> set[str]:
    """Run on a CPU what can run there, each time anew, and list the others with their limits."""
    stages = list(stages)
    result.unlink(missing_ok=True)
    wrong = run_call([stage for stage in stages if stage.on_cpu], result)
    for stage in stages:
        if not stage.on_cpu:
            print(f"needs a GPU: call {stage.call}, {stage.name}, at most {stage.seconds:g} s")
    return wrong


def main() -> int:
    """Exit status 0: all has run, and nothing failed; 1: something failed, or was cut by its own limit; 3: a stage was
    cut by the end of the call; 4: some had no time to begin. After 3 and 4 the same call goes on."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("call", nargs="?", type=int, choices=(1, 2, 3), help="which; all three with --dry-run")
    parser.add_argument("--out", type=Path, default=ROOT / "gpu_check", help="folder of result.md")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU: what can run there")
    parser.add_argument("--check", choices=CHECKS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.check is not None:
        CHECKS[given.check]()
        return 0
    if given.call is None and not given.dry_run:
        parser.error("which call: 1, 2 or 3")
    given.out.mkdir(parents=True, exist_ok=True)
    stages = [stage for stage in STAGES if given.call in (None, stage.call)]
    call, name = (dry_run, "dry_run.md") if given.dry_run else (run_call, "result.md")
    wrong = call(stages, given.out / name)
    if wrong:
        print(f"not all passed: {', '.join(word for word in STATUSES if word in wrong)}")
    return min((STATUSES[word] for word in wrong), default=0)


if __name__ == "__main__":
    raise SystemExit(main())
