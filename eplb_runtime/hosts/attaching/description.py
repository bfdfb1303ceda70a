"""How a host describes its model to the rest of this room: where the experts are and how to compute with them."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import ModuleType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ...balancer.balancer import Balancer
from ...checkpoint.stream import Weight
from ...config import BalancerConfig, Trial
from ...distributed.process_groups import ProcessGroups
from ...distributed.ranks import Job, Ranks
from ...load.clock import ExpertClock
from ...moe.experts.compute import Compute
from ...moe.experts.optimizer_state import StateOwner

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Hidden states ``[T, D]``, expert ids and router weights ``[T, K]`` -> ``[T, D]``."""
End = Callable[[], None]
Watch = Callable[[Callable[[Tensor, int, int], None], ExpertClock], End]
"""Lets another see the experts chosen in each forward, int64 ``[T, K]`` or bool ``[T, E]``, with columns and K, and a
clock measure the work of experts."""
recorded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose load `eplb_runtime.record` is writing down."""


class AttachError(ValueError):
    """The model, optimizer or job cannot be balanced as it is; one line that says why and what would help."""


def refusing(line: str) -> Callable[..., Any]:
    """Return a function that raises AttachError with this line, however it is called: to replace a method."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AttachError(line)

    return refuse


@dataclass(frozen=True)
class MoELayer:
    """One MoE layer as its host describes it; of a model whose load is only recorded (`record`), without what computes.

    Args:
        compute: runs rows through local slots with the module's own code; None: the host carries and computes tokens
            itself (`moe.layer.HostDispatchedLayer`).
        live_weights: the weights that the module computes with now, ``[E/R, ...]`` each and plain, where its parameters
            are not that themselves; gradients reach the parameters through them as the host wants them. None: the
            parameters.
        slots: where the experts of this rank are tensors of their own: names of the tensors of each home slot, in
            order, by what they are to an expert; ``parameters`` has all of them. Such a model is made with its experts
            spread already, in logical order.
        by_expert: how whole parameters are seen as ``[E, ...]`` whose own first dimension is another. They are
            ``[E/R, ...]`` from then on.
        run: the module's own way, before ``install``; None: it cannot be called alone.
        watch: looks at that way's forwards, in place of ``install``; None: it does not run where all experts are on
            each rank.
        experts_here, ep_size: of a recorded layer: experts in the tensors of ``experts``, and over how many ranks they
            are spread (0: as many as hold all of them so).
    """

    name: str  # of the experts module within the model
    experts: nn.Module  # holds the expert weights; its parameters are replaced by the local ones
    num_experts: int  # E
    parameters: tuple[str, ...] = ()  # names, within ``experts``, of the tensors whose first dimension is E
    compute: Compute | None = None
    install: Callable[[Any], None] = lambda layer: None  # puts the expert-parallel way in the place of the own forward
    live_weights: Callable[[], Sequence[Tensor]] | None = None
    slots: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    alignment: int = 1  # ``compute`` wants every slot's rows filled up to a multiple of so many
    by_expert: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    run: Run | None = None
    watch: Watch | None = None
    patched: tuple[Any, ...] = ()  # what ``install`` sets attributes of and is no module
    replaced: Mapping[str, weakref.ref[Tensor]] = field(default_factory=dict)  # parameters of before, by name
    experts_here: int = 0
    ep_size: int = 0

    def parameter(self, name: str) -> nn.Parameter:
        """Return the tensor that ``experts`` has under this dotted name now, perhaps for one call alone."""
        found: nn.Parameter = attrgetter(name)(self.experts)
        return found

    def of_experts(self, name: str, whole: Tensor) -> Tensor:
        """Return the full parameter of this name, or its optimizer state, viewed as ``[E, ...]``."""
        return self.by_expert[name](whole) if name in self.by_expert else whole

    def put(self, name: str, parameter: nn.Parameter) -> None:
        """Set the attribute of ``experts`` with this dotted name to ``parameter``."""
        inside, _, own_name = name.rpartition(".")
        setattr(self.experts.get_submodule(inside), own_name, parameter)


