"""The page of a framework says of each class of settings what the rules say, and no yes without a test that ran it."""

import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from eplb_runtime.hosts.megatron import settings as megatron
from eplb_runtime.hosts.torchtitan import settings as torchtitan

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests"
PAGES = {name: ROOT / f"eplb_runtime/hosts/{name}/README.md" for name in ("megatron", "torchtitan")}
SETTINGS: dict[str, ModuleType] = {"megatron": megatron, "torchtitan": torchtitan}
JUDGED = {"megatron": {*megatron.DEFAULTS}, "torchtitan": {one.name for one in fields(torchtitan.TitanSettings)}}
OF_NO_FLAG = {"assumed", "num_experts", "num_moe_experts", "lora_target_modules"}
"""Fields that no class of settings is named after."""
NO_OPTION = {"expert_data_parallel_size", "phase_offload", "lora"}
"""Fields that no framework has an option for: what a job is or does."""
BEFORE = {"cuda_graph_modules": "cuda_graph_scope"}
"""Names that settings have in the versions of the tests."""
USUAL = {"megatron": ("`test_megatron_rows.py`", "0.16.1"), "torchtitan": ("`test_torchtitan.py`", "2.13, 2.14")}
"""Tests and versions of rows that name none."""
NEWER = "newer"
"""In the names of tests that run Megatron-Core 0.19.2."""


def table(text: str, heading: str) -> list[list[str]]:
    """Cells of each row of the table under a heading, without its head."""
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[1:]]


def words(cell: str) -> list[str]:
    """What stands between backticks: flags, or names of files."""
    return [word for quoted in re.findall(r"`([^`]+)`", cell) for word in quoted.split("=")[:1]]


def source(names: list[str]) -> str:
    """The text of test files and of the files of ours that they import."""
    texts, left, seen = [], [f"distributed/{name}" for name in names], set()
    while left:
        name = left.pop()
        path = TESTS / name
        if name in seen or not path.is_file():
            continue
        seen.add(name)
        texts.append(path.read_text())
        for module in re.findall(r"^ *(?:import|from(?: support\.| support import|)) *(\w+)", texts[-1], re.M):
            left += [f"{module}.py", f"support/{module}.py", f"distributed/{module}.py"]
    return "\n".join([*texts, *(path.read_text() for path in sorted((ROOT / "launch/examples").glob("*.py")))])


@pytest.mark.parametrize("name", PAGES)
def test_each_refusal_is_in_the_table_of_refused_settings(name: str) -> None:
    refused = {word for row in table(PAGES[name].read_text(), "Refused") for word in words(row[0])}
    found = {*re.findall(r'yield "(\w+)",', Path(str(SETTINGS[name].__file__)).read_text())}
    assert len(found) > 3
    found |= {*getattr(SETTINGS[name], "MUST_BE_DEFAULT", ())}
    assert found - refused == set()


@pytest.mark.parametrize("name", PAGES)
def test_each_setting_that_is_judged_is_on_the_page(name: str) -> None:
    text = PAGES[name].read_text()
    rows = [*table(text, "Refused"), *table(text, "Open")]
    assert JUDGED[name] - OF_NO_FLAG - {w for row in rows for w in words(row[0])} == set()


@pytest.mark.parametrize("name", PAGES)
def test_no_setting_is_open_without_a_test_that_has_it(name: str) -> None:
    for settings, exact, tests, versions, _ in table(PAGES[name].read_text(), "Open"):
        if exact == "not tried":
            assert not tests and not versions, settings
            continue
        files = words(tests or USUAL[name][0])
        versions = versions or USUAL[name][1]
        assert files, settings
        assert exact in ("bit", "rounding", "1e-10"), settings
        for file in files:
            assert (TESTS / "distributed" / file).is_file(), file
        text = source(files)
        missing = [
            flag
            for flag in sorted({*words(settings)} - NO_OPTION)
            if not re.search(rf"\b{BEFORE.get(flag, flag)}\b", text)
        ]
        assert missing == [], f"{settings}: not in {files}"
        if name == "megatron":
            assert ("0.19.2" in versions) == any(NEWER in file for file in files), settings
            assert ("0.16.1" in versions) == any(NEWER not in file for file in files), settings


@pytest.mark.parametrize("name", PAGES)
def test_what_was_tested_with_a_stand_in_or_not_at_all_says_so(name: str) -> None:
    rows = table(PAGES[name].read_text(), "Open")
    with_a_stand_in = {word for row in rows if _says_so(name, row) for word in [*words(row[0]), *row[0].split()]}
    assert {*(megatron.NOT_FOR_REAL if name == "megatron" else ("moe_comm_backend",))} - with_a_stand_in == set()


def _says_so(name: str, row: list[str]) -> bool:
    """Whether the last cell is of a stand-in, or nothing ran; on torchtitan's page it has what was run besides."""
    return row[1] == "not tried" or (bool(row[4]) if name == "megatron" else "stand-in" in row[4])
