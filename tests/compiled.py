"""Imported by the process that ranks are forked from: what numba would load in each of them, seconds of every test.

Nothing of it runs in threads, which would not survive a fork.
"""

from __future__ import annotations

from eplb_runtime.balancer.compile_ahead import compile_here

for policy in ("incremental", "static"):
    compile_here(policy)
