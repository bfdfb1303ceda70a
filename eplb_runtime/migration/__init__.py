"""Move experts: a schedule of bounded rounds, an engine that stages, verifies, agrees and commits, and transports."""
