"""Imported last by the process that ranks are forked from: a rank's collector leaves alone what is there by then, which
was four tenths of what a rank did."""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
