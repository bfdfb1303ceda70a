"""How ranks sit on nodes and how fast the links between them are. Measuring a live cluster is the balancer's business:
here is the result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from numbers import Integral

DEFAULT_INTRA_NODE_BANDWIDTH = 400e9
DEFAULT_INTER_NODE_BANDWIDTH = 50e9


class TopologyError(ValueError):
    """Ranks and nodes that do not fit together, or a number that is not positive."""


@dataclass(frozen=True)
class Topology:
    """Ranks of one EP group and the links between them. Hashable.

    Args:
        num_ranks: ranks R of the EP group.
        ranks_per_node: how many consecutive ranks share a node; divides ``num_ranks``. 0: all of them (one node).
        intra_node_bandwidth: bytes/s that a rank can send to one of its own node (400e9: NVLink, one direction).
        inter_node_bandwidth: bytes/s that a rank can send to one of another node (50e9: one 400 Gbit/s NIC a GPU).

    Raises:
        TopologyError: a number is not positive, or ``ranks_per_node`` does not divide ``num_ranks``.

    Example:
        >>> topology = Topology(8, ranks_per_node=4)
        >>> topology.num_nodes, topology.node_of(5), topology.slowest_bandwidth  # bytes/s of one NIC
        (2, 1, 50000000000.0)
    """

    num_ranks: int
    ranks_per_node: int = 0
    intra_node_bandwidth: float = DEFAULT_INTRA_NODE_BANDWIDTH
    inter_node_bandwidth: float = DEFAULT_INTER_NODE_BANDWIDTH

    def __post_init__(self) -> None:
        for name in ("num_ranks", "ranks_per_node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TopologyError(f"{name}={value!r}: give a whole number")
        if self.num_ranks < 1:
            raise TopologyError(f"num_ranks is {self.num_ranks}: a topology needs at least one rank")
        if self.ranks_per_node == 0:
            object.__setattr__(self, "ranks_per_node", self.num_ranks)
        if self.ranks_per_node < 1 or self.num_ranks % self.ranks_per_node:
            raise TopologyError(f"ranks_per_node={self.ranks_per_node} does not divide num_ranks={self.num_ranks}")
        for name in ("intra_node_bandwidth", "inter_node_bandwidth"):
            if not getattr(self, name) > 0:
                raise TopologyError(f"{name}={getattr(self, name)}: give a positive number of bytes/s")

    @classmethod
    def from_launcher(
        cls, environ: Mapping[str, str], num_ranks: int, ep_groups: Sequence[Sequence[int]] | None = None
    ) -> "Topology":
        """Return a topology with the node size that torchrun's ``LOCAL_WORLD_SIZE`` gives; of one node if that is
        missing, or ranks lie unevenly on nodes.

        Args:
            environ: the process environment (or a stand-in).
            num_ranks: ranks of the EP group, which may be fewer than the world.
            ep_groups: the ranks of every EP group of the job; None: one group, of the first ranks. A group of every
                other rank has half as many ranks on a node. Where groups lie differently on the nodes, the smallest
                node counts, so that all ranks have the same topology.
        """
        local = int(environ.get("LOCAL_WORLD_SIZE", "0") or 0)
        if local < 1:
            return cls(num_ranks)
        groups = ep_groups if ep_groups is not None else [range(num_ranks)]
        return cls(num_ranks, min(_ranks_per_node([rank // local for rank in ranks]) for ranks in groups))

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.ranks_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    @property
    def slowest_bandwidth(self) -> float:
        """The smaller one of the two bandwidths, in bytes/s."""
        return min(self.intra_node_bandwidth, self.inter_node_bandwidth)


def _ranks_per_node(node_of_rank: Sequence[int]) -> int:
    """How many consecutive ranks share a node, where that is the same number everywhere; else all."""
    per_node = [len(list(ranks)) for _, ranks in groupby(node_of_rank)]
    regular = len(per_node) == len(set(node_of_rank)) and len(set(per_node)) == 1
    return per_node[0] if regular else len(node_of_rank)
