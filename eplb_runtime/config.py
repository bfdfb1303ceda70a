"""Keep what a user can choose, in frozen values that are checked when made; no other room reads the environment.

`BalancerConfig` has what everybody may want, and holds a `DispatchConfig` and a `MigrationConfig`. No torch.distributed
here.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import KW_ONLY, Field, asdict, dataclass, field, fields
from math import inf, nan
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, overload

import numpy as np
from numpy.typing import NDArray

from .placement import Placement

TRANSPORTS = ("torch", "cuda_ipc", "nixl", "nvshmem", "deepep", "auto")
"""A new one is named here and in `distributed.transports.TRANSPORTS`; `tests/transport_contract.py` tries it."""
DISPATCHES = ("all_to_all", "hierarchical", "deepep", "auto")
CHOICES = {
    "split": ("water_filling", "even"),
    "gate": ("payoff", "always"),
    "policy": ("incremental", "static"),
    "transport": TRANSPORTS,
    "copies_by": ("torch", "copy_engine"),
    "combine_order": ("logical", "by_rank"),
    "dtype": ("model", "float8"),
    "guard": ("auto", "raise", "warn", "off"),
    "dense_gradients": ("host", "allreduce"),
}
"""Values of settings that are words."""
LEAST = {
    **dict.fromkeys(("interval", "window", "horizon_steps", "staging_bytes", "bytes_per_step"), 1),
    **dict.fromkeys(("replica_slots", "split_least_tokens", "lag", "max_moves"), 0),
    "sms": 2,
}
"""Least values of settings that are whole numbers."""
SECONDS = ("timeout_seconds", "max_pause_seconds")
GONE = {
    "transport='shm'": "gone; gloo does it: leave transport out",
    "copies_by='deepep'": "gone: leave copies_by out, or choose 'copy_engine'",
    "most_tokens": "gone: leave it out",
    "shared_between_layers": "gone: leave it out, each layer keeps its own replicas",
}
MOST_LOW_LATENCY_TOKENS = 508
"""DeepEP wants two entries of NVSHMEM's queues for each and one more, of 1024."""
LOOPBACK = "127.0.0.1"
_TOKEN = re.compile(r"[A-Za-z0-9_-]{8,256}")
_OF_COPIES = ("split", "split_locality", "split_least_tokens")
_WINDOW_DECISIONS = 4
"""Decisions whose load a decision looks at, unless ``window`` says otherwise."""
_ON_RANK_0 = ("run", "listen", "listen_token")
_MOST_SHOWN = 60
_MOST = 1 << 60
"""Of a whole number: beyond it there is no counting in 64 bits."""
_MOST_SECONDS = 366 * 86400.0
"""Of a wait: clocks overflow far beyond it."""
SLOWEST = 1e-3
"""A rank that is slower beside the fastest is broken, or its number is in another unit."""


class ConfigError(ValueError):
    """A setting that cannot work; the message says which and what would."""


def _shown(value: object) -> str:
    """A value in one line that is not too long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # Python refuses to print numbers of thousands of digits
        text = f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def _as_float(value: object) -> float:
    """A real number as Python's; not a number: it is none; infinite: it is too large."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return nan
    try:
        return float(value)
    except OverflowError:
        return inf


