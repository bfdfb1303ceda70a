"""What tokens cost the links between hosts, counted there: dispatch that crosses to a node once beside the plain
all-to-all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from namespaces import MakeCluster

pytestmark = [pytest.mark.multinode, pytest.mark.slow]
JOB = Path(__file__).parent / "jobs/count_bytes.py"
ROWS = {
    "all_to_all": {"there": "ranks", "back": "choices"},
    "logical": {"there": "hosts", "back": "choices"},
    "by_rank": {"there": "hosts", "back": "hosts"},
}
"""A row crosses for each of these that is on another host."""


def test_a_token_crosses_to_a_host_once(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Two hosts of four ranks, 8 of 64 experts a token: of four groups of eight, or of all."""
    cluster = make_cluster(2)
    cluster.start_ranks(4, JOB, tmp_path)
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
