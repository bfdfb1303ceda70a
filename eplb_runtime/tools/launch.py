"""Process groups for commands: join the ranks that torchrun started, be the only one, or start some."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ..config import launcher_environment
from ..distributed.consensus import gather_bytes
from ..distributed.transports.symmetric import node_of_this_rank


class LaunchError(ValueError):
    """The ranks and devices don't fit; one line that says what would."""


def launched() -> bool:
    """Return whether torchrun, or a launcher that sets the same environment variables, started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= launcher_environment().keys()


def is_first() -> bool:
    """Return whether this process has rank 0, by the launcher's environment; without a launcher, True."""
    return launcher_environment().get("RANK", "0") == "0"


def start_ranks(arguments: Sequence[str], ranks: int, module: str = "eplb_runtime.cli") -> int:
    """Run a module with these arguments by torchrun on ``ranks`` ranks of this machine, and return its exit status."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    end_on_signals()
    # Signals of the terminal are for this process: torchrun hears of the end once, and ends its ranks before itself.
    job = subprocess.Popen([*torchrun, "-m", module, *arguments], start_new_session=True)
    try:
        return job.wait()
    finally:
        job.terminate()
        job.wait()


def end_on_signals() -> None:
    """Have SIGTERM and SIGHUP raise KeyboardInterrupt, so that what this process has started ends with it."""
    is_ours = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN  # which nohup sets
    for one in (signal.SIGTERM, signal.SIGHUP)[: 1 + is_ours]:
        signal.signal(one, signal.default_int_handler)


@contextmanager
def process_group(device: str) -> Iterator[torch.device]:
    """Yield this rank's device, with a default process group for the block: torchrun's ranks, or this process alone.

    Args:
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL and gloo; the rank's own GPU becomes torch's current device).

    Raises:
        LaunchError: there is no GPU, or fewer than ranks on this node, or ranks share one.
    """
    here, backend = torch.device("cpu"), "gloo"
    if device == "cuda":
        here, backend = gpu_of(int(launcher_environment().get("LOCAL_RANK", "0"))), "cpu:gloo,cuda:nccl"
    if launched():
        dist.init_process_group(backend)
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        refuse_shared_gpus(str(torch.cuda.get_device_properties(here).uuid) if device == "cuda" else "")
        yield here
    finally:
        dist.destroy_process_group()


def refuse_shared_gpus(gpu: str) -> None:
    """Raise LaunchError if two ranks have one GPU. Collective. ``gpu``: this rank's, a name on its node; "": none."""
    world = dist.distributed_c10d._get_default_group()
    word = json.dumps([node_of_this_rank(), gpu]).encode()
    rank_of: dict[bytes, int] = {}
    for rank, said in enumerate(gather_bytes(word, world)):
        if json.loads(said)[1] and rank_of.setdefault(said, rank) != rank:
            have = f"ranks {rank_of[said]} and {rank} have the same GPU"
            raise LaunchError(f"{have}: start as many ranks on a node as it has GPUs, or give --device cpu")


def gpu_of(local_rank: int) -> torch.device:
    """Return a rank's own GPU; the only one that it sees, where the launcher shows each rank one. LaunchError: none."""
    count = torch.cuda.device_count()
    if local_rank >= count != 1:
        have = f"this node has {count} GPUs and a rank {local_rank}"
        raise LaunchError(f"{have}: start as many ranks as GPUs, or give --device cpu")
    here = torch.device("cuda", min(local_rank, count - 1))
    torch.cuda.set_device(here)
    return here
