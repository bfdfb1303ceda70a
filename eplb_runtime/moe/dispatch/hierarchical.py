"""Dispatch over torch.distributed for several nodes: a token crosses to a node once, and is forwarded inside it.

A token goes from its rank to the rank of the same place on each node where it has choices, and from there once to each
rank that it visits: two exchanges among all ranks of the EP group, each empty for ranks that have no part in it. In
logical order results come back one for each choice, as `all_to_all` brings them, to the same bits. By rank they are
weighed and summed where they were computed, again where the token came to the node, and once more where it came from: a
row for each node crosses back.

Shape suffixes in addition to the room's: N nodes, G ranks a node, F tokens that come to this rank to be forwarded.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..routing.water_filling import Longs, RowCounts
from . import permute
from .all_to_all import AllToAll, AllToAllMetadata, AllToAllSplits, RowRouting
from .base import DispatchContext
from .permute import block_offsets, local_first_order


class Hierarchical(AllToAll):
    """Dispatch and combine for one EP group. Sizes are exchanged for every new batch: known ``counts`` are not by node.

    Args:
        ranks_per_node: G, consecutive ranks; divides the group's size.
        combine_order: by rank, sums are in float32, rounded to the rows' dtype where they travel.
    """

    def __init__(
        self, context: DispatchContext, ranks_per_node: int, combine_order: Literal["logical", "by_rank"] = "logical"
    ) -> None:
        super().__init__(context)
        self.combine_order = combine_order
        self._nodes, self._on_node = self._num_ranks // ranks_per_node, ranks_per_node
        self._node, self._place = divmod(self._rank, ranks_per_node)

    def plan(self, slots_TK: Tensor, counts: RowCounts | None = None) -> AllToAllMetadata:
        nodes, on_node, slots = self._nodes, self._on_node, self._slots_per_rank
        visits_TNG = permute.visits(slots_TK // slots, self._num_ranks).view(-1, nodes, on_node)
        visits_TN = (visits_TNG.sum(dim=2) > 0).to(torch.int64)
        # Each rank learns of the tokens that visit its node, and of those that visit each of the ranks there.
        counts_NW = torch.cat([visits_TN.sum(dim=0).unsqueeze(1), visits_TNG.sum(dim=0)], dim=1)
        leaving = self._leaving(slots_TK, dedup=True)
        tag_R1 = counts_NW.new_full((self._num_ranks, 1), self.forward_tag.value)
        counts_RW = torch.cat([leaving.counts_2RW[0], counts_NW.repeat_interleave(on_node, dim=0), tag_R1], dim=1)
        both_2RW, received_RW = self._exchange_counts(torch.stack([counts_RW, counts_RW]))
        straight = self._metadata(leaving, both_2RW, received_RW)  # as if each token came from its own rank
        tokens_2NG = both_2RW[:, :, slots + 1].reshape(2, nodes, on_node)
        # Of tokens by node and place, to each rank here.
        visits_NGG = both_2RW[1, :, slots + 2 : slots + 2 + on_node].reshape(nodes, on_node, on_node)

        across, visited = self._across(visits_TNG, visits_TN, tokens_2NG[:, :, self._place])
        shift_R = self._begin_of_sources(visits_NGG[:, :, self._place])
        shift_R -= block_offsets(both_2RW[1, :, slots], self._rank)
        shifts = np.stack([np.tile(shift_R, slots), both_2RW[1, :, :slots].T.ravel()])
        shift, length = torch.from_numpy(shifts).to(slots_TK.device, non_blocking=True)
        row_M = straight.tokens.received_row_M
        row_M = row_M + torch.repeat_interleave(shift, length, output_size=row_M.shape[0])
        within, sums = self._within(visited(), visits_NGG), None
        if self.combine_order == "by_rank":
            sums = (
                _by_token(row_M, within.num_received_rows, slots_TK.shape[1]),
                _by_token(within.index_U, across.num_received_rows, on_node),
                _by_token(across.index_U, slots_TK.shape[0], nodes),
            )
        return replace(straight, tokens=RowRouting(within, row_M), across=across, sums=sums)

    def _across(
        self, visits_TNG: Tensor, visits_TN: Tensor, tokens_2N: Longs
    ) -> tuple[AllToAllSplits, Callable[[], Tensor]]:
        """Return how tokens go to nodes, and a wait for what goes ahead: int64 ``[F, G]``, 1 for a visit of a rank."""
        device, node = visits_TN.device, self._node
        offsets_2N, rows = np.stack([block_offsets(tokens_2N[0], node), tokens_2N[0]]), int(tokens_2N[0].sum())
        sent_2N = torch.from_numpy(offsets_2N).to(device, non_blocking=True)
        token_U, _ = permute.dedup_tokens(visits_TN, sent_2N[0], rows)
        order_N = torch.from_numpy(local_first_order(self._nodes, node)).to(device, non_blocking=True)
        node_U = torch.repeat_interleave(order_N, sent_2N[1][order_N], output_size=rows)
        sent_R, received_R = np.zeros((2, self._num_ranks), dtype=np.int64)
        sent_R[self._place :: self._on_node], received_R[self._place :: self._on_node] = tokens_2N
        across = AllToAllSplits.of(token_U, sent_R, received_R, self._rank)
        visits = replace(across, index_U=token_U * self._nodes + node_U)
        visited = self._to_ranks(visits_TNG.to(torch.uint8).flatten(0, 1), visits)
        return across, lambda: visited().to(torch.int64)

    def _within(self, visited_FG: Tensor, visits_NGG: Longs) -> AllToAllSplits:
        """What has come to this rank to be forwarded, to the ranks of this node."""
        sent_G, received_G = visits_NGG[:, self._place].sum(axis=0), visits_NGG[:, :, self._place].sum(axis=0)
        begin_G = torch.from_numpy(block_offsets(sent_G, self._place)).to(visited_FG.device, non_blocking=True)
        row_U, _ = permute.dedup_tokens(visited_FG, begin_G, int(sent_G.sum()))
        sent_R, received_R = np.zeros((2, self._nodes, self._on_node), dtype=np.int64)
        sent_R[self._node], received_R[self._node] = sent_G, received_G
        return AllToAllSplits.of(row_U, sent_R.reshape(-1), received_R.reshape(-1), self._rank)

    def _begin_of_sources(self, tokens_NG: Longs) -> Longs:
        """int64 ``[R]``: where each rank's tokens begin among those that visit this rank: by the rank of this node that
        has forwarded them, then by the node they are from; this one first in both."""
        order = np.ix_(local_first_order(self._nodes, self._node), local_first_order(self._on_node, self._place))
        begin_NG = np.empty_like(tokens_NG)
        begin_NG[order] = permute.group_begins(tokens_NG[order].T).T
        return begin_NG.reshape(-1)


def _by_token(token_U: Tensor | None, tokens: int, most: int) -> Tensor:
    """Return int64 ``[tokens, most]``: the rows of each token, in their order, then -1. ``token_U``: of each row."""
    assert token_U is not None
    is_row = torch.arange(most, device=token_U.device) < permute.count(token_U, tokens).unsqueeze(1)
    return token_U.new_full(is_row.shape, -1).masked_scatter_(is_row, torch.argsort(token_U, stable=True))
