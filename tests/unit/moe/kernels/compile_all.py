"""Compile every kernel for compute capabilities 8.0 and 9.0, which needs no GPU; prints them."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from eplb_runtime.moe.dispatch import kernels as moves
from eplb_runtime.moe.experts import aligned_kernel
from eplb_runtime.moe.routing import kernels, sources_kernel, water_filling_kernel
from eplb_runtime.utils import checksums_triton

LONG, INT, NUMBER = "*i64", "*i32", "i32"
SPLIT = [LONG, *[INT] * 6, *[LONG] * 2, *[NUMBER] * 4, "i64"]
SIZES = {"C": 3, "EXPERTS": 256, "REPLICATED": 64, "COPIES": 4, "RANKS": 64}
NUMBERS = {"FRACTION": 16, "EIGHTHS": 5, "FROM": 2, "TOLERANCE": 10}
SUMMED = {"TOP_K": 8, "COLUMNS": 1024}


def of_slots(dedup: bool) -> dict[str, Any]:
    return {"TOP_K": 8, "SLOTS": 512, "RANKS": 64 * dedup}


KERNELS: list[tuple[Any, list[str], dict[str, Any]]] = [
    (checksums_triton._hash, [LONG, LONG, LONG, NUMBER], {"WORDS": 128, "BLOCKS": 16}),
    (kernels._begin, [INT, LONG, NUMBER, NUMBER], {"EXPERTS": 256, "WIDE": 32, "AT_ONCE": 128}),
    *(
        case
        for ids in (INT, LONG)
        for case in (
            (
                kernels._count_and_look_up,
                [ids, "*i1", LONG, LONG, LONG, *[NUMBER] * 2],
                {"TOP_K": 8, "PADDED": ids == INT, "EXPERTS": 256, "BLOCK": 256},
            ),
            (kernels._count_block, [ids, INT, NUMBER, NUMBER], {"EXPERTS": 256, "BLOCK": 256}),
            (kernels._deal, [ids, INT, LONG, LONG, LONG, NUMBER], {"COPIES": 3, "EXPERTS": 256, "BLOCK": 256}),
        )
    ),
    *(
        case
        for dedup in (True, False)
        for case in (
            (moves._count_slots, [LONG, INT, *[NUMBER] * 3], {**of_slots(dedup), "BLOCK": 256}),
            (
                moves._begin_slots,
                [INT, LONG, NUMBER, "i64", *[NUMBER] * 3],
                {"SLOTS": 512, "RANKS": 64 * dedup, "HAS_TAG": dedup, "WIDE": 32, "AT_ONCE": 128},
            ),
            (moves._place, [LONG, INT, *[LONG] * 5, *[NUMBER] * 5], {**of_slots(dedup), "BLOCK": 256, "SOME": 64}),
            (
                moves._arrive,
                [*[LONG] * 5, INT, *[NUMBER] * 4],
                {"HAS_SOURCE_ROWS": dedup, "CELLS": 512, "RANKS": 64, "BLOCK": 1024, "PARTS": 4},
            ),
        )
    ),
    *(
        (moves._part, [of, LONG, of, of, *[NUMBER] * 3], {"ROWS": rows, "COLUMNS": 1024 // rows})
        for of, rows in (("*bf16", 1), (LONG, 1024))
    ),
    *(
        (moves._sum, [of, LONG, weights, out, NUMBER], {"WEIGHED": weights != LONG, "SUM": wide, **SUMMED})
        for of, weights, out, wide in (
            ("*bf16", "*bf16", "*bf16", tl.float32),
            ("*bf16", "*fp32", "*fp32", tl.float32),
            ("*fp16", LONG, "*fp16", tl.float32),
            ("*fp32", "*fp32", "*fp32", tl.float32),
            ("*fp64", "*fp32", "*fp64", tl.float64),
        )
    ),
    (
        aligned_kernel._move,
        ["*bf16", INT, INT, INT, "*bf16", *[NUMBER] * 3],
        {"SLOTS": 8, "ROWS": 16, "COLUMNS": 128},
    ),
    *(
        (
            sources_kernel._share_out,
            [*[LONG] * 5, *[NUMBER] * 7],
            {"LOCALITY": near, "COPIES": 8, "EXPERTS": 256, "RANKS": 64},
        )
        for near in (True, False)
    ),
    (water_filling_kernel._split, SPLIT, {**SIZES, **NUMBERS}),
]


def compiled(kernel: Any, types: list[str], constants: dict[str, Any], capability: int, options: dict[str, Any]) -> str:
    """What the GPU's assembler is given."""
    names = kernel.arg_names
    signature = dict(zip(names, [*types, *["constexpr"] * len(constants)], strict=True))
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values)
    return str(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"])


if __name__ == "__main__":
    for capability in (80, 90):
        for kernel, types, constants in KERNELS:
            sums = kernel is moves._sum
            asserting = kernel in (moves._count_slots, kernels._count_and_look_up, kernels._count_block)
            options = {"enable_fp_fusion": False} if sums else dict(kernels.ASSERT) if asserting else {}
            code = compiled(kernel, types, constants, capability, options)
            assert not (sums and "fma.rn.f" in code), "a product that is added at once is not rounded"
            assert not sums or ("cvt.rn.bf16" in code) == (types[3] == "*bf16")
            assert ("__assertfail" in code) == asserting
            if sums and constants["WEIGHED"] and types[0] == "*fp32":
                assert "fma.rn.f" in compiled(kernel, types, constants, capability, {"enable_fp_fusion": True})
        print(capability)
