"""DeepEP as Megatron-Core's flex dispatcher calls it, over torch.distributed: a token travels once to
each rank that has any of its experts, and what ranks give back for it is added in float32, in the order of ranks."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Handle:
    """Which of this rank's tokens travel where (bool), and how many rows were ``received`` from each rank."""

    group: Any
    sent_TR: Tensor
    received: list[int]

    @property
    def sent(self) -> list[int]:
        counts: list[int] = self.sent_TR.sum(dim=0).tolist()
        return counts

    def there(self, tokens: Tensor) -> Tensor:
        """By source rank, then by token."""
        rows = torch.cat([tokens[mine] for mine in self.sent_TR.T])
        result = rows.new_empty(sum(self.received), *rows.shape[1:])
        dist.all_to_all_single(result, rows, self.received, self.sent, group=self.group)
        return result

    def back(self, rows: Tensor) -> Tensor:
        returned = rows.new_empty(sum(self.sent), *rows.shape[1:])
        dist.all_to_all_single(returned, rows.contiguous(), self.sent, self.received, group=self.group)
        total = torch.zeros(len(self.sent_TR), *rows.shape[1:], dtype=torch.promote_types(rows.dtype, torch.float32))
        for mine, part in zip(self.sent_TR.T, returned.split(self.sent), strict=True):
            total[mine] += part.to(total.dtype)
        return total.to(rows.dtype)


class There(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, handle: Handle) -> Tensor:
        ctx.handle = handle
        return handle.there(tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.handle.back(gradient), None


class Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, handle: Handle) -> Tensor:
        ctx.handle = handle
        return handle.back(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.handle.there(gradient), None


def handle_of(group: Any, sent_TR: Tensor) -> Handle:
    """Tell ranks how many tokens come. Collective."""
    sent = sent_TR.sum(dim=0)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return Handle(group, sent_TR, received.tolist())


def fused_dispatch(
    tokens: Tensor, indices_TK: Tensor, probs_TK: Tensor, num_experts: int, group: Any, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Handle]:
    count, rank = num_experts // group.size(), group.rank()
    ranks = torch.arange(group.size())
    handle = handle_of(group, ((indices_TK // count)[..., None] == ranks).any(dim=1))
    indices = handle.there(indices_TK) - rank * count
    mine = (indices >= 0) & (indices < count)
    probs = torch.where(mine, There.apply(probs_TK, handle), 0)
    counts = torch.stack([(indices == number).sum() for number in range(count)])
    return There.apply(tokens, handle), torch.where(mine, indices, -1), probs, counts, handle


def fused_combine(rows: Tensor, group: Any, handle: Handle, **_: Any) -> tuple[Tensor, None]:
    return Back.apply(rows, handle), None


def use() -> None:
    """Let Megatron find these in the place of DeepEP's."""
    import megatron.core.transformer.moe.token_dispatcher as dispatchers

    dispatchers.fused_dispatch, dispatchers.fused_combine = fused_dispatch, fused_combine
    dispatchers.set_deepep_num_sms = lambda number: None
