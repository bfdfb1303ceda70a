"""Jobs over hosts. The first test, and the one that loses a host, start them as a user would: by
``launch/multi_node.sh``; the others fork ranks, whose imports would cost more than what they do."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import pytest
import torch
from namespaces import ROOT, Cluster, MakeCluster
from slurm import NODES, Slurm, missing
from support.examples import load_example
from support.ranks import compile_once
from torch.nn import functional

pytestmark = [pytest.mark.multinode, pytest.mark.slow]
JOBS = Path(__file__).parent / "jobs"
SMALL_TALK_BYTES = 200_000
"""What else goes through a cable while something is counted: votes, barriers, acknowledgements of what comes in."""


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[MakeCluster]:
    """``make_cluster(hosts, rate=None)``; all of it is removed after the test."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for command in ("ip", "tc", "unshare"):
        if shutil.which(command) is None:
            pytest.skip(f"no {command} command: install iproute2 and util-linux")
    compile_once()  # a deadline counts a job's own time; four ranks that compile at once take minutes
    with ExitStack() as stack:

        def make(hosts: int, rate: str | None = None) -> Cluster:
            try:
                return stack.enter_context(Cluster(hosts, tmp_path, rate))
            except OSError as error:
                pytest.skip(f"this machine does not let us make hosts: {error}")

        yield make


