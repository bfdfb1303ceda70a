"""One run of a user's job under ``eplb-runtime verify``: ``attach`` overrides the layout, each step is put on record,
and the job ends after some steps. What the records mean is decided in `tools.verification`.

A record has a few numbers for each tensor, and for each logical expert of it: a digest of all bits, the sum of squares,
and random sums, from which the distance of two tensors is estimated that are never in one memory.
"""

import gc
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import CellType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...balancer.balancer import Balancer
from ...balancer.gradients.reduction import bit_words
from ...balancer.loop_state import LoopHooks
from ...config import BalancerConfig, Trial
from ...distributed.consensus import gather_bytes, gather_json, gather_rows
from ...distributed.ranks import Ranks
from ...moe.experts.optimizer_state import state_of
from ...moe.experts.registry import ExpertTensors
from ...moe.experts.slices import has_memory, local
from ...planner.policies import shuffled
from ...utils.files import write_file
from .checks import Checked
from .description import AttachError

MOVING = ("moved", "replicas")
"""Layouts in which homes move after each step; the other has replicas, too."""
SKETCHES = 16
"""Random sums of a tensor, each of every sixteenth element with random signs; the distance of two tensors is about the
norm of what these sums differ by."""
_CHUNK = 1 << 22
_BALANCERS = "the job attaches more than one balancer, and the first alone is compared"
_WRITTEN = "take parameters from model.parameters() after attach: {} of before is written, and no model has it"
_NO_CLIPPING, _NOISE = 1e6, 8
"""Norms that are given to `clip_grad_norm_` to learn of the norm alone; rounding errors of a tensor's mean element that
are no gradient (of an attention key's bias), and whole steps to Adam."""
_FRAMEWORKS = ("eplb_runtime.", "torch.distributed.", "torch.autograd.", "megatron.core.", "torchtitan.", "numba.")
"""Packages that hold buffers and tables of their own, as their objects do."""
_DEPTH = 6
"""Containers between a tensor and what has a name."""
KINDS = ("given", "gradient", "buffer", "optimizer_state", "range", "number", "parameter")
"""Kinds of tensors on record, causes first. ``given``: a gradient ahead of what a loop does to it; ``range`` and
``number``: state of which ranks have parts."""


class TrialRow(NamedTuple):
    """A tensor on record, or an expert's part of it (-1: no expert's); ``sums``: of squares, and `SKETCHES`."""

    name: str
    kind: str
    expert: int
    numel: int
    digest: int
    sums: list[float]


def row_of(name: str, kind: str, expert: int, tensor: Tensor, first: int = 0) -> TrialRow:
    """Return the record of a tensor: digest of its bits, sum of squares, random sums (0 for optimizer state).
    ``first``: position of its first element in the whole row, whose digest and sums are those of its parts added up."""
    flat = tensor.detach().resolve_conj()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).contiguous().reshape(-1)
    digest = torch.zeros((), dtype=torch.int64, device=flat.device)
    sums = torch.zeros(1 + SKETCHES, dtype=torch.float64, device=flat.device)
    for begin in range(first, first + flat.numel(), _CHUNK):
        part = flat[begin - first : begin - first + _CHUNK]
        keys = _keys(begin, part.numel(), flat.device)
        digest += (bit_words(part).to(torch.int64) * keys).sum()
        values = part.double()
        sums[0] += values @ values
        if kind != "optimizer_state":
            signed = torch.where(keys & 256 == 0, values, -values)
            before, after = begin % SKETCHES, -(begin + part.numel()) % SKETCHES
            sums[1:] += nn.functional.pad(signed, (before, after)).view(-1, SKETCHES).sum(dim=0)
    return TrialRow(name, kind, expert, tensor.numel(), int(digest), sums.tolist())


@lru_cache(maxsize=16)
def _keys(first: int, count: int, device: torch.device) -> Tensor:
    """A random odd int64 for each place, the same on every rank and device."""
    keys = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device)
    for factor, shift in ((-7046029254386353131, 31), (-4658895280553007687, 29)):
        keys = keys * factor
        keys = keys ^ (keys >> shift)
    return keys | 1


# -- the layout of a run -----------------------------------------------------------------------------------------------


