"""Hugging Face Transformers 5: its MoE layers, its checkpoint folders, and small models of its classes."""

from .describe import describe

__all__ = ["describe"]