class _Settings:
    """Base of the configs: names that they do not know, and the checks of one value. A numpy number is taken as
    Python's, so that configs of equal settings describe themselves alike."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __new__(cls, *given: object, **settings: object) -> Self:
        by_place = [own.name for own in fields(cls) if not own.kw_only]
        if len(given) > len(by_place):
            name = fields(cls)[len(by_place)].name
            raise ConfigError(f"{cls.__name__} takes settings by name: {name}={_shown(given[len(by_place)])}, ...")
        for name in settings:
            if name not in cls.__dataclass_fields__:
                kinds = (BalancerConfig, DispatchConfig, MigrationConfig)
                homes = [f"{kind.__name__} has it" for kind in kinds if name in kind.__dataclass_fields__]
                there_are = f"there are: {', '.join(cls.__dataclass_fields__)}"
                raise ConfigError(
                    f"{cls.__name__} has no setting {name!r}; {homes[0] if homes else GONE.get(name, there_are)}"
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for own in fields(self):
            if getattr(self, own.name) is None and (own.default is None or own.name == "interval"):
                continue
            if own.name in CHOICES:
                self._one_of(own.name, CHOICES[own.name])
            elif own.name in LEAST:
                self._whole(own.name, LEAST[own.name])
            elif own.name in SECONDS:
                self._seconds(own.name)
            elif isinstance(own.default, bool):
                self._flag(own.name)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _whole(self, name: str, least: int | None = None) -> None:
        value = getattr(self, name)
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ConfigError(f"{name}={_shown(value)}: give a whole number")
        if least is not None and value < least:
            raise ConfigError(f"{name}={_shown(value)}: give at least {least}")
        if abs(int(value)) > _MOST:
            raise ConfigError(f"{name}={_shown(value)}: give at most {_MOST}")
        self._set(name, int(value))

    def _seconds(self, name: str) -> None:
        value = getattr(self, name)
        seconds = _as_float(value)
        if not 0 < seconds < inf:
            raise ConfigError(f"{name}={_shown(value)}: give a positive number of seconds")
        if seconds > _MOST_SECONDS:
            raise ConfigError(f"{name}={_shown(value)}: give at most {_MOST_SECONDS:g} seconds, which are a year")
        self._set(name, seconds)

    def _flag(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool | np.bool_):
            raise ConfigError(f"{name}={_shown(value)}: give True or False")
        self._set(name, bool(value))

    def _one_of(self, name: str, known: tuple[str, ...], shown_as: str = "") -> None:
        value = getattr(self, name)
        if (given := f"{name}={value!r}") in GONE:
            raise ConfigError(f"{given} is {GONE[given]}")
        if not isinstance(value, str) or value not in known:
            raise ConfigError(f"{shown_as or name}={_shown(value)} is unknown; choose one of: {', '.join(known)}")
        self._set(name, str(value))


@dataclass(frozen=True)
class DispatchConfig(_Settings):
    """Settings of what happens in each MoE layer: how a batch is split over copies, travels and is summed.

    Args:
        name: what carries tokens: ``"all_to_all"`` (torch.distributed), ``"hierarchical"`` (the same, a token crosses
            to a node once), ``"deepep"`` (the package deep_ep, on Hopper GPUs and newer) or ``"auto"`` (``"deepep"``
            where every rank has it, ``"all_to_all"`` elsewhere).
        combine_order: how a token's results are summed: ``"logical"``, in the router's order, so that no bit depends
            on where experts stand; or ``"by_rank"``, on each rank first: fewer bytes, the way of DeepEP; equal to
            rounding. ``"all_to_all"`` has the first only.
        dtype: how hidden states travel to the experts: ``"model"``, as they are, or ``"float8"``, rounded with a scale
            for 128 columns: half the bytes of bfloat16, for ``"deepep"`` and bfloat16 only. Results and gradients
            travel as they are.
        low_latency_tokens: in evaluation without gradients, batches of up to so many tokens on each rank go by DeepEP's
            low-latency kernels (RDMA or NVLink through NVSHMEM, in buffers made for as many): a multiple of 4, up to
            508. For ``"deepep"`` with ``combine_order="by_rank"``, on one node. 0: never.
        sms: multiprocessors of a GPU that DeepEP's kernels take; even.
        kernels: on GPUs, Triton kernels count, route and sum a layer's choices. The first batch of each is compared
            with plain torch, which is used, and the log says so, where the bits differ.
        split: how tokens are shared out over an expert's copies, batch by batch: ``"water_filling"`` (the busiest rank
            has as little as can be) or ``"even"``.
        split_locality: serve a token on its own rank or node where that does not change the balance.
        split_least_tokens: a batch with fewer (token, choice) pairs over all ranks is not split: it stays at home.

    Raises:
        ConfigError: a value is out of range, a name is unknown, or a setting has no effect beside the others.

    Example:
        >>> DispatchConfig("deepep", combine_order="by_rank", sms=24).sms
        24
    """

    name: str = "all_to_all"
    _: KW_ONLY
    combine_order: Literal["logical", "by_rank"] = "logical"
    dtype: Literal["model", "float8"] = "model"
    low_latency_tokens: int = 0
    sms: int = 20
    kernels: bool = False
    split: Literal["water_filling", "even"] = "water_filling"
    split_locality: bool = True
    split_least_tokens: int = 64

    def __post_init__(self) -> None:
        self._one_of("name", DISPATCHES, shown_as="dispatch")
        super().__post_init__()
        if self.combine_order == "by_rank" and self.name == "all_to_all":
            raise ConfigError(
                "combine_order='by_rank' with dispatch='all_to_all', which sums in logical order: leave it out, or "
                "choose another dispatch"
            )
        if self.dtype == "float8" and self.name != "deepep":
            raise ConfigError(f"dtype='float8' with dispatch={self.name!r}: only 'deepep' carries it")
        self._check_low_latency()
        if self.sms % 2:
            raise ConfigError(f"sms={self.sms}: give an even number")

    def _check_low_latency(self) -> None:
        self._whole("low_latency_tokens")
        tokens = self.low_latency_tokens
        if not 0 <= tokens <= MOST_LOW_LATENCY_TOKENS or tokens % 4:
            raise ConfigError(
                f"low_latency_tokens={tokens}: give a multiple of 4 up to {MOST_LOW_LATENCY_TOKENS}, or 0 for none"
            )
        if tokens and (self.name != "deepep" or self.combine_order != "by_rank"):
            raise ConfigError(
                f"low_latency_tokens={tokens} with dispatch={self.name!r}, combine_order={self.combine_order!r}: "
                "they need dispatch='deepep' and combine_order='by_rank'"
            )


@dataclass(frozen=True, kw_only=True)
class MigrationConfig(_Settings):
    """Settings of what happens when experts change places: when, how much at a time, and what carries it.

    Args:
        lag: steps between a decision's measurement and its commit, during which aggregation, planning and broadcast
            run in the background. Fixed, so that a rerun commits at the same steps. Not with ``interval=None``:
            `rebalance()` decides and commits at once.
        horizon_steps: steps over which the gate, and what is reported of a plan, count what a rebalance saves; None:
            ``10 * interval``, or with ``interval=None`` the steps between the last two calls of `rebalance()`.
        moe_share: share of a step, as the job is, in expert work (dispatch to combine), in (0, 1]; for the same
            prediction. None: measured in a few steps before decisions; 0.5 is assumed until then, and where CUDA graphs
            replay the layers.
        max_moves: at most so many experts move in one decision, over all layers; None: no limit.
        max_pause_seconds: a plan whose predicted pause is longer is trimmed to fit; None: no limit.
        transport: what carries experts: ``"torch"`` (torch.distributed point to point: gloo or NCCL), ``"cuda_ipc"``
            (between the GPUs of one node, by their copy engines), ``"nixl"`` (extra ``nixl``: RDMA or TCP),
            ``"nvshmem"`` (extra ``nvshmem-cu12`` or ``nvshmem-cu13``, between GPUs), ``"deepep"`` (the package deep_ep,
            between Hopper GPUs and newer; not with ``overlap``) or ``"auto"`` (of the first three, the one that fits
            on every rank).
        staging_bytes: bytes of received experts that a rank stages at once; bounds both memory and a round's size.
            Never less than one expert with its state.
        bytes_per_step: with ``overlap``, the most that a rank receives beside one step, up to ``staging_bytes``; None:
            as much as that.
        move_gradients: carry the experts' ``.grad`` along too. Only needed by a loop that does not call ``zero_grad``
            after each step; otherwise gradients that experts have left behind may not be added to nor used again.

    Raises:
        ConfigError: a value is out of range, a name is unknown, or a setting has no effect beside the others.

    Example:
        >>> MigrationConfig(transport="auto", lag=0).transport
        'auto'
    """

    lag: int = 1
    horizon_steps: int | None = None
    moe_share: float | None = None
    max_moves: int | None = None
    max_pause_seconds: float | None = None
    transport: str = "torch"
    staging_bytes: int = 256 << 20
    bytes_per_step: int | None = None
    move_gradients: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.moe_share is not None:
            share = _as_float(self.moe_share)
            if not 0 < share <= 1:
                raise ConfigError(f"moe_share={_shown(self.moe_share)}: give a share of the step in (0, 1], or None")
            self._set("moe_share", share)
        if self.bytes_per_step is not None and self.bytes_per_step > self.staging_bytes:
            raise ConfigError(
                f"bytes_per_step={self.bytes_per_step} is above staging_bytes={self.staging_bytes}, which bounds it: "
                "lower it, or give more staging_bytes"
            )


class _DispatchField:
    """Field that is set to the name of a dispatcher or to a `DispatchConfig`, and read as a `DispatchConfig`."""

    @overload
    def __get__(self, config: None, owner: type) -> DispatchConfig: ...
    @overload
    def __get__(self, config: BalancerConfig, owner: type) -> DispatchConfig: ...
    def __get__(self, config: BalancerConfig | None, owner: type) -> DispatchConfig:
        """On the class: the default, as `dataclasses` asks."""
        if config is None:
            return DispatchConfig()
        chosen: DispatchConfig = config.__dict__["dispatch"]
        return chosen

    def __set__(self, config: BalancerConfig, value: str | DispatchConfig) -> None:
        if isinstance(value, str):
            value = DispatchConfig(value)
        if not isinstance(value, DispatchConfig):
            raise ConfigError(f"dispatch={_shown(value)}: give DispatchConfig(...), or one of: {', '.join(DISPATCHES)}")
        config.__dict__["dispatch"] = value


@dataclass(frozen=True, kw_only=True)
class BalancerConfig(_Settings):
    """Settings of a balancer; the same on every rank (checked at attach).

    A setting without effect is refused, but beside ``policy="static"``, which turns rebalancing off to compare with.

    Args:
        interval: optimizer steps between decisions; None: ``balancer.rebalance()`` alone decides, as between rollouts.
        replica_slots: k, weights-only copies that each rank can hold per layer; with 0, training is bit-identical.
        policy: ``"incremental"`` moves the few experts that pay; ``"static"`` measures and never moves.
        gate: ``"payoff"`` rebalances when predicted seconds saved exceed predicted seconds spent; ``"always"``
            whenever the plan lowers the imbalance.
        overlap: migrate while training goes on: experts travel beside the forwards of steps, and each layer is
            committed before its own forward begins. False: between two steps, all at once.
        dense_gradients: who averages the gradients outside the experts: ``"host"`` (your DDP or FSDP) or
            ``"allreduce"`` (the balancer, before the optimizer's step).
        timeout_seconds: a collective or transfer of the balancer that takes longer is given up, the rebalance dropped.
            Attaching is given two minutes for each of its steps, or this where it is longer.
        run: a folder to which rank 0 adds the measured load (a series in ``load/`` that ``eplb-runtime simulate`` and
            ``convert`` read), events (``events.jsonl``) and, at the end, ``summary.json``. None: none.
        listen: where rank 0 shows a live page (``/``) and metrics for Prometheus (``/metrics``): a port of this
            machine alone (0: any that is free), or ``"host:port"``. None: nothing listens.
        listen_token: that a browser or a scraper must bring; needed beyond this machine. In the page's address once
            (``/?token=...``), or as ``Authorization: Bearer``.
        dispatch: how tokens reach their experts: `DispatchConfig`, or its ``name`` alone.
        migration: how experts change places: `MigrationConfig`.
        window: steps of load history that a decision looks at; None: ``4 * interval``. With ``interval=None`` it counts
            decisions, and None is 4.
        guard: what happens when a check in the running job finds a mistake that would spoil training: ``"auto"`` raises
            in the first 3 steps and warns later, ``"raise"``, ``"warn"``, ``"off"`` (no checks).
        elementwise: the optimizers update each element by itself: those of an unknown class are not tried at attach.
        rank_speed: how fast each rank of the EP group is beside the others, one number above 0 for each; a slow one is
            given fewer tokens, by homes and by the split over copies. None: all alike.
        initial_placement: a placement, or its file, to start from instead of logical order.
        copies_by: what carries weights to copies and their gradients home: ``"torch"`` (torch.distributed point to
            point: gloo or NCCL) or ``"copy_engine"`` (inside a node by the copy engines of its GPUs, through torch's
            symmetric memory; between nodes as ``"torch"``). The same bits either way.

    Raises:
        ConfigError: a value is out of range, a name is unknown, or a setting has no effect beside the others.

    Example:
        >>> config = BalancerConfig(interval=100, replica_slots=1, migration=MigrationConfig(transport="auto"))
        >>> config.window_steps, config.horizon, config.gate, config.migration.transport
        (400, 1000, 'payoff', 'auto')
        >>> BalancerConfig(interval=0)
        Traceback (most recent call last):
            ...
        eplb_runtime.config.ConfigError: interval=0: give at least 1
    """

    interval: int | None = 50
    replica_slots: int = 0
    policy: str = "incremental"
    gate: Literal["payoff", "always"] = "payoff"
    overlap: bool = False
    dense_gradients: Literal["host", "allreduce"] = "host"
    timeout_seconds: float = 30.0
    run: str | Path | None = None
    listen: int | str | None = None
    listen_token: str | None = field(default=None, repr=False)
    dispatch: _DispatchField = _DispatchField()
    migration: MigrationConfig = MigrationConfig()
    window: int | None = None
    guard: Literal["auto", "raise", "warn", "off"] = "auto"
    elementwise: bool = False
    rank_speed: Sequence[float] | None = None
    initial_placement: Placement | str | Path | None = None
    copies_by: str = "torch"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_files()
        self._check_listening()
        self._check_speeds()
        self._check_migration()
        self._check_copies()

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
    def window_steps(self) -> int | None:
        """Steps of load history that a decision looks at; None: ``window`` counts decisions."""
        if self.interval is None:
            return None
        return self.window if self.window is not None else _WINDOW_DECISIONS * self.interval

    def window_rows(self, steps_per_row: int) -> int:
        """Number of rows of load history that a decision looks at, at least 1.

        Args:
            steps_per_row: steps that a row covers. Not used with ``interval=None``: there a row is what lies between
                two decisions.
        """
        if self.window_steps is None:
            return self.window if self.window is not None else _WINDOW_DECISIONS
        return max(1, self.window_steps // steps_per_row)

    @property
    def horizon(self) -> int | None:
        """Steps over which a rebalance is expected to go on paying; None: the steps between the last two decisions."""
        if self.migration.horizon_steps is not None:
            return self.migration.horizon_steps
        return None if self.interval is None else 10 * self.interval

    def described(self) -> dict[str, str]:
        """What ranks must have in common, by setting, in words that are equal where settings are."""
        top = {own.name: getattr(self, own.name) for own in fields(self) if own.name not in _ON_RANK_0}
        dispatch, migration = top.pop("dispatch"), top.pop("migration")
        settings = {**top, **{f"dispatch.{name}": value for name, value in vars(dispatch).items()}, **vars(migration)}
        return {
            name: value.digest() if isinstance(value, Placement) else str(value) for name, value in settings.items()
        }

    def describe(self) -> str:
        """One canonical line, equal on ranks whose settings are equal."""
        return " ".join(f"{name}={value}" for name, value in self.described().items())

    def _check_migration(self) -> None:
        migration = self.migration
        if not isinstance(migration, MigrationConfig):
            raise ConfigError(f"migration={_shown(migration)}: give MigrationConfig(...)")
        if self.interval is None:
            self._refuse_between_decisions()
        elif migration.lag >= self.interval:
            raise ConfigError(f"lag={migration.lag} must be less than interval={self.interval}: one decision at a time")
        if self.overlap and migration.move_gradients:
            raise ConfigError("overlap=True with move_gradients=True: gradients do not stay as they are during a step")
        if self.overlap and migration.transport == "deepep":
            raise ConfigError("overlap=True with transport='deepep': all ranks make its calls, between steps only")
        if migration.bytes_per_step is not None and not self.overlap:
            raise ConfigError(
                f"bytes_per_step={migration.bytes_per_step} without overlap: give overlap=True; between steps "
                "staging_bytes is the limit"
            )

    def _refuse_between_decisions(self) -> None:
        """Refuse settings that only periodic decisions use: `rebalance()` decides and migrates before it returns."""
        if self.migration.lag != MigrationConfig.lag:
            raise ConfigError(
                f"lag={self.migration.lag} with interval=None: rebalance() decides and commits at once; leave it out, "
                "or give an interval"
            )
        if self.overlap:
            raise ConfigError(
                "overlap=True with interval=None: rebalance() migrates before it returns, beside no step; leave it "
                "out, or give an interval"
            )

    def _check_copies(self) -> None:
        """Refuse what only copies use where there are none, and DeepEP's share of a GPU where nothing uses DeepEP."""
        if not self.replica_slots:
            mend = "without replica slots: give replica_slots=1 or more"
            if self.copies_by != BalancerConfig.copies_by:
                raise ConfigError(f"copies_by={self.copies_by!r} {mend}")
            for name in _OF_COPIES:
                if (value := getattr(self.dispatch, name)) != DispatchConfig.__dataclass_fields__[name].default:
                    raise ConfigError(f"{name}={value!r} {mend}")
        if self.dispatch.sms != DispatchConfig.sms and self.dispatch.name not in ("deepep", "auto"):
            raise ConfigError(
                f"sms={self.dispatch.sms} with dispatch={self.dispatch.name!r}: only DeepEP's kernels take it; choose "
                "dispatch='deepep', or leave it out"
            )

    def _check_files(self) -> None:
        for name, kinds in (("run", (str, Path)), ("initial_placement", (Placement, str, Path))):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, kinds) or value == ""):
                wanted = "a folder" if name == "run" else "a Placement or its file"
                raise ConfigError(f"{name}={_shown(value)}: give {wanted}")

    def _check_speeds(self) -> None:
        speeds = self.rank_speed
        if speeds is None:
            return
        speeds = speeds.tolist() if isinstance(speeds, np.ndarray) else speeds
        numbers = tuple(map(_as_float, speeds)) if isinstance(speeds, list | tuple) else (nan,)
        if not all(0 < number < inf for number in numbers):
            raise ConfigError(f"rank_speed={_shown(speeds)}: give numbers above 0, one for each rank")
        if not numbers:
            raise ConfigError("rank_speed has no numbers: give one for each rank, or leave it out")
        if min(numbers) < SLOWEST * max(numbers):
            raise ConfigError(
                f"rank_speed: {min(numbers):g} beside {max(numbers):g}: a rank that is {1 / SLOWEST:g} times slower is "
                "broken, or measured in another unit"
            )
        self._set("rank_speed", numbers)

    def _check_listening(self) -> None:
        token = self.listen_token
        if token is not None and not isinstance(token, str):
            raise ConfigError("listen_token must be a text of 8 to 256 letters, digits, '-' or '_'")
        if self.listen is None or isinstance(self.listen, bool):
            if self.listen is not None or token is not None:
                raise ConfigError(f'listen={self.listen}: give a port, as listen=8080, or "host:port"')
            return
        if isinstance(self.listen, Integral):
            self._set("listen", int(self.listen))
        try:
            host, port = self.listen_address if isinstance(self.listen, int | str) else ("", -1)
        except ValueError:
            host, port = "", -1
        if not host or not 0 <= port < 1 << 16:
            raise ConfigError(f'listen={_shown(self.listen)}: give a port, as 8080, or "host:port", as "0.0.0.0:8080"')
        if token is not None and not _TOKEN.fullmatch(token):
            raise ConfigError("listen_token must be 8 to 256 letters, digits, '-' or '_'")
        if token is None and not _is_loopback(host):
            raise ConfigError(
                f"listen={self.listen!r} is open to other machines: give listen_token=..., or listen on {LOOPBACK}"
            )


