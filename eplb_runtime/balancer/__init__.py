"""The slow clock: what users call, decisions and their guard, gradients on their way to the optimizer."""
