"""What a user can choose, in one frozen value that is checked when made; the only room that reads the environment.

No torch.distributed here.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .placement import Placement

SPLITS = ("water_filling", "even")
TRAINING_GATES = ("payoff", "always")
TRAINING_POLICIES = ("incremental", "static")
TRANSPORTS = ("torch", "shm", "cuda_ipc", "nixl", "nvshmem", "deepep", "auto")
COPIES_BY = ("torch", "copy_engine", "deepep")
DISPATCHES = ("all_to_all", "hierarchical", "deepep", "auto")
COMBINE_ORDERS = ("logical", "by_rank")
DISPATCH_DTYPES = ("model", "float8")
MOST_LOW_LATENCY_TOKENS = 508
"""DeepEP wants two entries of NVSHMEM's queues for each and one more, of 1024."""
GUARDS = ("auto", "raise", "warn", "off")
DENSE_GRADIENTS = ("host", "allreduce")
LOOPBACK = "127.0.0.1"
_TOKEN = re.compile(r"[A-Za-z0-9_-]{8,256}")


class ConfigError(ValueError):
    """A setting that cannot work; the message says which and what would."""


@dataclass(frozen=True)
class BalancerConfig:
    """Settings of a balancer; the same on every rank (checked at attach).

    Args:
        interval: optimizer steps between decisions.
        window: steps of load history that a decision looks at; None: ``4 * interval``.
        lag: steps between a decision's measurement and its commit, during which aggregation, planning and broadcast
            run in the background. Fixed, so that a rerun commits at the same steps.
        replica_slots: k, weights-only copies that each rank can hold per layer; with 0, training is bit-identical.
        shared_between_layers: layers of equal shapes take turns with one set of k replica rows instead of keeping
            theirs. Saves memory (both sizes are logged at attach); copies then travel in every forward and backward
            instead of once a step, and are computed by a second call, again in the backward pass.
        copies_by: what carries weights to copies and their gradients home: ``"torch"`` (torch.distributed point to
            point: gloo or NCCL), ``"copy_engine"`` (inside a node by the copy engines of its GPUs, through torch's
            symmetric memory; between nodes as ``"torch"``) or ``"deepep"`` (weights to all copies of a layer in one
            dispatch of the package deep_ep, with ``dispatch_sms``; gradients as ``"torch"``). The same bits either way.
        split: how tokens are shared out over an expert's copies, batch by batch: ``"water_filling"`` (the busiest rank
            has as little as can be) or ``"even"``.
        split_locality: serve a token on its own rank or node where that does not change the balance.
        split_least_tokens: a batch with fewer (token, choice) pairs over all ranks is not split: it stays at home.
        policy: ``"incremental"`` moves the few experts that pay; ``"static"`` measures and never moves.
        gate: ``"payoff"`` rebalances when predicted seconds saved exceed predicted seconds spent; ``"always"``
            whenever the plan lowers the imbalance.
        max_moves: at most so many experts move in one decision, over all layers; None: no limit.
        max_pause_seconds: a plan whose predicted pause is longer is trimmed to fit; None: no limit.
        horizon_steps: steps over which the gate counts what a rebalance saves; None: ``10 * interval``.
        moe_share: share of a step that expert compute and dispatch take, in (0, 1]; for the gate's prediction.
        timeout_seconds: a collective or transfer of the balancer that takes longer is given up, the rebalance dropped.
            Attaching is given two minutes for each of its steps, or this where it is longer.
        staging_bytes: bytes of received experts that a rank stages at once; bounds both memory and a round's size.
            Never less than one expert with its state.
        overlap: migrate while training goes on: experts travel beside the forwards of steps, and each layer is
            committed before its own forward begins. False: between two steps, all at once.
        bytes_per_step: with ``overlap``, the most that a rank receives beside one step; None: ``staging_bytes``.
        transport: what carries experts: ``"torch"`` (torch.distributed point to point: gloo or NCCL), ``"shm"`` (shared
            memory between the ranks of one node, on a CPU), ``"cuda_ipc"`` (the same between the GPUs of one node, by
            their copy engines), ``"nixl"`` (extra ``nixl``: RDMA or TCP), ``"nvshmem"`` (extra ``nvshmem-cu12`` or
            ``nvshmem-cu13``, between GPUs), ``"deepep"`` (the package deep_ep, between Hopper GPUs and newer; not with
            ``overlap``) or ``"auto"`` (inside nodes and across them what fits on every rank, of the first four).
        dispatch: what carries tokens: ``"all_to_all"`` (torch.distributed), ``"hierarchical"`` (the same, a token
            crosses to a node once), ``"deepep"`` (the package deep_ep, on Hopper GPUs and newer) or ``"auto"``
            (``"deepep"`` where every rank has it, ``"all_to_all"`` elsewhere).
        combine_order: how a token's results are summed: ``"logical"``, in the router's order, so that no bit depends
            on where experts stand; or ``"by_rank"``, on each rank first: fewer bytes, the way of DeepEP; equal to
            rounding.
            ``"all_to_all"`` has the first only.
        dispatch_dtype: how hidden states travel to the experts: ``"model"``, as they are, or ``"float8"``, rounded
            with a scale for 128 columns: half the bytes of bfloat16, for ``dispatch="deepep"`` and bfloat16
            only. Results and gradients travel as they are.
        low_latency_tokens: in evaluation without gradients, batches of up to so many tokens on each rank go by DeepEP's
            low-latency kernels (RDMA or NVLink through NVSHMEM, in buffers made for as many): a multiple of 4, up to
            508. For ``dispatch="deepep"`` with ``combine_order="by_rank"``, on one node. 0: never.
        most_tokens: no batch of any rank has more tokens than that, in training and in evaluation. For
            ``dispatch="deepep"`` on one node: a layer then never waits for the device, so that CUDA graphs can hold it,
            and its rows lie in memory for as many from every rank (in ``"logical"`` order for each choice): for small
            batches. A larger batch is refused. 0: not known; the number of rows comes to the host first.
        dispatch_sms: multiprocessors of a GPU that the kernels of DeepEP take; even.
        kernels: on GPUs, Triton kernels count, route and sum a layer's choices and hash experts for checksums; with
            ``most_tokens`` and replica slots they also split batches over copies, without the host. Each is tried at
            attach: one that does not give what plain torch gives there is not used, and the log says so.
        dense_gradients: who averages the gradients outside the experts: ``"host"`` (your DDP or FSDP) or
            ``"allreduce"`` (the balancer, before the optimizer's step).
        move_gradients: carry the experts' ``.grad`` along too. Only needed by a loop that does not call ``zero_grad``
            after each step; otherwise gradients that experts have left behind may not be added to nor used again.
        guard: what happens when a check in the running job finds a mistake that would spoil training: ``"auto"`` raises
            in the first 3 steps and warns later, ``"raise"``, ``"warn"``, ``"off"`` (no checks).
        rank_speed: how fast each rank of the EP group is beside the others, one number above 0 for each; a slow one is
            given fewer tokens, by homes and by the split over copies. None: all alike.
        initial_placement: a placement, or its file, to start from instead of logical order.
        run: a folder in which rank 0 puts down what the job shows of itself: the load that was measured, as a series in
            ``load/`` that ``eplb-runtime simulate`` and ``convert`` read, and its events, in ``events.jsonl``. It is
            added to, never written over, and ``summary.json`` at the end. None: no such folder.
        listen: where rank 0 shows a live page (``/``) and metrics for Prometheus (``/metrics``): a port of this
            machine alone (0: any that is free), or ``"host:port"``. None: nothing listens.
        listen_token: that a browser or a scraper must bring; needed beyond this machine. In the page's address once
            (``/?token=...``), or as ``Authorization: Bearer``.

    Raises:
        ConfigError: a value is out of range or a name is unknown.

    Example:
        >>> config = BalancerConfig(interval=100, replica_slots=1)
        >>> config.window_steps, config.horizon, config.gate
        (400, 1000, 'payoff')
        >>> BalancerConfig(interval=0)
        Traceback (most recent call last):
            ...
        eplb_runtime.config.ConfigError: interval=0: give at least 1
    """

    interval: int = 50
    window: int | None = None
    lag: int = 1
    replica_slots: int = 0
    shared_between_layers: bool = False
    copies_by: str = "torch"
    split: Literal["water_filling", "even"] = "water_filling"
    split_locality: bool = True
    split_least_tokens: int = 64
    policy: str = "incremental"
    gate: Literal["payoff", "always"] = "payoff"
    max_moves: int | None = None
    max_pause_seconds: float | None = None
    horizon_steps: int | None = None
    moe_share: float = 0.5
    timeout_seconds: float = 30.0
    staging_bytes: int = 256 << 20
    overlap: bool = False
    bytes_per_step: int | None = None
    transport: str = "torch"
    dispatch: str = "all_to_all"
    combine_order: Literal["logical", "by_rank"] = "logical"
    dispatch_dtype: Literal["model", "float8"] = "model"
    low_latency_tokens: int = 0
    most_tokens: int = 0
    dispatch_sms: int = 20
    kernels: bool = False
    dense_gradients: Literal["host", "allreduce"] = "host"
    move_gradients: bool = False
    guard: Literal["auto", "raise", "warn", "off"] = "auto"
    rank_speed: tuple[float, ...] | None = None
    initial_placement: Placement | str | Path | None = None
    run: str | Path | None = None
    listen: int | str | None = None
    listen_token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._at_least("interval", 1)
        self._at_least("window", 1)
        self._at_least("lag", 0)
        self._at_least("replica_slots", 0)
        self._at_least("split_least_tokens", 0)
        self._at_least("max_moves", 0)
        self._at_least("horizon_steps", 1)
        self._at_least("staging_bytes", 1)
        self._at_least("bytes_per_step", 1)
        if self.lag >= self.interval:
            raise ConfigError(f"lag={self.lag} must be less than interval={self.interval}: one decision at a time")
        if self.shared_between_layers and not self.replica_slots:
            raise ConfigError("shared_between_layers=True without replica slots: give replica_slots=1 or more")
        self._one_of("copies_by", COPIES_BY)
        if self.copies_by != "torch" and not self.replica_slots:
            raise ConfigError(f"copies_by={self.copies_by!r} without replica slots: give replica_slots=1 or more")
        if self.overlap and self.move_gradients:
            raise ConfigError("overlap=True with move_gradients=True: gradients do not stay as they are during a step")
        if self.overlap and self.transport == "deepep":
            raise ConfigError("overlap=True with transport='deepep': all ranks make its calls, between steps only")
        for name in ("timeout_seconds", "max_pause_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value}: give a positive number of seconds")
        if self.rank_speed is not None and not all(0 < speed < inf for speed in self.rank_speed):
            raise ConfigError(f"rank_speed={self.rank_speed}: give numbers above 0")
        if not 0 < self.moe_share <= 1:
            raise ConfigError(f"moe_share={self.moe_share}: give a share of the step in (0, 1]")
        self._one_of("policy", TRAINING_POLICIES)
        self._one_of("gate", TRAINING_GATES)
        self._one_of("split", SPLITS)
        self._one_of("transport", TRANSPORTS)
        self._one_of("dispatch", DISPATCHES)
        self._one_of("combine_order", COMBINE_ORDERS)
        if self.combine_order == "by_rank" and self.dispatch == "all_to_all":
            raise ConfigError("combine_order='by_rank' with dispatch='all_to_all', which sums in logical order")
        self._one_of("dispatch_dtype", DISPATCH_DTYPES)
        if self.dispatch_dtype == "float8" and self.dispatch != "deepep":
            raise ConfigError(f"dispatch_dtype='float8' with dispatch={self.dispatch!r}: only 'deepep' carries it")
        self._check_low_latency()
        self._check_most_tokens()
        self._at_least("dispatch_sms", 2)
        if self.dispatch_sms % 2:
            raise ConfigError(f"dispatch_sms={self.dispatch_sms}: give an even number")
        self._one_of("dense_gradients", DENSE_GRADIENTS)
        self._one_of("guard", GUARDS)
        self._check_listening()

    @property
    def speed_R(self) -> NDArray[np.float64] | None:
        """float64 ``[R]``, of each rank, the fastest 1; None: all alike."""
        if self.rank_speed is None or len(set(self.rank_speed)) == 1:
            return None
        return np.array(self.rank_speed, dtype=np.float64) / max(self.rank_speed)

    @property
    def listen_address(self) -> tuple[str, int]:
        """Host and port of ``listen``, which is given."""
        host, _, port = (
            f"{LOOPBACK}:{self.listen}".rpartition(":") if isinstance(self.listen, int) else _split(self.listen)
        )
        return host.removeprefix("[").removesuffix("]"), int(port)

    @property
    def window_steps(self) -> int:
        return self.window if self.window is not None else 4 * self.interval

    @property
    def horizon(self) -> int:
        """Steps over which a rebalance is expected to go on paying."""
        return self.horizon_steps if self.horizon_steps is not None else 10 * self.interval

    def describe(self) -> str:
        """One canonical line, equal on ranks whose settings are equal."""
        shown = []
        for own in fields(self):
            if own.name in ("run", "listen", "listen_token"):  # only rank 0 looks at it
                continue
            value = getattr(self, own.name)
            shown.append(f"{own.name}={value.digest() if isinstance(value, Placement) else value}")
        return " ".join(shown)

    def _check_low_latency(self) -> None:
        tokens = self.low_latency_tokens
        if not 0 <= tokens <= MOST_LOW_LATENCY_TOKENS or tokens % 4:
            raise ConfigError(
                f"low_latency_tokens={tokens}: give a multiple of 4 up to {MOST_LOW_LATENCY_TOKENS}, or 0 for none"
            )
        if tokens and (self.dispatch != "deepep" or self.combine_order != "by_rank"):
            raise ConfigError(
                f"low_latency_tokens={tokens} with dispatch={self.dispatch!r}, combine_order={self.combine_order!r}: "
                "they need dispatch='deepep' and combine_order='by_rank'"
            )

    def _check_most_tokens(self) -> None:
        self._at_least("most_tokens", 0)
        if self.most_tokens and self.dispatch != "deepep":
            raise ConfigError(
                f"most_tokens={self.most_tokens} with dispatch={self.dispatch!r}: only 'deepep' has use for it"
            )
        if self.most_tokens and self.low_latency_tokens:
            raise ConfigError(
                f"most_tokens={self.most_tokens} with low_latency_tokens={self.low_latency_tokens}, which wait for "
                "numbers of rows: give one of them"
            )

    def _check_listening(self) -> None:
        if self.listen is None or isinstance(self.listen, bool):
            if self.listen is not None or self.listen_token is not None:
                raise ConfigError(f'listen={self.listen}: give a port, as listen=8080, or "host:port"')
            return
        try:
            host, port = self.listen_address
        except ValueError:
            host, port = "", -1
        if not host or not 0 <= port < 1 << 16:
            raise ConfigError(f'listen={self.listen!r}: give a port, as 8080, or "host:port", as "0.0.0.0:8080"')
        if self.listen_token is not None and not _TOKEN.fullmatch(self.listen_token):
            raise ConfigError("listen_token must be 8 to 256 letters, digits, '-' or '_'")
        if self.listen_token is None and not _is_loopback(host):
            raise ConfigError(
                f"listen={self.listen!r} is open to other machines: give listen_token=..., or listen on {LOOPBACK}"
            )

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and value < least:
            raise ConfigError(f"{name}={value}: give at least {least}")

    def _one_of(self, name: str, known: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in known:
            raise ConfigError(f"{name}={value!r} is unknown; choose one of: {', '.join(known)}")


def _split(address: str | None) -> tuple[str, str, str]:
    """``host:port`` or a port in letters."""
    given = str(address)
    return (LOOPBACK, ":", given) if given.isdigit() else given.rpartition(":")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def launcher_environment() -> Mapping[str, str]:
    """The process environment, for the few facts that a launcher hands over (``LOCAL_WORLD_SIZE``)."""
    return os.environ
