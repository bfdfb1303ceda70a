"""Gradients on their way to the optimizer: averaged, clipped, scaled; each logical expert counted once."""
