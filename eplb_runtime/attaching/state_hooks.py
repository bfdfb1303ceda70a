"""What a plain ``state_dict`` of an attached model says of itself, and what ``load_state_dict`` takes.

A rank's state dict holds its own experts, in the slots where they stand: loaded elsewhere, or after a migration, they
would become other experts without a word. So it carries which experts it holds, and is refused where they differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

KEY = "eplb_runtime_experts"
"""In the metadata of a state dict, which ``torch.save`` keeps, beside the experts module's version."""


def mark_state(experts: nn.Module, name: str, experts_here: Callable[[], list[int]]) -> None:
    """Let the state of an experts module say which logical experts its rows are.

    Args:
        name: of the module, for messages.
        experts_here: the logical expert of each of this rank's rows, now.
    """

    def saved(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        metadata[KEY] = experts_here()

    def loading(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        here = experts_here()
        own = [key for key, _ in module.named_parameters()]
        rows = [state[prefix + key].shape[0] for key in own if hasattr(state.get(prefix + key), "shape")]
        theirs = metadata.get(KEY, list(range(len(here))))
        if rows and set(rows) == {len(here)} and theirs != here:
            raise RuntimeError(
                f"the state dict holds experts {_shown(theirs)} of {name}, and here stand {_shown(here)}: a plain "
                "state dict fits only the rank and placement that it was taken at; use eplb_runtime.checkpoint, or "
                "eplb_runtime.logical_state_dict and load_logical_state_dict"
            )

    experts._register_state_dict_hook(saved)
    experts._register_load_state_dict_pre_hook(loading, with_module=True)


def _shown(experts: list[int]) -> str:
    more = ", ..." if len(experts) > 8 else ""
    return f"[{', '.join(map(str, experts[:8]))}{more}]"
