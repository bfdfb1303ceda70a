"""Keep what a user can choose, in frozen values. They raise `ConfigError` when made if a value is out of range, a name
is unknown, or a setting has no effect with the others. No other room reads the environment."""

import json
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import KW_ONLY, Field, asdict, dataclass, field, fields
from math import nan
from numbers import Integral
from pathlib import Path
from reprlib import repr as _shown
from types import NoneType
from typing import Any, ClassVar, Literal, Self, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from .placement import Placement

Transport = Literal["torch", "cuda_ipc", "nixl", "nvshmem", "deepep", "auto"]
TRANSPORTS = get_args(Transport)
"""Names of `distributed.transports.TRANSPORTS`."""
LEAST = dict.fromkeys(("interval", "window", "horizon_steps", "staging_bytes", "bytes_per_step"), 1) | {"num_sms": 2}
"""Least values of settings that are whole numbers, where it is not 0."""
UP_TO = {"moe_share": (1.0, "a share of the step in (0, 1], or None")}
"""Largest values of settings that are numbers above 0, and what to give, where it is not a year in seconds."""
LOOPBACK = "127.0.0.1"
_MOST = (1 << 60) - 1  # largest whole number that is taken: beyond it there is no counting in 64 bits
_MOST_LOW_LATENCY_TOKENS = 508
"""DeepEP wants two entries of NVSHMEM's queues for each and one more, of 1024."""
_TOKEN = re.compile(r"[A-Za-z0-9_-]{8,256}")
_ADDRESS = re.compile(r"(?:(.+):)?(\d{1,5})")
_THIS_MACHINE = re.compile(r"localhost|::1|127(?:\.\d{1,3}){3}")
_WINDOW_DECISIONS = 4  # whose load a decision looks at, unless ``window`` says otherwise
_ON_RANK_0 = ("run", "listen", "listen_token")


class ConfigError(ValueError):
    """A setting that cannot work; the message says which and what would."""


def _as_float(value: Any) -> float:
    """A real number as Python's; NaN where it is none, or too large."""
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < _MOST else nan


def _checked(own: Field[Any], value: Any) -> Any:
    """Return a setting as Python's own kind of value."""
    kind: Any = own.type
    given = f"{'dispatch' if own.name == 'name' else own.name}={_shown(value)}"
    if get_origin(kind) is Literal:
        if not isinstance(value, str) or value not in get_args(kind):
            raise ConfigError(f"{given} is unknown; choose one of: {', '.join(get_args(kind))}")
        return str(value)
    if kind in (int, int | None):
        is_whole, least = isinstance(value, Integral) and not isinstance(value, bool), LEAST.get(own.name, 0)
        if not (is_whole and least <= int(value) <= _MOST):
            raise ConfigError(f"{given}: give a whole number of at least {least}, below 2**60")
        return int(value)
    if kind in (float, float | None):
        most, wanted = UP_TO.get(own.name, (366 * 86400.0, "a number of seconds above 0, up to a year"))
        if not 0 < _as_float(value) <= most:
            raise ConfigError(f"{given}: give {wanted}")
        return float(value)
    if kind is bool:
        if not isinstance(value, bool | np.bool_):
            raise ConfigError(f"{given}: give True or False")
        return bool(value)
    return _speeds(value) if own.name == "rank_speed" else value


def _speeds(given: Any) -> tuple[float, ...]:
    given = given.tolist() if isinstance(given, np.ndarray) else given
    numbers = tuple(map(_as_float, given)) if isinstance(given, list | tuple) else ()
    if not numbers or not all(number > 0 for number in numbers):
        raise ConfigError(f"rank_speed={_shown(given)}: give numbers above 0, one for each rank")
    return numbers


