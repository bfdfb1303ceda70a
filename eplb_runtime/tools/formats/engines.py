"""The engines whose files are known here, in the order they are asked. Megatron and slime come before SGLang: folders
of SGLang may hold other ``.pt`` files, those of slime hold nothing else."""

from __future__ import annotations

from .base import Engine
from .megatron import Megatron
from .own import Own
from .sglang import SGLang
from .slime import Slime
from .tensorrt_llm import TensorRTLLM
from .vllm import VLLM

OWN = Own()
ENGINES: tuple[Engine, ...] = (OWN, Megatron(), Slime(), SGLang(), VLLM(), TensorRTLLM())