def test_training_over_two_hosts_rebalances_and_is_bit_identical(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(2)
    options = {"--steps": 12, "--interval": 4, "--layers": 2, "--width": 64, "--batch": 2, "--replica-slots": 0}
    cluster.start(2, ROOT / "launch/train_moe.py", *chain.from_iterable(options.items()), "--out", tmp_path)
    cluster.wait(240)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["world_size"] == 4
    assert summary["migrations"] >= 1
    assert summary["bytes_moved"] > 0
    assert summary["bit_identical"] is True


@pytest.mark.parametrize(("hosts", "ranks_per_host"), [(2, 2), (4, 1)])
def test_no_more_bytes_cross_a_cable_than_must(
    make_cluster: MakeCluster, tmp_path: Path, hosts: int, ranks_per_host: int
) -> None:
    """Cables of 1 Gbit/s between hosts, memory inside them; what leaves a host is counted on its cable."""
    cluster = make_cluster(hosts, rate="1gbit")
    cluster.start_ranks(ranks_per_host, JOBS / "count.py", tmp_path, "experts")
    cluster.wait(240)
    results = [json.loads((tmp_path / f"counted.{rank}.json").read_text()) for rank in range(4)]
    topology = results[0]["topology"]
    assert all(result["topology"] == topology for result in results)
    assert (topology["num_ranks"], topology["ranks_per_node"]) == (4, ranks_per_host)
    # The ranks of a host share its cable. One that measures while the other is not yet, or no longer, at it sees more
    # than its part, but not the whole cable (125e6).
    assert topology["inter_node_bandwidth"] < (150e6 if ranks_per_host == 1 else 110e6)
    if ranks_per_host > 1:
        assert topology["intra_node_bandwidth"] > topology["inter_node_bandwidth"]
    for case in results[0]["cases"]:
        for host, result in enumerate(results[::ranks_per_host]):
            said = result["cases"][case]
            assert said["least"] <= said["sent"] <= 1.03 * said["least"] + SMALL_TALK_BYTES, (case, host)
    first = results[0]["cases"]
    assert first["across"]["least"] > 5e6, "control: the cables do carry experts"
    if ranks_per_host > 1:
        assert first["within"]["least"] == 0


@pytest.mark.long
def test_a_cable_cut_during_a_rebalance_costs_that_rebalance_and_nothing_else(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """Cut before experts leave, before the ranks vote, between two rounds of transfers, and while a step runs beside
    them; plugged when the ranks of the first host have given up, and the first time when they have then waited for the
    others for several timeouts."""
    points = ["prepared", "staged", "committed", "beside"]
    cluster = make_cluster(2)
    cluster.start_ranks(2, JOBS / "train_with_cut_cable.py", tmp_path, *points)
    for point in points:
        cluster.wait_for_files([tmp_path / f"{point}.{rank}" for rank in range(4)], 90)
        cluster.cut_cable(1)
        (tmp_path / f"cut.{point}").touch()
        over = "waited" if point == "prepared" else f"dropped.{point}"
        cluster.wait_for_files([tmp_path / f"{over}.{rank}" for rank in (0, 1)], 60)
        cluster.plug_cable(1)
    cluster.wait(90)
    results = [json.loads((tmp_path / f"result.{rank}.json").read_text()) for rank in range(4)]
    assert [phase for _, phase, _ in results[0][0]["aborted"]] == ["prepared", "staged", "staged"]
    for between, beside in results:
        assert [step for step, _, _ in between["aborted"]] == [step for step, _, _ in results[0][0]["aborted"]]
        assert between["committed"][-1][0] > between["aborted"][-1][0], "no rebalance after the last cut"
        assert beside["committed"][-1][0] > beside["resumed"][-1] > 0, "no rebalance after the cut"
        for said, first in ((between, results[0][0]), (beside, results[0][1])):
            assert said["committed"] == first["committed"] and said["carriers"] == "TorchPointToPoint"
            assert said["same_losses"] and said["same_state"]


def losses_of_one_process(steps: int) -> list[float]:
    """What the resume example's job computes without a balancer, all sequences in one process."""
    example, sequences = load_example("any_module"), range(8)
    torch.manual_seed(0)
    model = example.Model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(1, steps + 1):
        pairs = [(model(ids[:-1]), ids[1:]) for ids in (example.batch(number, step) for number in sequences)]
        loss = torch.stack([functional.cross_entropy(*pair) for pair in pairs]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_job_goes_on_without_a_host_that_died(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Three hosts, of which two work, because three do not divide the experts; one dies, the third takes its place."""
    cluster = make_cluster(3)
    elastic = {"MIN_NODES": 1, "RESTARTS": 4, "LAST_CALL_SECONDS": 3, "HOST_LOST_SECONDS": 3}
    options = ["--folder", tmp_path, "--steps", 8, "--die-at", 7, "--with-torchrun"]
    cluster.start(1, ROOT / "launch/examples/resume.py", *options, **elastic)
    cluster.wait(240, lost=[1])
    (life,) = tmp_path.glob("losses.*.json")
    result = json.loads(life.read_text())
    assert (result["resumed_from"], result["ranks"], result["standing_by"]) == (5, 2, 0)
    losses = losses_of_one_process(8)
    assert list(result["losses"].values()) == pytest.approx(losses[5:], rel=0, abs=1e-10)
    assert len({round(loss, 9) for loss in losses}) == 8, "control: any other step is further away"


# -- What tokens cost the links between hosts, counted there: dispatch that crosses to a node once beside the plain


ROWS = {
    "all_to_all": {"there": "ranks", "back": "choices"},
    "logical": {"there": "hosts", "back": "choices"},
    "by_rank": {"there": "hosts", "back": "hosts"},
}
"""A row crosses for each of these that is on another host."""


def test_a_token_crosses_to_a_host_once(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Two hosts of four ranks, 8 of 64 experts a token: of four groups of eight, or of all."""
    cluster = make_cluster(2)
    cluster.start_ranks(4, JOBS / "count.py", tmp_path, "tokens")
    cluster.wait(120)
    found = json.loads((tmp_path / "bytes.json").read_text())
    for routing in ("group-limited", "free"):
        of_routing = found[routing]
        for way, rows in ROWS.items():
            for leg, what in rows.items():
                expected = of_routing["rows"][what] * found["row_bytes"]
                print(f"{routing}, {way}, {leg}: {of_routing[way][leg] / 1e6:.2f} MB, rows alone {expected / 1e6:.2f}")
                # Headers, acknowledgements, and what tells a rank which row is meant.
                assert expected < of_routing[way][leg] < 1.15 * expected, (routing, way, leg)
        plain, logical, by_rank = (sum(of_routing[way].values()) for way in ROWS)
        assert of_routing["logical"]["there"] < 0.6 * of_routing["all_to_all"]["there"]
        assert by_rank < 0.6 * logical < 0.6 * plain


# -- ``launch/slurm.sbatch`` under Slurm itself: two nodes on loopback


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    if missing():
        pytest.skip(missing())
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:  # not tmp_path: a socket's name is short
        try:
            cluster = stack.enter_context(Slurm(Path(folder)))
        except OSError as error:
            pytest.skip(f"Slurm does not start here: {error}")
        yield cluster


def test_slurm_runs_the_job_over_its_nodes(slurm: Slurm, tmp_path: Path) -> None:
    options = {"--steps": 8, "--interval": 4, "--layers": 2, "--width": 64, "--batch": 2, "--replica-slots": 0}
    job = ["launch/train_moe.py", *map(str, chain.from_iterable(options.items())), "--out", str(tmp_path)]
    # What a cluster without GPUs has, in place of the script's first lines; the rest of it is as it stands.
    have = [f"--nodes={len(NODES)}", "--gpus-per-node=0", "--cpus-per-task=1", f"--chdir={ROOT}"]
    said = slurm.submit(*have, str(ROOT / "launch/slurm.sbatch"), *job, PYTHON=sys.executable, RANKS_PER_NODE="1")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["world_size"] == len(NODES) and summary["bit_identical"] is True, said
