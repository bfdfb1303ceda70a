"""Small traces whose answers are known, in the form that torch.profiler writes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

HOST, GPU = 4711, 0
FIRST = 5_000_000.0
"""When they begin: times of a trace count from some boot or other."""


def span(
    name: str, category: str, begin: float, end: float, tid: Any = 1, pid: Any = HOST, **more: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": FIRST + begin,
        "dur": end - begin,
    } | more


def kernel(name: str, begin: float, end: float, stream: int, launched: int) -> dict[str, Any]:
    return span(name, "kernel", begin, end, stream, GPU, args={"correlation": launched})


def launch(begin: float, correlation: int, tid: int = 1) -> dict[str, Any]:
    return span("cudaLaunchKernel", "cuda_runtime", begin, begin + 2, tid, args={"correlation": correlation})


DISPATCH = "void deep_ep::internode::dispatch<false, 8>(int4*, float*)"
COMBINE = "void deep_ep::internode::combine<false, 8>(int4*, float*)"
NOTIFY = "void deep_ep::internode::notify_dispatch<false, 8>(int const*)"
GEMM = "void cutlass::device_kernel<Gemm>(Gemm::Params)"
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def gpu_events() -> list[dict[str, Any]]:
    """What it holds (us): span 0 to 400.

    Stream 7 computes 0-100, 150-250 and 260-300, stream 20 40-60 too: computing 240. Stream 20 sends 60-150 (notify
    60-70, dispatch 70-150) and 290-400 (combine); stream 24 140-160 (all-reduce): communication 60-160 and 290-400,
    210; hidden 60-100, 150-160, 290-300: 60; exposed 150. Idle: 250-260.
    """
    host = [
        span("ProfilerStep#3", "user_annotation", -50, 300),
        span("eplb_runtime compute(F) layer=2 epoch=1", "user_annotation", -40, -30),
        launch(-39, 1),
        launch(-37, 2),
        span("eplb_runtime dispatch(F) layer=2 epoch=1", "user_annotation", -25, 20),
        launch(-20, 3),
        launch(-10, 4),
        span("inside, of no phase", "user_annotation", -8, -2),
        launch(-5, 5),
        span("eplb_runtime compute(F) layer=3 epoch=1", "user_annotation", 30, 40),
        launch(31, 6),
        launch(33, 7),
        launch(60, 8),
    ]
    device = [
        kernel(GEMM, 0, 100, 7, 1),
        span("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 40, 60, 20, GPU, args={"correlation": 2}),
        kernel(NOTIFY, 60, 70, 20, 3),
        kernel(DISPATCH, 70, 150, 20, 4),
        kernel(REDUCE, 140, 160, 24, 5),
        kernel(GEMM, 150, 250, 7, 6),
        kernel(GEMM, 260, 300, 7, 7),
        kernel(COMBINE, 290, 400, 20, 8),
    ]
    return [*host, *device]


def cpu_events() -> list[dict[str, Any]]:
    """What it holds (us): span 0 to 100.

    The training thread computes 0-30 and 40-60, waits in a node of autograd until 100; another computes 20-35:
    computing 55. gloo sends 25-55 and 60-100: communication 70, hidden 25, exposed 45. Idle: nothing.
    """
    return [
        span("ProfilerStep#1", "user_annotation", -5, 110, 1),
        span("eplb_runtime dispatch(F) layer=0 epoch=0", "user_annotation", 24, 58, 1),
        span("eplb_runtime combine(B) layer=0 epoch=0", "user_annotation", 59, 101, 1),
        span("aten::linear", "cpu_op", 0, 30, 1),
        span("aten::mm", "cpu_op", 1, 29, 1),
        span("aten::mm", "cpu_op", 40, 60, 1),
        span("c10d::alltoall_base_", "cpu_op", 24, 25, 1),
        span("_CombineBackward", "cpu_op", 59, 100, 1),
        span("aten::sort", "cpu_op", 20, 35, 2),
        span("gloo:all_to_all", "user_annotation", 25, 55, 3),
        span("gloo:all_to_all", "user_annotation", 60, 100, 3),
    ]


def write(path: Path, events: list[dict[str, Any]], **head: Any) -> Path:
    """As torch writes it; gzipped if its name says so."""
    text = json.dumps({"schemaVersion": 1, **head, "traceEvents": events, "traceName": str(path)}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def of_rank(path: Path, rank: int, events: list[dict[str, Any]], base: int = 10**18) -> Path:
    return write(path, events, distributedInfo={"backend": "nccl", "rank": rank}, baseTimeNanoseconds=base)
