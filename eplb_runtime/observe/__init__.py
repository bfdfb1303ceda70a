"""What a job shows of itself; it listens, and never makes the job wait."""
