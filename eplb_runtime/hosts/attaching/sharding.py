"""Cut a model's experts to those of this rank: as a part of ``attach``, or before it, for FSDP2 over EDP."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...config import BalancerConfig, take_trial
from ...distributed.process_groups import ProcessGroups
from ...distributed.ranks import Ranks
from ...moe.experts.optimizer_state import replace_parameter
from ...placement import Placement
from ...utils.errors import one_line
from .checks import check, raise_on_all, undone_on_failure
from .description import AttachError, MoELayer, Spread, Stage, mark_spread
from .meta import blank
from .self_test import problems_of, try_layers
from .trial import layout_of
from .undo import Before

logger = logging.getLogger("eplb_runtime")


def shard_stage(
    stage: Stage, *, config: BalancerConfig, ep_group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """``shard_experts`` for a model whose host has described it; arguments and errors as there."""
    host = stage.host
    try:
        # A communicator of a job that leaves part of the world out would stay to the end of the process.
        ranks, layers = Ranks.of_group(ep_group), [len(host.layers)]
        if (trial := take_trial(keep=True)) is not None:
            config, ranks = layout_of(trial, config, ranks)
        groups = ProcessGroups(ranks, layers, device, config.timeout_seconds, only_control=True)
    except Exception as error:
        raise AttachError(one_line(error, with_type=True)) from error
    with undone_on_failure(groups, [Before([stage.model], []).restore]):
        placement = check([stage], [], config, groups, device)
        problems = problems_of(host.layers, try_layers(host.layers, config.guard))
        for problem in problems if config.guard == "warn" else ():
            logger.warning("%s", problem)
        raise_on_all("" if config.guard == "warn" else next(iter(problems), ""), groups)
        rows_LH = rows_of_rank(placement, groups.job.ep_rank)
        for layer, rows in zip(host.layers, rows_LH, strict=True):
            for name in layer.parameters:
                layer.put(name, cut_rows(layer, name, rows, device, trial is not None and trial.layout == "single"))
            mark_spread(layer.experts, Spread(len(rows), placement.digest(), groups.job.ep_ranks))
    groups.close()


def rows_of_rank(placement: Placement, rank: int) -> Tensor:
    """int64 ``[L, E/R]``: the logical experts at home on a rank."""
    return torch.from_numpy(placement.homes_LRH[:, rank].astype("int64"))


def cut_rows(layer: MoELayer, name: str, rows: Tensor, device: torch.device, keep: bool = False) -> nn.Parameter:
    """These experts' rows of a full parameter. ``keep`` the very parameter, which a loop may have from before, where
    it has memory: all experts are here."""
    full = layer.parameter(name)
    if keep and not full.is_meta and name not in layer.by_expert:
        return full
    stack = layer.of_experts(name, full.detach())
    if full.is_meta:
        local = blank(torch.Size([len(rows), *stack.shape[1:]]), full.dtype, device)
        return nn.Parameter(local, requires_grad=full.requires_grad)
    return nn.Parameter(stack[rows.to(full.device)].contiguous(), requires_grad=full.requires_grad)


def install(
    layer: MoELayer, name: str, local: nn.Parameter, rows: Tensor | None, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Put a parameter in the place of an expert parameter, in module and optimizer; ``rows`` of what was there are its
    own."""
    old = layer.parameter(name)
    local.__dict__.update(vars(old))  # what people write on parameters (no weight decay, groups)

    def take(state: Tensor) -> Tensor:
        return state if rows is None else layer.of_experts(name, state.detach())[rows.to(state.device)].contiguous()

    for optimizer in optimizers:
        if any(p is old for group in optimizer.param_groups for p in group["params"]):
            replace_parameter(optimizer, old, local, take)
    layer.put(name, local)


STEADY_ROW_BYTES = 128
"""Two of the widest vectors of a CPU (AVX-512). Elementwise loops take two at a time and compute what is left at the
end otherwise, with other last bits; with rows of this many bytes nothing is ever left, wherever a row stands."""


def note_of_odd_rows(parameters: Mapping[str, Tensor]) -> str:
    """Return a line about odd rows, where there are such: on a CPU the last bits of a result depend on their place."""
    odd = {}
    for name, tensor in parameters.items():
        widths = [width * tensor.element_size() for width in tensor.shape[1:]]
        if tensor.device.type == "cpu" and tensor.ndim > 2 and any(width % STEADY_ROW_BYTES for width in widths):
            odd[name] = " and ".join(map(str, widths))
    if not odd:
        return ""
    first, rows = next(iter(odd.items()))
    return (
        f"{len(odd)} expert tensors, such as {first}, make rows of {rows} bytes: on a CPU results may differ in the "
        f"last bits by placement; widths that are multiples of {STEADY_ROW_BYTES} bytes avoid it"
    )
