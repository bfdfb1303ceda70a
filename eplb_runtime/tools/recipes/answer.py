"""What a recipe's settings come to: the answer of ``eplb-runtime doctor --recipe``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ...hosts.megatron import settings as megatron
from ...hosts.settings import (
    Emulated,
    Exact,
    JobVerdict,
    Refusal,
    Resolved,
    Unresolved,
    UnresolvedError,
    emulated_settings,
    judge,
)
from ...hosts.torchtitan import settings as torchtitan
from .base import Recipe, RecipeError

HOSTS = {"megatron": megatron.HOST, "torchtitan": torchtitan.HOST}
EXPERT_RANKS = ("expert_model_parallel_size", "expert_parallel_degree")
"""Names of EP in the frameworks."""
EXPERTS = ("num_moe_experts", "num_experts")
"""Their names for the experts of a layer."""


@dataclass(frozen=True)
class RecipeAnswer:
    """Whether a recipe's job could be balanced.

    Args:
        version: of the framework that the rules are for; empty: it has no host.
        exact: how equal it is to the same training without moves; None: not known.
        assumed: settings that have a default, which the recipe does not give.
        unknown: settings whose value the recipe does not show, and where it comes from.
        checked_at_attach: what only the live job shows.
        ep, edp: ranks that share a layer's experts, and ranks that hold the same; None: not known.
        emulated: what of a job that attaches was tested with a stand-in.
    """

    recipe: Recipe
    version: str
    judgement: JobVerdict
    exact: Exact | None
    assumed: Mapping[str, Any]
    unknown: Mapping[str, str]
    checked_at_attach: Sequence[str]
    ep: int | None
    edp: int | None
    emulated: Sequence[Emulated] = ()

    @property
    def attaches(self) -> bool | None:
        """None: a rule depends on a setting that is not known."""
        return self.judgement.homes

    def to_dict(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return {
            "attaches": self.attaches,
            "homes": self.judgement.homes,
            "replicas": self.judgement.replicas,
            "exact": self.exact,
            "refused": [
                {"setting": one.setting, "value": one.value, "why": one.why, "instead": one.instead}
                for one in self.judgement.refused
            ],
            "assumed": [{"setting": name, "value": value, "of": self.version} for name, value in self.assumed.items()],
            "unknown": [{"setting": name, "value": text} for name, text in self.unknown.items()],
            "ep": self.ep,
            "edp": self.edp,
            "stand_in": [{"setting": one.setting, "tested": one.tested} for one in self.emulated],
        }


def answer(recipe: Recipe) -> RecipeAnswer:
    """Judge a recipe by the rules of its framework.

    Raises:
        RecipeError: a size is no whole number of at least 1, or EP does not divide the experts.
    """
    host = HOSTS.get(recipe.host)
    if host is None:
        return _without_host(recipe)
    given = {name: value for name, value in recipe.options.items() if value is not None}
    _check_sizes(recipe, host.settings_of({}), given)
    settings = host.settings_of({**recipe.defaults, **given})
    values = {field.name: getattr(settings, field.name) for field in fields(settings) if field.name != "assumed"}
    judgement = judge(settings, host.rules)
    try:
        exact: Exact | None = host.exact(Resolved(settings))
    except UnresolvedError:
        exact = None
    ep = next(values[name] for name in EXPERT_RANKS if name in values)
    _check_divides(recipe, values, ep)
    of_project = [name for name in recipe.defaults if name not in given]
    assumed = [name for name in values if name in settings.assumed or name in of_project]
    return RecipeAnswer(
        recipe,
        host.version,
        replace(judgement, refused=tuple(_as_written(one, recipe) for one in judgement.refused)),
        exact,
        {name: values[name] for name in assumed if not isinstance(values[name], Unresolved)},
        {name: str(value) for name, value in values.items() if isinstance(value, Unresolved)},
        host.checked_at_attach,
        _known(ep),
        _known(values["expert_data_parallel_size"]),
        () if judgement.refused else emulated_settings(settings, host.emulated),
    )


def _check_sizes(recipe: Recipe, defaults: Any, given: Mapping[str, Any]) -> None:
    """A size is a whole number of at least 1; 0 is one, too, where None is."""
    kinds = {field.name: str(field.type) for field in fields(defaults)}
    sizes = {name: kind for name, kind in kinds.items() if kind.startswith("int ")}
    for name, kind in {**sizes, "world_size": "int"}.items():
        value, least = given.get(name, 1), 0 if "None" in kind else 1
        if not isinstance(value, Unresolved) and not (isinstance(value, int) and value >= least):
            written = recipe.written.get(name, name)
            raise RecipeError(f"{recipe.name}: {written} is {value!r}, and must be a whole number of at least {least}")


def _check_divides(recipe: Recipe, values: Mapping[str, Any], ep: Any) -> None:
    """Each rank of a layer's EP group has equally many experts."""
    of_experts, of_ranks = (next(name for name in names if name in values) for names in (EXPERTS, EXPERT_RANKS))
    experts = _known(values[of_experts])
    if experts and _known(ep) and experts % ep:
        written = [recipe.written.get(name, name) for name in (of_experts, of_ranks)]
        raise RecipeError(f"{recipe.name}: {written[0]} {experts} is no multiple of {written[1]} {ep}")


def _as_written(refusal: Refusal, recipe: Recipe) -> Refusal:
    """With the name that the recipe has for the setting."""
    return replace(refusal, setting=recipe.written.get(refusal.setting, refusal.setting))


def _without_host(recipe: Recipe) -> RecipeAnswer:
    refusal = Refusal(
        "host",
        f"{recipe.source or recipe.host}",
        "its trainer spreads experts itself, and no host of ours knows it",
        "attach by hand, by attach(..., layers=[eplb.MoE(...)]), where each rank still has all experts",
    )
    ep, edp = recipe.options.get("expert_parallel_degree"), recipe.options.get("expert_data_parallel_size")
    return RecipeAnswer(recipe, "", JobVerdict((refusal,), (), ()), None, {}, {}, (), ep, edp)


def _known(value: Any) -> int | None:
    return None if isinstance(value, Unresolved) else value


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
    every = Counter(refusal.setting for one in answers for refusal in one.judgement.refused)
    only = Counter(one.judgement.refused[0].setting for one in answers if len(one.judgement.refused) == 1)
    return [{"setting": name, "recipes": count, "alone": only[name]} for name, count in every.most_common()]
