"""One run of a user's job under ``eplb-runtime verify``: ``attach`` overrides the layout, each step is put on record,
and the job ends after some steps. What the records mean is decided in `tools.verification`.

A record has a few numbers for each tensor, and for each logical expert of it: a digest of all bits, the sum of squares,
and random sums, from which the distance of two tensors is estimated that are never in one memory.
"""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...balancer.balancer import Balancer
from ...balancer.gradients.reduction import bit_words
from ...balancer.loop_state import LoopHooks
from ...config import BalancerConfig, DispatchConfig, Trial
from ...distributed.consensus import gather_bytes, gather_json, gather_rows
from ...distributed.ranks import Ranks
from ...moe.experts.optimizer_state import state_of
from ...moe.experts.slices import has_memory, local
from ...placement import Placement
from ...planner.policies import shuffled
from ...utils.files import write_file
from .description import AttachError, Stage
from .unregistered import holder_of, memories, suspects

SKETCHES = 16
"""Random sums of a tensor, each of every sixteenth element with random signs; the distance of two tensors is about the
norm of what these sums differ by."""
_CHUNK = 1 << 22
"""Elements that are read at once."""
_IS_SUM, _EXACT = 0.05, 0.01
"""Relative distances up to which a gradient is a sum of what backward passes gave, and a factor a number."""
_SHARES = (
    "average gradients over ranks once, all ranks alike, and divide the loss by no number of ranks (as DDP, or "
    "dense_gradients='allreduce'): those of {} come {:.3g} times as large as the experts'"
)
_WRITTEN = "take parameters from model.parameters() after attach: {} of before is written, and no model has it"
_ONE_MORE = "the gradient of {} has more of one rank's than of another's: average gradients over ranks, all alike"
_BALANCERS = "the job attaches more than one balancer, and the first alone is compared"
_UNEVEN = "{} is not the same on all ranks: each has it by its own tokens alone"
_SHARE_OF_EPS = 0.3
"""Root mean square of a rounding error, which is up to half of the distance between two numbers."""
_NO_CLIPPING = 1e6
"""Norms that are given to `clip_grad_norm_` to learn of the norm alone."""
_ENOUGH_MEMORY = 0.8
"""Share of the free memory that the experts of a run with all of them on each rank may take."""
FOUND = " ahead of the step"
"""Ends the name of a weight of which it is said how a step found it."""
FIRST = "run-1-fixed"
"""Folder of the first run, next to those of the others."""
KINDS = ("found", "gradient", "buffer", "cache", "optimizer_state", "range", "number", "parameter")
"""Kinds of a tensor on record by its number, causes first; ``found``: a weight ahead of the optimizer's step;
``range``, ``number``: state of which ranks have parts; ``cache``: a buffer that checkpoints leave out, unless we
average: DistributedDataParallel would keep it alike, too."""


def without_replicas(config: BalancerConfig) -> BalancerConfig:
    """Return the same settings without replica slots and what only these use. An initial placement is for one number of
    replica slots, so it goes, too."""
    if not config.replica_slots:
        return config
    dispatch = replace(config.dispatch, split_least_tokens=DispatchConfig.split_least_tokens)
    return replace(
        config, replica_slots=0, initial_placement=None, dispatch=dispatch, copies_by=BalancerConfig.copies_by
    )


def begin_record(trial: Trial) -> None:
    """Raise AttachError where a training of the same command is on record already."""
    if (Path(trial.folder) / "meta.json").exists():
        raise AttachError("verify compares one training run, and this command starts a second: give it the first alone")


def layout_of(trial: Trial, config: BalancerConfig, ranks: Ranks) -> tuple[BalancerConfig, Ranks]:
    """Return settings and ranks of a run: nothing is decided by load, and nothing is written but the records."""
    alone: dict[str, Any] = {"policy": "static", "run": None, "listen": None, "listen_token": None, "guard": "warn"}
    own = replace(config, **alone, migration=replace(config.migration, max_moves=None, max_pause_seconds=None))
    if trial.layout == "single":
        return replace(without_replicas(own), initial_placement=None), replace(ranks, ep=(dist.get_rank(),))
    return own if trial.replicas else without_replicas(own), ranks


