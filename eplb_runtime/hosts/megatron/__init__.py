"""Megatron-Core 0.16 to 0.19: its MoE layers, its optimizers, and its distributed checkpoints, which name experts.

Megatron carries tokens and computes experts itself; columns of its routing map change places (`layer.py` in this room).
`describe.py` is asked for a model's experts. `settings.py` runs without Megatron.
"""
