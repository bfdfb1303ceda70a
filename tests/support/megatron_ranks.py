"""Imported by the process that ranks with Megatron-Core are forked from: seconds of each of them.

Megatron compiles small functions of its router and its activations by ``torch.compile``, which each rank would do for
itself, for seconds. They are run as they are; a long test of `test_megatron` has the compiled ones.
"""

from __future__ import annotations

import sys

import torch._dynamo
from support.examples import FOLDER, load_example

torch._dynamo.config.disable = True
sys.path.insert(0, str(FOLDER))
load_example("megatron_gpt")
