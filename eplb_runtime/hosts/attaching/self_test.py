"""Runs a few rows through an MoE layer before its experts are spread: its own way, and the way that replaces it.

Both must give the same to rounding, also row by row and with experts in other slots. What is called leaves no trace in
modules, buffers and torch's generators. A layer that cannot be called alone is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...moe.experts.compute import Compute, SlotCounts
from ...utils.text import one_line
from .description import MoELayer, Run, spread_of

_SLOTS, _ROWS = 3, 3
"""Experts whose weights are made up, and rows of each."""
_CROWD = 24
"""Tokens of which each chooses the first expert and another: a capacity shows."""
_ROUNDING = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Differences, of the largest value, that are rounding; of wider dtypes 1e-3 (TF32)."""
SEED = 20


@dataclass(frozen=True)
class LayerTest:
    """What a test of a layer found."""

    problem: str = ""  # how it computes otherwise than what replaces it, with the layer's name
    draws: bool = False  # whether its experts draw random numbers in training
    untried: str = ""  # why its own way could not be called alone
    has_own_way: bool = True  # whether that is implemented


def try_layers(layers: Sequence[MoELayer], guard: str) -> list[LayerTest]:
    """Try each whose experts are whole here, and plain tensors with memory; with ``guard="off"`` none."""
    return [_tried(layer) if guard != "off" else LayerTest() for layer in layers]


def _tried(layer: MoELayer) -> LayerTest:
    weights = [layer.of_experts(name, layer.parameter(name).detach()) for name in layer.parameters]
    whole = spread_of(layer.experts) is None and not layer.slots and layer.live_weights is None
    compute, run = layer.compute, layer.run
    if compute is None or not whole or layer.alignment > 1 or any(tensor.is_meta for tensor in weights):
        return LayerTest()
    owner, device = getattr(run, "__self__", None), weights[0].device
    modules = [layer.experts, *([owner] if isinstance(owner, nn.Module) else [])]
    with untouched(modules, compute, device), torch.no_grad(), suppress(Exception):  # it fails in its own words later
        few = _few_of(weights)
        counts = SlotCounts.of([_ROWS] * len(few[0]), device)
        sizes = [size for tensor in weights for size in reversed(tensor.shape[1:])]
        width = width_of_rows(lambda rows: compute(rows, counts, few), sizes, weights[0], _ROWS * len(few[0]))
        if width is None:
            return LayerTest()
        rows = rows_like(weights[0], _ROWS * len(few[0]), width)

        def draws() -> bool:
            before = _generator_state(device)
            compute(rows, counts, few)
            return not torch.equal(before, _generator_state(device))

        if draws():  # in evaluation, too: two calls give two things
            return LayerTest(draws=True)
        untried, has_own_way = "", True
        problem = _why_slots_count(compute, rows, few)
        try:
            problem = problem or ("" if run is None else _why_run_differs(run, compute, width, weights))
        except Exception as error:
            has_own_way = not isinstance(error, NotImplementedError)
            untried = one_line(error) if has_own_way else ""
        if problem:
            return LayerTest(f"{problem} ({layer.name})")
        for module in modules:
            module.train()
        return LayerTest(draws=draws(), untried=untried, has_own_way=has_own_way)
    return LayerTest()


def _why_slots_count(compute: Compute, rows: Tensor, weights: Sequence[Tensor]) -> str:
    """Return whether a row's result depends on other rows, or on the slot of its expert."""
    slots, device = range(len(weights[0])), rows.device
    each = SlotCounts.of([_ROWS for _ in slots], device)
    together = compute(rows, each, weights)
    for number in slots:
        row = slice(number * _ROWS, number * _ROWS + 1)
        alone = compute(rows[row], SlotCounts.of([int(slot == number) for slot in slots], device), weights)
        if not same_to_rounding(alone, together[row]):
            return "let a row's result depend on that row alone: it changes when other rows are computed with it"
    turned = compute(rows.roll(_ROWS, 0), each, [tensor.roll(1, 0) for tensor in weights])
    if not same_to_rounding(turned, together.roll(_ROWS, 0)):
        return "keep what belongs to an expert in its tensors, which move: its code depends on the slot's number"
    return ""