class HostOptimizer(StateOwner, Protocol):
    """An optimizer of the framework's own, which is no torch optimizer but steps with some ``inside``, which step
    experts. ``param_groups``: the model's expert parameters that it steps. ``divides_over``: the ranks that
    ``ranges_of`` is of, in their order; empty: no expert is divided. ``patched``: what `join` sets attributes of."""

    patched: Sequence[Any]

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def inside(self) -> Sequence[torch.optim.Optimizer]: ...

    @property
    def divides_over(self) -> tuple[int, ...]: ...

    def join(
        self,
        before: Callable[[], None],
        after: Callable[[], None],
        square_of_experts: Callable[[Callable[[Tensor], Tensor | None]], Tensor],
        has_moved: Callable[[], bool],
        experts_here: Callable[[Tensor], list[int]],
    ) -> Any:
        """Call ``before`` and ``after`` around each step from now on, and clip by a norm that does not depend on the
        placement. ``square_of_experts(gradient_of)`` gives the experts' part: the squared norm over all logical experts
        of ``gradient_of(parameter)``, a tensor or None. ``has_moved()``: whether experts are in other slots than where
        the host put them. ``experts_here(parameter)``: the logical experts in this rank's slots. Return an object whose
        ``remove()`` ends the clipping."""


AnyOptimizer = torch.optim.Optimizer | HostOptimizer


@dataclass(frozen=True)
class HostModel:
    """What a host knows of a model.

    Args:
        real_tokens: ``T -> bool [T]``, the real tokens of the running batch (the others are padding), or None.
        watch_batches: hooks into the model what ``real_tokens`` needs, and returns how to end it.
        remake_buffers: fills the non-persistent buffers of one module, as the framework does when it makes a model.
        save_together: puts collective ways of saving in the place of the framework's own, which would write one rank's
            experts.
        folders: reads and writes the framework's own checkpoint folders, as `transformers.folders`; None: it has none.
        saves_itself: the framework saves and loads the attached model in logical order by its own means, called so;
            empty: `checkpoint` does it.
        ranks: who shares what and which stage this model is, where the framework knows; None: ``attach`` is given them.
            Such a model may have no MoE layer.
        optimizer: makes of an optimizer of the framework's own what attaching can use, given the MoE layers of all
            models on this rank, by their names over all of these.
        dispatches: whether the framework carries and computes tokens itself (``compute`` of its layers is None), and
            holds no replicas; also said of a stage without an MoE layer.
        problems: what of the job's settings and of a config cannot be balanced, given the optimizers: a line each.
        weights: lists the tensors of the attached model as the framework's checkpoints name them, given the model and
            the number of its first MoE layer. Collective where weights are still on their way. None: under the model's
            own names.
    """

    layers: tuple[MoELayer, ...]  # in model order
    real_tokens: Callable[[int], Tensor | None] = lambda tokens: None
    watch_batches: Callable[[], End] = lambda: lambda: None
    remake_buffers: Callable[[nn.Module], None] = lambda module: None
    save_together: Callable[[Balancer], None] = lambda balancer: None
    folders: ModuleType | None = None
    saves_itself: str = ""
    ranks: Ranks | None = None
    optimizer: Callable[[Sequence[MoELayer], Any], AnyOptimizer] | None = None
    dispatches: bool = False
    dense_is_equal: bool = True  # whether parameters outside the experts are whole, and equal on all ranks
    problems: Callable[[Sequence[Any], BalancerConfig], list[str]] = lambda optimizers, config: []
    weights: Callable[[nn.Module, int], Sequence[Weight]] | None = None
    notes: tuple[str, ...] = ()  # lines that say what makes bits depend on where experts are


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside wrappers that have no step hooks, as Accelerate's; another object as it is."""
    if not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "_optimizer_step_post_hooks"):
        return optimizer
    inner = getattr(optimizer, "optimizer", None)
    return optimizer if inner is None else unwrapped(inner)


@dataclass(frozen=True)
class Stage:
    """An attached model or pipeline stage; ``prefix`` goes before its names where there are several."""

    number: int
    model: nn.Module
    host: HostModel
    prefix: str = ""


