"""``record``: the load of a model as it is, with the experts where they are."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import launcher_environment
from ..distributed.consensus import all_equal
from ..distributed.process_groups import forget_group, make_group
from ..distributed.store import name_of_job
from ..load.series import RecordedJob
from ..observe.recording import Recorder, Recording
from ..topology import Topology
from ..utils.files import FileError
from . import module, rooms
from .attaching.checks import wait_for_ranks
from .attaching.description import AttachError, HostModel, MoELayer, recorded, unwrapped
from .module import MoE


def record(
    model: nn.Module | Sequence[nn.Module],
    run: str | Path,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    layers: Sequence[MoE] | None = None,
    interval: int = 10,
) -> Recording:
    """Begin to record how many tokens each expert of a model gets, step by step. Return the open recording, a context
    manager with ``step()`` and ``close()``. Until it is closed, model and optimizer have hooks; results stay the same.

    For a job without a balancer; ``eplb-runtime assess`` and ``simulate`` read it. Written, too: sizes of an expert and
    of its optimizer state, seconds of a step and of rank 0's expert work. Counting is one small kernel a layer; sums
    over the world and writing happen during training, on a thread. Padding, recompute and, of a model that is trained,
    evaluation do not count. Collective: every rank of the world calls it for the same model::

        with eplb.record(model, "runs/first", optimizer):
            train(model, optimizer)

    Args:
        model: a Hugging Face Transformers (>= 5.18) or Megatron-Core 0.16 model with MoE layers (also in the list that
            ``get_model`` gives), or any module with ``layers``; perhaps in DistributedDataParallel. Attached
            models record by ``BalancerConfig(run=...)``.
        run: folder; rank 0 appends the series to its ``load.jsonl``.
        optimizer: its steps are the steps; None (and with Megatron-Core, whose optimizer is no torch one): call
            ``step()`` of what is returned.
        layers: as for ``attach``; lists of experts need not be stacked.
        interval: steps between two writings; with more than 32 steps, a window is several steps.

    Raises:
        AttachError: no MoE layer was found, layers have different numbers of experts, or the folder holds the load of
            another model or cannot be written to; on all ranks alike.
        RuntimeError: a rank did not come.
    """
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    undo, group, recorder, whole, optimizer = ExitStack(), None, None, nn.Module(), unwrapped(optimizer)
    problem: Exception | None = None
    try:
        one = model[0] if isinstance(model, Sequence) and len(model) == 1 else model  # as Megatron's get_model gives it
        if not isinstance(one, nn.Module):
            raise AttachError(f"a {type(one).__name__} is no model: record one torch.nn.Module into each folder")
        whole = one.module if isinstance(one, nn.parallel.DistributedDataParallel) else one
        if interval < 1:
            raise AttachError(f"interval={interval}: give at least 1")
        if not isinstance(optimizer, torch.optim.Optimizer | None):
            raise AttachError(
                f"a {type(optimizer).__name__} is no torch.optim.Optimizer: leave it out, and call "
                "step() of what record gives after each step (with eplb.record(...) as recording: recording.step())"
            )
        found = _watched(whole, layers)
        sizes = {layer.num_experts for layer in found.layers}
        if len(sizes) != 1:
            raise AttachError(f"layers have different numbers of experts ({sorted(sizes)}): name equal ones by layers=")
        if alone or dist.get_rank() == 0:
            recorder = Recorder(Path(run), len(found.layers), max(sizes), _job(found, interval))
            undo.callback(recorder.close)
    except FileError as error:
        problem = AttachError(str(error))
    except OSError as error:
        problem = AttachError(f"{run} cannot be written to: {error.strerror or error}")
    except Exception as error:
        problem = error
    if alone and problem is not None:
        raise problem
    with undo:
        if not alone:
            everyone, rank = list(range(dist.get_world_size())), dist.get_rank()
            wait_for_ranks(everyone, "record", 30.0, problem, patient=True)
            # A gloo group of our own: sums are taken on a thread during training.
            store = dist.distributed_c10d._get_default_group().get_group_store().clone()  # type: ignore[attr-defined]
            name, timeout = name_of_job(store, everyone, rank), dist.distributed_c10d.default_pg_timeout
            group = make_group(store, f"{name}/record", everyone, rank, "gloo", timeout, "eplb_runtime record")
            undo.callback(forget_group, group)
            mine = torch.tensor([len(found.layers), *sizes, interval]).numpy().tobytes()
            if odd := all_equal(mine, "number of layers, number of experts or interval", group):
                raise AttachError(f"ranks record different models: {odd}")
        recording = Recording(
            whole,
            [layer.watch for layer in found.layers if layer.watch is not None],
            *sizes,
            interval=interval,
            device=next(whole.parameters()).device,
            recorder=recorder,
            group=group,
            real_tokens=found.real_tokens,
            in_training_only=optimizer is not None,
            optimizer_bytes=lambda: 0 if optimizer is None else max(_state_bytes(o, optimizer) for o in found.layers),
        )
        recording.until_closed(undo.pop_all().close)
    recording.until_closed(found.watch_batches())
    recorded.add(whole)
    recording.until_closed(lambda: recorded.discard(whole))
    if optimizer is not None:
        recording.until_closed(optimizer.register_step_post_hook(lambda *_: recording.step()).remove)
    return recording


def _job(found: HostModel, interval: int) -> RecordedJob:
    layers = found.layers
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    weights = max((list(layer.experts.parameters()) for layer in layers), key=lambda of: sum(one.nbytes for one in of))
    here = layers[0].experts_here
    return RecordedJob(
        ranks=ranks,
        ranks_per_node=Topology.from_launcher(launcher_environment(), ranks).ranks_per_node,
        ep_size=layers[0].ep_size or layers[0].num_experts // max(1, here),
        interval=interval,
        takes_no_replicas=int(found.dispatches),
        expert_parameters=sum(weight.numel() for weight in weights) // max(1, here),
        expert_bytes=sum(weight.nbytes for weight in weights) // max(1, here),
        dtype=str(weights[0].dtype).removeprefix("torch.") if weights else "",
        device=weights[0].device.type if weights else "",
    )


def _state_bytes(layer: MoELayer, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of one expert's optimizer state; without scalars, as step counts are."""
    states = (optimizer.state.get(weight, {}).values() for weight in layer.experts.parameters())
    tensors = [tensor for state in states for tensor in state if isinstance(tensor, Tensor) and tensor.ndim]
    return sum(tensor.nbytes for tensor in tensors) // max(1, layer.experts_here)


def _watched(model: nn.Module, layers: Sequence[MoE] | None) -> HostModel:
    if hasattr(model, "_eplb_runtime_balancer"):
        raise AttachError("the model is attached: give BalancerConfig(run=...) instead of record")
    if layers is not None:
        if not layers:
            raise AttachError("layers=[] names no MoE layer: nothing to record")
        return module.watched(model, layers)
    for room in rooms():
        found: HostModel = room.watched(model)
        if found.layers:
            return found
    raise AttachError(
        f"{type(model).__name__} has no MoE layer that follows the Transformers experts interface: name the layers "
        "of a model of your own by record(..., layers=[eplb.MoE(...)])"
    )
