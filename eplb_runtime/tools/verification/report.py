"""The answer of a verification, as a value: a paragraph for people, a dict for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from .records import Closeness, Difference

Verdict = Literal["right", "wrong", "unknown"]


@dataclass(frozen=True)
class Report:
    """What the runs of a job have shown.

    Args:
        reason: why the verdict is not ``"right"``.
        moved: whether a run with homes moved after each step gave the same bits; ``difference``: the first that is not.
        moved_rounding: where bits cannot be the same (replicas, or what ``notes`` say): how close they are.
        single: how close a run is with all experts on each rank; ``single_reason``: why there is none.
        unregistered: ``{"holder", "shape"}`` of tensors that may be experts and are not registered.
        said: lines of the guard. notes: what ``attach`` says of bits.
    """

    verdict: Verdict
    reason: str = ""
    steps: int = 0
    ranks: int = 0
    tensors: int = 0
    repeats: bool | None = None
    moved: bool | None = None
    difference: Difference | None = None
    moved_rounding: Closeness | None = None
    single: Closeness | None = None
    single_reason: str = ""
    unregistered: tuple[dict[str, Any], ...] = ()
    said: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Return whether the verdict is ``"right"``."""
        return self.verdict == "right"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of ``eplb-runtime verify --json``; numbers that JSON does not have are null."""
        plain = asdict(self)
        moved, rounding, single = (plain.pop(name) for name in ("difference", "moved_rounding", "single"))
        moved = moved or dict.fromkeys(one.name for one in fields(Difference))
        single = single or dict.fromkeys(one.name for one in fields(Closeness))
        plain["moved"] = {"equal": self.moved, **moved, "rounding": rounding}
        plain["single"] = {**single, "reason": plain.pop("single_reason")}
        found: dict[str, Any] = json.loads(json.dumps(plain), parse_constant=lambda _: None)
        return found

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self.reason}"]
        if self.passed:
            lines = [f"right: {self.steps} steps, {self.ranks} ranks: {'; '.join(self._shown())}."]
        lines += dict.fromkeys(f"  not registered: {o['holder']}, shape {o['shape']}" for o in self.unregistered)
        said = {one.partition(":")[0]: f"  said in the job: {one}" for one in self.said if one not in self.reason}
        return "\n".join([*lines, *said.values(), *(f"  bits: {line}" for line in self.notes)])

    def _shown(self) -> list[str]:
        """What a right job has shown."""
        shown = [f"moved homes gave the same bits in {self.tensors} tensors"] if self.moved else []
        close = ("replicas give" if self.moved else "moved homes give", self.moved_rounding)
        for what, one in (close, ("all experts on each rank give", self.single)):
            if one is not None:
                shown.append(f"{what} the same to rounding (worst {one.worst:.1g} of {one.tensor}, {one.steps} steps)")
        if self.single is None:
            shown.append(f"not compared with all experts on each rank: {self.single_reason}")
        return [*shown, "the job repeats itself"]