def without_replicas(config: BalancerConfig) -> BalancerConfig:
    """Return settings without replica slots, their transport and initial placement; unchanged if there are no slots."""
    without = replace(
        config, replica_slots=0, initial_placement=None, replica_transport=BalancerConfig.replica_transport
    )
    return without if config.replica_slots else config


def layout_of(trial: Trial, config: BalancerConfig, ranks: Ranks) -> tuple[BalancerConfig, Ranks]:
    """Return settings and ranks of one run of ``verify``: a static policy, no limits, nothing written but the records;
    with layout ``single`` each rank is its own EP group. AttachError: the folder has a record of another training."""
    if (Path(trial.folder) / "meta.json").exists():
        raise AttachError("verify compares one training run, and this command starts a second: give it the first alone")
    alone: dict[str, Any] = {"policy": "static", "run": None, "listen": None, "listen_token": None, "guard": "warn"}
    own = replace(config, **alone, migration=replace(config.migration, max_moves=None, max_pause_seconds=None))
    if trial.layout == "single":
        return replace(without_replicas(own), initial_placement=None), replace(ranks, ep=(dist.get_rank(),))
    return own if trial.layout == "replicas" else without_replicas(own), ranks


class TrialRun(LoopHooks):
    """Records the steps of a balancer, moves experts as the trial says, and ends the job. ``known`` goes on record,
    too: ``notes``, what attach has said of bits, and ``replica_slots`` of the job's own settings."""

    def __init__(self, request: Checked, trial: Trial, balancer: Balancer, known: Mapping[str, Any]) -> None:
        self._request, self._trial, self._balancer = request, trial, balancer
        self._runtime, self._tensors = balancer.runtime, balancer.tensors
        self._group, job = self._runtime.groups.background, self._runtime.job
        self._step, self._began, self._moves = 0, balancer.placement.epoch, trial.layout in MOVING
        self._rows: dict[tuple[str, int], TrialRow] = {}
        self._norms: dict[tuple[torch.Size, ...], float] = {}
        self._coarsest, self._of_old, self._has_run = 0.0, dict[str, int](), False
        tests = zip(request.layers, request.tests, strict=True)
        untried = [f"{name} ({test.untried})" for (_, name, _), test in tests if test.untried]
        self._meta: dict[str, Any] = {**known, "ranks": len(job.ranks), "untried": untried, "doubts": []}
        balancer.guard.complete_steps = trial.steps
        # Where all is on each rank gradients are averaged as they are made: what a loop does with them sees averages.
        self._is_early = trial.layout == "single" and len(job.layers_of_stage) == 1  # a schedule goes by stage
        self._hooks = hooks = ExitStack()
        for owner, name, wrapper in (
            (torch.autograd, "_engine_run_backward", self._run_backward),
            (torch.nn.utils.clip_grad, "_clip_grads_with_norm_", self._clip_more),
        ):
            hooks.callback(setattr, owner, name, inner := getattr(owner, name))
            setattr(owner, name, partial(wrapper, inner))
        hooks.callback(nn.modules.module.register_module_forward_pre_hook(self._before_forward).remove)
        for name, parameter in self._tensors.dense.items() if self._is_early else ():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                hooks.callback(parameter.register_hook(partial(self._arrives, name)).remove)
        balancer.loop.hooks.append(self)
        balancer.closing.callback(hooks.close)
        self._write()
        if self._moves:
            self._spoil_replaced()

    # -- what the hooks see ------------------------------------------------------------------------------------------

    def _run_backward(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass, and average the gradients that it has left here, if the model has run in this step."""
        found = inner(*args, **kwargs)
        if kwargs.get("accumulate_grad") and self._has_run:
            self._average()
        return found

    @torch.no_grad()
    def _average(self) -> None:
        """Average gradients that a backward pass has left here, and put these on record: a loop that averages them, as
        it does where they are its ranks' own, leaves them as they are."""
        self._balancer.reduce_gradients()
        for parameter in self._tensors.dense.values() if self._runtime.config.dense_gradients == "host" else ():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                mean = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(mean, group=self._runtime.groups.data)
                if parameter.grad is not None or mean.any():  # another rank may have used what this one has not
                    parameter.grad = mean.div_(self._runtime.groups.data.size())
        for name, _, expert, row in self._gradients():
            if expert >= 0 or isinstance(self._tensors.dense[name.removesuffix("/grad")], DTensor):
                self._put(name.removesuffix("grad") + "given", "given", expert, row)

    def _arrives(self, name: str, gradient: Tensor) -> None:
        """Put on record what each backward pass here gives a parameter outside the experts."""
        self._rows[f"{name}/given", len(self._rows)] = row_of(f"{name}/given", "given", -1, gradient)

    def _clip_more(self, inner: Callable[..., None], parameters: Any, most: float, norm: Tensor, *rest: Any) -> None:
        """Let clipping bite, to a tenth of the norm that the same parameters had at first, or less, by turns."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if 0 < value < math.inf and most < _NO_CLIPPING:
            first = self._norms.setdefault(tuple(one.shape for one in parameters), value)
            most = min(most, first / (10 + 7 * (self._step % 2)))
        inner(parameters, most, norm, *rest)

    def on_forward_begin(self, trains: bool) -> None:
        self._has_run |= trains and self._is_early

    def _before_forward(self, *_: object) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if torch.is_autocast_enabled(device):
            self._coarsest = max(self._coarsest, torch.finfo(torch.get_autocast_dtype(device)).eps)

    @torch.no_grad()
    def before_step(self) -> None:
        """Record reduced gradients, in the place of those of an earlier optimizer in this step; then set elements of
        dense ones that are rounding errors alone to zero, in place. Keep a copy of this rank's load counts."""
        for entry in self._gradients():
            self._put(*entry)
            if entry[2] < 0:  # no expert's
                size, rounding = entry[3].abs(), max(self._coarsest, torch.finfo(entry[3].dtype).eps)
                entry[3].masked_fill_(size < _NOISE * rounding * size.mean(), 0)
        self._counts = self._runtime.counter.counts.clone()

    @torch.no_grad()
    def on_step_end(self) -> None:
        self._step, self._has_run = self._step + 1, False
        counts = self._write()
        if self._step == self._trial.steps:
            self._end()
        elif self._moves:
            rebalancer, placement = self._balancer.rebalancer, self._balancer.placement
            rebalancer.place(shuffled(placement, counts.double().numpy()).with_epoch(placement.epoch + 1))
            self._spoil_replaced()

    def _spoil_replaced(self) -> None:
        """Give parameters from before attach other numbers and gradients: who still uses them trains otherwise."""
        replaced = self._tensors.replaced()
        for name, old in replaced.items():
            digest = row_of(name, "number", -1, old).digest
            if self._of_old.get(name, digest) != digest:
                self._balancer.guard.report(_WRITTEN.format(name))
            old.data.add_(1)
            old.grad, self._of_old[name] = torch.ones_like(old), row_of(name, "number", -1, old).digest
        self._meta["replaced"] = list(replaced)

    # -- the record ----------------------------------------------------------------------------------------------------

    def _put(self, *entry: Any) -> None:
        row = row_of(*entry)
        self._rows[row.name, row.expert] = row

    def _write(self) -> Tensor:
        """Gather the record of a step, on rank 0 of the job: a line of JSON with the counts, and one of each rank.
        Returns int64 ``[L, E]``, the counts of all ranks."""
        for entry in self._entries():
            if has_memory(entry[3]):
                self._put(*entry)
        mine = json.dumps([*self._rows.values()])
        self._rows.clear()
        counts = self._counts if self._step else torch.zeros_like(self._runtime.counter.counts)
        total = gather_rows(counts.cpu().contiguous(), self._group).sum(dim=0)
        lines = [json.dumps(total.tolist()), *(line.decode() for line in gather_bytes(mine.encode(), self._group))]
        self._write_file(f"step-{self._step:05d}.jsonl", "\n".join(lines))
        self._write_meta()
        return total

    def _write_file(self, name: str, text: str) -> None:
        if self._runtime.job.is_planner or not self._trial.ends_process:  # else all ranks read the record
            write_file(Path(self._trial.folder) / name, text)

    def _write_meta(self) -> None:
        held = [*self._tensors.dense.values(), *self._runtime.registry.parameters()]
        meta = self._meta | {
            "said": self._balancer.guard.said,
            "rounding": max([self._coarsest, *(torch.finfo(p.dtype).eps for p in held if p.is_floating_point())]),
            "commits": self._balancer.placement.epoch - self._began,
            "not_single": self._why_not_single(),
        }
        self._write_file("meta.json", gather_bytes(json.dumps(meta).encode(), self._group)[0].decode())

    def _why_not_single(self) -> str:
        """Say why the job cannot run with all experts on each rank; empty: it can."""
        job, device, hosts = self._runtime.job, self._runtime.device, [stage.host for stage in self._request.stages]
        if any(host.dispatches or host.ranks is not None or any(one.slots for one in host.layers) for host in hosts):
            return "the framework spreads the experts itself"
        if job.divided_rows or job.divided_state:
            return "the job divides what it keeps of an expert"
        if self._tensors.sliced:
            return "fully_shard divides experts over ranks that the job chooses"
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
        else:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // max(1, len(job.ranks))
        # Four times their weights, with Adam; a fifth of this rank's memory stays free.
        here = sum(local(parameter).nbytes for parameter in self._runtime.registry.parameters())
        needed = 4 * here * (job.ep_size - 1)
        return f"all experts take {needed / 2**30:.1f} GiB more on a rank" if needed > 0.8 * free else ""

    def _end(self) -> None:
        """Finish the record; the job does not go on to what comes after its loop."""
        self._hooks.close()
        _keys.cache_clear()
        if self._moves:
            self._look_for_kept()
        self._meta["ended"] = True
        self._write_meta()
        dist.barrier(self._group)
        if self._trial.ends_process:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _look_for_kept(self) -> None:
        """Put on record what may be experts by place, of no model or balancer of this process. Collective."""
        balancers = [one for one in gc.get_objects() if type(one) is Balancer and not one.closed]
        self._meta["doubts"] = [_BALANCERS] if len(balancers) > 1 else []
        owned = [one for balancer in balancers for one in (*balancer.rebalancer.staging, *balancer.tensors.known())]
        owned += [entry[3] for entry in self._entries()]
        if self._tensors.host_steps:  # the framework's own, inside of what the balancer was given
            states = [state for o in gc.get_objects() if issubclass(type(o), Optimizer) for state in o.state.values()]
            owned += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        replaced = self._tensors.replaced().values()  # the records tell who uses these
        known = (*owned, *replaced, *(old.grad for old in replaced))
        found = unregistered([stage.model for stage in self._request.stages], self._runtime.registry, known)
        holders = [(holder, one.shape) for one in found if (holder := holder_of(one, found))]
        self._meta["unregistered"] = [
            {"holder": f"rank {rank}: {holder}", "shape": shape}
            for rank, listed in enumerate(gather_json(holders, self._group))
            for holder, shape in listed
        ]

    # -- what is there -------------------------------------------------------------------------------------------------

    def _entries(self) -> Iterator[tuple[Any, ...]]:
        """Yield what `row_of` takes of weights, optimizer state and buffers, of experts by their logical ids."""
        job, registry = self._runtime.job, self._runtime.registry
        for layer, module, _ in self._request.layers:
            for tensor in registry.of_home(layer):
                kind = tensor.kind if tensor.part == "row" else tensor.part
                name = tensor.name if tensor.name.startswith(f"{module}.") else f"{module}.{tensor.name}"
                for slot, expert in enumerate(self._balancer.logical_expert_ids(layer)):
                    part = tensor.ranges[slot][job.edp_ranks.index(job.rank)] if kind == "range" else (0, 0)
                    if (row := tensor.row(slot).detach()).numel():
                        yield name, kind, expert, row, part[0]
        for name, parameter in self._tensors.dense.items():
            yield name, "parameter", -1, local(parameter)
            for optimizer in self._tensors.optimizers:
                for key, value in state_of(optimizer, parameter).items():
                    if isinstance(value, Tensor):
                        yield f"{name}/{key}", "optimizer_state", -1, local(value)
        for stage in self._request.stages:
            buffers = ((name, one) for name, one in stage.model.named_buffers() if not one.is_sparse)
            yield from ((stage.prefix + name, "buffer", -1, local(one)) for name, one in buffers)

    def _gradients(self) -> Iterator[tuple[Any, ...]]:
        layer_of, dense = self._runtime.layer_of_parameter, self._tensors.dense
        experts = {} if self._runtime.registry.has_slots else self._runtime.parameters
        for name, one in {**experts, **dense}.items():
            gradient = getattr(one, "main_grad", None) if one.grad is None else one.grad  # Megatron's is in a buffer
            if gradient is not None and name in dense:
                yield f"{name}/grad", "gradient", -1, local(gradient)
            elif gradient is not None:
                rows = zip(self._balancer.logical_expert_ids(layer_of[name]), local(gradient), strict=True)
                yield from ((f"{name}/grad", "gradient", expert, row) for expert, row in rows)


# -- tensors that may be experts and that nobody has registered, and who holds them ------------------------------------


def unregistered(models: Sequence[nn.Module], registry: ExpertTensors, owned: Iterable[Tensor | None]) -> list[Tensor]:
    """Return live tensors of this process that may hold experts and are not of the models, their gradients, the
    registry or ``owned``: of the shape of an expert parameter or of one expert in it, or vectors with as many elements
    as experts have. Run the garbage collector and unfreeze its objects first."""
    gc.collect()
    gc.unfreeze()  # else what was frozen is not among them
    held = [one for model in models for tensors in (model.parameters(), model.buffers()) for one in tensors]
    gradients = [getattr(tensor, name, None) for tensor in held for name in ("grad", "main_grad")]
    known = {0, *(_memory_of(one) for one in (*held, *gradients, *owned, *registry.parameters()) if one is not None)}
    shapes = {tuple(one.shape) for one in registry.parameters()}
    parts = {shape[1:] for shape in shapes if len(shape) > 2} | {(size,) for size in _sizes(models, registry)}
    found = []
    for value in gc.get_objects():
        if issubclass(type(value), Tensor):  # isinstance() wakes objects that pretend to be of another class
            with suppress(Exception):  # there are tensors that cannot even say their shape
                shape, memory = tuple(value.shape), _memory_of(value)
                if memory not in known and (shape in shapes or (shape in parts and value.grad_fn is None)):
                    known.add(memory)
                    found.append(value)
    return found


def _sizes(models: Sequence[nn.Module], registry: ExpertTensors) -> set[int]:
    """Return numbers of elements of vectors that may hold experts."""
    experts, own = list(registry.parameters()), set(map(id, registry.parameters()))
    together: list[Sequence[Tensor]] = [experts, *([one] for one in experts if one.dim() > 2)]
    for module in (module for model in models for module in model.modules()):
        if not own.isdisjoint(map(id, parameters := [*module.parameters()])):
            together += [parameters, [one for one in parameters if one.requires_grad]]
    return {sum(local(one).numel() for one in parameters) for parameters in together}


def _memory_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0: it has none."""
    try:
        return local(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def holder_of(tensor: Tensor, ours: list[Tensor]) -> str:
    """Return a text that names the variable, object or function that keeps a tensor alive; "": a framework does.
    ``ours``: the caller's own list with the tensor, which does not count."""
    variables, level = {id(value): name for name, value in _variables()}, list[Any]([tensor])
    seen = {id(one) for one in (ours, level, *level)}
    for _ in range(_DEPTH):
        if names := [name for one in level if (name := _name_of(one, variables)) is not None]:
            return max(names, key=bool)
        above = [one for one in gc.get_referrers(*level) if id(one) not in seen and type(one) is not FrameType]
        level = list({id(one): one for one in above}.values())
        seen |= {id(one) for one in (*level, level, above)}
    return f"a {type(tensor).__name__}"


def _variables() -> Iterator[tuple[str, Any]]:
    """Yield names and values of the local variables of all running functions, and of the script."""
    for frame in sys._current_frames().values():
        inner: FrameType | None = frame
        while inner is not None:
            if not f"{inner.f_globals.get('__name__', '')}.".startswith(_FRAMEWORKS):
                yield from ((f"{name} in {inner.f_code.co_name}()", value) for name, value in inner.f_locals.items())
            inner = inner.f_back
    yield from vars(sys.modules["__main__"]).items()


def _name_of(value: Any, variables: Mapping[int, str]) -> str | None:
    """Name what holds others under a name; empty: a framework's; None: it is only a container of what is named."""
    if id(value) in variables:
        return f"variable {variables[id(value)]}"
    if isinstance(value, dict | list | tuple | set | CellType | Tensor):
        return None
    kind = type(value)
    made_in = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or kind.__module__
    if f"{made_in}.".startswith(_FRAMEWORKS) and not isinstance(value, nn.Module):  # which may be the job's copy of one
        return ""
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    is_code = isinstance(value, FunctionType | GeneratorType)
    return f"{kind.__name__} {value.__qualname__}" if is_code else f"an object of {kind.__name__}"
