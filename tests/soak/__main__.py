"""Training under faults at each point of the protocol, beside an undisturbed twin: ``python -m tests.soak``.

Exit status 1: a bit differs, ranks part, a job ends but by a kill, or a thing hangs or grows.
"""

from tests.benchmarks.harness import command

from .lives import run

if __name__ == "__main__":
    command(run)