class _Settings:
    """Base of the configs, which checks names and values, one by one and together."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __new__(cls, *_: object, **settings: object) -> Self:
        for name in settings.keys() - cls.__dataclass_fields__.keys():
            kinds = (BalancerConfig, DispatchConfig, MigrationConfig)
            homes = [f"{kind.__name__} has it" for kind in kinds if name in kind.__dataclass_fields__]
            homes.append(f"there are: {', '.join(cls.__dataclass_fields__)}")
            raise ConfigError(f"{cls.__name__} has no setting {name!r}; {homes[0]}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for own in fields(self):
            value = getattr(self, own.name)
            if value is not None or NoneType not in get_args(own.type):
                object.__setattr__(self, own.name, _checked(own, value))
        for line in self._refusals():
            raise ConfigError(line)

    def _refusals(self) -> Iterator[str]:
        """Yield what cannot work together, or has no effect with the others."""
        raise NotImplementedError


@dataclass(frozen=True)
class DispatchConfig(_Settings):
    """Settings of what happens in each MoE layer: how a batch is split over copies, travels and is summed."""

    name: Literal["all_to_all", "hierarchical", "deepep", "auto"] = "all_to_all"
    """Carrier of tokens: ``"all_to_all"``, ``"hierarchical"`` (the same, a token crosses to a node once), ``"deepep"``
    (bfloat16, on Hopper GPUs and newer) or ``"auto"`` (``"deepep"`` where every rank has it, else ``"all_to_all"``)."""
    _: KW_ONLY
    combine_order: Literal["logical", "by_rank"] = "logical"
    """How a token's results are summed: ``"logical"``, in the router's order, so that no bit depends on where experts
    are; or ``"by_rank"``, on each rank first: fewer bytes, equal to rounding; not with ``"all_to_all"``."""
    dtype: Literal["model", "float8"] = "model"
    """How hidden states travel to the experts: as they are, or rounded with a scale for 128 columns; for ``"deepep"``
    and bfloat16 only."""
    low_latency_tokens: int = 0
    """In evaluation without gradients, batches of up to so many tokens on each rank go by DeepEP's low-latency kernels:
    a multiple of 4, up to 508. For ``"deepep"`` with ``combine_order="by_rank"``, on one node. 0: never."""
    num_sms: int = 20
    """Multiprocessors of a GPU that DeepEP's kernels take; even."""
    kernels: bool = True
    """On GPUs with Triton its kernels count, route and sum a layer's choices; torch where the first batch differs."""

    def _refusals(self) -> Iterator[str]:
        tokens, order = self.low_latency_tokens, self.combine_order
        if order == "by_rank" and self.name == "all_to_all":
            yield "combine_order='by_rank' with dispatch='all_to_all', which has logical order: choose another dispatch"
        if order == "by_rank" and not self.kernels:
            yield "combine_order='by_rank' with kernels=False: torch would sum in a pass for each choice; leave one out"
        if self.dtype == "float8" and self.name != "deepep":
            yield f"dtype='float8' with dispatch={self.name!r}: only 'deepep' carries it"
        if tokens > _MOST_LOW_LATENCY_TOKENS or tokens % 4:
            yield f"low_latency_tokens={tokens}: give a multiple of 4 up to {_MOST_LOW_LATENCY_TOKENS}, or 0 for none"
        if tokens and (self.name, order) != ("deepep", "by_rank"):
            given = f"low_latency_tokens={tokens} with dispatch={self.name!r}, combine_order={order!r}"
            yield f"{given}: they need dispatch='deepep' and combine_order='by_rank'"
        if self.num_sms % 2:
            yield f"num_sms={self.num_sms}: give an even number"


@dataclass(frozen=True, kw_only=True)
class MigrationConfig(_Settings):
    """Settings of what happens when experts change places: when, how much at a time, and what carries it."""

    lag: int = 1
    """Steps between a decision's measurement and its commit, in which it is planned in the background. Fixed, so that
    a rerun commits at the same steps. Not with ``interval=None``."""
    horizon_steps: int | None = None
    """Steps over which a rebalance is expected to go on paying; None: ``10 * interval``, or with ``interval=None`` the
    steps between the last two calls of `rebalance()`."""
    moe_share: float | None = None
    """Share of a step in expert work (dispatch to combine), in (0, 1]. None: measured in a few steps before decisions;
    0.5 is assumed until then, and where CUDA graphs replay the layers."""
    max_moves: int | None = None
    """At most so many experts move in one decision, over all layers; None: no limit."""
    max_pause_seconds: float | None = None
    """A plan whose predicted pause is longer is trimmed to fit; None: no limit."""
    transport: Transport = "torch"
    """Carrier of experts: ``"torch"`` (gloo or NCCL), ``"cuda_ipc"`` (between the GPUs of one node), ``"nixl"`` (extra
    ``nixl``: RDMA or TCP), ``"nvshmem"`` (extra ``nvshmem-cu12`` or ``-cu13``, between GPUs), ``"deepep"`` (Hopper GPUs
    and newer; not with ``overlap``) or ``"auto"`` (of the first three, the one that fits on every rank)."""
    staging_bytes: int = 256 << 20
    """Bytes of received experts that a rank stages at once, and of a round; never less than one expert's."""
    bytes_per_step: int | None = None
    """With ``overlap``, the most that a rank receives during a step, up to ``staging_bytes``; None: as much as that."""

    def _refusals(self) -> Iterator[str]:
        if self.bytes_per_step is not None and self.bytes_per_step > self.staging_bytes:
            yield f"bytes_per_step={self.bytes_per_step}: lower it, or give more staging_bytes"


