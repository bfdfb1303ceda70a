"""The engines whose files are known here, in the order in which they are asked."""

from __future__ import annotations

from .base import Engine
from .own import Own
from .sglang import SGLang
from .tensorrt_llm import TensorRTLLM
from .vllm import VLLM
from .vllm_ascend import VLLMAscend

OWN = Own()
ENGINES: tuple[Engine, ...] = (OWN, SGLang(), VLLM(), VLLMAscend(), TensorRTLLM())
