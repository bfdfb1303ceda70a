"""Carry tokens to the slots that were picked for them and bring the results back in logical top-k order."""
