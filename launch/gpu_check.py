"""The first calls on a GPU: what runs there, what does not, how fast. 30 minutes in all; call 0 has one of each kind.

    python launch/gpu_check.py 0 --out shared_folder      # then 1, 2 and 3

Each stage is a process with a limit of its own, and the limits of a call fit into it. After each stage a line is
appended to ``result.md``, so a call that is cut leaves what it found; what stages print goes to ``output.txt`` as they
run. A call that is repeated goes on with stages that have no line yet, or were cut by the end of a call; ``--again``
runs failed and cut ones again. ``--dry-run`` runs on a CPU what can run there, into ``dry_run.md``, and lists the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module, util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CALL_SECONDS = (290.0, 560.0, 500.0, 350.0)  # of each call, less what it takes to start and to bring files back
LEAST_SECONDS, ENDING_SECONDS = 10.0, 10.0
"""A stage that would have less is left to the next call; and longest wait for the end of a process that was killed."""
LAST_LINES, LONGEST_LINE, MOST_READ_BYTES = 40, 500, 4 << 20  # of what a stage says
STAGE_VARIABLE = "EPLB_GPU_CHECK_STAGE"
"""In the environment of all processes of a stage, by which they are found when it is over."""
LONGEST_RANKS_SECONDS, LEFT_AFTER_RANKS = 120.0, 10.0
"""Ranks of a test that hang are ended then, or so long before the limit of their stage, and say where they stand."""
STATUSES = {"failed": 1, "cut": 1, "unfinished": 3, "not run": 4}
"""Exit status by how stages of a call ended: by themselves, by their own limit, by the end of a call, or not begun."""
PACKAGES = ("torch", "triton", "deep_ep", "nvshmem.core", "nixl_cu13._api", "transformers", "eplb_runtime")


@dataclass(frozen=True)
class Stage:
    """One process of a call: its unique name, its limit, what follows ``python``; whether it needs no GPU."""

    call: int
    name: str
    seconds: float
    command: tuple[str, ...]
    on_cpu: bool = False


def _check(call: int, name: str, seconds: float, on_cpu: bool = True) -> Stage:
    return Stage(call, name, seconds, (str(Path(__file__).resolve()), "--check", name), on_cpu)


def _tests(call: int, name: str, seconds: float, file: str, which: str = "", folder: str = "gpu") -> Stage:
    # By name, so that one that hangs is known; one line of each that fails or is skipped, after the others' tracebacks.
    chosen = ("-k", which) if which else ()
    how = ("-v", "-rfEs", f"--timeout={seconds:g}", f"tests/{folder}/test_{file}.py", *chosen)
    return Stage(call, name, seconds, ("-m", "pytest", *how))


_ONE_RANK, _THREE_RANKS, _REPLICAS = "known_counts or between_slots", "three_ranks or anew", "copy_engines"
"""Of the training tests; the others take two ranks."""
_BENCH = "eplb_runtime.tools.bench"

STAGES = (
    _check(0, "packages and a compiler", 25),
    _check(0, "rows of a grouped product", 20),
    _tests(0, "a kernel of each kind", 35, "kernels_on_cuda", "first_batch or dealt_out"),
    _tests(0, "two NCCL ranks", 35, "training_on_cuda", "replica_slots"),
    _tests(0, "fixed against moved", 45, "training_on_cuda", "bit_identical and nccl"),
    _tests(0, "memory between ranks", 35, "transports_on_cuda", "cuda_ipc and of_a_pair"),
    _tests(0, "DeepEP in logical order", 30, "deepep_on_cuda", "logical_order and 512"),
    _tests(0, "overlap", 35, "training_on_cuda", "beside_training and torch"),
    _tests(0, "replicas over symmetric memory", 30, "training_on_cuda", _REPLICAS),
    _tests(1, "kernels, counting and routing", 170, "kernels_on_cuda"),
    _tests(1, "expert kernels", 60, "expert_kernels"),
    _tests(1, "records", 40, "what_moves", "bit", "unit/moe/experts"),
    _tests(1, "CUDA graphs", 90, "cuda_graphs"),
    _tests(1, "training of one rank", 100, "training_on_cuda", _ONE_RANK),
    _check(1, "sanitized kernels", 100, on_cpu=False),
    _tests(2, "training", 210, "training_on_cuda", f"not ({_ONE_RANK} or {_THREE_RANKS} or {_REPLICAS})"),
    _tests(2, "transports", 150, "transports_on_cuda"),
    _tests(2, "DeepEP", 140, "deepep_on_cuda"),
    _tests(3, "two micro-batches at once", 60, "two_batches_on_cuda"),
    _tests(3, "three ranks", 50, "training_on_cuda", _THREE_RANKS),
    _tests(3, "Megatron", 40, "megatron_on_cuda"),
    Stage(3, "bench kernels", 40, ("-m", "tests.benchmarks.kernels", "--device", "cuda")),
    # Figures of ranks that share a GPU say nothing but as ratios.
    *(
        Stage(3, name, 40, ("tests/gpu/bench_of_two_ranks.py", name))
        for name in (f"{_BENCH}.dispatch", f"{_BENCH}.migrate", "benchmarks.dispatch", "benchmarks.vdev_2d")
    ),
)


# -- stages that are written here --------------------------------------------------------------------------------------


def packages_and_a_compiler() -> None:
    """Import each package, which resolves its symbols, and find what Triton compiles with. A package that is not
    installed is no failure; one that cannot be loaded is."""
    compilers = filter(None, map(shutil.which, ("gcc", "clang", "cc")))
    broken = [] if (compiler := next(compilers, None)) else ["a C compiler, as Triton needs one"]
    print(f"compiler: {compiler}; python {sys.version.split()[0]}")
    for name in PACKAGES:
        if util.find_spec(name.partition(".")[0]) is None:
            print(f"{name}: not installed")
            continue
        try:
            print(f"{name}: {getattr(import_module(name), '__version__', 'loaded')}")
        except Exception as error:
            broken.append(name)
            print(f"{name}: {type(error).__name__}: {error}")
    if broken:
        raise SystemExit(f"missing, or cannot be loaded: {', '.join(broken)}")


def rows_of_a_grouped_product() -> None:
    """Fail unless a row's result has the same bits wherever its group stands, and however long its neighbours are."""
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
    """Run the kernels that split and place under ``compute-sanitizer``, in memory that torch does not cut up."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        raise SystemExit("compute-sanitizer is not on the PATH, nor where CUDA's tools are")
    tests = "tests/gpu/test_kernels_on_cuda.py", "-k", "dealt_out or what_leaves"
    command = tool, "--error-exitcode", "9", "--target-processes", "all", sys.executable, "-m", "pytest", "-v", *tests
    os.execve(tool, command, {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


_FUNCTIONS = (packages_and_a_compiler, rows_of_a_grouped_product, sanitized_kernels)
CHECKS: dict[str, Callable[[], None]] = {one.__name__.replace("_", " "): one for one in _FUNCTIONS}


# -- running them ------------------------------------------------------------------------------------------------------


def run(stage: Stage, seconds: float, output: Path) -> tuple[str, list[str]]:
    """Return ``"passed"``, ``"skipped"`` (all its tests) or a word of ``STATUSES``, and its last lines. It ends with
    its first process; what it says is appended to ``output``."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    of_ranks = max(1.0, min(LONGEST_RANKS_SECONDS, seconds - LEFT_AFTER_RANKS))
    given = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "EPLB_TEST_FINISH_SECONDS": f"{of_ranks:g}"}
    given["COLUMNS"] = "240"  # room for a test's name and why it has failed
    with output.open("ab") as file:
        file.write(f"\n==== {stage.name}\n".encode())
        file.flush()
        begin, ended = file.tell(), True
        with _processes([sys.executable, *stage.command], given, file) as process:
            try:
                process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                ended = False
    with output.open("rb") as file:
        file.seek(max(begin, output.stat().st_size - MOST_READ_BYTES))
        said = file.read().decode(errors="replace")
    lines = [line[:LONGEST_LINE] for line in said.splitlines() if line.strip()]
    if not ended:
        return "cut" if seconds >= stage.seconds else "unfinished", lines[-LAST_LINES:]
    if process.returncode:
        return "failed", lines[-LAST_LINES:]
    if "pytest" not in stage.command:
        return "passed", lines[-LAST_LINES:]
    # Ranks and libraries may say something after its last line.
    summary = [line for line in lines if re.search(r"\b\d+ (passed|skipped)\b.* in [\d.]+s", line)][-1:]
    missing = [line for line in lines if line.startswith("SKIPPED ")]
    return "passed" if any(" passed" in line for line in summary) else "skipped", [*missing, *summary]