def stages_of(numbers: Sequence[int], models: Sequence[nn.Module], hosts: Sequence[HostModel]) -> list[Stage]:
    """Return a `Stage` for each model; names of several are prefixed by ``stages.<number>.``. Missing numbers become
    -1, further ones are dropped: ranks refuse either together, later."""
    prefix = "stages.{}." if len(models) > 1 else ""
    given = zip((*numbers, *[-1] * len(models)), models, hosts, strict=False)
    return [Stage(number, model, host, prefix.format(number)) for number, model, host in given]


@dataclass(frozen=True)
class Described:
    """Arguments of an attach, in the words of the hosts. ``stages``: the models of this rank, in the order of
    ``ranks.stages``. ``optimizers`` empty: inference. ``device``: where experts are, or will be made. ``container``:
    steps the optimizers, all in one step of its own; None: each steps by itself."""

    stages: Sequence[Stage]
    optimizers: Sequence[AnyOptimizer]
    config: BalancerConfig
    ranks: Ranks
    device: torch.device
    container: torch.optim.Optimizer | None = None


@dataclass(frozen=True, kw_only=True)
class Request(Described):
    """The same of ranks that have met, and as a run under ``eplb-runtime verify`` overrides it."""

    groups: ProcessGroups
    trial: Trial | None

    @property
    def single(self) -> bool:
        """Return whether ``verify`` runs its layout ``single``: each rank has all experts and runs the model's code."""
        return self.trial is not None and self.trial.layout == "single"

    @property
    def job(self) -> Job:
        return self.groups.job

    @property
    def host_dispatches(self) -> bool:
        return any(stage.host.dispatches for stage in self.stages)

    @property
    def is_spread(self) -> bool:
        return any(spread_of(layer.experts) is not None for _, _, layer in self.layers)

    @property
    def layers(self) -> list[tuple[int, str, MoELayer]]:
        """Return number over the whole model, name with the stage's prefix, and description of this rank's layers."""
        return [
            (self.job.first_layer(stage.number) + position, stage.prefix + layer.name, layer)
            for stage in self.stages
            for position, layer in enumerate(stage.host.layers)
        ]

    @property
    def experts(self) -> list[tuple[str, MoELayer, nn.Parameter]]:
        """Return name, layer and live tensor of each expert parameter on this rank."""
        return [
            (f"{name}.{own}", layer, layer.parameter(own)) for _, name, layer in self.layers for own in layer.parameters
        ]


@dataclass(frozen=True)
class ShardingMark:
    """What ``shard_experts`` has cut: E/R, the placement's digest (empty: logical order), and the EP ranks."""

    rows: int
    placement: str
    ep_ranks: tuple[int, ...]


def spread_of(experts: nn.Module) -> ShardingMark | None:
    """Return the mark of an experts module that has its rank's experts alone; None: it has all experts."""
    return experts.__dict__.get("_eplb_runtime_spread")


def mark_spread(experts: nn.Module, spread: ShardingMark) -> None:
    experts.__dict__["_eplb_runtime_spread"] = spread


Exact = Literal["bit", "rounding"]
EXACT_BY_ITSELF = EXACT_IN_ONE_SUM = 2  # results of a token, gradients of ranks: a sum of two has one order
BY_PLACE = "with experts moved, training is equal to rounding, not to the bit"
NOT_RUN = "%s=%s was tested with a stand-in at best, and not on a GPU yet: prove it by `eplb-runtime verify -- JOB`"


@dataclass(frozen=True)
class Refusal:
    """A setting that cannot be balanced: its value, the reason, and what to write."""

    setting: str
    value: Any
    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.setting}={self.value}: {self.why}; {self.instead}"


def sums_of_results(dispatcher: str, top_k: int) -> str:
    """Return a line of warning: this dispatcher adds up a token's results in an order that depends on the placement."""
    order = "in an order that depends on where they are"
    return f"{dispatcher} adds up the results of a token's {top_k} experts {order}: {BY_PLACE}"


def sums_of_gradients(ranks: int) -> tuple[str, ...]:
    """Return a line of warning: ``ranks`` ranks sum an expert's gradients in no fixed order. (): at most 2 ranks do."""
    if ranks <= EXACT_IN_ONE_SUM:
        return ()
    order = "perhaps in an order that follows an expert's place"
    return (f"gradients of experts are added up over {ranks} ranks, {order}: {BY_PLACE}; with at most 2 it is",)
