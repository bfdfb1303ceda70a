"""Run a script on two ranks, as torchrun does, but forked from one process that has imported everything once:
``python forked.py SCRIPT ARGUMENTS``. They end as any interpreter does; the exit status is that of the first rank that
failed."""

from __future__ import annotations

import os
import runpy
import sys

import torch.distributed.checkpoint

import eplb_runtime.hosts  # noqa: F401

RANKS = 2


def main(script: str, *arguments: str) -> None:
    ports, of_store = os.pipe()
    ranks = []
    for rank in range(RANKS):
        if process := os.fork():
            ranks.append(process)
            continue
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
        place |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0, "OMP_NUM_THREADS": 1}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.read(ports, 5).decode())
        torch.set_num_threads(1)
        sys.argv = [script, *arguments]
        sys.path.insert(0, os.path.dirname(script))
        runpy.run_path(script, run_name="__main__")
        return
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # no thread is forked
    os.write(of_store, f"{store.port:05}".encode() * RANKS)
    ended = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks]
    sys.exit(next((abs(status) for status in ended if status), 0))


if __name__ == "__main__":
    main(*sys.argv[1:])
