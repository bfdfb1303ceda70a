"""Which ranks of an EP group share a host, as the launcher's environment tells it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from eplb_runtime import Topology


@pytest.mark.parametrize(
    ("local_world_size", "ep_groups", "ranks_per_node"),
    [
        ("4", [range(8)], 4),
        ("4", [[0, 2, 4, 6], [1, 3, 5, 7]], 2),
        ("4", [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]], 1),
        ("8", [range(4), range(4, 8)], 4),
        ("4", [range(4), range(4, 8)], 4),
        ("6", [range(4), range(4, 8), range(8, 12)], 2),
        ("3", [range(4)], 4),
        ("2", [[0, 2, 1, 3]], 4),
        ("", [[0, 1]], 2),
        (None, [[0, 1]], 2),
    ],
    ids=[
        "two hosts",
        "every other rank",
        "one rank a host",
        "half a host",
        "a host each",
        "the second group lies across two hosts",
        "hosts of three do not divide four",
        "out of order",
        "an empty variable",
        "no launcher",
    ],
)
def test_ranks_per_node(local_world_size: str | None, ep_groups: Sequence[Sequence[int]], ranks_per_node: int) -> None:
    environ = {} if local_world_size is None else {"LOCAL_WORLD_SIZE": local_world_size}
    topology = Topology.from_launcher(environ, len(ep_groups[0]), ep_groups)
    assert topology.ranks_per_node == ranks_per_node