def _why_run_differs(run: Run, compute: Compute, width: int, weights: Sequence[Tensor]) -> str:
    experts, hidden_TD = len(weights[0]), rows_like(weights[0], _CROWD, width)
    ids_TK = torch.stack([torch.zeros(_CROWD), 1 + torch.arange(_CROWD) % max(1, experts - 1)], dim=1)
    ids_TK = ids_TK.long()[:, : min(2, experts)].to(hidden_TD.device)
    weights_TK = torch.tensor([[0.55, 0.25]]).to(hidden_TD)[:, : ids_TK.shape[1]].repeat(_CROWD, 1)
    own_TD = run(hidden_TD, ids_TK, weights_TK)
    order = ids_TK.flatten().argsort(stable=True)
    counts = SlotCounts.of(torch.bincount(ids_TK.flatten(), minlength=experts).tolist(), hidden_TD.device)
    out_MD = compute(hidden_TD.repeat_interleave(ids_TK.shape[1], 0)[order], counts, list(weights))
    weighed = torch.empty_like(out_MD).index_copy_(0, order, out_MD) * weights_TK.reshape(-1, 1)
    expected_TD = weighed.unflatten(0, ids_TK.shape).sum(1)
    if own_TD.shape != expected_TD.shape or same_to_rounding(own_TD, expected_TD):
        return ""
    return (
        "let the method that attach replaces give no more than router weight times expert, added up (no shared expert, "
        "factor, capacity or weights that it changes)"
    )


def width_of_rows(
    call: Callable[[Tensor], Tensor], sizes: Sequence[int], like: Tensor, number: int = _ROWS
) -> int | None:
    """Return the first of these sizes whose rows the call takes and gives; None: it takes none."""
    for width in dict.fromkeys(size for size in [*sizes, 8] if size > 0):
        with suppress(Exception):
            rows = rows_like(like, number, width)
            if call(rows).shape == rows.shape:
                return width
    return None


def same_to_rounding(one: Tensor, other: Tensor) -> bool:
    """Return whether two results are equal, as far as dtypes can tell."""
    most = _ROUNDING.get(one.dtype, 1e-3) * other.abs().amax(-1, keepdim=True).nan_to_num(0.0, 0.0)
    return one.shape == other.shape and bool(
        ((one - other).abs() <= most).logical_or(one.isnan() & other.isnan()).all()
    )


def rows_like(like: Tensor, number: int, width: int) -> Tensor:
    """Rows ``[number, width]``, the same ones in each call."""
    rows = torch.randn(number, width, generator=torch.Generator().manual_seed(SEED))
    return rows.to(like.device, like.dtype)


def _few_of(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return values of the size that weights have, for a few experts: zeros at the start hide all that is behind."""
    generator, few = torch.Generator(weights[0].device).manual_seed(SEED), []
    for tensor in weights:
        shape = min(_SLOTS, len(tensor)), *tensor.shape[1:]
        made = torch.rand(shape, generator=generator, dtype=tensor.dtype, device=tensor.device)
        few.append(made.sub_(0.4).mul_(2 * tensor.shape[-1] ** -0.5))
    return few


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def untouched(modules: Sequence[nn.Module], compute: object, device: torch.device) -> Iterator[None]:
    """Inside, modules are in evaluation mode; at the end they and torch's generators are as they were."""
    inside = {id(part): part for module in modules for part in module.modules()}.values()
    attributes = [(part, dict(vars(part))) for part in (*inside, compute) if hasattr(part, "__dict__")]
    buffers = [(buffer, buffer.clone()) for part in inside for buffer in part.buffers(recurse=False)]
    try:
        compiled = "torch._dynamo" in sys.modules  # else nothing is, and the import takes seconds
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
        ):
            for module in modules:
                module.eval()
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for part, own in attributes:
            vars(part).clear()
            vars(part).update(own)
