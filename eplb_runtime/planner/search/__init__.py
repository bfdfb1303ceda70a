"""The moves, packings and bounds that policies share; compiled by numba."""
