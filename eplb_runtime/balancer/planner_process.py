"""Plans in a child of rank 0, where neither numba's compiler nor a search holds the interpreter that trains.

The child imports no torch. It compiles the planner, or reads compiled code from the disk, and then answers questions
over a pair of sockets: a line of JSON, and arrays in NumPy's format.
"""

import faulthandler
import io
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from threading import RLock, Timer
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..moe.routing.water_filling import SplitTables, split_for_rank, split_totals
from ..placement import Placement
from ..planner import CostModel, Plan, plan
from ..planner.evaluate import has_no_copies
from ..topology import Topology
from ..utils.jit import note_compiled

logger = logging.getLogger("eplb_runtime")
_say_once = cache(logger.info)

SECONDS = 5.0  # from one look of a child whether its parent lives to the next; the longest wait for a killed child

_VALUES: dict[str, Any] = {"Placement": Placement.from_json, "Topology": Topology, "CostModel": CostModel}


class PlannerLost(RuntimeError):
    """The child has died or was late; another one has begun."""


class PlannerProcess:
    """A child that plans within ``seconds``. One thread asks, another may close. ``process``: None: it cannot begin."""

    process: subprocess.Popen[bytes] | None = None
    _connection: Connection
    _is_ready = False

    def __init__(self, seconds: float) -> None:
        self._seconds, self._owner = seconds, os.getpid()
        self._asking = RLock()
        self._closed = False
        self._begin()

    def plan(self, load: NDArray[Any], topology: Topology, **terms: Any) -> Plan:
        """Return what `planner.plan` gives in the child, in the home layout. Until the child has compiled, homes are
        planned here by DeepSeek's rule; the reason and a log line say so. A child that dies or is late is replaced.
        Raises PlannerLost: there is no plan; RuntimeError: the planner failed, and its error is named."""
        with self._asking:
            if not self.is_ready(0.0):
                _say_once("the planner is being compiled: meanwhile DeepSeek's algorithm plans (no replicas)")
                return _homes_alone(load, topology, **terms)
            began, deadline = time.monotonic(), Timer(self._seconds, self._socket.shutdown, [socket.SHUT_RDWR])
            deadline.start()
            try:
                self._connection.send_bytes(encode({"load": load, "topology": topology, **terms}))
                answer = decode(self._connection.recv_bytes())
            except (OSError, EOFError):
                answer = {}
            deadline.cancel()
            deadline.join()
            if not answer:
                why, late = self._end(), time.monotonic() - began >= self._seconds
                self._begin()
                raise PlannerLost(f"the planner took longer than {self._seconds:g} s" if late else why)
        if "failure" in answer:
            raise RuntimeError(answer["failure"])
        return Plan(**answer)

    def is_ready(self, seconds: float) -> bool:
        """Return whether the child has compiled and can plan, after waiting for so many seconds at most. A child that
        has died is replaced by another, with a warning; PlannerLost: this is closed."""
        with self._asking:
            try:
                if not self._is_ready and self._connection.poll(seconds):
                    self._is_ready = bool(self._connection.recv_bytes())
            except (OSError, EOFError):
                ended = self._end()
                self._begin()
                logger.warning("%s; a new one starts, and DeepSeek's algorithm plans meanwhile (no replicas)", ended)
            return self._is_ready

    def close(self) -> None:
        """Kill the child, and with it a plan that is asked for. In a process forked from the owner it does nothing."""
        if self._owner != os.getpid():
            return  # a process that was forked has a copy of this object
        self._closed = True
        if (process := self.process) is not None:
            process.kill()
        with self._asking:
            self._end()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def _begin(self) -> None:
        """Begin another child; PlannerLost: this is closed."""
        self._is_ready = False
        if self._closed:
            raise PlannerLost("the planner process is closed")
        self._socket, other = socket.socketpair()
        self._connection = Connection(os.dup(self._socket.fileno()))
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        settings = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        with other, suppress(OSError):
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "eplb_runtime.balancer.planner_process", str(self._seconds)],
                env={"NUMBA_OPT": "1", **os.environ, **settings},  # compiles in a seventh less time
                stdin=other.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # signals to a job's processes, to save and leave, are not for it
            )

    def _end(self) -> str:
        """End the child. Returns how it ended; the status of one that died before is its own."""
        self._connection.close()
        self._socket.close()
        process, self.process = self.process, None
        if process is None:
            return "no planner process could be started"
        process.kill()
        return f"the planner process ended with status {process.wait(SECONDS)}"


