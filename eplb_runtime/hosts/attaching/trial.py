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
import time
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...balancer.balancer import Balancer
from ...balancer.gradients.reduction import bit_words
from ...balancer.loop_state import LoopHooks
from ...config import BalancerConfig, DispatchConfig, Trial
from ...distributed.consensus import gather_bytes, gather_rows
from ...distributed.ranks import Ranks
from ...moe.experts.optimizer_state import state_of
from ...moe.experts.slices import has_memory, local
from ...placement import Placement
from ...planner.policies import shuffled
from ...utils.files import write_file
from .description import AttachError, Stage
from .trial_hooks import descendants, let_clipping_bite, listen
from .unregistered import ALIKE, OWN, candidates, memories, named, shared_memory

SKETCHES = 16
"""Random sums of a tensor, each of every sixteenth element with random signs; the distance of two tensors is about the
norm of what these sums differ by."""
_CHUNK = 1 << 22
"""Elements that are read at once."""
_SAME_SHARES, _DISTINCT, _EXACT, _CLOSER = 0.05, 0.05, 0.01, 0.25
"""Relative distances: up to which gradients are sums of what backward passes gave, by which these must differ, and up
to which a factor is a number of ranks; and how much closer a fit by rank is."""
_ALIKE, _LEAST_ALIKE, _TIMES_OFF = 0.02, 1e-4, 10.0
"""Relative distances up to which shares are alike, at most and at least; between them, times what a fit leaves."""
_MOST_RANKS = SKETCHES // 2
"""Up to which each rank's own share is distinguished."""
_SHARES = (
    "average gradients over ranks once, all ranks alike, and divide the loss by no number of ranks (as DDP, or "
    "dense_gradients='allreduce'): those of {} come {:.3g} times as large as the experts'"
)
_WRITTEN = "take parameters from model.parameters() after attach: {} of before is written, and no model has it"
_BALANCERS = "the job attaches more than one balancer, and the first alone is compared"
_UNEVEN = "{} is not the same on all ranks: each has it by its own tokens alone"
_SHARE_OF_EPS = 0.3
"""Root mean square of a rounding error, which is up to half of the distance between two numbers."""
_ENOUGH_MEMORY = 0.8
"""Share of the free memory that the experts of a run with all of them on each rank may take."""
FOUND = " ahead of the step"
"""Ends the name of a weight of which it is said how a step found it."""
RUNS = ("run-1-fixed", "run-2-moved")
"""Folders of the first runs, next to those of the others."""
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
    own = replace(
        config,
        policy="static",
        run=None,
        listen=None,
        listen_token=None,
        guard="warn",
        migration=replace(config.migration, max_moves=None, max_pause_seconds=None),
    )
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
        self._losses: list[Tensor] = []
        self._shaken: set[int] = set()
        self._foreign: Counter[str] = Counter()
        self._steppers: list[Optimizer] = []
        self._calls = 0
        self._spoiled: set[tuple[int, ...]] | None = None
        self._steady: set[str] = set()
        self._unchanged: set[tuple[int, ...]] = set()
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
        hooks.callback(listen(self._losses, self._before_forward, self._average_early if is_early else lambda *_: None))
        hooks.callback(let_clipping_bite(lambda: (self._step, self._largest)))
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
        self._first, self._second = (self._of_run(name) for name in RUNS)  # ranks meet here, and not in a forward
        self._write([])

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
        """See the precision, and, ahead of the last step, buffers; in a second run with fixed homes change what may
        have been kept: what is another at the end was made from it."""
        if self._spoiled is None and self._step == self._trial.steps - 1 and self._trial.layout in ("fixed", "moved"):
            self._spoiled = set()
            dense = [one for one in self._entries() if one.expert < 0] if self._runtime.averages_dense else []
            self._digests = {f"buffer {one.name}": int(_sketched(one)[0]) for one in dense if one.kind == "buffer"}
            suspects = self._second.get("unregistered") if self._trial.ends_process else None
            if self._trial.layout == "fixed" and suspects:
                self._spoiled = {tuple(one["shape"]) for one in suspects}
                shared = shared_memory()
                values = [value for value in self._candidates()[2] if value.shape in self._spoiled]
                self._unchanged = {value.shape for value in values if not value.spoil(shared)}
            elif self._trial.layout == "moved":
                self._steady = {content for _, content in self._candidates()[0]}
        self._steppers.clear()  # a step that has raised is over
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if torch.is_autocast_enabled(device):
            self._coarsest = max(self._coarsest, torch.finfo(torch.get_autocast_dtype(device)).eps)

    def _of_run(self, name: str) -> dict[str, Any]:
        """Return what is on record of a run before; empty: there was none. Collective."""
        path = Path(self._trial.folder).parent / name / "meta.json"
        return dict(json.loads(gather_bytes(path.read_bytes() if path.exists() else b"{}", self._group)[0]))

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
        counts = self._write([float(loss) for loss in self._losses])
        self._losses.clear()
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
        """Note parameters whose gradient has other shares of what ranks' backward passes gave than experts have."""
        job, none = self._runtime.job, torch.zeros(SKETCHES, dtype=torch.float64)
        seen = dict.fromkeys(self._arrived, none)
        for name, parameter in self._weighed:
            if parameter.grad is not None:
                seen[name] = seen.get(name, none) + _sketched(TrialEntry("", "gradient", -1, parameter.grad))[1][1:]
        mine = {name: torch.stack([self._arrived.get(name, none), one]).tolist() for name, one in seen.items()}
        self._arrived.clear()
        of_ranks = list(map(json.loads, gather_bytes(json.dumps(mine).encode(), self._group)))
        both = torch.tensor([one[""] for one in of_ranks if "" in one], dtype=torch.float64).sum(dim=0)
        if both.ndim < 2 or (usual := _shares(both[:1], both[1])) is None:
            return
        for ranks in job.data_sets:
            here = [of_ranks[job.ranks.index(rank)] for rank in ranks]
            for name in here[0].keys() - {""}:
                given, seen_RS = torch.tensor([one[name] for one in here if name in one], dtype=torch.float64).unbind(1)
                if (shares := _shares(given, seen_RS[0])) is not None:
                    ratios = shares[0] / usual[0] * len(job.edp_ranks) * job.gradient_divisor
                    self._judge(name, float(ratios.min()), float(ratios.max()), shares[1])

    def _judge(self, name: str, least: float, most: float, off: float) -> None:
        """Note shares of a wrong size: a rank's own, or the number of ranks too often or too seldom in two steps, where
        clipping these alone would give a factor of each step's own."""
        before, self._ratios[name], job = self._ratios.get(name, 0.0), most, self._runtime.job
        counts = {len(job.data_ranks), len(job.edp_ranks), job.ep_size} - {1}
        is_count = any(max(abs(r * by - 1) for r in (before, most)) < _EXACT for n in counts for by in (n, 1 / n))
        line = _SHARES.format(name, least if most < 1 else most)
        if most - least > max(_LEAST_ALIKE, min(_TIMES_OFF * off, _ALIKE)) * least:
            self._balancer.guard.report(line)
        elif is_count:  # it may be a rate of the loop's own
            self._meta["doubts"].append(line)

    def _end(self) -> None:
        """Finish the record; the job does not go on to what comes after its loop."""
        self._undo()
        _keys.cache_clear()
        if self._spoiled is not None:
            self._look_for_kept(self._spoiled)
            self._digests.update(self._foreign)
            of_ranks = list(map(json.loads, gather_bytes(json.dumps(self._digests).encode(), self._group)))
            job = self._runtime.job
            copies = [[of_ranks[job.ranks.index(rank)] for rank in ranks] for ranks in job.data_sets]
            named_here = {n for same in copies for n in same[0] if len({one[n] for one in same if n in one}) > 1}
            self._meta["doubts"] += map(_UNEVEN.format, sorted(named_here))
        self._meta["ended"] = True
        self._write_meta()
        dist.barrier(self._group)
        if self._trial.ends_process:
            for how in (signal.SIGTERM, signal.SIGKILL):  # what the job would end after its loop
                for child in (children := descendants()):
                    with suppress(OSError):  # it has ended by itself
                        os.kill(child, how)
                time.sleep(bool(children) and how == signal.SIGTERM)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _candidates(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Return what may be experts, and is not known."""
        return candidates([stage.model for stage in self._stages], self._runtime.registry, self._known())

    def _look_for_kept(self, spoiled: Collection[tuple[int, ...]]) -> None:
        """List what may be experts by place: with moved homes what the first run, with fixed homes, does not have; in a
        second run with fixed homes what has another content than in the first one, where such shapes were spoiled."""
        found, holders, _ = self._candidates()
        mine = json.dumps(sorted({content for _, content in found})).encode()
        ranks_with = Counter(chain.from_iterable(map(json.loads, gather_bytes(mine, self._group))))
        self._meta["contents"] = sorted(ranks_with)
        known, ranks = {*self._first.get("contents", ranks_with)}, len(self._runtime.job.data_ranks)
        if not spoiled:
            known = {c for c in known if not c.startswith(OWN) and (ranks_with[c] == ranks or not c.startswith(ALIKE))}
            known |= {
                content for content in self._steady if not content.startswith((ALIKE, OWN))
            }  # data comes and stays
        is_wanted = self._trial.layout == "moved" or bool(spoiled)
        new = [place for place, (shape, one) in enumerate(found) if one not in known or shape in self._unchanged]
        wanted = [place for place in new if is_wanted and (not spoiled or found[place][0] in spoiled)]
        lines = [
            {"holder": f"rank {self._runtime.job.rank}: {name}", "shape": shape}
            for name, shape in named(found, holders, wanted)
        ]
        of_ranks = gather_bytes(json.dumps(lines).encode(), self._group)
        all_lines = [line for of_rank in of_ranks for line in json.loads(of_rank)]
        self._meta["confirmed" if spoiled else "unregistered"] = all_lines

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

    def _write(self, losses: list[float]) -> Tensor:
        """Gather the record of a step, on rank 0 of the job. Returns int64 ``[L, E]``, the counts of all ranks."""
        for entry in self._entries():
            if has_memory(entry.tensor):
                self._rows[entry.name, entry.expert] = (entry, *_sketched(entry))
        rows, self._rows = list(self._rows.values()), {}
        names = sorted({entry.name for entry, _, _ in rows})
        place = {name: index for index, name in enumerate(names)}
        whole = torch.tensor(
            [(place[e.name], e.expert, KINDS.index(e.kind), e.tensor.numel()) for e, _, _ in rows], dtype=torch.int64
        ).reshape(-1, 4)
        digests = torch.stack([digest for _, digest, _ in rows]).reshape(-1, 1) if rows else whole[:, :1]
        sums = torch.stack([sums for _, _, sums in rows]) if rows else torch.zeros(0, 1 + SKETCHES)
        head = json.dumps({"names": names, "rows": len(rows), "losses": losses}).encode()
        body = torch.cat([whole, digests, sums.double().view(torch.int64)], dim=1).numpy().tobytes()
        counts = self._counts if self._step else torch.zeros_like(self._runtime.counter.counts)
        total = gather_rows(counts.cpu().contiguous(), self._group).sum(dim=0)
        gather = _gather_on_first if self._trial.ends_process else gather_bytes  # else all ranks read the record
        if received := gather(len(head).to_bytes(8, "little") + head + body, self._group):
            folder = Path(self._trial.folder)
            arrays: dict[str, Any] = {"counts": total.numpy()}
            for rank, message in enumerate(received):
                arrays[f"rank{rank}"] = np.frombuffer(message, dtype=np.uint8)
            partial = folder / "partial.npz"
            np.savez(partial, **arrays)
            partial.replace(folder / f"step-{self._step:05d}.npz")
        self._write_meta()
        return total

    def _write_meta(self) -> None:
        not_single = self._meta["not_single"] or self._does_not_fit()
        said = self._balancer.guard.said
        held = [*self._balancer.tensors.dense.values(), *self._runtime.registry.parameters()]
        error = max([self._coarsest, *(torch.finfo(p.dtype).eps for p in held if p.is_floating_point())])
        commits = self._balancer.placement.epoch - self._began
        groups = [group for one in self._balancer.tensors.optimizers for group in getattr(one, "param_groups", ())]
        still = {id(parameter) for group in groups if group.get("lr") == 0 for parameter in group["params"]}
        meta = {**self._meta, "said": said, "not_single": not_single, "rounding": error, "commits": commits}
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


def _shares(given_RS: Tensor, seen_S: Tensor) -> tuple[Tensor, float] | None:
    """Return the weight that each rank's gradient has in what the optimizer sees, one for all where that fits, and how
    far off it may be; None: it is no such sum, or ranks' gradients are too much alike to tell."""
    if not (given_RS.isfinite().all() and seen_S.isfinite().all()):
        return None
    fits = []
    for columns_SR in (given_RS.sum(dim=0).unsqueeze(1), given_RS.T):
        if columns_SR.shape[1] <= _MOST_RANKS and (cond := float(torch.linalg.cond(columns_SR))) <= 1 / _DISTINCT:
            shares_R = torch.linalg.lstsq(columns_SR, seen_S.unsqueeze(1)).solution[:, 0]
            off = float((columns_SR @ shares_R - seen_S).norm() / seen_S.norm())
            fits += [(off, shares_R, cond)] if off < _SAME_SHARES else []
    if not fits:
        return None
    off, shares_R, cond = fits[-1 if fits[-1][0] < _CLOSER * fits[0][0] else 0]
    return shares_R, off * cond


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
