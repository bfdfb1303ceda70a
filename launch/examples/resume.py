"""Shows a job outlive the death of a rank: torchrun starts all ranks again, and they go on from the last checkpoint.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 2 --max-restarts 1 launch/examples/resume.py \
        --folder runs/resume --die-at 12

With gloo the variable is needed: otherwise ranks of the second life find addresses of the first one in the store that
torchrun shares with them. torchrun ignores it with ``--master-port``, which always shares the store: leave that option
out, or use ``--rdzv-backend c10d --rdzv-endpoint <host>:<port>``; the first life says so in a line.

The losses of all steps are those of a job that nobody disturbed, bit for bit; on another number of ranks, with the same
batch over all of them, they differ by rounding. Each life writes ``losses.<life>.json``.

With ``--nnodes 1:4`` a job goes on with the hosts that are left. Experts and sequences are shared out evenly, so of the
ranks as many work as divide both; the others stand by until one is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from any_module import EXPERTS, LAYERS_TO_BALANCE, batch, make
from torch import nn
from torch.nn import functional

import eplb_runtime as eplb
from eplb_runtime import checkpoint
from eplb_runtime.distributed.ranks import Ranks
from eplb_runtime.events import RebalanceCommitted

SEQUENCES = 8
"""Of a step, over all ranks that work."""


def ranks_that_work() -> int:
    """The most that share out experts and sequences evenly."""
    return max(n for n in range(1, dist.get_world_size() + 1) if EXPERTS % n == 0 and SEQUENCES % n == 0)


def loss_of(model: nn.Module, step: int, ranks: int) -> torch.Tensor:
    """Mean over this rank's share of the step's sequences, which are the same ones on any number of ranks."""
    share = SEQUENCES // ranks
    first = dist.get_rank() * share
    losses = []
    for number in range(first, first + share):
        ids = batch(number, step)
        losses.append(functional.cross_entropy(model(ids[:-1]), ids[1:]))
    return torch.stack(losses).mean()


def last_checkpoint(folder: Path) -> int:
    """The step of the newest whole checkpoint; 0: there is none. A folder is switched in when it is whole."""
    steps = [int(path.parent.name.removeprefix("step-")) for path in folder.glob("step-*/checkpoint.json")]
    return max(steps, default=0)


def why_no_second_life() -> str:
    """Why ranks that torchrun starts again could not connect, in a line; empty: they can, or it starts none."""
    environment = os.environ
    restarts = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if not restarts or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    if environment.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":
        return (
            "torchrun's --master-port ignores TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and ranks that it starts again "
            "will not connect: use --rdzv-backend c10d --rdzv-endpoint <host>:<port>"
        )
    return "ranks that torchrun starts again will not connect: give it TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints; one that all ranks see")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument(
        "--die-at", type=int, default=0, help="the last rank that works kills itself at this step of its first life"
    )
    parser.add_argument(
        "--with-torchrun", action="store_true", help="and the torchrun above it, as if its host were gone"
    )
    args = parser.parse_args()
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    if os.environ["RANK"] == "0" and (why := why_no_second_life()):
        print(why, flush=True)
    dist.init_process_group("gloo")
    ranks = ranks_that_work()
    working = dist.new_group(range(ranks))
    if dist.get_rank() < ranks:
        train(args, life, ranks, working)
    # Spare ranks wait here. If a rank dies, so does this wait, and torchrun starts all again.
    dist.monitored_barrier(timeout=timedelta(days=30))
    dist.destroy_process_group()


def train(args: argparse.Namespace, life: int, ranks: int, working: dist.ProcessGroup) -> None:
    model, optimizer = make()
    model.double()
    config = eplb.BalancerConfig(interval=4, gate="always", dense_gradients="allreduce")
    balancer = eplb.attach(
        model, optimizer, layers=LAYERS_TO_BALANCE, config=config, ranks=Ranks(job=tuple(range(ranks)))
    )
    first = last_checkpoint(args.folder)
    if first:
        # Weights, optimizer, placement and the load that the next decision looks at.
        checkpoint.load(args.folder / f"step-{first}", model, optimizer)

    losses = {}
    for step in range(first + 1, args.steps + 1):
        if step == args.die_at and life == 0 == first and dist.get_rank() == ranks - 1:
            if args.with_torchrun:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        loss = loss_of(model, step, ranks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean, group=working)
        losses[step] = mean.item()
        if step % args.save_every == 0:
            checkpoint.save(args.folder / f"step-{step}", model, optimizer)

    if dist.get_rank() == 0:
        migrations = len(balancer.events.of_type(RebalanceCommitted))
        result = {"resumed_from": first, "losses": losses, "migrations": migrations, "epoch": balancer.placement.epoch}
        result |= {"ranks": ranks, "standing_by": dist.get_world_size() - ranks}
        (args.folder / f"losses.{life}.json").write_text(json.dumps(result))
        print(f"life {life}: steps {first + 1} to {args.steps}, {migrations} migrations, last loss {mean.item():.12f}")
    balancer.close()


if __name__ == "__main__":
    main()
