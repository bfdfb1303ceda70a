"""Each fault that is put into the package on purpose is caught by the test that is named for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.megatron_jobs import needs_megatron
from support.mutants import MUTANTS, apply
from support.ranks import run_ranks


def _apply_all(rank: int) -> None:
    for name in MUTANTS:
        apply(name)


@needs_megatron
def test_faults_and_their_tests_name_what_is_there() -> None:
    run_ranks(1, _apply_all)
    for where, _ in MUTANTS.values():
        file, _, test = where.partition("::")
        assert f"def {test.partition('[')[0]}" in Path(__file__).with_name(file).read_text(), where


@pytest.mark.long
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str) -> None:
    file, _, test = MUTANTS[name][0].partition("::")
    path = Path(__file__).with_name(file)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", "-p", "no:cacheprovider", str(path)]
    if test.endswith("]"):
        command[-1] += f"::{test}"
    else:
        command += ["-k", test]
    environment = os.environ | {"EPLB_TEST_MUTANT": name}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    unpatched = "in apply" in done.stdout or "import mutants" in done.stdout
    assert done.returncode == 1 and not unpatched, done.stdout[-3000:]
