"""Run a module on hosts of this machine with slow links between them, as root:

python tests/multinode/slow_links.py 1gbit 2 eplb_runtime.cli bench dispatch --repeats 5 --json

starts two ranks on each of two hosts (network namespaces), whose cables carry 1 Gbit/s outwards, and prints what host 0
says.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from namespaces import Cluster


def main(rate: str, ranks_per_host: int, *module: str) -> None:
    with TemporaryDirectory() as folder, Cluster(2, Path(folder), rate) as cluster:
        cluster.start(ranks_per_host, Path("-m"), *module)
        cluster.wait(900)
        print((Path(folder) / "host0.log").read_text())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