def _homes_alone(load: NDArray[Any], topology: Topology, **terms: Any) -> Plan:
    """Plan homes by DeepSeek's rule, which needs nothing compiled; where replicas stand or ranks differ all stays."""
    current, cost = terms.get("current"), terms.get("cost")
    stays = terms.get("rank_speed") is not None or not (current is None or has_no_copies(current))
    terms |= {"policy": "static" if stays else "deepseek", "sources": None}
    made = plan(load, topology, **terms | {"cost": cost and replace(cost, crossing_seconds=0.0)})
    reason = f"{'nothing moves' if stays else made.reason} (homes only: the planner is still being compiled)"
    return replace(made, reason=reason, code="compiling" if stays else made.code)


def encode(values: Mapping[str, Any]) -> bytes:
    """Return named values as bytes: JSON, in which placement, topology and costs are their fields, and NumPy arrays."""
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    plain = {name: _plain(value) for name, value in values.items() if name not in arrays}
    buffer = io.BytesIO()
    buffer.write(json.dumps([plain, list(arrays)]).encode() + b"\n")
    for array in arrays.values():
        np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def decode(message: bytes) -> dict[str, Any]:
    """Return the named values that `encode` was given."""
    buffer = io.BytesIO(message)
    plain, names = json.loads(buffer.readline())
    for name, value in plain.items():
        if isinstance(value, dict):
            ((kind, content),) = value.items()
            plain[name] = _VALUES[kind](**content)
    return plain | {name: np.load(buffer, allow_pickle=False) for name in names}


def _plain(value: Any) -> Any:
    kind = type(value).__name__
    if isinstance(value, Placement):
        return {kind: {"text": value.to_json()}}
    return {kind: asdict(value)} if kind in _VALUES else value


def compile_planner() -> None:
    """Compile all that planning and batches with replicas run, by planning and splitting toy problems."""
    load = np.arange(1.0, 17.0).reshape(2, 8)
    plan(load, Topology(4, 2), slots_per_rank=3, current=Placement.initial(2, 8, 4, 1))
    compile_split()


def compile_split() -> None:
    """Compile what batches with replicas run, by splitting a toy batch: five seconds of a core, once on a machine."""
    tables = SplitTables.of(Placement(np.array([[0, 1, 1, 0]]), 2, 2, np.array([[0, 2]])))
    tables.sum_by_rank(split_totals(np.ones((1, 2), dtype=np.int64), tables))
    split_for_rank(np.ones((2, 2), dtype=np.int64), tables, 0, 1)


def main() -> None:
    """Compile the planner, say ``b"ready"``, and answer questions with plans. Runs in the child, on the socket that is
    its standard input, until its parent is dead; OSError or EOFError: the other end was closed."""
    parent, connection = os.getppid(), Connection(os.dup(0))
    compile_planner()
    note_compiled()
    connection.send_bytes(b"ready")
    while os.getppid() == parent:
        if connection.poll(SECONDS):
            question = decode(connection.recv_bytes())
            faulthandler.dump_traceback_later(float(sys.argv[1]) + SECONDS, exit=True)  # its parent may be dead by then
            try:
                made = plan(question.pop("load"), question.pop("topology"), **question)
                answer = {field.name: getattr(made, field.name) for field in fields(made)}
            except Exception as error:
                answer = {"failure": f"{type(error).__name__}: {error}"}
            faulthandler.cancel_dump_traceback_later()
            connection.send_bytes(encode(answer))


if __name__ == "__main__":
    with suppress(OSError, EOFError):  # the parent is gone
        main()
