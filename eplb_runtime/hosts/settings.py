"""Settings of a job, and how they are checked. `attach` gives the live configs, ``eplb-runtime doctor --recipe`` the
options of a recipe; the checks of each framework are in its folder's `settings`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

Exact = Literal["bit", "rounding"]


STAND_IN = "%s=%s was tested with a stand-in, and not on a GPU yet: prove it by `eplb-runtime verify -- JOB`"


class Unknown(str):
    """A setting whose value is not known: the value as written, or where it comes from."""


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


def run_checks(job: Any, checks: Iterable[Check]) -> tuple[list[Refusal], list[str]]:
    """Return what all checks find, and the settings that they need and that are not known."""
    found: list[Refusal] = []
    undecided: dict[str, None] = {}
    for check in checks:
        try:
            found.extend(check(job))
        except UnknownError as error:
            undecided[str(error)] = None
    return found, list(undecided)


def ranks_of_an_expert(world_size: Any, *sizes: Any) -> int | Unknown:
    """Return EDP, from the ranks of the job and of each dimension over which experts are spread."""
    unknown = next((size for size in (*sizes, world_size) if not isinstance(size, int)), None)
    if unknown is not None or world_size is None:
        return Unknown(unknown or "ranks of the job")
    whole = prod(sizes)
    return Unknown(f"{world_size} ranks are no multiple of {whole}") if world_size % whole else world_size // whole
