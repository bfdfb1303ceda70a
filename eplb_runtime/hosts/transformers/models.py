"""Small models of the library's own classes, with random weights: something to verify with when no model is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...utils.errors import one_line

FAMILIES = ("olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")

_COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "olmoe": {"intermediate_size": 32},
    "qwen3_moe": {"intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True},
    "mixtral": {"intermediate_size": 32},
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "gpt_oss": {"intermediate_size": 32, "head_dim": 16, "sliding_window": 16},
}
_EXPERTS_OF = {
    "olmoe": "num_experts",
    "qwen3_moe": "num_experts",
    "mixtral": "num_local_experts",
    "deepseek_v3": "n_routed_experts",
    "gpt_oss": "num_local_experts",
}


class ModelError(ValueError):
    """A configuration that no model can be made from; one line that says why."""


def small_config(family: str, experts: int) -> Any:
    """Return the configuration of a small causal language model of two MoE layers, two experts a token."""
    from transformers import AutoConfig

    own = {**_OF_FAMILY[family], _EXPERTS_OF[family]: experts, "num_experts_per_tok": 2}
    return AutoConfig.for_model(family, **{**_COMMON, **own})


def read_config(path: str | Path) -> Any:
    """Return a model's configuration from its folder or ``config.json``; nothing is fetched, no code of it is run."""
    from transformers import AutoConfig

    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ModelError(f"{file}: no such file: give a folder with a config.json, or that file")
    try:
        return AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises whatever its parsers meet
        raise ModelError(f"{file}: not a configuration that Transformers knows: {one_line(error)}") from None


def meta_model(config: Any, dtype: torch.dtype) -> nn.Module:
    """Return a causal language model of this configuration on the meta device: shapes and no memory."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except MemoryError:
        raise
    except Exception as error:  # sizes that no model has end in whatever they meet on the way
        raise ModelError(f"no causal language model can be made of it: {one_line(error)}") from None
    return model


def choices_per_token(config: Any) -> int:
    """K, experts that a router picks for a token; 0: the configuration does not say."""
    return int(getattr(config.get_text_config(), "num_experts_per_tok", 0) or 0)


def make_model(config: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return a causal language model of this configuration with random weights and routers that prefer some experts."""
    from transformers import AutoModelForCausalLM

    try:
        with device:
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise ModelError(f"no causal language model can be made of it: {one_line(error)}") from None
    model.to(dtype)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # type: ignore[operator]
    with torch.no_grad():
        # Fresh routers barely prefer anything and biases are zero: make everything count.
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "gate.weight" in name or "router.weight" in name:
                parameter.normal_(std=0.3)
    return model
