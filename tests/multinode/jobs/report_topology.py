"""Attach, and write what each rank takes for the topology to ``<folder>/topology.<rank>.json``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from moe_models import make_model

import eplb_runtime as eplb


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    balancer = eplb.attach(make_model("olmoe", experts=8))
    (folder / f"topology.{dist.get_rank()}.json").write_text(json.dumps(asdict(balancer.topology)))
    balancer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
