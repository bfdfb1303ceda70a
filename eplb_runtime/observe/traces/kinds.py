"""What the names in a trace mean: which kernels and spans carry data between ranks, and which phase of a layer they
belong to.

Kernels go by the names of NCCL, of DeepEP (both generations, and under DeepSeek's own name), of NVSHMEM and of torch's
symmetric memory; gloo by the spans that torch's process group records. Everything else that a device runs is compute.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver", "hip_runtime", "mtia_runtime", "xpu_runtime")
ANNOTATIONS = ("user_annotation", None)
COMPUTE = "compute"
DISPATCH, COMBINE, NOTIFY = "dispatch", "combine", "notify and layout"
COLLECTIVE, POINT_TO_POINT, ONE_SIDED = "collective", "send and receive", "one-sided"

_EP = re.compile(r"\b(?:deep_ep|dpsk::ep)::|\b(?:internode_ll|internode|intranode)::\w")
_NOTIFY = re.compile(r"notify|layout|barrier|clean|mask_buffer|sync", re.IGNORECASE)
_NCCL = re.compile(r"^(?:void )?nccl(?:Dev|Sym|Symk)*Kernel|^nccl:|^ncclKernel|^RCCL|^rccl", re.IGNORECASE)
_OTHER = re.compile(r"nvshmem|symmetric_memory|multimem_|(?:one|two)_shot_all_reduce|symm_mem", re.IGNORECASE)
_SEND = re.compile(r"send|recv", re.IGNORECASE)
_GLOO = re.compile(r"^(?:gloo|mpi|ucc):(\w+)")
_PHASE = re.compile(
    r"^(?P<ours>eplb_runtime )?(?P<phase>[A-Za-z_ :,]+?)(?:\((?P<pass>[FBW])\))?"
    r"(?: layer=(?P<layer>\d+))?(?: epoch=\d+)?$"
)
_STEP = re.compile(r"^ProfilerStep#\d+$")
_MICRO_BATCH = re.compile(r"^PP:\d+(?:FULL_BACKWARD|[FBIW])(\d+)$|^(?:Forward|Backward) (\d+)$")


@lru_cache(maxsize=65536)
def kind_of(name: str, category: str) -> str:
    """Return what a kernel, copy or memset of a GPU is for, one of the words above."""
    if category != "kernel":  # by the copy engine: between devices it carries data, on one it is part of computing
        return ONE_SIDED if "PtoP" in name or "Peer" in name else COMPUTE
    plain = name.split("(", 1)[0]  # a signature names types, which say nothing of what the kernel does
    if _NCCL.search(plain):
        return POINT_TO_POINT if _SEND.search(plain) else COLLECTIVE
    if found := _EP.search(plain):
        own = plain[found.start() :]
        if _NOTIFY.search(own):
            return NOTIFY
        return COMBINE if "combine" in own else DISPATCH if "dispatch" in own else ONE_SIDED
    return ONE_SIDED if _OTHER.search(plain) else COMPUTE


@lru_cache(maxsize=65536)
def kind_of_gloo(name: str) -> str | None:
    """Return the kind of a span that a CPU's process group records; None: it is none."""
    found = _GLOO.match(name)
    return found and (POINT_TO_POINT if _SEND.search(found[1]) else COLLECTIVE)


def computes(operator: str) -> bool:
    """Return whether a CPU operator of this name computes by itself. Those that only call others, as a node of
    autograd, may wait inside; communication and its launch have spans of their own."""
    space, colon, _ = operator.partition("::")
    return bool(colon) and space not in ("c10d", "autograd", "record_param_comms", "profiler")


class PhaseKind(NamedTuple):
    """A phase that a span names. ``direction``: F forward, B backward (of inputs, or of all), W gradients of weights,
    empty: none of them. ``layer``: None where the span does not say."""

    phase: str
    direction: str = ""
    layer: int | None = None


@lru_cache(maxsize=65536)
def phase_of(name: str) -> PhaseKind | None:
    """Return the phase that a span names; None: none. Ours are ``eplb_runtime dispatch(F) layer=3 epoch=7``; those of
    DeepSeek's published traces are ``dispatch(F)``."""
    found = _PHASE.match(name)
    if found is None or not (found["ours"] or (found["pass"] and name.endswith(")"))):
        return None
    return PhaseKind(found["phase"], found["pass"] or "", None if found["layer"] is None else int(found["layer"]))


def is_step(name: str) -> bool:
    """Return whether a span is a step that the profiler has marked."""
    return _STEP.match(name) is not None


@lru_cache(maxsize=65536)
def micro_batch_of(name: str) -> int | None:
    """Return the micro-batch that a span of torch.distributed.pipelining is of; None: it is no such span."""
    found = _MICRO_BATCH.match(name)
    return None if found is None else int(found[1] or found[2])
