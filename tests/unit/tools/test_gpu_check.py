"""`launch/gpu_check.py` without a GPU: its dry run, and that a cut call leaves what it found and is gone on with."""

from __future__ import annotations

import ast
import fcntl
import os
import signal
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "launch" / "gpu_check.py"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


def stage(check: ModuleType, name: str, code: str, seconds: float = 60.0):  # type: ignore[no-untyped-def]
    return check.Stage(1, name, seconds, ("-c", code))


def test_a_dry_run_runs_what_a_cpu_can_and_lists_the_rest(check: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--dry-run", "--out", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    on_cpu = {one.name for one in check.STAGES if one.on_cpu}
    assert check.have_run(tmp_path / "dry_run.md") == on_cpu
    assert not (tmp_path / "result.md").exists(), "a call would take these stages for done"
    listed = [line for line in ran.stdout.splitlines() if line.startswith("needs a GPU: ")]
    assert len(listed) == len(check.STAGES) - len(on_cpu) > 0


def test_a_repeated_call_goes_on_with_what_has_not_run(check: ModuleType, tmp_path: Path) -> None:
    result, ran = tmp_path / "result.md", tmp_path / "ran"
    stages = [stage(check, name, f"open({str(ran)!r}, 'a').write({name!r})") for name in "abc"]
    assert not check.run_call(stages[:2], result)
    assert not check.run_call(stages, result)
    assert ran.read_text() == "abc"


def test_a_stage_that_fails_or_is_cut_leaves_its_last_lines_and_the_next_runs(
    check: ModuleType, tmp_path: Path
) -> None:
    result = tmp_path / "result.md"
    stages = [
        stage(check, "fails", "print('the reason'); raise SystemExit(3)"),
        stage(check, "hangs", "import time; print('so far', flush=True); time.sleep(600)", seconds=2.0),
        stage(check, "passes", "print('all well')"),
    ]
    assert check.run_call(stages, result) == {"failed", "cut"}
    said = result.read_text()
    assert [name in said for name in ("| fails | failed |", "| hangs | cut |", "| passes | passed |")] == [True] * 3
    assert all(line in said for line in ("the reason", "so far", "all well"))


def test_a_stage_that_the_end_of_a_call_cuts_runs_again_in_the_next(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "LEAST_SECONDS", 1.0)
    result, begun = tmp_path / "result.md", tmp_path / "begun"
    code = (
        f"import os, time; seen = os.path.exists({str(begun)!r}); "
        f"open({str(begun)!r}, 'w'); time.sleep(0 if seen else 600)"
    )
    assert check.run_call([stage(check, "long", code)], result, seconds=3.0) == {check.UNFINISHED}
    assert f"| long | {check.UNFINISHED} |" in result.read_text()
    assert not check.run_call([stage(check, "long", code)], result)
    assert check.have_run(result) == {"long"}


def test_tests_that_are_all_skipped_have_not_passed(check: ModuleType, tmp_path: Path) -> None:
    for name, marked in (("skips", "@pytest.mark.skip(reason='no such device')\n"), ("runs", "")):
        (tmp_path / f"test_{name}.py").write_text(f"import pytest\n{marked}def test_it(): pass\n")
        arguments = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(tmp_path / f"test_{name}.py"))
        how, lines = check.run(check.Stage(1, name, 60.0, arguments), 60.0, tmp_path / "output.txt")
        assert how == {"skips": "skipped", "runs": "passed"}[name], lines
        assert ("no such device" in " ".join(lines)) == (name == "skips")


def test_what_is_said_after_the_last_line_of_tests_does_not_make_them_skipped(
    check: ModuleType, tmp_path: Path
) -> None:
    """Ranks and libraries say things as they end."""
    (tmp_path / "test_says.py").write_text(
        "import atexit, os\natexit.register(os.write, 2, b'a warning of a library\\n')\ndef test_it(): pass\n"
    )
    arguments = ("-m", "pytest", "-v", "-s", "-p", "no:cacheprovider", str(tmp_path / "test_says.py"))
    how, lines = check.run(check.Stage(1, "says", 60.0, arguments), 60.0, tmp_path / "output.txt")
    assert how == "passed", lines
    assert (tmp_path / "output.txt").read_text().rstrip().endswith("a warning of a library"), "control"


def test_tests_that_fail_are_named_one_by_one_with_their_reasons(check: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "test_fails.py"
    file.write_text("def test_one(): assert not 'the first reason'\ndef test_other(): assert not 'the second'\n")
    how, lines = check.run(check._tests(1, "fails", 60.0, str(file)), 60.0, tmp_path / "output.txt")
    assert how == "failed"
    said = [line for line in lines if line.startswith("FAILED ")]
    assert len(said) == 2 and "the first reason" in said[0] and "the second" in said[1]


def test_a_stage_ends_with_its_first_process(check: ModuleType, tmp_path: Path) -> None:
    """One that it has left behind, in a session of its own, has its output open."""
    code = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " start_new_session=True).pid)"
    )
    how, lines = check.run(stage(check, "leaves one", code), 30.0, tmp_path / "output.txt")
    os.kill(int(lines[-1]), signal.SIGKILL)
    assert how == "passed"


