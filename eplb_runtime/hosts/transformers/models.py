"""Models of a configuration alone: what they would take, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...utils.errors import one_line


class ModelError(ValueError):
    """A configuration that no model can be made from; one line that says why."""


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
