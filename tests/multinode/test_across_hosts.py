"""Jobs over two hosts, started on each as a user would: by ``launch/multi_node.sh``."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
from namespaces import ROOT, MakeCluster

pytestmark = [pytest.mark.multinode, pytest.mark.slow]
JOBS = Path(__file__).parent / "jobs"


def test_training_over_two_hosts_rebalances_and_is_bit_identical(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(2)
    options = {"--steps": 20, "--interval": 5, "--layers": 2, "--width": 64, "--batch": 2, "--replica-slots": 0}
    cluster.start(2, ROOT / "launch/train_moe.py", *chain.from_iterable(options.items()), "--out", tmp_path)
    cluster.wait(120)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["world_size"] == 4
    assert summary["migrations"] >= 1
    assert summary["bytes_moved"] > 0
    assert summary["bit_identical"] is True


def test_hosts_are_nodes_and_their_links_are_measured(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Cables of 200 Mbit/s between hosts, memory inside them."""
    cluster = make_cluster(2, rate="200mbit")
    cluster.start(2, JOBS / "report_topology.py", tmp_path)
    cluster.wait(120)
    topologies = [json.loads((tmp_path / f"topology.{rank}.json").read_text()) for rank in range(4)]
    assert all(topology == topologies[0] for topology in topologies)
    topology = topologies[0]
    assert (topology["num_ranks"], topology["ranks_per_node"]) == (4, 2)
    # Both ranks of a host share its cable: 12.5 MB/s each at most, whatever else the machine does.
    assert topology["inter_node_bandwidth"] < 15e6
    assert topology["intra_node_bandwidth"] > 4 * topology["inter_node_bandwidth"]


def test_a_cable_cut_during_a_rebalance_costs_that_rebalance_and_nothing_else(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """Cut before experts leave, before the ranks vote, and between two rounds of transfers; plugged when the ranks of
    the first host have given up."""
    points = ["prepared", "staged", "committed"]
    cluster = make_cluster(2)
    cluster.start(2, JOBS / "train_with_cut_cable.py", tmp_path, "torch", *points)
    for point in points:
        cluster.wait_for_files([tmp_path / f"{point}.{rank}" for rank in range(4)], 90)
        cluster.cut_cable(1)
        (tmp_path / f"cut.{point}").touch()
        cluster.wait_for_files([tmp_path / f"dropped.{point}.{rank}" for rank in (0, 1)], 60)
        cluster.plug_cable(1)
    cluster.wait(90)
    results = [json.loads((tmp_path / f"result.{rank}.json").read_text()) for rank in range(4)]
    assert [phase for _, phase, _ in results[0]["aborted"]] == ["prepared", "staged", "staged"]
    for result in results:
        assert [step for step, _, _ in result["aborted"]] == [step for step, _, _ in results[0]["aborted"]]
        assert result["committed"] == results[0]["committed"]
        assert result["committed"][-1][0] > result["aborted"][-1][0], "no rebalance after the last cut"
        assert result["same_losses"] and result["same_state"]


def test_rebalancing_comes_back_however_long_a_cable_stays_cut(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Plugged when the ranks of the first host have waited for the others for several timeouts. Ranks of one host share
    memory, gloo carries between hosts; both are made anew."""
    cluster = make_cluster(2)
    cluster.start(2, JOBS / "train_with_cut_cable.py", tmp_path, "auto", "staged")
    cluster.wait_for_files([tmp_path / f"staged.{rank}" for rank in range(4)], 90)
    cluster.cut_cable(1)
    (tmp_path / "cut.staged").touch()
    cluster.wait_for_files([tmp_path / f"waited.{rank}" for rank in (0, 1)], 60)
    cluster.plug_cable(1)
    cluster.wait(90)
    for rank in range(4):
        result = json.loads((tmp_path / f"result.{rank}.json").read_text())
        assert [phase for _, phase, _ in result["aborted"]] == ["staged"]
        assert result["committed"], "no rebalance after the cut"
        assert (result["carriers"]["within"], result["carriers"]["across"]) == ("shm", "torch")
        assert result["same_losses"] and result["same_state"]
