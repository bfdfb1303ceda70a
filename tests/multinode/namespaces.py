"""Hosts on one machine: network namespaces with a cable each to a switch, which is a namespace too.

Nothing of it is seen outside: removing the namespaces removes cables, addresses and processes. A host has a name of its
own (UTS namespace), address 10.77.0.<number> on ``eth0``, and shares files and memory with the others. As a command:

    PYTHONPATH=tests python tests/multinode/namespaces.py 1gbit 2 eplb_runtime.cli bench dispatch --repeats 5 --json

starts two ranks on each of two hosts, whose cables carry 1 Gbit/s outwards, and prints what host 0 says.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

from support.scripts import start_script

ROOT = Path(__file__).resolve().parents[2]


def run(command: str) -> str:
    """Run a command of words without spaces; its output, or an error that holds it."""
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def remove(namespaces: Sequence[str]) -> None:
    """Remove namespaces and what runs in them; those that do not exist are removed already."""
    for namespace in namespaces:
        with contextlib.suppress(OSError):
            for pid in run(f"ip netns pids {namespace}").split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
    for namespace in namespaces:
        with contextlib.suppress(OSError):
            run(f"ip netns del {namespace}")


def remove_leftovers() -> None:
    """Remove what tests left behind that were killed themselves; namespaces carry their test process's id."""
    found = re.findall(r"^(eplb(\d+)[sh]\d*)", run("ip netns list"), re.MULTILINE)
    remove([name for name, pid in found if not Path(f"/proc/{pid}").exists()])


CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000


def enter(hosts: Sequence[str], number: int) -> None:
    """Put this process, which has no threads yet, on one of these hosts."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{hosts[number]}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), f"this process cannot enter {hosts[number]}")
    socket.sethostname(f"host{number}")


@dataclass
class Forked:
    """A rank with what a `subprocess.Popen` has."""

    process: BaseProcess

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, seconds: float) -> None:
        self.process.join(seconds)


class Cluster:
    """``hosts`` hosts on one switch; a context manager that leaves nothing behind.

    Args:
        rate: bandwidth of each host's cable, outwards, as ``tc`` writes it (``"200mbit"``); None: as fast as it goes.
    """

    def __init__(self, hosts: int, folder: Path, rate: str | None = None) -> None:
        self._tag = f"eplb{os.getpid()}"
        self._switch = f"{self._tag}s"
        self._hosts = [f"{self._tag}h{number}" for number in range(hosts)]
        self._folder = folder
        self._rate = rate
        self._agents: list[subprocess.Popen[bytes] | Forked] = []
        self._lost: frozenset[int] = frozenset()

    def __enter__(self) -> Cluster:
        remove_leftovers()
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        remove([*self._hosts, self._switch])
        for agent in self._agents:
            agent.wait(30)

    def _build(self) -> None:
        run(f"ip netns add {self._switch}")
        run(f"ip -n {self._switch} link add bridge0 type bridge")
        run(f"ip -n {self._switch} link set bridge0 up")
        for number, host in enumerate(self._hosts):
            run(f"ip netns add {host}")
            run(f"ip -n {self._switch} link add cable{number} type veth peer name eth0 netns {host}")
            run(f"ip -n {self._switch} link set cable{number} master bridge0 up")
            run(f"ip -n {host} addr add {self.address(number)}/24 dev eth0")
            run(f"ip -n {host} link set lo up")
            run(f"ip -n {host} link set eth0 up")
            if self._rate is not None:
                run(f"tc -n {host} qdisc add dev eth0 root tbf rate {self._rate} burst 512kb latency 50ms")

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def cut_cable(self, host: int) -> None:
        """From now on nothing reaches this host and nothing leaves it; nobody is told."""
        run(f"ip -n {self._switch} link set cable{host} down")

    def plug_cable(self, host: int) -> None:
        run(f"ip -n {self._switch} link set cable{host} up")

    def start(self, ranks_per_host: int, script: Path, *arguments: object, **settings: object) -> None:
        """Start a script on all hosts through ``launch/multi_node.sh``, with further settings of it."""
        for number, host in enumerate(self._hosts):
            environment = {
                **os.environ,
                "NODES": str(len(self._hosts)),
                "NODE_INDEX": str(number),
                "HEAD": self.address(0),
                "RANKS_PER_NODE": str(ranks_per_host),
                "INTERFACE": "eth0",
                "LOCAL_ADDRESS": self.address(number),
                "PYTHON": sys.executable,
                "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests"))),
                **{name: str(value) for name, value in settings.items()},
            }
            named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', f"host{number}"]
            command = ["bash", str(ROOT / "launch/multi_node.sh"), str(script), *map(str, arguments)]
            with self._log(number).open("wb") as log:
                self._agents.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", host, *named, *command],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )

    def start_ranks(self, ranks_per_host: int, script: Path, *arguments: object) -> None:
        """Start a script on all hosts without a launcher, forked from a process that has imported what it needs."""
        logs = [self._log(number) for number in range(len(self._hosts)) for _ in range(ranks_per_host)]
        there = {"MASTER_ADDR": self.address(0), "MASTER_PORT": "29400", "GLOO_SOCKET_IFNAME": "eth0"}
        processes = start_script(
            [str(script), *map(str, arguments)],
            [(log, log) for log in logs],
            there,
            ranks_per_host=ranks_per_host,
            before=partial(enter, self._hosts),
        )
        self._agents.extend(map(Forked, processes))

    def wait(self, seconds: float, lost: Collection[int] = ()) -> None:
        """Until every host's launcher, or every rank, has ended: well, or, of hosts that are meant to be lost, killed.

        Raises:
            AssertionError: one failed or is not done in time; the message holds the ends of all logs.
        """
        over = self._lost = frozenset(lost)
        self.wait_until(lambda: all(agent.poll() is not None for agent in self._agents), "the job ends", seconds)
        codes = [agent.returncode for agent in self._agents]
        assert all(bool(code) == (host in over) for host, code in enumerate(codes)), f"{codes}\n{self._logs()}"

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        """Until ``condition`` holds; fails when that takes too long or a launcher or rank failed."""
        deadline = time.monotonic() + seconds
        while not condition():
            failed = [a.returncode for host, a in enumerate(self._agents) if a.poll() and host not in self._lost]
            assert not failed, f"the job failed before this: {what}\n{self._logs()}"
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}\n{self._logs()}"
            time.sleep(0.02)

    def wait_for_files(self, paths: Sequence[Path], seconds: float) -> None:
        """Until ranks have written all of these: how they tell the test where they are, cable or not."""
        self.wait_until(lambda: all(path.exists() for path in paths), ", ".join(p.name for p in paths), seconds)

    def _log(self, host: int) -> Path:
        return self._folder / f"host{host}.log"

    def _logs(self) -> str:
        return "\n".join(
            f"-- host {number}\n{self._log(number).read_text(errors='replace')[-4000:]}"
            for number in range(len(self._hosts))
            if self._log(number).exists()
        )


MakeCluster = Callable[..., Cluster]
"""The fixture ``make_cluster``: (hosts, rate=None) -> a cluster that stands until the test ends."""


if __name__ == "__main__":
    rate, ranks_per_host, *module = sys.argv[1:]
    with TemporaryDirectory() as logs, Cluster(2, Path(logs), rate) as cluster:
        cluster.start(int(ranks_per_host), Path("-m"), *module)
        cluster.wait(900)
        print((Path(logs) / "host0.log").read_text())
