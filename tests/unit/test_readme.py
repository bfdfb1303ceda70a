"""README is short, its script is the example's file, and what any README links to or types in is there."""

import json
import re
import runpy
import shlex
from pathlib import Path

import numpy as np
import pytest
from benchmarks import rollouts
from benchmarks.harness import table
from benchmarks.planner import suite

from eplb_runtime.cli import _parser, main
from eplb_runtime.events import RebalanceCommitted, RebalancePlanned
from eplb_runtime.observe.start import DecisionLine
from eplb_runtime.tools.bench.planner import PlanShape, measure

ROOT = Path(__file__).parents[2]
README, PLANNER = ROOT / "README.md", ROOT / "eplb_runtime/planner/README.md"
DOCS = [
    README,
    *sorted(path for room in ("eplb_runtime", "launch", ".github") for path in (ROOT / room).rglob("*.md")),
]
MOST_BYTES = 9_216


def headings(text: str) -> set[str]:
    """As GitHub makes anchors of them."""
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in found}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Lines of shell blocks that start our command, with what a backslash continues."""
    lines = "\n".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("eplb-runtime ")]


def test_readme_ends() -> None:
    assert len(README.read_bytes()) <= MOST_BYTES, "what is longer belongs into a room's README"


def test_the_verdict_is_what_assess_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["assess", "sample", "--ranks", "8"]) == 0
    paragraph, _, _ = capsys.readouterr().out.partition("\n\n")
    assert " ".join(paragraph.split()) in " ".join(README.read_text().replace("\n> ", " ").split())


def test_the_table_of_policies_is_what_simulate_says(capsys: pytest.CaptureFixture[str]) -> None:
    page, rows = (ROOT / "eplb_runtime/tools/README.md").read_text(), []
    command = next(line for line in commands(page) if "simulate sample" in line)
    for gate in ("always", "payoff"):
        assert main([*shlex.split(command)[1:], "--gate", gate, "--json"]) == 0
        rows += json.loads(capsys.readouterr().out)["policies"]
    for row in (*rows[:3], rows[-1]):
        moved, milliseconds = row["moved_slots_share"], 1e3 * row["step_seconds"]
        assert f"| {row['balancedness']['mean']:.3f} | {moved:.1%} | {milliseconds:.1f} ms" in page


def test_lines_of_the_log_are_as_they_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    why = "saves 2.23 s for 0.0115 s; forecast imbalance 1.525 -> 1.051, worst layer 1.986 -> 1.070, by moves in 2 of 2"
    planned = RebalancePlanned(6, 1, 12, "rebalance", why, 1.525, 1.051, 0.1, seconds_saved=2.23, seconds_spent=0.0115)
    line = DecisionLine()
    with caplog.at_level("INFO", "eplb_runtime"):
        for event in (planned, RebalanceCommitted(6, 1, "", 12, int(6.8 * 2**20), 0.0665)):
            line(event)
    assert "\n".join(caplog.messages) in README.read_text()


def test_the_table_of_plans_is_what_the_planner_makes(shared_data: Path) -> None:
    page = PLANNER.read_text()
    for layers, experts, ranks, slots in re.findall(r"^\| (\d+) x (\d+), EP(\d+), (\d+) slots", page, re.MULTILINE):
        name = "deepseek_v3_expert_load" if experts == "256" else "gpt_oss_20b_expert_load_shuffled"
        load = np.load(shared_data / f"{name}.npz")["load"].astype(float)
        made = measure(name, load, PlanShape(int(ranks), 8, int(slots) // int(ranks)), {}, 1)
        row = next(line for line in page.splitlines() if f"{layers} x {experts}, EP{ranks}, {slots} slots" in line)
        assert " | ".join(f"{one['balancedness']:.3f}" for one in made) in row


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_table_of_next_windows_is_what_the_suite_says(whole: bool) -> None:
    pytest.importorskip("scipy")
    rows = suite.run([family for family in suite.FAMILIES if whole or not family.replicas or family.ranks < 32])
    assert all(line in PLANNER.read_text() for line in table(rows).splitlines()[2:])
    assert not whole or suite.behind(rows) in " ".join(PLANNER.read_text().split())


@pytest.mark.long
def test_what_declared_loads_are_worth_is_what_is_played(shared_data: Path) -> None:
    made = rollouts.run([shared_data / "gpt_oss_20b_expert_load_by_domain.npz"])["rollouts"]
    page = " ".join((ROOT / "eplb_runtime/hosts/REINFORCEMENT_LEARNING.md").read_text().split())
    shown = [f"{one['policy']} {one['share']:.3f}" for one in made if one["policy"] != "oracle, copies"]
    moved = [one["moved_gib"] for one in made if one["policy"].startswith("declared")]
    assert f"{'; '.join(shown)}. Oracle" in page and f"{min(moved):.0f} to {max(moved):.0f} GiB a step" in page


def test_the_picture_of_gain_is_that_of_the_table() -> None:
    draw = runpy.run_path(str(ROOT / "launch/images/gain.py"))["drawn"]
    assert (ROOT / "launch/images/gain.svg").read_text() == draw(README.read_text()), "run launch/images/gain.py"


def test_the_script_is_the_example() -> None:
    script = (ROOT / "launch/examples/transformers_loop.py").read_text()
    assert script in blocks(README.read_text(), "python")


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        linked = path if not file else path.parent / file
        assert linked.exists(), target
        assert not anchor or anchor in headings(linked.read_text()), target


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_are_understood(path: Path) -> None:
    for line in commands(path.read_text()):
        try:
            _parser().parse_args(shlex.split(line, comments=True)[1:])
        except SystemExit:
            pytest.fail(f"{path.name}: {line}")
    for command, file in re.findall(r"`(pytest [^`]*?(tests/\S+\.py)[^`]*)`", path.read_text()):
        assert "-m" in command or not re.search("^pytestmark.*long", (ROOT / file).read_text(), re.MULTILINE), command
