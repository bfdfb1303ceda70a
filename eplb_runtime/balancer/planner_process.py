"""Plans in a child of rank 0, where neither numba's compiler nor a search holds the interpreter that trains.

The child imports no torch. It compiles the planner, or reads compiled code from the disk, and then answers questions
over a pair of sockets: a line of JSON, and arrays in NumPy's format.
"""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from threading import RLock
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

SECONDS = 5.0
"""Period in which a child looks whether its parent lives; the longest wait for a child that was killed."""

_VALUES: dict[str, Any] = {"Placement": Placement.from_json, "Topology": Topology, "CostModel": CostModel}


class PlannerLost(RuntimeError):
    """The child has died or was late; another one has begun."""


class PlannerProcess:
    """A child that plans. One thread asks, another may close.

    Args:
        seconds: longest time for a plan.

    Attributes:
        process: the child; None: there is none, as it could not be started.
    """

    process: subprocess.Popen[bytes] | None = None
    _connection: Connection
    _is_ready = False

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._owner = os.getpid()
        self._asking = RLock()
        self._closed = False
        self._begin()

    def plan(self, load: NDArray[Any], topology: Topology, **terms: Any) -> Plan:
        """Plan as `planner.plan` does, in the home layout. Until the child has compiled, homes are dealt out here by
        DeepSeek's rule, and the reason says so.

        Raises:
            PlannerLost: there is no plan.
            RuntimeError: the planner failed; its error is named.
        """
        with self._asking:
            if not self.is_ready(0.0):
                _say_once("the planner is being compiled: meanwhile DeepSeek's algorithm plans (no replicas)")
                return _homes_alone(load, topology, **terms)
            try:
                self._connection.send_bytes(encode({"load": load, "topology": topology, **terms}))
                if not self._connection.poll(self._seconds):
                    raise BlockingIOError
                answer = decode(self._connection.recv_bytes())
            except (OSError, EOFError) as error:
                why, late = self._end(), isinstance(error, BlockingIOError)
                self._begin()
                raise PlannerLost(f"the planner took longer than {self._seconds:g} s" if late else why) from None
        if "failure" in answer:
            raise RuntimeError(answer["failure"])
        return Plan(**answer)

    def is_ready(self, seconds: float) -> bool:
        """Return whether the child plans, at the latest after so many seconds."""
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
        """End the child, and with it a plan that is asked for."""
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
        own, other = socket.socketpair()
        for way in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            own.setsockopt(socket.SOL_SOCKET, way, struct.pack("ll", int(self._seconds) + 1, 0))
        self._connection = Connection(own.detach())
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"NUMBA_OPT": "1", **os.environ}  # compiles in a seventh less time
        environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        with other, suppress(OSError):
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "eplb_runtime.balancer.planner_process"],
                env=environment,
                stdin=other.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # signals to a job's processes, to save and leave, are not for it
            )

    def _end(self) -> str:
        """End the child. Returns how it ended; the status of one that died before is its own."""
        self._connection.close()
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
    """Return named values as a message."""
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    plain = {name: _plain(value) for name, value in values.items() if name not in arrays}
    buffer = io.BytesIO()
    buffer.write(json.dumps([plain, list(arrays)]).encode() + b"\n")
    for array in arrays.values():
        np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def decode(message: bytes) -> dict[str, Any]:
    """Return the values that `encode` was given."""
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
    """Plan and split toy problems, which compiles all that planning and batches with replicas run."""
    load = np.arange(1.0, 17.0).reshape(2, 8)
    plan(load, Topology(4, 2), slots_per_rank=3, current=Placement.initial(2, 8, 4, 1))
    compile_split()


def compile_split() -> None:
    """Split a toy batch, which compiles what batches with replicas run: five seconds of a core, once on a machine."""
    tables = SplitTables.of(Placement(np.array([[0, 1, 1, 0]]), 2, 2, np.array([[0, 2]])))
    tables.sum_by_rank(split_totals(np.ones((1, 2), dtype=np.int64), tables))
    split_for_rank(np.ones((2, 2), dtype=np.int64), tables, 0, 1)


def main() -> None:
    """Run in the child, until the other end of its standard input is closed or its parent is dead."""
    parent, connection = os.getppid(), Connection(os.dup(0))
    compile_planner()
    note_compiled()
    connection.send_bytes(b"ready")
    while os.getppid() == parent:
        if connection.poll(SECONDS):
            question = decode(connection.recv_bytes())
            try:
                made = plan(question.pop("load"), question.pop("topology"), **question)
                answer = {field.name: getattr(made, field.name) for field in fields(made)}
            except Exception as error:
                answer = {"failure": f"{type(error).__name__}: {error}"}
            connection.send_bytes(encode(answer))


if __name__ == "__main__":
    with suppress(OSError, EOFError):  # the parent is gone
        main()
