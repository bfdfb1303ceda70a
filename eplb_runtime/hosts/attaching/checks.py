"""Everything that ``attach`` refuses, before it changes anything: one line each that says why and what would help."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import islice

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...balancer.gradients.reduction import foreign_hooks
from ...config import BalancerConfig, DispatchConfig
from ...distributed.consensus import barrier, differing, first_problem, gather_json
from ...distributed.process_groups import ProcessGroups
from ...distributed.ranks import GroupError, Ranks, job_ranks
from ...moe.experts.compute import Compute, SlotCounts
from ...moe.experts.slices import has_divide_factor, local, why_not_rows, why_not_slices
from ...placement import Placement, PlacementError, uneven
from ...utils.checksums import as_bytes, checksum
from ...utils.text import one_line
from .description import AttachError, Described, MoELayer, Request, Run, Stage, recorded, spread_of
from .optimizers import held_by, why_not_stepped

_SLOTS, _ROWS = 3, 3
"""Experts whose weights are made up, and rows of each."""
_CROWD = 24
"""Tokens of which each chooses the first expert and another: a capacity shows."""
_ROUNDING = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Differences, of the largest value, that are rounding; of wider dtypes 1e-3 (TF32)."""
SEED = 20

# -- before there are groups -------------------------------------------------------------------------------------------


def describe_together(
    what: str, describe: Callable[[BalancerConfig], Described], config: object, ranks: Ranks | None = None
) -> Described:
    """Return ``describe(config)`` (None: the defaults), once every rank of the job has its own. If it fails on a rank,
    that rank raises its error, others AttachError. ``what`` names the call; ``ranks``: as ``attach`` was given them."""
    described, problem = None, None
    usable = config if isinstance(config, BalancerConfig) else BalancerConfig()
    try:
        if config is not None and usable is not config:
            shown = config.__name__ if isinstance(config, type) else f"a {type(config).__name__}"
            raise AttachError(f"config={shown}: give BalancerConfig(...)")
        described = describe(usable)
    except BaseException as error:
        problem = error
    if not dist.is_initialized():
        raise problem or AttachError("torch.distributed is not initialised: call init_process_group, or use torchrun")
    try:
        everyone, patient = job_ranks((ranks if described is None else described.ranks) or Ranks()), True
    except GroupError as error:
        # Which ranks wait for this one is not known; most jobs are the whole world.
        everyone, patient, problem = tuple(range(dist.get_world_size())), False, problem or AttachError(str(error))
    wait_for_ranks(everyone, what, usable.timeout_seconds, problem, patient=patient)
    assert described is not None
    return described


def wait_for_ranks(
    everyone: Sequence[int], what: str, seconds: float, problem: BaseException | None = None, *, patient: bool = False
) -> None:
    """Wait until these ranks have called this for ``what``, by way of the launcher's store. RuntimeError: a rank did
    not come in ``seconds``; with ``patient`` that is a warning, and the host's own timeout counts. Raise ``problem`` if
    it is given; AttachError: another rank has a problem."""
    if others_problem := barrier(everyone, what, seconds, problem, patient=patient):
        raise AttachError(others_problem)


def device_of(stages: Sequence[Stage], wanted: torch.device | str | None) -> torch.device:
    """Return the device of the experts; without experts, of the parameters; of a model on the meta device, ``wanted``.
    AttachError: there are several, ``wanted`` is another one, or is not given for a meta model."""
    # An empty tensor knows the index of "cuda".
    given = torch.empty(0, device=wanted).device if wanted is not None else None
    layers = [layer for stage in stages for layer in stage.host.layers]
    parameters = [parameter for stage in stages for parameter in stage.model.parameters()]
    devices = {layer.parameter(name).device for layer in layers for name in layer.parameters}
    devices = devices or {parameter.device for parameter in parameters}
    if len(devices) > 1:
        raise AttachError(f"the experts are on several devices ({', '.join(sorted(map(str, devices)))}): one per rank")
    device = devices.pop() if devices else torch.device("cpu")
    buffers = [buffer for stage in stages for _, buffer in stage.model.named_buffers()]
    if any(one.is_meta for one in (*parameters, *buffers)):
        if given is None or given.type == "meta":
            raise AttachError(
                "the model is on the meta device: name the one to make it on, attach(..., device='cuda'), and load its "
                "weights afterwards"
            )
        return given
    if given is not None and given != device:
        raise AttachError(f"device='{given}', but the experts are on {device}: move the model there, or leave it out")
    return device


