"""Megatron-Core 0.16: its MoE layers, its optimizers, and its distributed checkpoints, which name experts.

Megatron carries tokens and computes experts itself; columns of its routing map change places (`layer.py` in this room).
"""

from .describe import describe, watched

__all__ = ["describe", "watched"]