class _DispatchField:
    """Field that is set to the name of a dispatcher or to a `DispatchConfig`, and read as a `DispatchConfig`."""

    def __get__(self, config: "BalancerConfig | None", owner: type) -> DispatchConfig:
        return DispatchConfig() if config is None else config.__dict__["dispatch"]  # on the class: the default

    def __set__(self, config: "BalancerConfig", value: str | DispatchConfig) -> None:
        config.__dict__["dispatch"] = value if isinstance(value, DispatchConfig) else DispatchConfig(value)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class BalancerConfig(_Settings):
    """Settings of a balancer; the same on every rank (checked at attach).

    A setting without effect is refused, but with ``policy="static"``, which turns rebalancing off to compare with.
    """

    interval: int | None = 50
    """Optimizer steps between decisions; None: ``balancer.rebalance()`` alone decides, as between rollouts."""
    replica_slots: int = 0
    """k, weights-only copies that each rank can hold per layer; with 0, training is bit-identical."""
    policy: Literal["incremental", "static"] = "incremental"
    """``"incremental"`` moves the few experts that pay; ``"static"`` measures and never moves."""
    gate: Literal["payoff", "always"] = "payoff"
    """``"payoff"`` rebalances when predicted seconds saved exceed predicted seconds spent; ``"always"`` whenever the
    plan lowers the imbalance."""
    overlap: bool = False
    """Migrate while training goes on, a layer at a time before its forward. False: between two steps, all at once. A
    term of the loss over weights of experts is computed after the model's forward then: before it they may yet move."""
    dense_gradients: Literal["host", "allreduce"] = "host"
    """Who averages gradients outside the experts: ``"host"`` (your DDP or FSDP) or ``"allreduce"`` (the balancer)."""
    timeout_seconds: float = 30.0
    """A collective or transfer of the balancer that takes longer is given up, the rebalance dropped; each step of
    attaching has two minutes at least."""
    run: str | Path | None = None
    """A folder to which rank 0 adds the measured load (``load.jsonl``, for ``eplb-runtime simulate``), ``events.jsonl``
    and, at the end, ``summary.json``. None: none."""
    listen: int | str | None = None
    """Where rank 0 shows a live page and metrics for Prometheus (``/metrics``): a port of this machine alone (0: any
    that is free), or ``"host:port"``. None: nothing listens."""
    listen_token: str | None = field(default=None, repr=False)
    """Secret that a browser (``/?token=...``) or a scraper (``Authorization: Bearer``) must bring; needed beyond this
    machine."""
    dispatch: _DispatchField = _DispatchField()
    """How tokens reach their experts: `DispatchConfig`, or its ``name`` alone."""
    migration: MigrationConfig = MigrationConfig()
    """How experts change places."""
    window: int | None = None
    """Steps of load history of a decision; None: ``4 * interval``. With ``interval=None`` it counts decisions: 4."""
    guard: Literal["auto", "raise", "warn", "off"] = "auto"
    """Answer to a mistake that would spoil training: ``"raise"``, ``"warn"``, ``"auto"`` (raises in the first 3 steps,
    then warns); ``"off"``: no checks."""
    elementwise: bool = False
    """The optimizers update each element by itself: those of an unknown class are not tried at attach."""
    rank_speed: Sequence[float] | None = None
    """Speed of each rank of the EP group, numbers above 0; a slow one is given fewer tokens. None: all alike."""
    initial_placement: Placement | str | Path | None = None
    """A placement, or its file, to start from instead of logical order."""
    replica_transport: Literal["torch", "copy_engine"] = "torch"
    """Carrier of weights to copies and of their gradients home: ``"torch"`` (gloo or NCCL) or ``"copy_engine"`` (inside
    a node by the copy engines of its GPUs, between nodes as ``"torch"``). The same bits either way."""

    @property
    def speed_R(self) -> NDArray[np.float64] | None:
        """Speed of each rank, float64 ``[R]``, the fastest 1; None: none given, or all equally fast."""
        if self.rank_speed is None or len(set(self.rank_speed)) == 1:
            return None
        return np.array(self.rank_speed, dtype=np.float64) / max(self.rank_speed)

    @property
    def listen_address(self) -> tuple[str, int]:
        """Host and port of ``listen``. The host of a port alone is `LOOPBACK`; brackets around an IPv6 host are
        removed. ``("", 65536)``: ``listen`` is None or malformed."""
        address = _ADDRESS.fullmatch(str(self.listen))
        host, port = address.groups() if address else ("", 1 << 16)
        return (LOOPBACK if host is None else host).removeprefix("[").removesuffix("]"), int(port)

    def window_rows(self, steps_per_row: int) -> int:
        """Return how many rows of load history a decision looks at, at least 1, where a row has ``steps_per_row``
        steps. With ``interval=None`` a row has all steps between two decisions."""
        if self.interval is None:
            return self.window or _WINDOW_DECISIONS
        return max(1, (self.window or _WINDOW_DECISIONS * self.interval) // steps_per_row)

    @property
    def horizon(self) -> int | None:
        """Steps over which a rebalance is expected to go on paying: ``horizon_steps``, or else ten intervals. None:
        neither is given, and callers take the steps between the last two decisions."""
        if self.migration.horizon_steps is not None:
            return self.migration.horizon_steps
        return None if self.interval is None else 10 * self.interval

    def described(self) -> dict[str, str]:
        """Return the settings that must be equal on all ranks as strings, by name (``"dispatch.NAME"`` for those of a
        `DispatchConfig`). A placement is given as its digest."""
        top = {own.name: getattr(self, own.name) for own in fields(self) if own.name not in _ON_RANK_0}
        dispatch, migration = top.pop("dispatch"), top.pop("migration")
        settings = {**top, **{f"dispatch.{name}": value for name, value in vars(dispatch).items()}, **vars(migration)}
        return {
            name: value.digest() if isinstance(value, Placement) else str(value) for name, value in settings.items()
        }

    def _refusals(self) -> Iterator[str]:
        if not isinstance(self.migration, MigrationConfig):
            yield f"migration={_shown(self.migration)}: give MigrationConfig(...)"
        if self.run is not None and not isinstance(self.run, str | Path):
            yield f"run={_shown(self.run)}: give a folder"
        yield from self._of_listening()
        lag, interval = self.migration.lag, self.interval
        if interval is None and lag != MigrationConfig.lag:
            yield f"lag={lag} with interval=None: rebalance() decides and commits at once; leave it out"
        if interval is None and self.overlap:
            yield "overlap=True with interval=None: rebalance() migrates before it returns; leave it out"
        if interval is not None and lag >= interval:
            yield f"lag={lag} must be less than interval={interval}: one decision at a time"
        if self.overlap and self.migration.transport == "deepep":
            yield "overlap=True with transport='deepep': all ranks make its calls, between steps only"
        if self.migration.bytes_per_step is not None and not self.overlap:
            yield f"bytes_per_step={self.migration.bytes_per_step} without overlap: give overlap=True, or leave it out"
        if self.replica_transport != BalancerConfig.replica_transport and not self.replica_slots:
            yield f"replica_transport={self.replica_transport!r} without replica slots: give replica_slots=1 or more"
        if self.dispatch.num_sms != DispatchConfig.num_sms and self.dispatch.name not in ("deepep", "auto"):
            yield f"num_sms={self.dispatch.num_sms} is DeepEP's alone: choose dispatch='deepep', or leave it out"

    def _of_listening(self) -> Iterator[str]:
        listen, token, wanted = self.listen, self.listen_token, 'give a port, as listen=8080, or "host:port"'
        if token is not None and not (isinstance(token, str) and _TOKEN.fullmatch(token)):
            yield "listen_token must be 8 to 256 letters, digits, '-' or '_'"
        if listen is None and token is not None:
            yield f"listen_token without listen: {wanted}"
        if listen is None:
            return
        host, port = self.listen_address
        if not host or port >= 1 << 16:
            yield f"listen={_shown(listen)}: {wanted}"
        if token is None and not _THIS_MACHINE.fullmatch(host):
            yield f"listen={listen!r} is open to other machines: give listen_token=..., or listen on {LOOPBACK}"


VERIFY = "EPLB_RUNTIME_VERIFY"
"""The environment variable by which ``eplb-runtime verify`` reaches the job that it runs: a `Trial` as JSON."""


@dataclass(frozen=True)
class Trial:
    """One run of a user's job under ``eplb-runtime verify``, whose layout ``attach`` overrides: ``"fixed"`` homes,
    ``"moved"`` after each step, the same with its ``"replicas"``, or ``"single"``: EP groups of one rank."""

    layout: str
    steps: int  # that are recorded
    folder: str  # in which rank 0 writes the records
    ends_process: bool = True  # whether the job ends after these steps


def take_trial(keep: bool = False) -> Trial | None:
    """Return the trial in this process's variable `VERIFY`, or None if there is none, and delete the variable, so that
    a second ``attach`` finds no trial. ``keep``: leave the variable for ``attach``."""
    text = os.environ.get(VERIFY, "") if keep else os.environ.pop(VERIFY, "")
    return Trial(**json.loads(text)) if text else None


def set_trial(trial: Trial, environment: MutableMapping[str, str] = os.environ) -> None:
    """Write a trial as JSON into the variable `VERIFY` of an environment, by default this process's, for the next
    ``attach`` of a process that has this environment."""
    environment[VERIFY] = json.dumps(asdict(trial))


def launcher_environment() -> Mapping[str, str]:
    """Return ``os.environ`` itself, for the few variables that a launcher sets (``LOCAL_WORLD_SIZE``)."""
    return os.environ
