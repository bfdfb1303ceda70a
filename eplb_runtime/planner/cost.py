"""Costs and savings of a rebalance, in seconds.

Expert work takes ``moe_share * step_seconds * imbalance`` of a step; so a plan saves, over the horizon,
``horizon_steps * moe_share * step_seconds * mean over layers of (imbalance before - after)``, and spends the transfer
of its bytes over the links plus a stall.
"""

from dataclasses import dataclass
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from ..topology import Topology

MOVE_LAYER, MOVE_EXPERT, MOVE_SOURCE_RANK, MOVE_DESTINATION_SLOT, MOVE_IS_HOME = range(5)
"""Columns of ``Plan.moves``."""
MOST = 2.0**60
"""Bytes and seconds are less; sums of more leave int64."""
HYSTERESIS = 1.2
"""A rebalance must save so many times what it costs: a forecast that errs must not make experts swing to and fro."""


@dataclass(frozen=True)
class CostModel:
    """Bytes and seconds that the gate weighs.

    Args:
        home_bytes: bytes of one expert with its optimizer state.
        replica_bytes: bytes of one expert's weights alone.
        step_seconds: measured time of one training step.
        moe_share: seconds of a step that expert compute and dispatch would take with even load, over ``step_seconds``,
            in [0, 1].
        horizon_steps: steps over which a rebalance is expected to go on paying.
        stall_seconds: fixed cost of a rebalance (agreement, commit, cold caches).
        crossing_seconds: how much longer a step would take if every token was computed on another node than its own,
            instead of none; with it, plans weigh such tokens against imbalance (`crossing_seconds` estimates it from a
            measured bandwidth).

    Raises:
        ValueError: a number is negative or not finite, a share above 1, or crossing 2**60 times as long as expert work.
    """

    home_bytes: int = 0
    replica_bytes: int = 0
    step_seconds: float = 0.0
    moe_share: float = 0.5
    horizon_steps: int = 500
    stall_seconds: float = 0.0
    crossing_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < MOST:
                raise ValueError(f"{name}={value!r}: give a finite number that is not negative, and less than 2**60")
        if self.moe_share > 1:
            raise ValueError(f"moe_share={self.moe_share!r}: give a share of the step, from 0 to 1")
        if not self.crossing_price < MOST:
            raise ValueError(
                f"crossing_seconds={self.crossing_seconds!r} beside step_seconds={self.step_seconds!r} and "
                f"moe_share={self.moe_share!r}: give all three for one step, in seconds"
            )

    def seconds_per_imbalance(self, num_layers: int, trust: float = 1.0) -> float:
        """Return the seconds that a unit of one layer's imbalance costs over the horizon, times ``trust``."""
        return trust * self.horizon_steps * self.moe_share * self.step_seconds / num_layers

    @property
    def crossing_price(self) -> float:
        """Return the imbalance of all layers that costs as much as all tokens crossing nodes; 0: seconds unknown."""
        a_step = self.moe_share * self.step_seconds
        return self.crossing_seconds / a_step if a_step > 0 else 0.0

    def bytes_moved(
        self, moves: NDArray[np.int32], topology: Topology, slots_per_rank: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return int64 ``[M]``, the bytes that each of the moves (``Plan.moves``) carries to another rank, 0 within a
        rank; and bool ``[M]``, whether a move is between two nodes."""
        source, destination = moves[:, MOVE_SOURCE_RANK], moves[:, MOVE_DESTINATION_SLOT] // slots_per_rank
        size = np.where(moves[:, MOVE_IS_HOME] != 0, self.home_bytes, self.replica_bytes).astype(np.int64)
        size[(source < 0) | (source == destination)] = 0
        return size, source // topology.ranks_per_node != destination // topology.ranks_per_node

    def transfer_seconds(self, moves: NDArray[np.int32], topology: Topology, slots_per_rank: int) -> float:
        """Return the seconds of all moves: what the busiest rank sends, or receives, one transfer after the other."""
        return float(self.seconds_by_layer(moves, 1, topology, slots_per_rank).max())

    def seconds_by_layer(
        self, moves: NDArray[np.int32], num_layers: int, topology: Topology, slots_per_rank: int
    ) -> NDArray[np.float64]:
        """Return the seconds for which each rank sends, and those for which it receives, what each layer moves.

        Args:
            moves: int32 ``[M, 5]`` as in ``Plan.moves``.
            num_layers: L; 1: all layers together.

        Returns:
            float64 ``[L, 2 R]``: sent by each rank, then received.
        """
        size, between = self.bytes_moved(moves, topology, slots_per_rank)
        seconds = size / np.where(between, topology.inter_node_bandwidth, topology.intra_node_bandwidth)
        layer = moves[:, MOVE_LAYER].astype(np.int64) if num_layers > 1 else np.zeros(len(moves), dtype=np.int64)
        source, destination = moves[:, MOVE_SOURCE_RANK], moves[:, MOVE_DESTINATION_SLOT] // slots_per_rank
        ends = 2 * topology.num_ranks
        place = np.concatenate([layer * ends + np.maximum(source, 0), layer * ends + topology.num_ranks + destination])
        sums = np.bincount(place, np.concatenate([seconds, seconds]), minlength=num_layers * ends)
        return np.asarray(sums.reshape(num_layers, ends))


def crossing_seconds(rank_tokens_L: NDArray[np.float64], token_bytes: float, topology: Topology) -> float:
    """Return the seconds by which a step is longer if all tokens cross nodes than if none does; 0 on one node.

    Args:
        rank_tokens_L: float64 ``[L]``, (token, choice) pairs of a rank on average.
        token_bytes: of one pair on the wire in a step, there and back, and both again in the backward pass.
    """
    if topology.num_nodes == 1:
        return 0.0
    return float(rank_tokens_L.sum() * token_bytes / topology.inter_node_bandwidth)