def _split(address: str | None) -> tuple[str, str, str]:
    """``host:port`` or a port in letters."""
    given = str(address)
    return (LOOPBACK, ":", given) if given.isdigit() else given.rpartition(":")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


VERIFY = "EPLB_RUNTIME_VERIFY"
"""The environment variable by which ``eplb-runtime verify`` reaches the job that it runs: a `Trial` as JSON."""


@dataclass(frozen=True)
class Trial:
    """One run of a user's job under ``eplb-runtime verify``, whose layout ``attach`` overrides.

    Args:
        layout: of experts: ``"fixed"`` homes, ``"moved"`` after each step, ``"single"``: EP groups of one rank, or
            ``"shaken"``: fixed, with gradients changed by a rounding error.
        steps: optimizer steps that are recorded.
        folder: in which rank 0 writes the records.
        replicas: whether replica slots are kept.
        ends_process: whether the job ends after these steps.
    """

    layout: str
    steps: int
    folder: str
    replicas: bool = True
    ends_process: bool = True


def take_trial(keep: bool = False) -> Trial | None:
    """Return the trial of this process, once: a second ``attach`` is left alone. ``keep``: leave it to ``attach``."""
    text = os.environ.get(VERIFY, "") if keep else os.environ.pop(VERIFY, "")
    return Trial(**json.loads(text)) if text else None


def set_trial(trial: Trial, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let the next ``attach`` of a process with this environment be part of a trial."""
    environment[VERIFY] = json.dumps(asdict(trial))


def launcher_environment() -> Mapping[str, str]:
    """The process environment, for the few facts that a launcher hands over (``LOCAL_WORLD_SIZE``)."""
    return os.environ
