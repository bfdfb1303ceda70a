"""Shows Ray Train start a balanced job: python launch/examples/ray_train.py [--workers 2] [--steps 20] [--static]

Ray starts the ranks and makes their process group; the training loop is that of ``any_module.py``. With --static
nothing moves: the losses are the same to the bit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

FOLDER = Path(__file__).resolve().parent


def train_loop(settings: dict[str, Any]) -> None:
    """Runs on every worker, where Ray has initialised torch.distributed."""
    import any_module  # on the workers' path, see below

    import eplb_runtime as eplb

    policy = "static" if settings["static"] else "incremental"
    config = eplb.BalancerConfig(policy=policy, interval=5, gate="always", dense_gradients="allreduce")
    losses, balancer, _ = any_module.train(config, settings["steps"], dist.get_rank())
    moved = sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts"))
    balancer.close()
    print(f"rank {dist.get_rank()}: loss {losses[-1]:.17g} after {len(losses)} steps, {moved} experts moved")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--static", action="store_true", help="measure, and move nothing")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each worker")
    parser.add_argument("--output", default=None, help="where Ray keeps what it writes")
    args = parser.parse_args()
    path = [str(FOLDER), *sys.path]
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": ":".join(filter(None, path)), "OMP_NUM_THREADS": "1"}})
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"steps": args.steps, "static": args.static},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpus),
        run_config=RunConfig(storage_path=args.output),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
