"""Measurements on this machine, one file a subject, the public peers beside ours in the same run."""
