"""Settings of a job, judged by one list of rules per framework.

A framework's file or folder has a frozen class of settings with two readers: the options of a recipe, and the objects
of the live job. Its list of rules is applied to both: by `attach`, and by ``eplb-runtime doctor --recipe``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

Exact = Literal["bit", "rounding"]
Settings = TypeVar("Settings")


@dataclass(frozen=True)
class Unresolved:
    """A setting whose value is not known.

    Args:
        text: the value as written, or where it comes from.
    """

    text: str

    def __str__(self) -> str:
        return self.text


class UnresolvedError(Exception):
    """A rule has asked for a setting whose value is not known."""


@dataclass(frozen=True)
class Rule:
    """One class of settings that cannot be balanced. Deleting its entry opens the class.

    Args:
        setting: name of a field of the settings.
        refuses: true where the settings are of the class; it may read any field.
        why: what stands against it.
        instead: what to write.
        replicas_only: homes move all the same; only replica slots are refused.
    """

    setting: str
    refuses: Callable[[Any], bool]
    why: str
    instead: str
    replicas_only: bool = False


@dataclass(frozen=True)
class Emulated:
    """One class of settings that is balanced, and was tested with a stand-in for what it runs on.

    Args:
        setting: name of a field of the settings.
        applies: true where the settings are of the class.
        tested: what stood in for what.
    """

    setting: str
    applies: Callable[[Any], bool]
    tested: str


@dataclass(frozen=True)
class Refusal:
    """A rule that refuses a job.

    Args:
        value: of the setting in this job.
    """

    setting: str
    value: Any
    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.setting}={self.value}: {self.why}; {self.instead}"


@dataclass(frozen=True)
class JobVerdict:
    """What the rules say of a job's settings.

    Args:
        refused: what stands against moving homes.
        without_replicas: what stands against replica slots besides.
        undecided: settings that a rule needs and that are not known.
    """

    refused: tuple[Refusal, ...]
    without_replicas: tuple[Refusal, ...]
    undecided: tuple[str, ...]

    @property
    def homes(self) -> bool | None:
        """Whether homes can move; None: not known."""
        return False if self.refused else None if self.undecided else True

    @property
    def replicas(self) -> bool | None:
        """Whether there can be replica slots; None: not known."""
        return False if self.without_replicas else self.homes


@dataclass(frozen=True)
class HostRules:
    """How jobs of a framework are judged.

    Args:
        version: the framework's, as people name it.
        settings_of: makes settings of options by the framework's own names.
        rules: what is refused.
        exact: how equal training with and without moves is; raises `UnresolvedError`.
        checked_at_attach: what only a live job shows.
        emulated: what of that which attaches was tested with a stand-in.
    """

    version: str
    settings_of: Callable[[Mapping[str, Any]], Any]
    rules: Sequence[Rule]
    exact: Callable[[Any], Exact]
    checked_at_attach: Sequence[str]
    emulated: Sequence[Emulated] = ()


class Resolved:
    """View of settings that raises `UnresolvedError` where a value is not known."""

    def __init__(self, settings: Any) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._settings, name)
        if isinstance(value, Unresolved):
            raise UnresolvedError(name)
        return value


def judge(settings: Any, rules: Sequence[Rule]) -> JobVerdict:
    """Apply every rule."""
    refused: list[Refusal] = []
    without_replicas: list[Refusal] = []
    undecided: dict[str, None] = {}
    for rule in rules:
        try:
            if not rule.refuses(Resolved(settings)):
                continue
        except UnresolvedError as error:
            undecided[str(error)] = None
            continue
        found = Refusal(rule.setting, getattr(settings, rule.setting, ""), rule.why, rule.instead)
        (without_replicas if rule.replicas_only else refused).append(found)
    return JobVerdict(tuple(refused), tuple(without_replicas), tuple(undecided))


def emulated_settings(settings: Any, emulated: Sequence[Emulated]) -> tuple[Emulated, ...]:
    """Those that apply, as far as settings are known."""
    found = []
    for one in emulated:
        with suppress(UnresolvedError):
            found += [one] if one.applies(Resolved(settings)) else []
    return tuple(found)


def problems(settings: Any, rules: Sequence[Rule]) -> list[str]:
    """One line for each rule that refuses a live job, whose unknown settings are let through."""
    return [str(refusal) for refusal in judge(settings, rules).refused]


def given_or_default(kind: type[Settings], options: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fields of a class of settings that ``options`` gives, and the names of those that take their default.

    Absent options and None take the default.
    """
    names = [field.name for field in fields(kind) if field.name != "assumed"]  # type: ignore[arg-type]
    given = {name: options[name] for name in names if options.get(name) is not None}
    return given, tuple(name for name in names if name not in given)


def copies_of_experts(world_size: Any, *sizes: int | Unresolved) -> int | Unresolved:
    """Number of ranks that hold the same experts (EDP).

    Args:
        world_size: ranks of the job; not an int: not known.
        sizes: of the dimensions over which experts are spread.
    """
    product = 1
    for size in sizes:
        if isinstance(size, Unresolved):
            return size
        product *= size
    if not isinstance(world_size, int):
        return Unresolved(str(world_size) if world_size is not None else "ranks of the job")
    if world_size % product:
        return Unresolved(f"{world_size} ranks are no multiple of {product}")
    return world_size // product