@contextlib.contextmanager
def _processes(command: list[str], given: dict[str, str], output: object) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a session of its own; at the end it is gone, with all that it has started: launchers give
    ranks other sessions, and what hangs there would hold the GPU's memory while the next stage is measured."""
    mark = secrets.token_hex(8)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **given, STAGE_VARIABLE: mark},
        stdin=subprocess.DEVNULL,
        stdout=output,  # type: ignore[call-overload]
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        sign = f"{STAGE_VARIABLE}={mark}".encode()
        for _ in range(3):  # one may have started another meanwhile
            for path in Path("/proc").glob("[0-9]*/environ"):
                with contextlib.suppress(OSError):  # another user's, or gone
                    if sign in path.read_bytes().split(b"\0"):
                        os.kill(int(path.parent.name), signal.SIGKILL)
            time.sleep(0.05)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that the driver holds cannot be killed
            process.wait(ENDING_SECONDS)


def how_they_ended(result: Path) -> dict[str, str]:
    """Return how each stage that has a line ended the last time, by its name."""
    lines = result.read_text().splitlines() if result.exists() else []
    rows = [line.split("|") for line in lines if line.startswith("| ") and line.count("|") >= 5]
    return {row[2].strip(): row[3].strip() for row in rows}


def run_call(stages: Iterable[Stage], result: Path, seconds: float, again: bool = False) -> dict[str, str]:
    """Run what has not run, as far as the time goes; the planner is compiled meanwhile. Returns how each stage ended,
    now or before."""
    end, stages = time.monotonic() + seconds, list(stages)
    over = {"passed", "skipped"} if again else {"passed", "skipped", "failed", "cut"}
    ended = {name: how for name, how in how_they_ended(result).items() if how in over}
    left = [stage for stage in stages if stage.name not in ended]
    warm = [sys.executable, "-m", "eplb_runtime.cli", "warmup"]
    with _processes(warm, {"PYTHONPATH": str(ROOT)}, subprocess.DEVNULL) if left else contextlib.nullcontext():
        for stage in left:
            if (rest := end - time.monotonic()) < min(LEAST_SECONDS, stage.seconds):
                print(f"no time left for: {stage.name}; call again")
                break
            begin = time.monotonic()
            how, lines = run(stage, min(stage.seconds, rest), result.with_name("output.txt"))
            with result.open("a") as file:
                file.write(f"| {stage.call} | {stage.name} | {how} | {time.monotonic() - begin:.0f} s |\n\n")
                file.writelines(f"    {line}\n" for line in lines)
                file.write("\n")
            print(f"{stage.name}: {how}", *lines, sep="\n  ")
    now = how_they_ended(result)
    return {stage.name: now.get(stage.name, "not run") for stage in stages}


