"""Helpers without torch.distributed: files, worker thread, tables, profiler spans, checksums, Triton."""
