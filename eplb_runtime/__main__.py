"""``python -m eplb_runtime``: the command ``eplb-runtime``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
