"""Hosts for the tests of this folder, or the reason why there are none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from namespaces import Cluster, MakeCluster
from ranks import compile_once


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[MakeCluster]:
    """``make_cluster(hosts, rate=None)``; all of it is removed after the test."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for command in ("ip", "tc", "unshare"):
        if shutil.which(command) is None:
            pytest.skip(f"no {command} command: install iproute2 and util-linux")
    compile_once()  # a deadline counts a job's own time; four ranks that compile at once take minutes
    with ExitStack() as stack:

        def make(hosts: int, rate: str | None = None) -> Cluster:
            try:
                return stack.enter_context(Cluster(hosts, tmp_path, rate))
            except OSError as error:
                pytest.skip(f"this machine does not let us make hosts: {error}")

        yield make
