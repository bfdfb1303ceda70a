"""Whether a recipe's job could be balanced: the answer of ``eplb-runtime doctor --recipe``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...hosts.megatron import settings as megatron
from ...hosts.settings import Exact, HostChecks, Refusal, StandIn, Unknown, UnknownError, run_checks
from ...hosts.torchtitan import settings as torchtitan
from .reading import Recipe, RecipeError

HOSTS = {"megatron": megatron.HOST, "torchtitan": torchtitan.HOST}


@dataclass(frozen=True)
class RecipeAnswer:
    """Whether a recipe's job could be balanced.

    Args:
        host: how it was judged; None: no host of ours trains it.
        refused, without_replicas: what is refused, and what is for replica slots besides.
        undecided: settings that a check needs and that are not known.
        exact: how equal it is to the same training without moves; None: not known.
        assumed: settings that have a default, which the recipe does not give.
        unknown: settings whose value the recipe does not show, and where it comes from.
        ep, edp: ranks that share a layer's experts, and ranks that hold the same; None: not known.
        stand_ins: what of a job that attaches was tested with a stand-in.
    """

    recipe: Recipe
    host: HostChecks | None
    refused: Sequence[Refusal]
    without_replicas: Sequence[Refusal] = ()
    undecided: Sequence[str] = ()
    exact: Exact | None = None
    assumed: Mapping[str, Any] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    ep: int | None = None
    edp: int | None = None
    stand_ins: Sequence[StandIn] = ()

    @property
    def attaches(self) -> bool | None:
        """None: a check needs a setting that is not known."""
        return False if self.refused else None if self.undecided else True

    @property
    def replicas(self) -> bool | None:
        """Whether there can be replica slots; None: not known."""
        return False if self.without_replicas else self.attaches

    def to_dict(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        version = self.host.version if self.host else ""
        return {
            "attaches": self.attaches,
            "homes": self.attaches,
            "replicas": self.replicas,
            "exact": self.exact,
            "refused": [asdict(one) for one in self.refused],
            "assumed": [{"setting": name, "value": value, "of": version} for name, value in self.assumed.items()],
            "unknown": [{"setting": name, "value": text} for name, text in self.unknown.items()],
            "ep": self.ep,
            "edp": self.edp,
            "stand_in": [{"setting": name, "tested": tested} for name, tested in self.stand_ins],
        }


def answer(recipe: Recipe) -> RecipeAnswer:
    """Judge a recipe by the checks of its framework.

    Raises:
        RecipeError: a size is no whole number of at least 1, or EP does not divide the experts.
    """
    host = HOSTS.get(recipe.host)
    if host is None:
        why = "its trainer spreads experts itself, and no host of ours knows it"
        instead = "attach by hand, by attach(..., layers=[eplb.MoE(...)]), where each rank still has all experts"
        refusal = Refusal("host", recipe.source or recipe.host, why, instead)
        return RecipeAnswer(recipe, None, (refusal,), ep=recipe.options.get("ep"), edp=recipe.options.get("edp"))
    given = {name: value for name, value in recipe.options.items() if value is not None}
    _check_sizes(recipe, {**host.settings_of({}).values, "world_size": 1}, given)
    settings = host.settings_of({**recipe.defaults, **given})
    experts, ep, edp = map(settings.values.get, (host.experts, host.ranks, "expert_data_parallel_size"))
    if isinstance(experts, int) and isinstance(ep, int) and experts % ep:
        names = [recipe.written.get(name, name) for name in (host.experts, host.ranks)]
        raise RecipeError(f"{recipe.name}: {names[0]} {experts} is no multiple of {names[1]} {ep}")
    refused, undecided = run_checks(settings, host.checks)
    without_replicas, undecided_replicas = run_checks(settings, (host.without_replicas,))
    exact: Exact | None = None
    with suppress(UnknownError):
        exact = host.exact(settings)
    unknown = {name: str(value) for name, value in settings.values.items() if isinstance(value, Unknown)}
    assumed = {name: settings.values[name] for name in settings.values if name not in given and name not in unknown}
    assumed.pop("expert_data_parallel_size", None)
    return RecipeAnswer(
        recipe,
        host,
        [replace(one, setting=recipe.written.get(one.setting, one.setting)) for one in refused],
        without_replicas,
        [*undecided, *undecided_replicas],
        exact,
        assumed,
        unknown,
        ep if isinstance(ep, int) else None,
        edp if isinstance(edp, int) else None,
        () if refused else run_checks(settings, (host.stand_ins,))[0],
    )


def _check_sizes(recipe: Recipe, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """A setting whose default is a whole number is one of at least 1."""
    for name in (name for name, default in defaults.items() if type(default) is int and name in given):
        value = given[name]
        if not isinstance(value, Unknown) and not (isinstance(value, int) and value >= 1):
            written = recipe.written.get(name, name)
            raise RecipeError(f"{recipe.name}: {written} is {value!r}, and must be a whole number of at least 1")


def totals(answers: Sequence[RecipeAnswer]) -> list[dict[str, Any]]:
    """How many recipes attach, by project; the last row is the sum."""
    sources = dict.fromkeys(one.recipe.source for one in answers)
    groups = [(source, [one for one in answers if one.recipe.source == source]) for source in sources]
    return [
        {
            "source": source,
            "recipes": len(of_source),
            "attach": sum(one.attaches is True for one in of_source),
            "refused": sum(one.attaches is False for one in of_source),
            "unknown": sum(one.attaches is None for one in of_source),
        }
        for source, of_source in [*groups, ("all", list(answers))]
    ]


def reasons(answers: Sequence[RecipeAnswer]) -> list[dict[str, Any]]:
    """How many recipes each setting refuses, and for how many it is the only one."""
    every = Counter(refusal.setting for one in answers for refusal in one.refused)
    only = Counter(one.refused[0].setting for one in answers if len(one.refused) == 1)
    return [{"setting": name, "recipes": count, "alone": only[name]} for name, count in every.most_common()]
