"""Gradients for the optimizer: averaged, clipped, scaled; each logical expert counted once."""
