"""Ranks of a job: their process groups, store, agreement, watchdog, links, and transports of expert bytes."""
