"""Compile every kernel for GPUs that need not be here: registers of a thread, and bytes that find no room in them.

What a kernel spills goes through memory, and it does so in each launch. No driver is asked, so any machine will do.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from eplb_runtime.moe.dispatch import kernels as moves
from eplb_runtime.moe.routing import kernels as routing
from eplb_runtime.utils.triton import tl, triton

CAPABILITIES = (80, 90, 100)
"""Ampere, Hopper and Blackwell: ten times the compute capability."""

LONG, INT, NUMBER = "*i64", "*i32", "i32"
OF_EXPERTS = {"EXPERTS": 256, "BLOCK": routing._BLOCK}
SUMMED = {"TOP_K": 8, "COLUMNS": 1024}


def _of_slots(dedup: bool) -> dict[str, Any]:
    return {"TOP_K": 8, "SLOTS": 512, "RANKS": 64 * dedup, "BLOCK": moves._BLOCK}


SUMS = (moves._sum,)
"""Kernels whose products are rounded before they are added."""
ASSERTING = (routing.count_slots, routing._count_and_map)
"""Kernels that end the job on a slot or an expert that there is not."""


@dataclass(frozen=True)
class Compiled:
    """A kernel for one kind of GPU.

    Args:
        ptx: what the GPU's assembler is given.
        registers: of a thread.
        spilled_bytes: of a thread, written to memory and read again for lack of registers.
    """

    ptx: str
    registers: int
    spilled_bytes: int


def kernels() -> list[tuple[Any, list[str], dict[str, Any]]]:
    """All of them: a kernel, types of its arguments, and the constants that follow."""
    return [
        *(
            case
            for ids in (INT, LONG)
            for case in (
                (
                    routing._count_and_map,
                    [ids, "*i1", LONG, LONG, LONG, *[NUMBER] * 2],
                    {"TOP_K": 8, "PADDED": ids == INT, **OF_EXPERTS},
                ),
                (routing.count_slots, [ids, INT, *[NUMBER] * 3], {"TOP_K": 8, "SLOTS": 256, "RANKS": 0, "BLOCK": 256}),
                (routing._deal, [ids, INT, LONG, LONG, LONG, NUMBER], {"COPIES": 3, **OF_EXPERTS}),
            )
        ),
        *(
            case
            for dedup in (True, False)
            for case in (
                (routing.count_slots, [LONG, INT, *[NUMBER] * 3], _of_slots(dedup)),
                (
                    routing.begin_slots,
                    [INT, LONG, NUMBER, "i64", *[NUMBER] * 3],
                    {"SLOTS": 512, "RANKS": 64 * dedup, "HAS_TAG": dedup, "WIDE": 32, "AT_ONCE": 128},
                ),
                (moves._place, [LONG, INT, *[LONG] * 5, *[NUMBER] * 5], {**_of_slots(dedup), "SOME": 64}),
                (
                    moves._arrive,
                    [*[LONG] * 5, INT, *[NUMBER] * 4],
                    {"HAS_SOURCE_ROWS": dedup, "CELLS": 512, "RANKS": 64, "BLOCK": moves._ROWS, "PARTS": moves._PARTS},
                ),
            )
        ),
        *(
            (
                moves._sum,
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


def compiled(
    kernel: Any, types: Sequence[str], constants: dict[str, Any], capability: int, options: dict[str, Any] | None = None
) -> Compiled:
    """Compile one kernel.

    Args:
        types: of its arguments, as Triton writes them.
        constants: those that follow.
        options: of Triton; None: those with which it is launched.

    Raises:
        RuntimeError: the assembler refuses it, or says nothing of registers.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if options is None:
        options = {"enable_fp_fusion": False} if kernel in SUMS else dict(routing.ASSERT) if kernel in ASSERTING else {}
    names = kernel.arg_names
    signature = dict(zip(names, [*types, *["constexpr"] * len(constants)], strict=True))
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values)
    ptx = str(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"])
    return Compiled(ptx, *_registers(ptx, capability))


def _registers(ptx: str, capability: int) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, by the assembler that Triton brings along."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"^[.]target (\w+)", ptx, re.MULTILINE)
    assert target is not None
    with TemporaryDirectory() as folder:
        code = Path(folder) / "kernel.ptx"
        code.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", "--gpu-name", target[1], str(code), "-o", f"{code}.cubin"]
        said = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False).stdout
    used = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    if used is None or spilled is None:
        raise RuntimeError(f"the assembler says nothing of registers: {' '.join(said.split())[-300:]}")
    return int(used[1]), int(spilled[1])