@dataclass(frozen=True)
class TrialEntry:
    """A tensor on record; ``expert`` -1: it is no expert's. ``first``: where it begins in the whole row."""

    name: str
    kind: str
    expert: int
    tensor: Tensor
    first: int = 0


class TrialRun(LoopHooks):
    """Records the steps of a balancer, moves experts as the trial says, and ends the job.

    Args:
        stages: the attached models of this rank.
        known: ``notes``, what attach has said of bits; ``untried``, layers whose own way attach could not call alone,
            and why; ``not_single``, why the job cannot run with all experts on each rank (empty: it can, if they fit);
            ``replica_slots`` of the job's own settings.
    """

    def __init__(self, trial: Trial, balancer: Balancer, stages: Sequence[Stage], known: Mapping[str, Any]) -> None:
        self._trial = trial
        self._balancer = balancer
        self._stages = stages
        self._runtime = balancer.runtime
        self._group, job = self._runtime.groups.background, self._runtime.job
        self._step = 0
        self._began = balancer.placement.epoch
        self._losses: list[float] = []
        self._shaken: set[int] = set()
        self._foreign: Counter[str] = Counter()
        self._steppers: list[Optimizer] = []
        self._calls = 0
        self._digests: dict[str, int] | None = None
        self._rows: dict[tuple[str, int], tuple[TrialEntry, Tensor, Tensor]] = {}
        self._weighed: list[tuple[str, Tensor]] = []
        self._arrived: dict[str, Tensor] = {}
        self._ratios: dict[str, float] = {}
        self._digests_of_old: dict[str, int] = {}
        self._coarsest = 0.0
        self._meta: dict[str, Any] = {**known, "ranks": len(job.ranks), "doubts": []}
        self._modules = {
            job.first_layer(stage.number) + position: stage.prefix + layer.name
            for stage in stages
            for position, layer in enumerate(stage.host.layers)
        }
        balancer.guard.complete_steps = trial.steps
        # Where all is on each rank gradients are averaged as they are made: what a loop does with them sees averages.
        is_early = trial.layout == "single" and len(job.layers_of_stage) == 1  # a schedule goes by stage
        self._largest = math.inf
        hooks = ExitStack()
        hooks.callback(
            _listen(self._losses, self._before_forward, self._average_early if is_early else lambda *_: None)
        )
        hooks.callback(_let_clipping_bite(lambda: (self._step, self._largest)))
        self._undo = hooks.close
        balancer.loop.hooks.append(self)
        balancer.closing.callback(self._undo)
        if trial.layout == "moved":
            balancer.rebalance_by(self._move_at_once)
            self._spoil_replaced()
        if trial.layout == "shaken":
            balancer.closing.callback(nn.modules.module.register_module_forward_hook(self._shake_output).remove)
        if trial.layout == "fixed" or is_early:
            experts = [("", parameter) for parameter in self._runtime.parameters.values()]
            trained = [(name, p) for name, p in (*balancer.tensors.dense.items(), *experts) if p.requires_grad]
            self._weighed = [(name, p) for name, p in trained if not isinstance(p, DTensor)]
        for name, parameter in self._weighed:
            balancer.closing.callback(parameter.register_hook(partial(self._arrives, name)).remove)
        self._ours = {id(p): p for p in (*balancer.tensors.dense.values(), *self._runtime.parameters.values())}
        if not balancer.tensors.host_steps:  # else optimizers of the framework have parts of parameters
            steps = register_optimizer_step_pre_hook(lambda one, *_: self._steppers.append(one))
            balancer.closing.callback(steps.remove)
            balancer.closing.callback(register_optimizer_step_post_hook(self._has_stepped).remove)
        self._write()

    def _has_stepped(self, optimizer: Optimizer, *_: object) -> None:
        """Take digests of what optimizers have stepped that the balancer does not know; of one inside another not."""
        self._steppers = self._steppers[:-1]
        parameters: list[Tensor] = [one for group in optimizer.param_groups for one in group["params"]]
        for number, parameter in enumerate(() if self._steppers else parameters):
            if id(parameter) not in self._ours and not isinstance(parameter, DTensor):  # of which each rank has a part
                digest = _sketched(TrialEntry("", "number", -1, parameter))[0]
                self._foreign[f"parameter {number} of another {type(optimizer).__name__}"] += int(digest)

    def _arrives(self, name: str, gradient: Tensor) -> None:
        """Add to the random sums of what backward passes here give a parameter outside the experts, or all experts."""
        self._arrived[name] = self._arrived.get(name, 0) + _sketched(TrialEntry("", "gradient", -1, gradient))[1][1:]

    def _average_early(self) -> None:
        """Average gradients that a backward pass has left here."""
        if self._arrived:  # else it was none of this model's
            self._arrived.clear()
            self._balancer.reduce_gradients()

    def _before_forward(self, *_: object) -> None:
        """See the precision, and buffers ahead of the last step."""
        is_last = self._step == self._trial.steps - 1 and self._trial.layout in ("fixed", "moved")
        if self._digests is None and is_last:
            dense = [one for one in self._entries() if one.expert < 0] if self._runtime.averages_dense else []
            self._digests = {f"buffer {one.name}": int(_sketched(one)[0]) for one in dense if one.kind == "buffer"}
        self._steppers.clear()  # a step that has raised is over
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if torch.is_autocast_enabled(device):
            self._coarsest = max(self._coarsest, torch.finfo(torch.get_autocast_dtype(device)).eps)

    def _known(self) -> set[int]:
        """Return where everything is that the models and balancers of this process have."""
        gc.unfreeze()
        objects = gc.get_objects()
        balancers = [one for one in objects if type(one) is Balancer and not one.closed]
        if len(balancers) > 1 and _BALANCERS not in self._meta["doubts"]:
            self._meta["doubts"].append(_BALANCERS)
        owned = [one for balancer in balancers for one in (*balancer.rebalancer.staging, *balancer.tensors.known())]
        owned += [entry.tensor for entry in self._entries()]
        if self._balancer.tensors.host_steps:  # the framework's own, inside of what the balancer was given
            states = [state for o in objects if issubclass(type(o), Optimizer) for state in o.state.values()]
            owned += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        for old in self._runtime.model_check.replaced().values():  # the run with moved homes tells who uses them
            owned += [old] if old.grad is None else [old, old.grad]
        return memories([stage.model for stage in self._stages], self._runtime.registry, owned)

    # -- the step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_step(self) -> None:
        """Put reduced gradients on record; with several optimizers those that the last of them sees."""
        if self._step >= self._trial.steps:
            return
        if self._trial.layout == "shaken":
            self._shake()
        for entry in self._entries() if not self._rows else ():
            if entry.kind == "parameter" and has_memory(entry.tensor):
                found = replace(entry, name=f"{entry.name}{FOUND}", kind="found")
                self._rows[found.name, found.expert] = (found, *_sketched(found))
        for entry in self._entries_of_gradients():
            self._rows[entry.name, entry.expert] = (entry, *_sketched(entry))
        largest = [float(e.tensor.abs().max()) for e in self._entries_of_gradients() if e.tensor.numel()]
        self._largest = float(gather_rows(torch.tensor([max(largest, default=0.0)]), self._group).max())
        if self._weighed and self._trial.layout == "fixed":
            self._compare_shares()
        self._counts = self._runtime.counter.counts.clone()

    @torch.no_grad()
    def on_step_end(self) -> None:
        if self._step >= self._trial.steps:
            return
        self._step += 1
        self._shaken.clear()
        counts = self._write()
        if self._step == self._trial.steps:
            self._end()
        elif self._trial.layout == "moved":
            self._balancer.place(self._next_placement(counts))
            self._spoil_replaced()

    def _next_placement(self, counts: Tensor) -> Placement:
        placement = self._balancer.placement
        return shuffled(placement, counts.double().numpy()).with_epoch(placement.epoch + 1)

    def _move_at_once(self) -> bool:
        """Move experts as a decision of the job's own `Balancer.rebalance` may."""
        self._balancer.rebalancer.move_to(self._next_placement(self._runtime.counter.counts.cpu()))
        return True

    def _spoil_replaced(self) -> None:
        """Give parameters from before attach other numbers and gradients: who still uses them trains otherwise."""
        replaced = self._runtime.model_check.replaced()
        for name, old in replaced.items() if self._step < self._trial.steps else ():
            entry = TrialEntry(name, "number", -1, old)
            if self._digests_of_old.get(name, digest := int(_sketched(entry)[0])) != digest:
                self._balancer.guard.report(_WRITTEN.format(name))
            with torch.no_grad():
                old.add_(1)
            old.grad, self._digests_of_old[name] = torch.ones_like(old), int(_sketched(entry)[0])
        self._meta["replaced"] = list(replaced)

    def _compare_shares(self) -> None:
        """Note parameters whose gradient is another multiple of what ranks' backward passes gave than that of experts:
        by a number of ranks or by rank, in two steps, where clipping these alone would give each step's own factor."""
        job, none = self._runtime.job, torch.zeros(SKETCHES, dtype=torch.float64)
        seen = dict.fromkeys(self._arrived, none)
        for name, parameter in self._weighed:
            if parameter.grad is not None:
                seen[name] = seen.get(name, none) + _sketched(TrialEntry("", "gradient", -1, parameter.grad))[1][1:]
        mine = {name: torch.stack([self._arrived.get(name, none), one]).tolist() for name, one in seen.items()}
        self._arrived.clear()
        of_ranks = gather_json(mine, self._group)
        usual = _multiple([one[""] for one in of_ranks if "" in one], of_all=True)
        numbers = {len(job.data_ranks), len(job.edp_ranks), job.ep_size} - {1}
        factors = [factor for number in numbers for factor in (number, 1 / number)]
        for ranks in job.data_sets if usual else ():
            here = [of_ranks[job.ranks.index(rank)] for rank in ranks]
            for name in here[0].keys() - {""}:
                if multiple := _multiple([one[name] for one in here if name in one]):
                    ratio = multiple / usual * job.gradient_divisor
                    before, self._ratios[name] = self._ratios.get(name, 0.0), ratio
                    is_number = any(max(abs(r / one - 1) for r in (before, ratio)) < _EXACT for one in factors)
                    if is_number or before == ratio == math.inf:  # it may be a rate of the loop's own
                        self._meta["doubts"].append((_SHARES if is_number else _ONE_MORE).format(name, ratio))

    def _end(self) -> None:
        """Finish the record; the job does not go on to what comes after its loop."""
        self._undo()
        _keys.cache_clear()
        if self._digests is not None:
            self._look_for_kept()
            self._digests.update(self._foreign)
            of_ranks = gather_json(self._digests, self._group)
            job = self._runtime.job
            copies = [[of_ranks[job.ranks.index(rank)] for rank in ranks] for ranks in job.data_sets]
            named_here = {n for same in copies for n in same[0] if len({one[n] for one in same if n in one}) > 1}
            self._meta["doubts"] += map(_UNEVEN.format, sorted(named_here))
        self._meta["ended"] = True
        self._write_meta()
        dist.barrier(self._group)
        if self._trial.ends_process:
            for child in descendants():  # which the job would end after its loop
                with suppress(OSError):  # it has ended by itself
                    os.kill(child, signal.SIGTERM)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _look_for_kept(self) -> None:
        """List what may be experts by place, with moved homes: what the first run, with fixed homes, does not have, and
        all that has the shape of a rank's own experts."""
        first = Path(self._trial.folder).parent / FIRST / "meta.json"
        before = json.loads(gather_bytes(first.read_bytes() if first.exists() else b"{}", self._group)[0])
        found = suspects([stage.model for stage in self._stages], self._runtime.registry, self._known())
        known = set(before.get("contents", ()))
        lines = [
            {"holder": f"rank {self._runtime.job.rank}: {holder}", "shape": one.shape}
            for one in (found if self._trial.layout == "moved" else ())
            if (one.is_own or one.content not in known) and (holder := holder_of(one, found))
        ]
        of_ranks = gather_json([lines, [one.content for one in found]], self._group)
        self._meta["unregistered"] = [line for listed, _ in of_ranks for line in listed]
        self._meta["contents"] = sorted({content for _, contents in of_ranks for content in contents})

    # -- what is there -------------------------------------------------------------------------------------------------

    def _entries(self) -> Iterator[TrialEntry]:
        """Weights, optimizer state and buffers, of experts by their logical ids."""
        runtime, balancer = self._runtime, self._balancer
        part = runtime.job.edp_ranks.index(runtime.job.rank)
        for layer in runtime.registry.layers:
            experts, prefix = balancer.logical_expert_ids(layer), f"{self._modules[layer]}."
            for tensor in runtime.registry.of_home(layer):
                kind = tensor.kind if tensor.part == "row" else tensor.part
                for slot, expert in enumerate(experts):
                    first = tensor.ranges[slot][part][0] if tensor.part == "range" else 0
                    row = tensor.row(slot).detach()
                    if row.numel():
                        name = tensor.name if tensor.name.startswith(prefix) else prefix + tensor.name
                        yield TrialEntry(name, kind, expert, row, first)
        for name, parameter in balancer.tensors.dense.items():
            yield TrialEntry(name, "parameter", -1, local(parameter))
            for optimizer in balancer.tensors.optimizers:
                for key, value in sorted(state_of(optimizer, parameter).items(), key=lambda item: str(item[0])):
                    if isinstance(value, Tensor):
                        yield TrialEntry(f"{name}/{key}", "optimizer_state", -1, local(value))
        for stage in self._stages:
            for name, buffer in stage.model.named_buffers():
                if not buffer.is_sparse:
                    owner, _, own = name.rpartition(".")
                    saved = own not in stage.model.get_submodule(owner)._non_persistent_buffers_set
                    group = "buffer" if saved or runtime.averages_dense else "cache"
                    yield TrialEntry(stage.prefix + name, group, -1, local(buffer))

    def _entries_of_gradients(self) -> Iterator[TrialEntry]:
        layer_of, slots = self._runtime.layer_of_parameter, self._runtime.registry.has_slots
        for name, parameter in {} if slots else self._runtime.parameters.items():
            if parameter.grad is not None:
                rows = zip(self._balancer.logical_expert_ids(layer_of[name]), local(parameter.grad), strict=True)
                yield from (TrialEntry(f"{name}/grad", "gradient", expert, row) for expert, row in rows)
        for name, parameter in self._balancer.tensors.dense.items():
            if parameter.grad is not None:
                yield TrialEntry(f"{name}/grad", "gradient", -1, local(parameter.grad))

    def _shake(self) -> None:
        """Change gradients by about a rounding error, alike on all ranks that share them."""
        for entry in self._entries_of_gradients():
            gradient = entry.tensor
            if not gradient.is_floating_point() or gradient.data_ptr() in self._shaken:
                continue
            self._shaken.add(gradient.data_ptr())
            seed = zlib.crc32(f"{self._step} {entry.name} {entry.expert}".encode())
            noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(
                gradient.device
            )
            error = _SHARE_OF_EPS * max(torch.finfo(gradient.dtype).eps, self._coarsest)
            noise *= gradient != 0  # rows of tokens, or of experts, that no batch has had
            gradient.add_(noise * (error * gradient.float().pow(2).mean().sqrt()))

    def _shake_output(self, module: nn.Module, _: object, output: Any) -> Any:
        """Change what a module without parts gives by about a rounding error of float32 or float64; whole numbers may
        be ids."""
        is_wide = isinstance(output, Tensor) and output.is_floating_point() and output.element_size() >= 4
        if not is_wide or next(module.children(), None) is not None or torch.equal(output, output.round()):
            return output
        self._calls += 1
        generator = torch.Generator(output.device).manual_seed(zlib.crc32(f"{self._step} {self._calls}".encode()))
        noise = torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
        shaken = output * (1 + torch.finfo(output.dtype).eps * noise)
        return shaken.clamp(output.amin(), output.amax())  # it may be a probability

    # -- the record ----------------------------------------------------------------------------------------------------

    def _write(self) -> Tensor:
        """Gather the record of a step, on rank 0 of the job: a line of JSON with the counts, and one of each rank.
        Returns int64 ``[L, E]``, the counts of all ranks."""
        for entry in self._entries():
            if has_memory(entry.tensor):
                self._rows[entry.name, entry.expert] = (entry, *_sketched(entry))
        rows = [
            (entry.name, entry.expert, entry.kind, entry.tensor.numel(), int(digest), sums.tolist())
            for entry, digest, sums in self._rows.values()
        ]
        mine = json.dumps([list(map(float, self._losses)), rows])
        self._rows.clear()
        self._losses.clear()
        counts = self._counts if self._step else torch.zeros_like(self._runtime.counter.counts)
        total = gather_rows(counts.cpu().contiguous(), self._group).sum(dim=0)
        gather = _gather_on_first if self._trial.ends_process else gather_bytes  # else all ranks read the record
        if received := gather(mine.encode(), self._group):
            lines = [json.dumps(total.tolist()), *(line.decode() for line in received)]
            write_file(Path(self._trial.folder) / f"step-{self._step:05d}.jsonl", "\n".join(lines))
        self._write_meta()
        return total

    def _write_meta(self) -> None:
        held = [*self._balancer.tensors.dense.values(), *self._runtime.registry.parameters()]
        error = max([self._coarsest, *(torch.finfo(p.dtype).eps for p in held if p.is_floating_point())])
        commits = self._balancer.placement.epoch - self._began
        groups = [group for one in self._balancer.tensors.optimizers for group in getattr(one, "param_groups", ())]
        still = {id(parameter) for group in groups if group.get("lr") == 0 for parameter in group["params"]}
        meta = {**self._meta, "said": self._balancer.guard.said, "rounding": error, "commits": commits}
        meta["not_single"] = self._meta["not_single"] or self._does_not_fit()
        every = {**self._balancer.tensors.dense, **self._runtime.parameters}
        meta["eps"] = {n: torch.finfo(p.dtype).eps for n, p in every.items() if p.is_floating_point()}
        meta["still"] = [name for name, parameter in every.items() if id(parameter) in still]
        of_first = gather_bytes(json.dumps(meta).encode(), self._group)[0]
        if self._runtime.job.is_planner or not self._trial.ends_process:
            write_file(Path(self._trial.folder) / "meta.json", of_first.decode())

    def _does_not_fit(self) -> str:
        """Say that all experts do not fit on this rank. With Adam an expert takes four times its weights."""
        job, device = self._runtime.job, self._runtime.device
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
        else:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // max(1, len(job.ranks))
        here = sum(local(parameter).nbytes for parameter in self._runtime.registry.parameters())
        needed = 4 * here * (job.ep_size - 1)
        return f"all experts take {needed / 2**30:.1f} GiB more on a rank" if needed > _ENOUGH_MEMORY * free else ""


