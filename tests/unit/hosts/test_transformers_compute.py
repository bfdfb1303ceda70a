"""Rows in order go through the library's own kernel without being sorted again, and give the very same numbers."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from support.moe_models import FAMILIES, make_model
from torch.overrides import TorchFunctionMode

from eplb_runtime.hosts.transformers import compute as room
from eplb_runtime.hosts.transformers.adapters import BY_EXPERT, OF_PEFT, LowRank
from eplb_runtime.hosts.transformers.describe import describe
from eplb_runtime.moe.experts.compute import SlotCounts


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several would add up a row's gradients in any order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


COUNTS = (0, 5, 1, 17, 0, 64, 3, 8)
WIDTH = 32
FLOAT = torch.float32


class Calls(TorchFunctionMode):
    """Names of the torch functions that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def compute_of(family: str, implementation: str, dtype: torch.dtype = torch.float32) -> tuple:
    model = make_model(family).to(dtype)
    model.set_experts_implementation(implementation)
    layer = describe(model).layers[0]
    return layer.compute, [getattr(layer.experts, name).detach() for name in layer.parameters]


def run(call, weights: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(sum(COUNTS), WIDTH, generator=generator).to(dtype).requires_grad_()
    weights = [weight.clone().requires_grad_() for weight in weights]
    out = call(rows, SlotCounts.of(COUNTS, rows.device), weights)
    out.backward(torch.randn(out.shape, generator=generator).to(dtype))
    return [out.detach(), rows.grad, *(weight.grad for weight in weights)]


def sorted_again(compute: room.RowCompute) -> room.RowCompute:
    """By the module's own forward."""
    again = room.RowCompute(compute._experts, compute._names)
    again._forward_is_the_librarys = False
    return again


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_grouped_mm_gives_the_bits_of_the_modules_own_forward_and_sorts_nothing(
    family: str, dtype: torch.dtype
) -> None:
    compute, weights = compute_of(family, "grouped_mm", dtype)
    first = run(compute, weights, dtype)  # looks whether it may
    with Calls() as calls:
        found = run(compute, weights, dtype)
    with Calls() as own_calls:
        own_results = run(sorted_again(compute), weights, dtype)
    assert "sort" in own_calls.names
    assert not {"sort", "argsort"} & set(calls.names)
    for one, again, own in zip(first, found, own_results, strict=True):
        assert torch.equal(one, own)
        assert torch.equal(again, own)
        assert own.abs().max() > 0


# -- LoRA ------------------------------------------------------------------------------------------------------------


def with_low_rank(family: str, rank: int, **state: bool) -> tuple[room.RowCompute, list[torch.Tensor]]:
    """LoRA on all matrices of the experts, and the weights with those of it."""
    compute, weights = compute_of(family, "grouped_mm")
    generator = torch.Generator().manual_seed(4)
    low_rank, pairs = [], []
    for name, matrix in zip(compute._names, weights, strict=True):
        if matrix.ndim < 3:
            continue
        wrapper = SimpleNamespace(
            parameter_name=name,
            scaling={"default": 0.7},
            active_adapters=["default"],
            **{"disable_adapters": False, "merged": False, **state},
        )
        low_rank.append(LowRank(wrapper, "", "default"))
        wide, narrow = matrix.shape[1:] if compute._experts.is_transposed else matrix.shape[:0:-1]
        pairs += [
            torch.randn(matrix.shape[0], rank, wide, generator=generator) * 0.1,
            torch.randn(matrix.shape[0], narrow, rank, generator=generator) * 0.1,
        ]
    return room.RowCompute(compute._experts, compute._names, low_rank), [*weights, *pairs]


def folded(compute: room.RowCompute):
    """The module's own forward with matrices to which the products are added."""

    def call(rows: torch.Tensor, counts: SlotCounts, weights: list[torch.Tensor]) -> torch.Tensor:
        own, pairs = dict(zip(compute._names, weights, strict=False)), weights[len(compute._names) :]
        for number, one in enumerate(compute._low_rank):
            delta = torch.einsum("sri,sor->soi", pairs[2 * number], pairs[2 * number + 1]) * 0.7
            name = one.wrapper.parameter_name
            own[name] = own[name] + (delta.mT if compute._experts.is_transposed else delta)
        return sorted_again(compute)(rows, counts, list(own.values()))

    return call


@pytest.mark.parametrize("family", FAMILIES)
def test_low_rank_matrices_give_what_they_give_on_the_matrices(family: str) -> None:
    compute, weights = with_low_rank(family, 3)
    for one, other in zip(run(compute, weights, FLOAT), run(folded(compute), weights, FLOAT), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
        assert other.abs().max() > 0
    with Calls() as calls:
        run(compute, weights, FLOAT)
    assert not {"sort", "argsort"} & set(calls.names)


def test_pefts_layout_is_split_by_expert_and_put_together_again() -> None:
    experts, rank, wide, narrow = 4, 3, 5, 6
    a, b = torch.randn(experts * rank, wide), torch.randn(narrow, rank * experts)
    a_E, b_E = BY_EXPERT["lora_A"](experts, a), BY_EXPERT["lora_B"](experts, b)
    assert a_E.shape == (experts, rank, wide) and b_E.shape == (experts, narrow, rank)
    by_peft = torch.einsum("ore,eri->eoi", b.reshape(narrow, -1, experts), a.reshape(experts, -1, wide))
    torch.testing.assert_close(b_E @ a_E, by_peft)
    assert torch.equal(OF_PEFT["lora_A"](a_E), a) and torch.equal(OF_PEFT["lora_B"](b_E), b)
