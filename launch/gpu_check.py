"""The first three calls on a GPU, of at most ten minutes each: what runs there, what does not, and how fast.

    python launch/gpu_check.py 1 --out shared_folder

Each stage is a process with a limit of its own. After each, a line is appended to ``result.md``, so a call that is cut
leaves what it found; all that the stages print goes to ``output.txt`` while they run. A call that is repeated goes on
with the stages that have no line yet, or were cut by the end of a call, and its exit status says whether there are any.
``--dry-run`` runs on a CPU the stages that can run there, into ``dry_run.md``, and lists the others with their limits.
Ranks share the GPU where there is only one.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import secrets
import shutil
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
FAILED_LINES, BENCH_LINES = 40, 40
LONGEST_LINE, MOST_READ_BYTES = 500, 4 << 20
"""Of what a stage says; all of it is in ``output.txt``."""
STAGE_VARIABLE = "EPLB_GPU_CHECK_STAGE"
"""In the environment of all processes of a stage, by which they are found when it is over."""
LONGEST_RANKS_SECONDS, LEFT_AFTER_RANKS = 120.0, 20.0
"""Ranks of a test that hang are ended after so long, or so long before the limit of their stage: then it is known where
they stand."""
UNFINISHED = "unfinished"
"""Cut by the end of a call and not by its own limit: the next call runs it again."""
NO_TIME = "no time left"
"""Not begun before the end of a call: the next call runs it."""
STATUSES = {"failed": 1, "cut": 1, UNFINISHED: 3, NO_TIME: 4}
"""Exit statuses, the first that fits; 2 is a wrong command."""
PACKAGES = ("torch", "triton", "deep_ep", "nvshmem.core", "nixl_cu13._api", "transformers", "eplb_runtime")


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
        each_call: whether it runs in every call, since a fresh machine has nothing of an earlier one.
    """

    call: int
    name: str
    seconds: float
    command: tuple[str, ...]
    on_cpu: bool = False
    lines: int = 1
    each_call: bool = False


def _check(call: int, name: str, seconds: float, on_cpu: bool = True) -> Stage:
    command = str(Path(__file__).resolve()), "--check", name
    return Stage(call, name, seconds, command, on_cpu, lines=BENCH_LINES)


def _compiled(call: int) -> Stage:
    """Before the first stage that plans or starts ranks: they would wait for it, each within its own limit."""
    command = "-m", "eplb_runtime.cli", "warmup"
    return Stage(call, f"compiled planner of call {call}", 300, command, lines=BENCH_LINES, each_call=True)


def _tests(call: int, name: str, seconds: float, *arguments: str) -> Stage:
    files = tuple(f"tests/gpu/{one}" if one.startswith("test_") else one for one in arguments)
    # By name, so that one that hangs is known; one line of each that fails or is skipped, after the others' tracebacks.
    return Stage(call, name, seconds, ("-m", "pytest", "-v", "-rfEs", f"--timeout={seconds:g}", *files))


def _bench(name: str, seconds: float, *arguments: str) -> Stage:
    return Stage(3, f"bench {name}", seconds, ("-m", f"tests.benchmarks.{name}", *arguments), lines=BENCH_LINES)


def _bench_of_two_ranks(name: str, seconds: float) -> Stage:
    """Its own command refuses ranks that share a GPU: their figures say nothing but as ratios."""
    return Stage(3, name, seconds, ("tests/gpu/bench_of_two_ranks.py", name), lines=BENCH_LINES)


_ONE_RANK = "world_size_1 or known_counts or starts_as_the_whole or between_slots"
"""Of the training tests; the others take two."""

