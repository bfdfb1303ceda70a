"""What a plain ``state_dict`` of an attached model or optimizer says of itself, and what ``load_state_dict`` takes.

A rank's state dict holds its own experts, in the slots where they stand: loaded elsewhere, or after a migration, they
would become other experts without a word. So it carries which experts it holds, and is refused where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

KEY = "eplb_runtime_experts"
"""In the metadata of a model's state dict, which ``torch.save`` keeps, beside the experts module's version; in an
optimizer's beside its ``state``."""
OURS = "eplb_runtime.checkpoint, or eplb_runtime.logical_state_dict and load_logical_state_dict"
BY_THE_FRAMEWORK = "the framework's distributed checkpoints (sharded_state_dict), which name experts"


def mark_state(
    experts: nn.Module, name: str, experts_here: Callable[[], list[int]], *, made_with: list[int] | None = None
) -> None:
    """Let the state of an experts module say which logical experts its rows are.

    Args:
        name: of the module, for messages.
        experts_here: the logical expert of each of this rank's rows, now.
        made_with: where the host has made this rank's experts alone, each as tensors of its own: which they were, and
            are in a state dict from before. None: rows of tensors, and all experts before.
    """

    def saved(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        metadata[KEY] = here = experts_here()
        if made_with is not None and here != made_with:
            # Shapes fit a model that nobody balances, where these would be other experts: it shall not know a key.
            state[prefix + KEY] = torch.tensor(here)

    def loading(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        here = experts_here()
        own = [key for key, _ in module.named_parameters()]
        if made_with is not None:
            # Without a version the framework has put it together, from a checkpoint that names experts.
            theirs = metadata.get(KEY, made_with if "version" in metadata else here)
            marked = state.pop(prefix + KEY, None)  # without the metadata, which a copy of the dict does not have
            theirs = theirs if marked is None else marked.tolist()
            if theirs != here and any(prefix + key in state for key in own):
                raise RuntimeError(refusal("state dict", name, theirs, here, BY_THE_FRAMEWORK))
            return
        rows = [state[prefix + key].shape[0] for key in own if hasattr(state.get(prefix + key), "shape")]
        theirs = metadata.get(KEY, list(range(len(here))))
        if rows and set(rows) == {len(here)} and theirs != here:
            raise RuntimeError(refusal("state dict", name, theirs, here))

    experts._register_state_dict_hook(saved)
    experts._register_load_state_dict_pre_hook(loading, with_module=True)


def mark_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], experts_here: Callable[[str], list[int]]
) -> list[RemovableHandle]:
    """Let the state of an optimizer say which logical experts its rows are.

    Args:
        names: of the expert parameters, by the parameter's id.
        experts_here: as for `mark_state`, of a parameter.

    Returns:
        How to end it.
    """

    def held() -> list[tuple[str, Tensor] | None]:
        """What the optimizer holds in order; None: no experts."""
        every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [(names[id(parameter)], parameter) if id(parameter) in names else None for parameter in every]

    def saved(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        state[KEY] = {expert[0]: experts_here(expert[0]) for expert in held() if expert is not None}

    def loading(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        for number, expert in zip(numbers, held(), strict=False):  # another number of them is refused by torch
            if expert is None or not state["state"].get(number):
                continue
            (name, parameter), values = expert, state["state"][number].values()
            here = experts_here(name)
            rows = [value.shape[0] for value in values if isinstance(value, Tensor) and value.ndim == parameter.ndim]
            theirs = state.get(KEY, {}).get(name, list(range(rows[0] if rows else len(here))))
            if rows and theirs != here:
                raise RuntimeError(refusal("optimizer's state dict", name, theirs, here))

    return [
        optimizer.register_state_dict_post_hook(saved),
        optimizer.register_load_state_dict_pre_hook(loading),
    ]


def refusal(what: str, name: str, theirs: list[int], here: list[int], instead: str = OURS) -> str:
    """What is said of state that is of other experts than those that stand here."""
    return (
        f"the {what} holds experts {_shown(theirs)} of {name}, and here stand {_shown(here)}: a plain state dict fits "
        f"only the rank and placement that it was taken at; use {instead}"
    )


def _shown(experts: list[int]) -> str:
    more = ", ..." if len(experts) > 8 else ""
    return f"[{', '.join(map(str, experts[:8]))}{more}]"
