"""Settings of a job, and the checks that refuse one. `attach` gives them the live configs, ``eplb-runtime doctor
--recipe`` the options of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

Exact = Literal["bit", "rounding"]


@dataclass(frozen=True)
class Unknown:
    """A setting whose value is not known.

    Args:
        text: the value as written, or where it comes from.
    """

    text: str

    def __str__(self) -> str:
        return self.text


class UnknownError(Exception):
    """A check has read a setting whose value is not known; the message is its name."""


class JobSettings:
    """Settings of a job, by its framework's names. Reading an `Unknown` one raises `UnknownError`.

    Args:
        given: values; None is not given.
        defaults: the framework's, of all settings that its checks read.
    """

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.values = {**defaults, **{name: given[name] for name in defaults if given.get(name) is not None}}
        self.assumed = tuple(name for name in defaults if given.get(name) is None)

    def __getattr__(self, name: str) -> Any:
        if name == "values" or name not in self.values:
            raise AttributeError(name)
        if isinstance(self.values[name], Unknown):
            raise UnknownError(name)
        return self.values[name]


@dataclass(frozen=True)
class Refusal:
    """A setting that cannot be balanced.

    Args:
        value: of the setting in this job.
        why: the reason.
        instead: what to write.
    """

    setting: str
    value: Any
    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.setting}={self.value}: {self.why}; {self.instead}"


Check = Callable[[Any], Iterator[Refusal]]
StandIn = tuple[str, str]
"""A setting that is balanced, and what replaced a GPU or a library where it was tested."""


@dataclass(frozen=True)
class HostChecks:
    """How jobs of a framework are judged.

    Args:
        version: the framework's, as people name it.
        settings_of: makes settings of options by the framework's own names.
        checks: what is refused; one ends at the first setting that it needs and that is not known.
        without_replicas: what is refused for replica slots alone.
        exact: how equal training with and without moves is.
        stand_ins: what of a job that attaches was tested with a stand-in.
        checked_at_attach: what only a live job shows.
        ranks, experts: the settings of the ranks and experts of a layer.
    """

    version: str
    settings_of: Callable[[Mapping[str, Any]], JobSettings]
    checks: Sequence[Check]
    without_replicas: Check
    exact: Callable[[Any], Exact]
    stand_ins: Callable[[Any], Iterator[StandIn]]
    checked_at_attach: Sequence[str]
    ranks: str
    experts: str


def refuse(job: Any, setting: str, why: str, instead: str) -> Refusal:
    """The refusal of a setting, with its value in this job."""
    return Refusal(setting, getattr(job, setting, ""), why, instead)


def run_checks(job: Any, checks: Iterable[Callable[[Any], Iterator[Any]]]) -> tuple[list[Any], list[str]]:
    """Run every check on a job.

    Returns:
        what they find, and the settings that are not known and that they need.
    """
    found: list[Any] = []
    undecided: dict[str, None] = {}
    for check in checks:
        try:
            found.extend(check(job))
        except UnknownError as error:
            undecided[str(error)] = None
    return found, list(undecided)


def ranks_of_an_expert(world_size: Any, *sizes: Any) -> int | Unknown:
    """Number of ranks that hold the same experts (EDP).

    Args:
        world_size: ranks of the job; not an int: not known.
        sizes: of the dimensions over which experts are spread.
    """
    unknown = next((size for size in sizes if isinstance(size, Unknown)), None)
    if unknown is not None:
        return unknown
    if not isinstance(world_size, int):
        return Unknown(str(world_size) if world_size is not None else "ranks of the job")
    if world_size % prod(sizes):
        return Unknown(f"{world_size} ranks are no multiple of {prod(sizes)}")
    return world_size // prod(sizes)