def _multiple(given_and_seen: Sequence[Any], of_all: bool = False) -> float:
    """Return how often the sum of what ranks' backward passes gave is in what the optimizer sees, on the first rank or
    added up over all; infinity: some ranks' more often than others'; 0: it is no sum of these."""
    if not given_and_seen:
        return 0.0
    given_RS, seen_RS = (both := torch.tensor(given_and_seen, dtype=torch.float64)).unbind(1)
    given_S, seen_S = given_RS.sum(dim=0), seen_RS.sum(dim=0) if of_all else seen_RS[0]
    multiple = given_S @ seen_S / (given_S @ given_S)
    if bool((multiple * given_S - seen_S).norm() < _IS_SUM * seen_S.norm()):
        return float(multiple)
    if of_all or len(given_RS) > SKETCHES // 2 or not both.isfinite().all():
        return 0.0
    best_S = given_RS.T @ torch.linalg.lstsq(given_RS.T, seen_S.unsqueeze(1)).solution[:, 0]
    return math.inf if bool((best_S - seen_S).norm() < _IS_SUM * seen_S.norm()) else 0.0


def _sketched(entry: TrialEntry) -> tuple[Tensor, Tensor]:
    """int64: a digest that a change of any element changes; float64 ``[1 + SKETCHES]``: the sum of squares and, of
    gradients, weights and buffers, sums with random signs. All are added up over the parts of a row."""
    tensor = entry.tensor.detach()
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).contiguous().reshape(-1)
    digest = torch.zeros((), dtype=torch.int64, device=flat.device)
    sums = torch.zeros(1 + SKETCHES, dtype=torch.float64, device=flat.device)
    for begin in range(0, flat.numel(), _CHUNK):
        part = flat[begin : begin + _CHUNK]
        first = entry.first + begin
        keys = _keys(first, part.numel(), flat.device)
        digest += (bit_words(part).to(torch.int64) * keys).sum()
        values = part.double()
        sums[0] += values @ values
        if entry.kind in ("found", "gradient", "parameter", "buffer"):
            signed = torch.where(keys & 256 == 0, values, -values)
            before, after = first % SKETCHES, -(first + part.numel()) % SKETCHES
            sums[1:] += nn.functional.pad(signed, (before, after)).view(-1, SKETCHES).sum(dim=0)
    return digest.cpu(), sums.cpu()