# -- all at once, in one exchange --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Checked(Request):
    """A request that nothing is refused in, the placement to start from, and what a test of each layer found."""

    placement: Placement
    tests: Sequence[LayerTest]


def check(asked: Request) -> Checked:
    """Return the request with the initial placement and tests of its layers, or raise AttachError on all ranks; change
    nothing. Collective: ranks exchange what each refuses, and what must be equal. A few rows run through each layer."""
    config, groups, job = asked.config, asked.groups, asked.job
    facts, given = list[_Fact](), None
    problem = "; also, ".join(_problems(asked))
    if not problem:
        try:
            if (path := config.initial_placement) is not None:
                given = path if isinstance(path, Placement) else Placement.load(path)
            facts = _facts(asked, given)
        except PlacementError as error:
            problem = f"initial_placement: {error}"
    digests = [text and xxhash.xxh3_128_hexdigest(text.encode()) for _, text, *_ in facts]
    mine = (problem, digests, [*{layer.num_experts for *_, layer in asked.layers}])
    said = dict(zip(job.ranks, gather_json(mine, groups.control), strict=True))
    for rank, (refused, *_) in said.items():
        if refused:
            raise AttachError(problem or f"rank {rank}: {refused}")
    for number, (what, _, hint, over_all) in enumerate(facts):
        of_ranks = {rank: of_rank[number] for rank, (_, of_rank, _) in said.items() if of_rank[number] is not None}
        for together in [job.ranks] if over_all else job.dp_groups:
            having = [rank for rank in together if rank in of_ranks]
            if odd := differing(of_ranks, having, what):
                raise AttachError(f"{odd}: {hint}")
    placement = _initial_placement(asked, sorted({count for *_, counts in said.values() for count in counts}), given)
    # Once no rank is refused: a layer's own way may wait for others.
    tests = try_layers([layer for _, _, layer in asked.layers], config.guard)
    raise_on_all(groups, "" if config.guard == "warn" else next((one.problem for one in tests if one.problem), ""))
    return Checked(**vars(asked), placement=placement, tests=tests)


_Fact = tuple[str, str | None, str, bool]
"""Something that ranks with the same stages, or all (the last), must have in common; its text; what to do. None: this
rank has nothing of it."""


def _facts(asked: Request, placement: Placement | None) -> list[_Fact]:
    weights = {
        stage.prefix + name: tensor
        for stage in ([] if asked.is_spread else asked.stages)
        for name, tensor in stage.model.state_dict().items()
        if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor)  # of which each rank has a part
    }
    shapes = " ".join(f"{name}{tuple(tensor.shape)}{tensor.dtype}" for name, tensor in weights.items())
    fingerprint = checksum([as_bytes(tensor.contiguous()) for tensor in weights.values() if not tensor.is_meta])
    dividing = [one for one in asked.optimizers if not isinstance(one, torch.optim.Optimizer) and one.divides_over]
    state = " ".join(str(one.ranges_of(parameter)) for one in dividing for _, _, parameter in asked.experts)
    spread = str(asked.is_spread) if asked.layers else None
    alike, start = "give all ranks the same config", "" if placement is None else placement.digest()
    return [
        *((f"{name} in its config", text, alike, True) for name, text in asked.config.described().items()),
        ("initial placement", start, "give all ranks the same one, or copies of one file", True),
        ("answer to whether shard_experts was called", spread, "call it for all stages, on all ranks", True),
        ("division of optimizer state", state, "make experts and optimizer alike on all ranks", False),
        ("model", shapes, "build the same model on every rank", False),
        ("set of weights", fingerprint.hex(), "seed all ranks equally, or load the same checkpoint", False),
    ]


