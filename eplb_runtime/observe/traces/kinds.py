"""What the names in a trace mean: which kernels and spans carry data between ranks, and which phase of a layer they
belong to.

Kernels go by the names of NCCL, of DeepEP (both generations, and under DeepSeek's own name), of NVSHMEM and of torch's
symmetric memory; gloo by the spans that torch's process group records. Everything else that a device runs is compute.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

COMPUTE = "compute"
DISPATCH, COMBINE, NOTIFY = "dispatch", "combine", "notify and layout"
COLLECTIVE, POINT_TO_POINT, ONE_SIDED = "collective", "send and receive", "one-sided"

_EP = re.compile(r"\b(?:deep_ep|dpsk::ep)::|\b(?:internode_ll|internode|intranode)::\w")
_NOTIFY = re.compile(r"notify|layout|barrier|clean|mask_buffer|sync", re.IGNORECASE)
_NCCL = re.compile(r"^(?:void )?nccl(?:Dev|Sym|Symk)*Kernel|^nccl:|^ncclKernel|^RCCL|^rccl", re.IGNORECASE)
_NVSHMEM = re.compile(r"nvshmem|\bnvshmemi?_|^void nvshmemi", re.IGNORECASE)
_SYMMETRIC = re.compile(r"symmetric_memory|multimem_|(?:one|two)_shot_all_reduce|symm_mem", re.IGNORECASE)
_SEND = re.compile(r"send|recv", re.IGNORECASE)
_GLOO = re.compile(r"^(?:gloo|mpi|ucc):(\w+)")


@lru_cache(maxsize=65536)
def kind_of_kernel(name: str) -> str:
    """Return what a kernel of this name is for, one of the words above."""
    plain = name.split("(", 1)[0]  # a signature names types, which say nothing of what the kernel does
    if _NCCL.search(plain):
        return POINT_TO_POINT if _SEND.search(plain) else COLLECTIVE
    if found := _EP.search(plain):
        own = plain[found.start() :]
        if _NOTIFY.search(own):
            return NOTIFY
        return COMBINE if "combine" in own else DISPATCH if "dispatch" in own else ONE_SIDED
    if _NVSHMEM.search(plain) or _SYMMETRIC.search(plain):
        return ONE_SIDED
    return COMPUTE


def kind_of_copy(name: str) -> str:
    """A copy or a memset by the copy engine: between devices it carries data, on one it is part of computing."""
    return ONE_SIDED if "PtoP" in name or "Peer" in name else COMPUTE


@lru_cache(maxsize=65536)
def kind_of_gloo(name: str) -> str | None:
    """Of a span that a CPU's process group records; None: it is none."""
    found = _GLOO.match(name)
    if found is None:
        return None
    return POINT_TO_POINT if _SEND.search(found[1]) else COLLECTIVE


@lru_cache(maxsize=65536)
def computes(operator: str) -> bool:
    """Whether a CPU operator of this name computes by itself. Those that only call others, as a node of autograd, may
    wait inside; communication and its launch have spans of their own."""
    space, colon, _ = operator.partition("::")
    return bool(colon) and space not in ("c10d", "autograd", "record_param_comms", "profiler")


# -- phases ----------------------------------------------------------------------------------------------------------

_OURS = re.compile(
    r"^eplb_runtime (?P<phase>[a-z_ :,]+?)(?:\((?P<pass>[FBW])\))?(?: layer=(?P<layer>\d+))?(?: epoch=(?P<epoch>\d+))?$"
)
_OTHERS = re.compile(r"^(?P<phase>[A-Za-z_ ]+)\((?P<pass>[FBW])\)$")
STEP = re.compile(r"^ProfilerStep#(\d+)$")
_MICRO_BATCH = re.compile(r"^PP:\d+(?:FULL_BACKWARD|[FBIW])(\d+)$|^(?:Forward|Backward) (\d+)$")


@dataclass(frozen=True)
class PhaseKind:
    """A phase that a span names. ``direction``: F forward, B backward (of inputs, or of all), W gradients of weights,
    empty: none of them. ``layer``: None where the span does not say."""

    phase: str
    direction: str = ""
    layer: int | None = None


@lru_cache(maxsize=65536)
def phase_of(name: str) -> PhaseKind | None:
    """Of a span by its name; None: it names none. Ours are ``eplb_runtime dispatch(F) layer=3 epoch=7``; those of
    DeepSeek's published traces are ``dispatch(F)``."""
    found = _OURS.match(name) or _OTHERS.match(name)
    if found is None:
        return None
    groups = found.groupdict()
    layer = groups.get("layer")
    return PhaseKind(groups["phase"], groups["pass"] or "", None if layer is None else int(layer))


@lru_cache(maxsize=65536)
def micro_batch_of(name: str) -> int | None:
    """The micro-batch that a span of torch.distributed.pipelining is of; None: it is no such span."""
    found = _MICRO_BATCH.match(name)
    return None if found is None else int(found[1] or found[2])