@lru_cache(maxsize=16)
def _keys(first: int, count: int, device: torch.device) -> Tensor:
    """A random odd int64 for each place, the same on every rank and device."""
    keys = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device)
    for factor, shift in ((-7046029254386353131, 31), (-4658895280553007687, 29)):
        keys = keys * factor
        keys = keys ^ (keys >> shift)
    return keys | 1


def _gather_on_first(mine: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Bytes of all ranks, on the first rank of a gloo group; empty on others."""
    lengths = gather_rows(torch.tensor([len(mine)]), group).flatten().tolist()
    padded = torch.frombuffer(bytearray(mine.ljust(max(lengths), b"\0")), dtype=torch.uint8)
    into = [torch.empty_like(padded) for _ in lengths] if group.rank() == 0 else None
    dist.gather(padded, into, dst=dist.get_global_rank(group, 0), group=group)
    return [row[:length].numpy().tobytes() for row, length in zip(into or (), lengths, strict=False)]


# -- hooks into torch, and what a job has started ----------------------------------------------------------------------


def descendants(process: int | str = "self") -> list[int]:
    """Return the processes that a process has started, and that these have."""
    found: list[int] = []
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, children.read_text().split())
    return found + [one for child in found for one in descendants(child)]


def _listen(losses: list[float], before_forward: Callable[..., None], after: Callable[..., None]) -> Callable[[], None]:
    """Collect what ``backward()`` is called on, and call functions before each module's forward and after each backward
    pass. Returns one that ends all."""
    inner: Any = torch.autograd._engine_run_backward

    def run(outputs: Any, grad_outputs: Any, retain: Any, create: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = inner(outputs, grad_outputs, retain, create, inputs, *args, **kwargs)
        if kwargs.get("accumulate_grad"):
            losses.extend(float(root.detach()) for root in outputs if isinstance(root, Tensor) and root.numel() == 1)
            after()
        return found

    torch.autograd._engine_run_backward = run  # type: ignore[assignment]
    handle = nn.modules.module.register_module_forward_pre_hook(before_forward)

    def undo() -> None:
        torch.autograd._engine_run_backward = inner
        handle.remove()

    return undo


def _let_clipping_bite(now: Callable[[], tuple[int, float]]) -> Callable[[], None]:
    """Let torch's clipping bite in each step: half of the norm of the step before is allowed, or half of the largest
    element then. ``now`` gives the step's number and that element. Returns what ends it."""
    norms: dict[object, float] = {}  # by what is clipped, and how often it was in this step
    seen: Counter[object] = Counter()
    at = -1
    module = torch.nn.utils.clip_grad
    # Loops have the function that sees to no_grad; what it calls is in its closure.
    inside = next((cell for cell in module.clip_grad_value_.__closure__ or () if callable(cell.cell_contents)), None)
    by_norm = module._clip_grads_with_norm_
    by_value: Any = None if inside is None else inside.cell_contents

    def clip_norm(parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any) -> None:
        nonlocal at
        if at != now()[0]:
            seen.clear()
        at = now()[0]
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        seen[shapes := tuple(one.shape for one in parameters)] += 1
        key = shapes, seen[shapes]
        norm = float(total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm)
        half = norms.setdefault(key, norm) / 2
        bites = 0 < half < math.inf and max_norm < _NO_CLIPPING
        if 0 < norm < math.inf:
            norms[key] = norm
        by_norm(parameters, min(half, max_norm) if bites else max_norm, total_norm, *args, **kwargs)

    def clip_value(parameters: Any, value: float, *args: Any, **kwargs: Any) -> None:
        by_value(parameters, min(float(value), now()[1] / 2 or math.inf), *args, **kwargs)

    def undo() -> None:
        module._clip_grads_with_norm_ = by_norm
        if inside is not None:
            inside.cell_contents = by_value

    module._clip_grads_with_norm_ = clip_norm
    if inside is not None:
        inside.cell_contents = clip_value
    return undo