def main() -> int:
    """Exit status 0: all stages of the call have passed or were skipped; 1: one failed, or was cut by its own limit; 3:
    one was cut by the end of the call; 4: some were not begun. After 3 and 4 the same call goes on."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("call", nargs="?", type=int, choices=range(4), help="which; all with --dry-run")
    parser.add_argument("--out", type=Path, default=ROOT / "gpu_check", help="folder of result.md")
    parser.add_argument("--again", action="store_true", help="run what failed or was cut once more")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU: what can run there")
    parser.add_argument("--check", choices=CHECKS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.check is not None:
        CHECKS[given.check]()
        return 0
    if given.call is None and not given.dry_run:
        parser.error("which call: 0 to 3")
    stages = [stage for stage in STAGES if given.call in (None, stage.call)]
    result = given.out / ("dry_run.md" if given.dry_run else "result.md")
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        if given.dry_run:
            for old in (result, result.with_name("output.txt")):
                old.unlink(missing_ok=True)
            for stage in stages:
                if not stage.on_cpu:
                    print(f"needs a GPU: call {stage.call}, {stage.name}, at most {stage.seconds:g} s")
            stages = [stage for stage in stages if stage.on_cpu]
        seconds = sum(CALL_SECONDS) if given.call is None else CALL_SECONDS[given.call]
        ended = run_call(stages, result, seconds, given.again)
    except OSError as error:
        parser.error(f"what was found cannot be written to {given.out}: {error}; give another --out")
    wrong = {name: how for name, how in ended.items() if how in STATUSES}
    if wrong:
        print("not all passed:", ", ".join(f"{name} ({how})" for name, how in wrong.items()))
    return min((STATUSES[how] for how in wrong.values()), default=0)


if __name__ == "__main__":
    raise SystemExit(main())
