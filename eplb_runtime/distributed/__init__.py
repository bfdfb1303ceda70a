"""Ranks of a job: their process groups, store, agreement, step tag, links, and transports of expert bytes."""
