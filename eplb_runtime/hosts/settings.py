"""Settings of a job, and how they are checked. `attach` gives the live configs, ``eplb-runtime doctor --recipe`` the
options of a recipe; the checks of each framework are in its folder's `settings`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

Exact = Literal["bit", "rounding"]


@dataclass(frozen=True)
class Unknown:
    """A setting whose value is not known: the value as written, or where it comes from."""

    text: str

    def __str__(self) -> str:
        return self.text


class UnknownError(Exception):
    """A check has read a setting whose value is not known; the message is its name."""


class JobSettings:
    """Settings of a job, by its framework's names; None is not given. Reading an `Unknown` raises `UnknownError`."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.values = {**defaults, **{name: given[name] for name in defaults if given.get(name) is not None}}

    def __getattr__(self, name: str) -> Any:
        if name == "values" or name not in self.values:
            raise AttributeError(name)
        if isinstance(self.values[name], Unknown):
            raise UnknownError(name)
        return self.values[name]


@dataclass(frozen=True)
class Refusal:
    """A setting that cannot be balanced, its value in this job, the reason, and what to write."""

    setting: str
    value: Any
    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.setting}={self.value}: {self.why}; {self.instead}"


Check = Callable[[Any], Iterator[Refusal]]


def refuse(job: Any, setting: str, why: str, instead: str) -> Refusal:
    """Return the refusal of a setting, with its value in this job."""
    return Refusal(setting, getattr(job, setting, ""), why, instead)


def refuse_all_but_defaults(defaults: Mapping[str, Any], reasons: Mapping[str, str]) -> list[Check]:
    """Return a check for each setting that must have its default, from the reasons."""

    def check_of(setting: str, why: str) -> Check:
        default = defaults[setting]

        def check(job: Any) -> Iterator[Refusal]:
            if getattr(job, setting) != default:
                instead = f"leave {setting} out" if default is None else f"set {setting}={default}"
                yield refuse(job, setting, why, instead)

        return check

    return [check_of(setting, why) for setting, why in reasons.items()]


def run_checks(job: Any, checks: Iterable[Callable[[Any], Iterator[Any]]]) -> tuple[list[Any], list[str]]:
    """Return what all checks find, and the settings that they need and that are not known."""
    found: list[Any] = []
    undecided: dict[str, None] = {}
    for check in checks:
        try:
            found.extend(check(job))
        except UnknownError as error:
            undecided[str(error)] = None
    return found, list(undecided)


def ranks_of_an_expert(world_size: Any, *sizes: Any) -> int | Unknown:
    """Return EDP, from the ranks of the job and of each dimension over which experts are spread."""
    unknown = next((size for size in sizes if isinstance(size, Unknown)), None)
    if unknown is not None:
        return unknown
    if not isinstance(world_size, int):
        return Unknown(str(world_size) if world_size is not None else "ranks of the job")
    if world_size % prod(sizes):
        return Unknown(f"{world_size} ranks are no multiple of {prod(sizes)}")
    return world_size // prod(sizes)
