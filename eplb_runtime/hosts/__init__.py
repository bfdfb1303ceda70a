"""One room per framework: what its MoE layers look like, where its experts are, how to get between the two.

``attach`` asks the hosts in turn and hands a description to `hosts.attaching`. Nothing else knows a framework.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..balancer.balancer import Balancer
from ..config import BalancerConfig
from ..distributed.ranks import Ranks
from . import module
from .attaching.attach import attach_stages, shard_stage
from .attaching.checks import describe_together, device_of
from .attaching.description import AttachError, Described, HostModel, Stage, spread_of, stages_of, unwrapped
from .module import MoE, stack_experts

__all__ = ["AttachError", "MoE", "attach", "shard_experts", "stack_experts"]

HOSTS = {"transformers.describe": "transformers", "megatron.describe": "megatron.core"}
"""Module in here -> the framework's; imported only where that is: what is not imported has made no model."""


def attach(
    model: nn.Module | Iterable[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    layers: Sequence[MoE] | Sequence[Sequence[MoE]] | None = None,
    config: BalancerConfig | None = None,
    ep_group: dist.ProcessGroup | None = None,
    ranks: Ranks | None = None,
    device: torch.device | str | None = None,
) -> Balancer:
    """Spread a model's experts over the EP group, and return the balancer that keeps them balanced. Collective.

    The model must be the same on every rank (same seed or checkpoint; checked). Afterwards each rank holds E/R experts
    of every MoE layer, whose forward counts tokens and sends them to the ranks of their experts. Other parameters are
    untouched. An optimizer made before keeps its groups, options and state: full expert parameters are replaced by
    local ones. Its ``step`` first reduces gradients, and a training step ends with a step of the balancer. Wrap the
    model in DistributedDataParallel after this call (expert parameters are excluded from it), or set
    ``dense_gradients="allreduce"`` and use no wrapper. For FSDP2 over EDP call ``shard_experts`` first.

    Gradients of experts are divided by the number of ranks that hold the same stages, so that they match what data
    parallelism's averaging gives the dense parameters: both are the gradient of the mean over ranks of each rank's
    loss. Experts sliced by FSDP2 are divided by R here and averaged over EDP by FSDP2: leave its
    ``set_gradient_divide_factor`` alone.

    Args:
        model: a Hugging Face Transformers (>= 5.18) model whose MoE layers follow its experts interface, or any
            module with ``layers``; or the list of this rank's pipeline stages, such modules each.
        optimizer: holds the model's parameters; element-wise (SGD, Adam, AdamW, ...). Several, as a list, step once
            each in a training step, on every rank. None: inference, load counts in evaluation too.
        layers: for modules that are not Transformers' or Megatron's, their MoE layers; a list of them for each stage.
        config: settings, the same on every rank; None: the defaults.
        ep_group: ranks among which experts are spread; None: all. With several EP groups (EDP) all hold the same
            placement, and expert gradients are averaged over them.
        ranks: in the place of ``ep_group`` where the world is not one whole model on every EP group: the job's ranks,
            this rank's EP group and pipeline stages, the divisor of gradients (`eplb_runtime.distributed.ranks.Ranks`).
        device: for a model on the meta device, where to make it: this rank's experts and the rest, nothing more. Its
            weights are NaN until you load them, with ``eplb_runtime.checkpoint.load`` or ``load_pretrained``.

    Raises:
        AttachError: there is nothing to balance, it cannot be done, or a rank has failed or died on the way; on all
            ranks, and models and optimizers are as they were.
        RuntimeError: a rank did not come to it within the timeout of the host's process group; likewise.
    """

    def describe(config: BalancerConfig) -> Described:
        if ranks is not None and ep_group is not None:
            raise AttachError("give ep_group or ranks, not both: ranks names the EP groups")
        models = [model] if isinstance(model, nn.Module) else list(model)
        of_each: list[Any] = [None] * len(models)
        if layers is not None:
            of_each = [list(own) for own in layers if not isinstance(own, MoE)] or [list(layers)]
        if len(of_each) != len(models):
            raise AttachError("layers= of several models: give a list of eplb.MoE for each, empty where one has none")
        # A stage of a pipeline may have no MoE layer; a whole model without is a mistake.
        hosts = [_describe(part, own, ranks is not None) for part, own in zip(models, of_each, strict=True)]
        of_hosts = _ranks_of_hosts(ranks, ep_group, hosts)
        stages = stages_of(of_hosts.stages, models, hosts)
        given: Sequence[Any] = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        optimizers = [unwrapped(one) for one in given if one is not None]
        if refused := [line for host in hosts for line in host.problems(optimizers, config)]:
            raise AttachError("; also, ".join(dict.fromkeys(refused)))
        if adapt := next((host.optimizer for host in hosts if host.optimizer is not None), None):
            named = [replace(layer, name=stage.prefix + layer.name) for stage in stages for layer in stage.host.layers]
            optimizers = [adapt(named, one) for one in optimizers]
        elif odd := [one for one in optimizers if not isinstance(one, torch.optim.Optimizer)]:
            raise AttachError(f"a {type(odd[0]).__name__} is no torch.optim.Optimizer")
        return Described(stages, optimizers, config, of_hosts, device_of(stages, device))

    return attach_stages(describe_together("attach", describe, config, ranks))


def shard_experts(
    model: nn.Module,
    *,
    layers: Sequence[MoE] | None = None,
    config: BalancerConfig | None = None,
    ep_group: dist.ProcessGroup | None = None,
) -> None:
    """Replace the expert parameters of every MoE layer by this rank's E/R experts, in the model. Collective.

    Only for FSDP2, which must see the experts cut before the optimizer is made: then ``fully_shard`` each experts
    module over the ranks that hold the same experts, along dimension 1, the rest as usual, make the optimizer, and
    ``attach`` with the same config and group; until then the layers must not run::

        eplb.shard_experts(model, ep_group=ep_group)
        for layer in model.model.layers:
            fully_shard(layer.mlp.experts, mesh=edp_mesh, shard_placement_fn=lambda parameter: Shard(1))
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        balancer = eplb.attach(model, optimizer, ep_group=ep_group)

    Args:
        model, layers, config, ep_group: as for ``attach``; ``config.initial_placement`` says which experts.

    Raises:
        AttachError: the experts cannot be spread; the model is as it was.
    """

    def describe(config: BalancerConfig) -> Described:
        stage = Stage(0, model, _describe(model, layers))
        if any(spread_of(layer.experts) is not None for layer in stage.host.layers):
            raise AttachError("the experts are spread already: shard_experts is called once")
        return Described([stage], [], config, Ranks.of_group(ep_group), device_of([stage], None))

    shard_stage(describe_together("shard_experts", describe, config))


def _ranks_of_hosts(given: Ranks | None, ep_group: dist.ProcessGroup | None, hosts: Sequence[HostModel]) -> Ranks:
    """What ``attach`` was given, and what frameworks know that have spread their experts themselves."""
    known = [host.ranks for host in hosts if host.ranks is not None]
    stages = sum((one.stages for one in known), ()) if known else tuple(range(len(hosts)))
    ranks = given if given is not None else replace(Ranks.of_group(ep_group), stages=stages)
    if known and ranks.stages != stages:
        raise AttachError(f"attach was given stages={ranks.stages}, and the model was made with {stages}: leave it out")
    for one in known:
        for what in ("ep", "gradient_divisor", "divided_rows", "divided_state"):
            said, is_so = getattr(ranks, what), getattr(one, what)
            if said and is_so and said != is_so:
                raise AttachError(f"attach was given {what}={said}, and the model was made with {is_so}: leave it out")
            ranks = replace(ranks, **{what: said or is_so})
    return ranks


def rooms() -> Iterator[Any]:
    """Yield our module for each framework of `HOSTS` that this process has imported, and import that module of ours."""
    for room, framework in HOSTS.items():
        if framework in sys.modules:
            yield import_module(f".{room}", __name__)


def _describe(model: nn.Module, layers: Sequence[MoE] | None, may_be_dense: bool = False) -> HostModel:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise AttachError("the model is wrapped in DistributedDataParallel: attach first, then wrap")
    if hasattr(model, "_eplb_runtime_balancer"):
        raise AttachError("the model is attached already: close() does not undo sharding; build the model again")
    if layers is not None:
        if not layers and not may_be_dense:
            raise AttachError("layers=[] names no MoE layer: nothing to balance")
        return module.describe(model, layers)
    hosts: list[HostModel] = [room.describe(model) for room in rooms()]
    if found := [host for host in hosts if host.layers or host.ranks is not None]:
        return found[0]
    if may_be_dense:
        return hosts[0] if hosts else module.describe(model, [])
    raise AttachError(
        f"{type(model).__name__} has no MoE layer that follows the Transformers experts interface: name the layers "
        "of a model of your own by attach(..., layers=[eplb.MoE(...)])"
    )
