"""Imported by the process that ranks with Megatron-Core's newer version are forked from: seconds of each of them."""

from support.newer_megatron import importable

importable()
from support import megatron_ranks  # noqa: E402, F401
