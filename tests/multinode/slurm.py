"""A Slurm cluster of two nodes on this machine's loopback, for as long as a test runs.

Its controller, its two nodes' daemons and the service that signs their messages are Debian's own, started by hand with
folders and ports of the test's. The nodes are named by the addresses that lead to them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

NODES = ("127.0.0.1", "127.0.0.2")
COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
SETTINGS = """
ClusterName=eplb
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/linear
SchedulerType=sched/builtin
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing() -> str:
    """Why there can be no such cluster here; empty: there can."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    lacking = [name for name in COMMANDS if shutil.which(name) is None]
    return f"no {', '.join(lacking)}: install slurmctld, slurmd, slurm-client and munge" if lacking else ""


class Slurm:
    """A context manager that leaves nothing behind. The folder, for settings, logs and what jobs print, has a path
    short enough for a socket's name; ``environment`` is for commands that talk to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> Slurm:
        folder = self._folder
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        (folder / "state").mkdir()
        ports = _free_ports(3)
        host = socket.gethostname().partition(".")[0]
        (folder / "slurm.conf").write_text(SETTINGS.format(folder=folder, host=host, ports=ports, nodes=NODES))
        files = {"key": "key", "socket": "socket", "pid": "pid", "log": "log", "seed": "seed"}
        options = [f"--{name}-file={folder}/munge.{file}" for name, file in files.items() if name != "socket"]
        try:
            self._run("munged", "--force", f"--socket={folder}/munge.socket", *options)
            self._run("slurmctld", "-c")
            for node in NODES:
                self._run("slurmd", "-N", node)
            self._wait_for_nodes()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for file in sorted(self._folder.glob("*.pid"), reverse=True):  # munge's last
            with contextlib.suppress(OSError, ValueError):
                pid = int(file.read_text())
                os.kill(pid, signal.SIGTERM)
                _wait_for_end(pid)

    def submit(self, *words: str, **settings: str) -> str:
        """Run ``sbatch`` and wait for the job's end; what it printed.

        Raises:
            AssertionError: it failed; the message holds what it printed, and the logs of the daemons.
        """
        output = self._folder / "job.log"
        done = subprocess.run(
            ["sbatch", "--wait", f"--output={output}", *words],
            env={**self.environment, **settings},
            capture_output=True,
            text=True,
            timeout=280,
        )
        said = output.read_text(errors="replace") if output.exists() else ""
        assert done.returncode == 0, f"{done.stdout}{done.stderr}{said}{self._logs()}"
        return said

    def _run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}{self._logs()}")
        return done.stdout

    def _wait_for_nodes(self) -> None:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError):
                states = self._run("sinfo", "--noheader", "--Node", "--format=%T").split()
                if states == ["idle", "idle"]:
                    return
            if time.monotonic() > deadline:
                raise OSError(f"Slurm's nodes do not come up{self._logs()}")
            time.sleep(0.1)

    def _logs(self) -> str:
        return "".join(
            f"\n-- {file.name}\n{file.read_text(errors='replace')[-2000:]}"
            for file in sorted(self._folder.glob("*.log"))
        )


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.02)
