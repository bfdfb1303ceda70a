"""Hugging Face Transformers 5: its MoE layers, checkpoint folders, expert parallelism. `settings` needs none of it."""
