"""Imported by the process that ranks with Megatron-Core are forked from: seconds of each of them."""

from __future__ import annotations

import sys

from examples import FOLDER, load_example

sys.path.insert(0, str(FOLDER))
load_example("megatron_gpt")
