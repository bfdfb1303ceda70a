"""Compile every kernel for compute capabilities 8.0, 9.0 and 10.0, and print these: no GPU and no driver is asked."""

from typing import Any

from eplb_runtime.moe import kernels
from eplb_runtime.utils.triton import tl, triton

CAPABILITIES = (80, 90, 100)
"""Ampere, Hopper and Blackwell: ten times the compute capability."""

LONG, INT, NUMBER = "*i64", "*i32", "i32"
OF_EXPERTS = {"EXPERTS": 256, "BLOCK": kernels.BLOCK}
SUMMED = {"TOP_K": 8, "COLUMNS": 1024}


def _of_slots(dedup: bool) -> dict[str, Any]:
    return {"TOP_K": 8, "SLOTS": 512, "RANKS": 64 * dedup, "BLOCK": kernels.PLACED}


SUMS = (kernels._sum,)
"""Kernels whose products are rounded before they are added."""
VARYING = {"choices", "blocks", "tag"}
"""Numbers that differ from batch to batch."""
ASSERTING = (kernels.count_slots, kernels._count_and_map)
"""Kernels that end the job on a slot or an expert that there is not."""


def cases() -> list[tuple[Any, list[str], dict[str, Any]]]:
    """All of them: a kernel, types of its arguments, and the constants that follow."""
    return [
        *(
            case
            for ids in (INT, LONG)
            for case in (
                (
                    kernels._count_and_map,
                    [ids, "*i1", LONG, LONG, LONG, *[NUMBER] * 2],
                    {"TOP_K": 8, "PADDED": ids == INT, **OF_EXPERTS},
                ),
                (kernels.count_slots, [ids, INT, *[NUMBER] * 3], {"TOP_K": 8, "SLOTS": 256, "RANKS": 0, "BLOCK": 256}),
                (kernels._deal, [ids, INT, LONG, LONG, LONG, NUMBER], {"COPIES": 3, **OF_EXPERTS}),
            )
        ),
        *(
            case
            for dedup in (True, False)
            for case in (
                (kernels.count_slots, [LONG, INT, *[NUMBER] * 3], _of_slots(dedup)),
                (
                    kernels.begin_slots,
                    [INT, LONG, NUMBER, "i64", *[NUMBER] * 3],
                    {"SLOTS": 512, "RANKS": 64 * dedup, "HAS_TAG": dedup, "WIDE": 32, "AT_ONCE": 128},
                ),
                (kernels._place, [LONG, INT, *[LONG] * 5, *[NUMBER] * 5], {**_of_slots(dedup), "SOME": 64}),
                (
                    kernels._arrive,
                    [*[LONG] * 5, INT, *[NUMBER] * 4],
                    {"HAS_SOURCE_ROWS": dedup, "CELLS": 512, "RANKS": 64, "BLOCK": kernels.ROWS, "PARTS": 4},
                ),
            )
        ),
        *(
            (
                kernels._sum,
                [of, LONG, weights, out, NUMBER],
                {"WEIGHED": weights != LONG, "HERE": here, "PRODUCT": product, "SUM": wide, **SUMMED},
            )
            for here, of, weights, out, product, wide in (
                (False, "*bf16", "*bf16", "*bf16", tl.bfloat16, tl.float32),
                (False, "*bf16", "*fp32", "*fp32", tl.float32, tl.float32),
                (False, "*fp16", LONG, "*fp16", tl.float16, tl.float32),
                (False, "*fp32", "*fp32", "*fp32", tl.float32, tl.float32),
                (False, "*fp64", "*fp32", "*fp64", tl.float64, tl.float64),
                (True, "*bf16", "*bf16", "*bf16", tl.bfloat16, tl.float32),
                (True, "*bf16", "*fp32", "*bf16", tl.float32, tl.float32),
                (True, "*bf16", LONG, "*bf16", tl.bfloat16, tl.float32),
            )
        ),
    ]


def compiled(kernel: Any, types: list[str], constants: dict[str, Any], capability: int, **options: bool) -> str:
    """What a kernel is to the GPU's assembler.

    Args:
        types: of its arguments, as Triton writes them.
        constants: those that follow.
        options: of Triton, in place of those with which it is launched.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    usual = {"enable_fp_fusion": False} if kernel in SUMS else dict(kernels.ASSERT) if kernel in ASSERTING else {}
    names = kernel.arg_names
    signature = dict(zip(names, [*types, *["constexpr"] * len(constants)], strict=True))
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    target = GPUTarget("cuda", capability, 32)
    return str(triton.compile(source, target=target, options=usual | options).asm["ptx"])


if __name__ == "__main__":
    for kernel, types, _ in cases():
        # A number that is 1, or a multiple of 16, in some batch would have a kernel of its own compiled then.
        for parameter, of in zip(kernel.params, types, strict=False):
            if parameter.name in VARYING and not of.startswith("*"):
                assert parameter.do_not_specialize, f"{kernel.__name__}: {parameter.name}"
    for capability in CAPABILITIES:
        for kernel, types, constants in cases():
            code, sums = compiled(kernel, types, constants, capability), kernel in SUMS
            assert not (sums and "fma.rn.f" in code), "a product that is added at once is not rounded"
            assert not sums or ("cvt.rn.bf16" in code) == (types[3] == "*bf16")
            assert ("__assertfail" in code) == (kernel in ASSERTING)
            if sums and constants["WEIGHED"] and types[0] == "*fp32":
                assert "fma.rn.f" in compiled(kernel, types, constants, capability, enable_fp_fusion=True)
        print(capability)
