"""Compile every kernel for compute capabilities 8.0, 9.0 and 10.0, which needs no GPU; prints these, and on stderr the
registers and spilled bytes of each kernel."""

from __future__ import annotations

import sys

from compiled_kernels import ASSERTING, CAPABILITIES, SUMS, compiled, kernels

VARYING = {"choices", "blocks", "tag"}
"""Numbers that differ from batch to batch."""
FEW = 128
"""Spilled bytes of a thread that no kernel has more of; placing had 716 in larger blocks."""

if __name__ == "__main__":
    for kernel, types, _ in kernels():
        # A number that is 1, or a multiple of 16, in some batch would have a kernel of its own compiled then.
        for parameter, of in zip(kernel.params, types, strict=False):
            if parameter.name in VARYING and not of.startswith("*"):
                assert parameter.do_not_specialize, f"{kernel.__name__}: {parameter.name}"
    for capability in CAPABILITIES:
        for kernel, types, constants in kernels():
            done = compiled(kernel, types, constants, capability)
            print(
                f"sm_{capability} {kernel.__name__}: {done.registers} registers, {done.spilled_bytes} B",
                file=sys.stderr,
            )
            assert done.registers > 0
            assert done.spilled_bytes <= FEW, f"{kernel.__name__} {constants}: {done.spilled_bytes} bytes spilled"
            sums, code = kernel in SUMS, done.ptx
            assert not (sums and "fma.rn.f" in code), "a product that is added at once is not rounded"
            assert not sums or ("cvt.rn.bf16" in code) == (types[3] == "*bf16")
            assert ("__assertfail" in code) == (kernel in ASSERTING)
            if sums and constants["WEIGHED"] and types[0] == "*fp32":
                fused = compiled(kernel, types, constants, capability, {"enable_fp_fusion": True})
                assert "fma.rn.f" in fused.ptx
        print(capability)
