"""Compile every kernel for compute capabilities 8.0 and 9.0, which needs no GPU; prints them."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from eplb_runtime import checksum_kernel
from eplb_runtime.dispatch import padded
from eplb_runtime.routing import kernels, water_filling_kernel

LONG, INT, NUMBER = "*i64", "*i32", "i32"
SPLIT = [LONG, *[INT] * 6, *[LONG] * 4, *[NUMBER] * 4, "i64"]
SIZES = {"C": 3, "EXPERTS": 256, "REPLICATED": 64, "COPIES": 4, "RANKS": 64}
NUMBERS = {"FRACTION": 16, "EIGHTHS": 5, "FROM": 2, "TOLERANCE": 10, "WARM": 16}
KERNELS: list[tuple[Any, list[str], dict[str, Any]]] = [
    (checksum_kernel._hash, [LONG, LONG, LONG, NUMBER], {"WORDS": 128, "BLOCKS": 16}),
    (kernels._begin, [INT, LONG, NUMBER, NUMBER], {"EXPERTS": 256, "WIDE": 32, "AT_ONCE": 128}),
    *(
        case
        for ids in (INT, LONG)
        for case in (
            (
                kernels._count_and_look_up,
                [ids, "*i1", LONG, LONG, LONG, *[NUMBER] * 3],
                {"PADDED": ids == INT, "EXPERTS": 256, "BLOCK": 256},
            ),
            (kernels._count_block, [ids, INT, NUMBER], {"EXPERTS": 256, "BLOCK": 256}),
            (kernels._deal, [ids, INT, LONG, LONG, LONG, NUMBER], {"COPIES": 3, "EXPERTS": 256, "BLOCK": 256}),
        )
    ),
    *(
        (
            padded._move,
            ["*bf16", LONG if padding else INT, INT, INT, "*bf16", *[NUMBER] * 3],
            {"PADDING": padding, "SLOTS": 8, "ROWS": 16, "COLUMNS": 128},
        )
        for padding in (True, False)
    ),
    *(
        (water_filling_kernel._split, SPLIT, {"IS_WARM": more, "HAS_BALLAST": more, **SIZES, **NUMBERS})
        for more in (False, True)
    ),
]

if __name__ == "__main__":
    for capability in (80, 90):
        for kernel, types, constants in KERNELS:
            names = kernel.arg_names
            signature = dict(zip(names, [*types, *["constexpr"] * len(constants)], strict=True))
            values = {(names.index(name),): value for name, value in constants.items()}
            triton.compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", capability, 32))
        print(capability)
