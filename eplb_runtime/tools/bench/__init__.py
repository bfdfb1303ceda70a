"""Measurements on the user's machine: planner, dispatch, migration, training. Others: ``tests/benchmarks``."""
