"""Replica slots: weights-only copies of experts, kept fresh from their homes, gradients brought home."""
