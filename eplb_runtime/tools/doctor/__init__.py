"""What a job will find usable on this machine."""
