"""Imported by the process that ranks are forked from: what numba would load in each of them, seconds of every test.

Nothing of it runs in threads, which would not survive a fork.
"""

from __future__ import annotations

from eplb_runtime.balancer.planner_process import compile_planner

compile_planner()
