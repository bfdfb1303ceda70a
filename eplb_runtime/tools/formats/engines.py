"""The engines whose files are known here, in the order they are asked: Hygon before SGLang, whose key it uses, and
Megatron and slime, too: folders of the one may hold other ``.pt`` files, those of the other hold nothing else."""

from __future__ import annotations

from .base import Engine
from .hygon import Hygon
from .megatron import Megatron
from .own import Own
from .sglang import SGLang
from .slime import Slime
from .tensorrt_llm import TensorRTLLM
from .vllm import VLLM
from .vllm_ascend import VLLMAscend

OWN = Own()
ENGINES: tuple[Engine, ...] = (OWN, Hygon(), Megatron(), Slime(), SGLang(), VLLM(), VLLMAscend(), TensorRTLLM())