@pytest.mark.parametrize("seconds", [3.0, 60.0])
def test_a_stage_ends_with_ranks_that_a_launcher_has_given_sessions_of_their_own(
    check: ModuleType, tmp_path: Path, seconds: float
) -> None:
    """Where it is cut, and where it ends by itself."""
    number = tmp_path / "number"
    rank = f"import os, time; open({str(number)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    hangs = "time.sleep(600)" if seconds < 10 else ""
    code = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {rank!r}], start_new_session=True)\n"
        f"while not os.path.exists({str(number)!r}) or not open({str(number)!r}).read(): time.sleep(.01)\n{hangs}"
    )
    how, _ = check.run(stage(check, "launches", code, seconds), seconds, tmp_path / "output.txt")
    assert how == ("cut" if hangs else "passed")
    left = Path(f"/proc/{number.read_text()}/stat")
    assert not left.exists() or left.read_text().split(") ")[1][0] in "ZX"


def test_a_stage_that_says_megabytes_leaves_a_short_line_in_the_result(check: ModuleType, tmp_path: Path) -> None:
    result = tmp_path / "result.md"
    code = "print('x' * 30_000_000); print('the reason'); raise SystemExit(1)"
    assert check.run_call([stage(check, "chatters", code)], result) == {"failed"}
    assert "the reason" in result.read_text() and result.stat().st_size < 2000
    assert (tmp_path / "output.txt").stat().st_size > 30_000_000


def test_a_second_call_at_once_is_refused_in_a_line(check: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "1", "--seconds", "0", "--out", str(tmp_path)]
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode == 2 and "another call writes to" in second.stderr.splitlines()[-1]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 4


def test_a_full_disk_is_said_in_a_line(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "output.txt").symlink_to("/dev/full")
    monkeypatch.setattr(check, "STAGES", (stage(check, "says something", "print('x')"),))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "1", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        check.main()
    assert ended.value.code == 2
    assert "cannot be written" in capsys.readouterr().err.splitlines()[-1]


def test_what_was_said_before_a_cut_is_there(check: ModuleType, tmp_path: Path) -> None:
    """Also where the whole call is cut: it is written as it is said."""
    output = tmp_path / "output.txt"
    code = f"print('so far'); assert 'so far' in open({str(output)!r}).read()"
    assert check.run(stage(check, "says", code), 30.0, output)[0] == "passed"


def test_what_a_fresh_machine_lacks_is_made_in_each_call_that_has_something_to_run(
    check: ModuleType, tmp_path: Path
) -> None:
    result, ran = tmp_path / "result.md", tmp_path / "ran"

    def writes(name: str, each_call: bool) -> object:
        command = ("-c", f"open({str(ran)!r}, 'a').write({name!r})")
        return check.Stage(1, name, 60.0, command, each_call=each_call)

    stages = [writes("M", True), writes("a", False), writes("b", False)]
    assert not check.run_call(stages[:2], result)
    assert not check.run_call(stages, result)
    assert not check.run_call(stages, result)
    assert ran.read_text() == "MaMb"


def test_before_ranks_start_the_planner_is_compiled(check: ModuleType) -> None:
    """Compiling takes longer than most stages have."""
    for call in (1, 2, 3):
        of_call = [one for one in check.STAGES if one.call == call]
        first = next(index for index, one in enumerate(of_call) if one.each_call)
        for one in of_call[:first]:
            files = [part for part in one.command if part.startswith("tests/")]
            assert not any("import run_ranks" in (ROOT / file).read_text() for file in files), one.name
            assert "bench" not in one.name


def test_benches_measure_the_gpu(check: ModuleType) -> None:
    """Their device is the CPU unless another is asked for."""
    for one in check.STAGES:
        if any(part.startswith("tests.benchmarks.") for part in one.command):
            assert one.command[-2:] == ("--device", "cuda")


def test_stages_of_training_take_tests_of_one_rank_and_of_two_apart(check: ModuleType) -> None:
    file = ROOT / "tests" / "gpu" / "test_training_on_cuda.py"
    tests = [one for one in ast.parse(file.read_text()).body if isinstance(one, ast.FunctionDef)]
    words = check._ONE_RANK.split(" or ")
    of_one = {one.name for one in tests if one.name.startswith("test_") and any(word in one.name for word in words)}
    assert len(of_one) == len(words), "a test was renamed"
    for one in tests:
        if one.name in of_one:
            assert "ranks_on_gpu(1, " in ast.unparse(one) and "ranks_on_gpu(2, " not in ast.unparse(one)
    chosen = [stage.command[-1] for stage in check.STAGES if str(file.relative_to(ROOT)) in stage.command]
    assert chosen == [check._ONE_RANK, f"not ({check._ONE_RANK})"]


def test_a_call_without_time_runs_nothing_more(check: ModuleType, tmp_path: Path) -> None:
    assert check.run_call([stage(check, "late", "pass")], tmp_path / "result.md", seconds=0.0) == {check.NO_TIME}
    assert check.have_run(tmp_path / "result.md") == set()


def test_a_call_that_has_not_run_all_exits_with_a_status_that_says_why(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "1", "--out", str(tmp_path)])
    for wrong, status, said in (
        (set(), 0, ""),
        ({"failed", check.NO_TIME}, 1, "not all passed: failed, no time left"),
        ({"cut"}, 1, "not all passed: cut"),
        ({check.UNFINISHED, check.NO_TIME}, 3, "not all passed: unfinished, no time left"),
        ({check.NO_TIME}, 4, "not all passed: no time left"),
    ):
        monkeypatch.setattr(check, "run_call", lambda *given, wrong=wrong: wrong)
        assert check.main() == status
        assert capsys.readouterr().out.strip() == said


def test_each_call_fits_its_limit_and_names_files_that_are_there(check: ModuleType) -> None:
    assert len({one.name for one in check.STAGES}) == len(check.STAGES)
    for one in check.STAGES:
        assert one.seconds < check.CALL_SECONDS
        assert all((ROOT / part).exists() for part in one.command if part.startswith("tests/"))
