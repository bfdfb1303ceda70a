"""Hugging Face Transformers 5: its MoE layers, its checkpoint folders, and small models of its classes."""

from .describe import describe, watched

__all__ = ["describe", "watched"]