def _initial_placement(asked: Request, counts: Sequence[int], given: Placement | None) -> Placement:
    """Return the placement to begin with, of layers with these numbers of experts; ranks have the same ``given``."""
    config, job, ranks = asked.config, asked.job, asked.job.ep_size
    if len(counts) != 1:
        odd = f"the MoE layers have different numbers of experts ({counts}); they must be equal"
        raise AttachError(odd if counts else "no stage has an MoE layer: nothing to balance")
    if (experts := counts[0]) % ranks:
        raise AttachError(uneven(experts, ranks))
    if config.replica_slots > (most := experts - experts // ranks):
        mend = f"set replica_slots={most} or less" if most else "the EP group has one rank, set replica_slots=0"
        raise AttachError(
            f"replica_slots={config.replica_slots}: a rank has only {most} experts of other ranks to copy; {mend}"
        )
    if config.rank_speed is not None and len(config.rank_speed) != ranks:
        raise AttachError(f"rank_speed has {len(config.rank_speed)} numbers for {ranks} ranks: give one for each")
    logical = Placement.initial(job.num_layers, experts, ranks, config.replica_slots)
    if given is not None:
        try:
            given.require_model(job.num_layers, experts, ranks, config.replica_slots)
        except PlacementError as error:
            raise AttachError(f"initial_placement: {error}") from None
    placement = logical if given is None else given.with_epoch(0)
    before = spread_of(asked.layers[0][2].experts) if asked.layers else None
    if before and (before.placement or logical.digest(), before.ep_ranks) != (placement.digest(), job.ep_ranks):
        raise AttachError(
            "the experts were spread before, over another EP group or by another placement (logical order, where a "
            "framework made them): give both the same config and ep_group, and go to another placement by "
            "balancer.load_state_dict"
        )
    return placement


# -- what a rank refuses by itself -------------------------------------------------------------------------------------


def _problems(asked: Request) -> list[str]:
    """Return the first finding of each kind."""
    found = list[str]()
    for kind in (_of_models, _of_tensors, _of_what_is_lost, _of_ties, _of_device, _of_optimizers, _of_sharding):
        try:
            found += islice(kind(asked), 1)
        except Exception:
            if not found:  # else it follows from what is refused
                raise
    return found


def _of_models(asked: Request) -> Iterator[str]:
    config, slots = asked.config, asked.config.replica_slots
    if len({spread_of(layer.experts) for *_, layer in asked.layers}) > 1:
        yield "some MoE layers were spread by shard_experts and others were not: build the model again"
    if asked.host_dispatches and slots:
        yield f"replica_slots={slots}: the framework's own dispatcher knows one place for an expert; set it to 0"
    if asked.host_dispatches and replace(config.dispatch, kernels=True) != DispatchConfig():
        yield "dispatch: the framework's own dispatcher sends tokens; leave dispatch out"
    if slots and asked.device.type != "cpu" and asked.groups.backend == "gloo":
        yield "replica slots on a GPU need a backend for it: init_process_group('cpu:gloo,cuda:nccl')"
    if any(stage.model in recorded for stage in asked.stages):
        yield "record is open on this model: close it, and attach with BalancerConfig(run=...) instead"
    modules = (named for stage in asked.stages for named in stage.model.named_modules(prefix=stage.prefix.rstrip(".")))
    for sparse in (name for name, one in modules if getattr(one, "sparse", False) is True):
        yield f"{sparse} has sparse gradients: make it with sparse=False"


def _of_device(asked: Request) -> Iterator[str]:
    """Kernels of Triton and of DeepEP run on this thread's current GPU."""
    device = asked.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        yield (
            f"the experts are on {device}, and this process works on GPU {torch.cuda.current_device()}: call "
            f"torch.cuda.set_device({device.index}) before the model is made"
        )


def _of_tensors(asked: Request) -> Iterator[str]:
    """Only plain tensors can be cut by expert: what wraps them says nothing of its rows."""
    job = asked.job
    for name, layer, parameter in asked.experts:
        if not isinstance(parameter, DTensor):
            kind = type(parameter.data)
            if kind is not Tensor or not parameter.is_floating_point() or parameter.element_size() < 2:
                what = f"{name} is a {kind.__name__} of {parameter.dtype}"
                yield f"{what}: quantised experts are not supported; load the model in bfloat16, float16 or float32"
        elif job.divided_rows:
            if wrong := why_not_rows(parameter, job.row_rank, len(job.row_ranks)):
                yield f"{name} {wrong}: it cannot be moved by expert"
        elif has_divide_factor(layer.experts):
            yield f"set_gradient_divide_factor was called on {layer.name}: FSDP averages over EDP itself; leave it out"
        else:
            outer = f"belongs to an FSDP module around {layer.name}"
            wrong = "is a DTensor of all experts" if spread_of(layer.experts) is None else ""
            wrong = wrong or why_not_slices(parameter, job.edp_ranks)
            if wrong := wrong or ("" if isinstance(layer.experts, FSDPModule) else outer):
                yield (
                    f"{name} {wrong}: call eplb_runtime.shard_experts(model) first, then fully_shard on the experts "
                    "module itself, with the mesh of the ranks that hold the same experts and shard_placement_fn="
                    "lambda parameter: Shard(1); or leave experts out of fully_shard (ignored_params)"
                )


def _of_sharding(asked: Request) -> Iterator[str]:
    """A model that was cut before, and perhaps wrapped by ``fully_shard``."""
    config, job = asked.config, asked.job
    if not asked.is_spread:
        return
    every = (parameter for stage in asked.stages for parameter in stage.model.parameters())
    if config.dense_gradients == "allreduce" and any(isinstance(parameter, DTensor) for parameter in every):
        yield "fully_shard averages gradients itself: leave dense_gradients='host'"
    sliced = {name: one for name, _, one in asked.experts if isinstance(one, DTensor)}
    for whole in [name for name, *_ in asked.experts if name not in sliced] if sliced else ():
        odd = f"fully_shard slices {next(iter(sliced))} and leaves {whole} whole"
        yield f"{odd}: give it all expert parameters of all MoE layers, or none"
    if config.overlap and (sliced or job.divided_rows):
        yield "overlap=True: experts that fully_shard slices move between steps; leave overlap=False, or give it none"
    for name, one in sliced.items() if config.replica_slots else ():
        wrong, part = "", type(local(one))
        if len(job.stage_sets) > 1:
            wrong = "in pipeline stages"
        elif job.divided_rows and one.shape[1] % job.dp_shard_degree:
            wrong = f"cannot be cut into {job.dp_shard_degree} slices along dimension 1 of {tuple(one.shape)}"
        elif part is not Tensor:
            wrong = f"as {part.__name__}s, which have a way of their own to be gathered, would be computed otherwise"
        if wrong:
            yield f"replica slots with {name}, which fully_shard slices: copies {wrong}; set replica_slots=0"


def _of_what_is_lost(asked: Request) -> Iterator[str]:
    """Its parameters are about to be replaced by those of this rank's experts: what hangs on them would be gone."""
    for name, layer, parameter in asked.experts:
        if not asked.config.replica_slots and spread_of(layer.experts) is not None:
            continue
        if foreign_hooks(parameter):
            yield f"{name} has gradient hooks, and attach puts this rank's experts in its place: register them later"
        if parameter.grad is not None and bool(parameter.grad.any()):
            yield f"{name} has a gradient from a backward pass before attach: step first, or call zero_grad()"


def _of_ties(asked: Request) -> Iterator[str]:
    """Each expert tensor is in one place; in the others it would go on as it is, with all experts."""
    of_layer = {
        id(layer.parameter(own)): (layer.experts.get_submodule(own.rpartition(".")[0]), f"{name}.{own}")
        for _, name, layer in asked.layers
        for own in layer.parameters
    }
    for path, module in (named for stage in asked.stages for named in stage.model.named_modules()):
        for own_name, parameter in module._parameters.items():
            owner, name = of_layer.get(id(parameter), (module, ""))
            if owner is not module:
                tied = f"{path}.{own_name} is the same tensor as {name}"
                yield f"{tied}: tied experts cannot be spread; let both layers share the experts module, or untie them"


def _of_optimizers(asked: Request) -> Iterator[str]:
    job, held_here = asked.job, {id(parameter) for _, _, parameter in asked.experts}
    each = any(layer.slots for _, _, layer in asked.layers)
    for one in asked.optimizers:
        # Those inside a framework's own may step masters instead.
        stepping, of_experts = ([one], held_here) if isinstance(one, torch.optim.Optimizer) else (one.inside, None)
        for optimizer in stepping:
            if why := why_not_stepped(optimizer, of_experts, each=each, known=asked.config.elementwise):
                yield why
            values = (value for state in optimizer.state.values() for value in state.values())
            if any(isinstance(value, Tensor) and value.is_meta for value in values):
                kind = type(optimizer).__name__
                yield f"{kind} has state on the meta device: make it at the first step, or build the model with memory"
        over = () if isinstance(one, torch.optim.Optimizer) else one.divides_over
        if over and (not job.divided_state or over != job.edp_ranks):
            yield (
                f"the optimizer divides experts over ranks {list(over)}, and ranks {list(job.edp_ranks)} hold the same "
                "ones: give attach the model as the optimizer was made for it"
            )
    held = held_by(asked.optimizers)
    for name, _, parameter in asked.experts if asked.optimizers else ():
        times = held[id(parameter)]
        if parameter.requires_grad and not times:
            yield (
                f"the optimizer does not hold {name}: build it from model.parameters() (with float32 "
                "masters in its state, not in the place of parameters), or freeze that parameter"
            )
        if times > 1:
            yield f"{name} is in {times} optimizers: give each parameter to one"


# -- for all ranks, or for none ----------------------------------------------------------------------------------------


def raise_on_all(groups: ProcessGroups, problem: str = "") -> None:
    """Raise AttachError on all ranks if one has a problem ("": none): its own, or the first rank's. Collective."""
    if first := first_problem(problem, groups.control):
        raise AttachError(problem or first)


@contextmanager
def rollback(groups: ProcessGroups) -> Iterator[ExitStack]:
    """Yield a stack for callbacks that undo changes. If the block fails: tell the other ranks, run the callbacks, the
    last first, close the groups, and raise AttachError. If it does not fail, nothing is undone or closed."""
    with ExitStack() as undo:
        undo.callback(groups.close)
        try:
            yield undo
            undo.pop_all()
        except BaseException as error:
            cause = groups.report_failure(error)
            if not cause and (isinstance(error, AttachError) or not isinstance(error, Exception)):
                raise
            raise AttachError(cause or one_line(error, with_type=True)) from error


# -- a few rows through a layer: its own way and the way that replaces it give the same to rounding, also row by row and
# with experts in other slots; what is called leaves no trace in modules, buffers and torch's generators ---------------


@dataclass(frozen=True)
class LayerTest:
    problem: str = ""  # how it computes otherwise than what replaces it, with the layer's name
    draws: bool = False  # whether its experts draw random numbers in training
    untried: str = ""  # why its own way could not be called alone
    has_own_way: bool = True  # whether that is implemented


def try_layers(layers: Sequence[MoELayer], guard: str) -> list[LayerTest]:
    """Run a few rows through each layer's own code and the code that replaces it, and return a `LayerTest` of each:
    what differs. It is empty, and nothing runs, with ``guard="off"`` and where experts are not whole, plain tensors
    with memory. Modules are left as they were."""
    return [_tried(layer) if guard != "off" else LayerTest() for layer in layers]


def _tried(layer: MoELayer) -> LayerTest:
    weights = [layer.of_experts(name, layer.parameter(name).detach()) for name in layer.parameters]
    whole = spread_of(layer.experts) is None and not layer.slots and layer.live_weights is None
    compute, run = layer.compute, layer.run
    if compute is None or not whole or layer.alignment > 1 or any(tensor.is_meta for tensor in weights):
        return LayerTest()
    owner, device = getattr(run, "__self__", None), weights[0].device
    modules = [layer.experts, *([owner] if isinstance(owner, nn.Module) else [])]
    with untouched(modules, compute, device), torch.no_grad(), suppress(Exception):  # it fails in its own words later
        few = _few_of(weights)
        counts = SlotCounts.of([_ROWS] * len(few[0]), device)
        sizes = [size for tensor in weights for size in reversed(tensor.shape[1:])]
        width = width_of_rows(lambda rows: compute(rows, counts, few), sizes, weights[0], _ROWS * len(few[0]))
        if width is None:
            return LayerTest()
        rows = rows_like(weights[0], _ROWS * len(few[0]), width)

        def draws() -> bool:
            before = _generator_state(device)
            compute(rows, counts, few)
            return not torch.equal(before, _generator_state(device))

        if draws():  # in evaluation, too: two calls give two things
            return LayerTest(draws=True)
        untried, has_own_way = "", True
        problem = _why_slots_count(compute, rows, few)
        try:
            problem = problem or ("" if run is None else _why_run_differs(run, compute, width, weights))
        except Exception as error:
            has_own_way = not isinstance(error, NotImplementedError)
            untried = one_line(error) if has_own_way else ""
        if problem:
            return LayerTest(f"{problem} ({layer.name})")
        for module in modules:
            module.train()
        return LayerTest(draws=draws(), untried=untried, has_own_way=has_own_way)
    return LayerTest()


def _why_slots_count(compute: Compute, rows: Tensor, weights: Sequence[Tensor]) -> str:
    """Return whether a row's result depends on other rows, or on the slot of its expert."""
    slots, device = range(len(weights[0])), rows.device
    each = SlotCounts.of([_ROWS for _ in slots], device)
    together = compute(rows, each, weights)
    for number in slots:
        row = slice(number * _ROWS, number * _ROWS + 1)
        alone = compute(rows[row], SlotCounts.of([int(slot == number) for slot in slots], device), weights)
        if not same_to_rounding(alone, together[row]):
            return "let a row's result depend on that row alone: it changes when other rows are computed with it"
    turned = compute(rows.roll(_ROWS, 0), each, [tensor.roll(1, 0) for tensor in weights])
    if not same_to_rounding(turned, together.roll(_ROWS, 0)):
        return "the result depends on the slot's number, but experts change slots: keep an expert's data in its tensors"
    return ""


def _why_run_differs(run: Run, compute: Compute, width: int, weights: Sequence[Tensor]) -> str:
    experts, hidden_TD = len(weights[0]), rows_like(weights[0], _CROWD, width)
    ids_TK = torch.stack([torch.zeros(_CROWD), 1 + torch.arange(_CROWD) % max(1, experts - 1)], dim=1)
    ids_TK = ids_TK.long()[:, : min(2, experts)].to(hidden_TD.device)
    weights_TK = torch.tensor([[0.55, 0.25]]).to(hidden_TD)[:, : ids_TK.shape[1]].repeat(_CROWD, 1)
    own_TD = run(hidden_TD, ids_TK, weights_TK)
    order = ids_TK.flatten().argsort(stable=True)
    counts = SlotCounts.of(torch.bincount(ids_TK.flatten(), minlength=experts).tolist(), hidden_TD.device)
    out_MD = compute(hidden_TD.repeat_interleave(ids_TK.shape[1], 0)[order], counts, list(weights))
    weighed = torch.empty_like(out_MD).index_copy_(0, order, out_MD) * weights_TK.reshape(-1, 1)
    expected_TD = weighed.unflatten(0, ids_TK.shape).sum(1)
    if own_TD.shape != expected_TD.shape or same_to_rounding(own_TD, expected_TD):
        return ""
    return (
        "the method that attach replaces must return the sum of router weight times expert output and nothing more: "
        "move shared experts, factors, capacity limits and changes of router weights out of it"
    )


def width_of_rows(
    call: Callable[[Tensor], Tensor], sizes: Sequence[int], like: Tensor, number: int = _ROWS
) -> int | None:
    """Return the first D in ``sizes`` and 8 for which ``call`` maps rows ``[number, D]`` to the same shape, or None."""
    for width in dict.fromkeys(size for size in [*sizes, 8] if size > 0):
        with suppress(Exception):
            rows = rows_like(like, number, width)
            if call(rows).shape == rows.shape:
                return width
    return None


def same_to_rounding(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have one shape and are equal up to their dtype's rounding; NaN equals NaN."""
    most = _ROUNDING.get(one.dtype, 1e-3) * other.abs().amax(-1, keepdim=True).nan_to_num(0.0, 0.0)
    return one.shape == other.shape and bool(
        ((one - other).abs() <= most).logical_or(one.isnan() & other.isnan()).all()
    )


def rows_like(like: Tensor, number: int, width: int) -> Tensor:
    """Return random rows ``[number, width]``, the same in each call, with device and dtype of ``like``."""
    rows = torch.randn(number, width, generator=torch.Generator().manual_seed(SEED))
    return rows.to(like.device, like.dtype)


def _few_of(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return values of the size that weights have, for a few experts: zeros at the start hide all that is behind."""
    generator, few = torch.Generator(weights[0].device).manual_seed(SEED), []
    for tensor in weights:
        shape = min(_SLOTS, len(tensor)), *tensor.shape[1:]
        made = torch.rand(shape, generator=generator, dtype=tensor.dtype, device=tensor.device)
        few.append(made.sub_(0.4).mul_(2 * tensor.shape[-1] ** -0.5))
    return few


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def untouched(modules: Sequence[nn.Module], compute: object, device: torch.device) -> Iterator[None]:
    """Set modules to evaluation mode in the block; after it restore attributes, buffers and random generators."""
    inside = {id(part): part for module in modules for part in module.modules()}.values()
    attributes = [(part, dict(vars(part))) for part in (*inside, compute) if hasattr(part, "__dict__")]
    buffers = [(buffer, buffer.clone()) for part in inside for buffer in part.buffers(recurse=False)]
    try:
        compiled = "torch._dynamo" in sys.modules  # else nothing is, and the import takes seconds
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
        ):
            for module in modules:
                module.eval()
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for part, own in attributes:
            vars(part).clear()
            vars(part).update(own)
