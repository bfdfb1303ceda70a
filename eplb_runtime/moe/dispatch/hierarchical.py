"""Dispatch over torch.distributed for several nodes: a token crosses to a node once, and is forwarded inside it.

What DeepEP's normal kernels do across NVLink and RDMA. A token goes from its rank to the rank of the same place on each
node where it has choices, and from there once to each rank that it visits. Two exchanges in the place of one, each
among all ranks of the EP group: what goes to ranks that have no part in one is empty.

In logical order results come back one for each choice, as `all_to_all` brings them, to the same bits. By rank they are
weighed and summed where they were computed, summed again where the token came to the node, and once more where it came
from: a row for each node crosses back.

Shape suffixes in addition to the room's: N nodes, G ranks a node, F tokens that come to this rank to be forwarded, V
tokens that visit it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..routing.water_filling import RowCounts
from . import permute
from .all_to_all import AllToAll, AllToAllMetadata, AllToAllSplits, RowRouting
from .base import DispatchContext
from .permute import block_offsets, local_first_order

Longs = NDArray[np.int64]


class Hierarchical(AllToAll):
    """Dispatch and combine for one EP group.

    Args:
        ranks_per_node: G, consecutive ranks; divides the group's size.
        combine_order: by rank, sums are in float32, rounded to the rows' dtype where they travel.

    Sizes are exchanged for every new batch, even if ``counts`` are known: these are not by node.
    """

    def __init__(
        self, context: DispatchContext, ranks_per_node: int, combine_order: Literal["logical", "by_rank"] = "logical"
    ) -> None:
        super().__init__(context)
        self.combine_order = combine_order
        if self._num_ranks % ranks_per_node:
            raise ValueError(
                f"ranks_per_node={ranks_per_node} does not divide the {self._num_ranks} ranks of the group"
            )
        self._nodes, self._on_node = self._num_ranks // ranks_per_node, ranks_per_node
        self._node, self._place = divmod(self._rank, ranks_per_node)

    def plan(self, slots_TK: Tensor, counts: RowCounts | None = None) -> AllToAllMetadata:
        nodes, on_node = self._nodes, self._on_node
        visits_TR = permute.visits(slots_TK, self._slots_per_rank, self._num_ranks)
        visits_TNG = visits_TR.view(-1, nodes, on_node)
        visits_TN = (visits_TNG.sum(dim=2) > 0).to(torch.int64)
        # Each rank learns of the tokens that visit its node, and of those that visit each of the ranks there.
        counts_NW = torch.cat([visits_TN.sum(dim=0).unsqueeze(1), visits_TNG.sum(dim=0)], dim=1)
        leaving = self._leaving(slots_TK, dedup=False, with_counts=False)
        tag_R1 = counts_NW.new_full((self._num_ranks, 1), self.forward_tag.value)
        counts_RW = torch.cat([leaving.counts_2RW[0], counts_NW.repeat_interleave(on_node, dim=0), tag_R1], dim=1)
        both_2RW, received_RW = self._exchange_counts(torch.stack([counts_RW, counts_RW]))
        by_choice, slots = self._metadata(leaving, both_2RW, received_RW), self._slots_per_rank
        tokens_2NG = both_2RW[:, :, slots].reshape(2, nodes, on_node)
        # Of tokens by node and place, to each rank here.
        visits_NGG = both_2RW[1, :, slots + 1 : slots + 1 + on_node].reshape(nodes, on_node, on_node)

        across, visited = self._across(visits_TNG, visits_TN, tokens_2NG[:, :, self._place])
        begin_R = self._begin_of_sources(visits_NGG[:, :, self._place])
        row_of_token_TR = visits_TR.cumsum(dim=0) - 1
        source_rows = self._source_rows(slots_TK, row_of_token_TR, by_choice.choices, both_2RW[1, :, :slots], begin_R)
        within = self._within(visited(), visits_NGG)
        tokens, sums = RowRouting(within, source_rows()), None
        if self.combine_order == "by_rank":
            sums = (
                _by_token(tokens.received_row_M, within.num_received_rows, slots_TK.shape[1]),
                _by_token(within.index_U, across.num_received_rows, on_node),
                _by_token(across.index_U, slots_TK.shape[0], nodes),
            )
        return replace(by_choice, tokens=tokens, across=across, sums=sums)

    def _tokens_to_experts(self, source_TD: Tensor, metadata: AllToAllMetadata) -> Callable[[], Tensor]:
        assert metadata.across is not None
        forwarded = self._to_ranks(source_TD, metadata.across)
        return lambda: self._to_experts(forwarded(), metadata.tokens)()

    def _source_rows(
        self, slots_TK: Tensor, row_of_token_TR: Tensor, choices: RowRouting, counts_RS: Longs, begin_R: Longs
    ) -> Callable[[], Tensor]:
        """Send with each choice the row that its token has on the choice's rank, where a token goes only once; waiting
        returns int64 ``[M]``, for each row by slot its token's received row."""
        source_row_TK = row_of_token_TR.gather(1, slots_TK // self._slots_per_rank)
        source_row = self._to_experts(source_row_TK.view(-1, 1), choices)
        begin_SR = np.tile(begin_R, self._slots_per_rank)
        groups = torch.from_numpy(np.stack([begin_SR, counts_RS.T.ravel()])).to(slots_TK.device, non_blocking=True)
        rows = choices.received_row_M.shape[0]
        begin_M = torch.repeat_interleave(groups[0], groups[1], output_size=rows)
        return lambda: begin_M + source_row().squeeze(1)

    def _across(
        self, visits_TNG: Tensor, visits_TN: Tensor, tokens_2N: Longs
    ) -> tuple[AllToAllSplits, Callable[[], Tensor]]:
        """Send tokens to nodes, and ahead of them int64 ``[F, G]``, 1 for a rank here that the token visits."""
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

    def _sums_to_tokens(
        self, rows_MD: Tensor, metadata: AllToAllMetadata, weights: Tensor | None
    ) -> Callable[[], Tensor]:
        if metadata.sums is None:
            return super()._sums_to_tokens(rows_MD, metadata, weights)
        assert metadata.across is not None
        across, (on_rank, on_node, over_nodes), dtype = metadata.across, metadata.sums, rows_MD.dtype
        sum_local_choices, back = self.kernels.sum_local_choices, metadata.tokens.splits.reversed(None)
        sums = self._to_ranks(sum_local_choices(rows_MD, on_rank, weights, dtype), back)

        def wait() -> Tensor:
            sums_of_nodes = self._to_ranks(sum_local_choices(sums(), on_node, None, dtype), across.reversed(None))
            return sum_local_choices(sums_of_nodes(), over_nodes, None, dtype)

        return wait


def _by_token(token_U: Tensor | None, tokens: int, most: int) -> Tensor:
    """Return int64 ``[tokens, most]``: the rows of each token, in their order, then -1. ``token_U``: of each row."""
    assert token_U is not None
    is_row = torch.arange(most, device=token_U.device) < permute.count(token_U, tokens).unsqueeze(1)
    return token_U.new_full(is_row.shape, -1).masked_scatter_(is_row, torch.argsort(token_U, stable=True))