STAGES = (
    _check(1, "imports and symbols", 60),
    _check(1, "rows of a grouped product", 60),
    _tests(1, "kernels against plain torch", 150, "test_kernels_on_cuda.py"),
    _tests(1, "counting and routing", 90, "test_counting_and_routing.py"),
    _tests(1, "expert kernels", 90, "test_expert_kernels.py"),
    _tests(1, "records", 60, "test_records.py"),
    _compiled(1),
    _tests(1, "CUDA graphs", 120, "test_cuda_graphs.py"),
    _tests(1, "training of one rank", 180, "test_training_on_cuda.py", "-k", _ONE_RANK),
    _compiled(2),
    _tests(2, "training", 300, "test_training_on_cuda.py", "-k", f"not ({_ONE_RANK})"),
    _tests(2, "transports", 240, "test_transports_on_cuda.py"),
    _tests(2, "DeepEP", 240, "test_deepep_on_cuda.py"),
    _tests(2, "two micro-batches at once", 180, "test_two_batches_on_cuda.py"),
    _tests(2, "copies", 180, "test_copies_on_cuda.py"),
    _compiled(3),
    _check(3, "sanitized kernels", 150, on_cpu=False),
    _bench("kernels", 120, "--device", "cuda"),
    _bench("attached", 120, "--device", "cuda"),
    _bench_of_two_ranks("eplb_runtime.tools.bench.dispatch", 90),
    _bench_of_two_ranks("benchmarks.dispatch", 90),
    _bench_of_two_ranks("eplb_runtime.tools.bench.migrate", 90),
    _tests(3, "three ranks", 150, "test_three_ranks_on_cuda.py"),
    _tests(3, "Megatron", 120, "test_megatron_on_cuda.py"),
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


def sanitized_kernels() -> None:
    """Run the kernels that split and place under ``compute-sanitizer``, in memory that torch does not cut up.

    Raises:
        SystemExit: there is none.
    """
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        raise SystemExit("compute-sanitizer is not on the PATH, nor where CUDA's tools are")
    tests = "tests/gpu/test_kernels_on_cuda.py", "-k", "dealt_out or what_leaves or integers_of_numba"
    command = tool, "--error-exitcode", "9", "--target-processes", "all", sys.executable, "-m", "pytest", "-v", *tests
    os.execve(tool, command, {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


CHECKS: dict[str, Callable[[], None]] = {
    "imports and symbols": imports_and_symbols,
    "rows of a grouped product": rows_of_a_grouped_product,
    "sanitized kernels": sanitized_kernels,
}


# -- running them ------------------------------------------------------------------------------------------------------


def run(stage: Stage, seconds: float, output: Path) -> tuple[str, list[str]]:
    """``"passed"``, ``"skipped"`` (all its tests), ``"failed"``, ``"cut"`` or ``UNFINISHED``, and its last lines.

    A stage that is cut ends with all its processes. A stage ends with its first process, whatever others still have its
    output open.

    Args:
        output: all that it says is appended there, as it says it.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    of_ranks = max(1.0, min(LONGEST_RANKS_SECONDS, seconds - LEFT_AFTER_RANKS))
    given = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "EPLB_TEST_FINISH_SECONDS": f"{of_ranks:g}"}
    mark = given[STAGE_VARIABLE] = secrets.token_hex(8)
    given["COLUMNS"] = "240"  # room for a test's name and why it has failed
    with output.open("ab") as file:
        file.write(f"\n==== {stage.name}\n".encode())
        file.flush()
        begin = file.tell()
        process = subprocess.Popen(
            [sys.executable, *stage.command],
            cwd=ROOT,
            env={**os.environ, **given},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ended = True
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            ended = False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            end_processes_of(mark)
            process.wait()
    with output.open("rb") as file:
        file.seek(max(begin, output.stat().st_size - MOST_READ_BYTES))
        said = file.read().decode(errors="replace")
    lines = [line[:LONGEST_LINE] for line in said.splitlines() if line.strip()]
    if not ended:
        return "cut" if seconds >= stage.seconds else UNFINISHED, lines[-FAILED_LINES:]
    if process.returncode:
        return "failed", lines[-FAILED_LINES:]
    if "pytest" in stage.command:
        # Ranks and libraries may say something after its last line.
        summary = [line for line in lines if re.search(r"\b\d+ (passed|skipped)\b.* in [\d.]+s", line)]
        if not any(" passed" in line for line in summary[-1:]):
            return "skipped", lines[-FAILED_LINES:]
        skipped = [line for line in lines if line.startswith("SKIPPED ")]
        return "passed", [*skipped, *summary[-1:]]
    return "passed", lines[-stage.lines :]


def end_processes_of(mark: str) -> None:
    """End what a stage has left: launchers give ranks sessions of their own, and what hangs there would hold the GPU's
    memory while the next stage is measured."""
    sign = f"{STAGE_VARIABLE}={mark}".encode()
    for _ in range(3):  # one may have started another meanwhile
        found = [path for path in Path("/proc").glob("[0-9]*/environ") if sign in _bytes_of(path).split(b"\0")]
        if not found:
            return
        for path in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(path.parent.name), signal.SIGKILL)
        time.sleep(0.05)


def _bytes_of(path: Path) -> bytes:
    """Nothing, where it is another user's or gone."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


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
    end, wrong = time.monotonic() + seconds, set[str]()
    ran, stages = have_run(result), list(stages)
    if all(one.each_call or one.name in ran for one in stages):
        return wrong  # nothing is left that what runs in each call would be for
    for stage in stages:
        if stage.name in ran and not stage.each_call:
            continue
        left = end - time.monotonic()
        if left < min(LEAST_SECONDS, stage.seconds):
            print(f"{NO_TIME} for: {stage.name}; call again")
            wrong.add(NO_TIME)
            break
        begin = time.monotonic()
        how, lines = run(stage, min(stage.seconds, left), result.with_name("output.txt"))
        append(result, stage, how, time.monotonic() - begin, lines)
        print(f"{stage.name}: {how}", *lines, sep="\n  ")
        wrong |= {how} & STATUSES.keys()
    return wrong


def dry_run(stages: Iterable[Stage], result: Path) -> set[str]:
    """Run on a CPU what can run there, each time anew, and list the others with their limits."""
    stages = list(stages)
    for old in (result, result.with_name("output.txt")):
        old.unlink(missing_ok=True)
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
    parser.add_argument("--seconds", type=float, default=CALL_SECONDS, help="of the whole call (default: %(default)g)")
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
    with (given.out / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            parser.error(f"another call writes to {given.out} now: wait for its end, or give another --out")
        try:
            if given.dry_run:
                wrong = dry_run(stages, given.out / "dry_run.md")
            else:
                wrong = run_call(stages, given.out / "result.md", given.seconds)
        except OSError as error:
            parser.error(f"what was found cannot be written to {given.out}: {error}; give another --out")
    if wrong:
        print(f"not all passed: {', '.join(word for word in STATUSES if word in wrong)}")
    return min((STATUSES[word] for word in wrong), default=0)


if __name__ == "__main__":
    raise SystemExit(main())
