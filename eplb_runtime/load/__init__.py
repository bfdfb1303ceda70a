"""Measure: count tokens per logical expert on the device, keep a window, sum it over ranks, forecast it."""
