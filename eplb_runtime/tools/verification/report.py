"""The answer of a verification, as a value: a paragraph for people, a dict for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from .records import Closeness, Difference

Verdict = Literal["right", "wrong", "unknown"]


@dataclass(frozen=True)
class Report:
    """What the runs of a job have shown; equal on every rank.

    Args:
        verdict: ``"right"``, ``"wrong"``, or ``"unknown"`` where something could not be compared.
        reason: why it is not right; empty: it is.
        steps: that were compared. ranks, tensors: of the job.
        repeats: whether two runs of the job are the same; None: not tried.
        moved: whether a run with homes moved after each step gave the same; None: there is no such run.
        difference: the first one between the two.
        moved_rounding: where bits cannot be the same (replicas, or what ``notes`` say): how close they are.
        single: how close a run is with all experts on each rank. single_reason: why there is none.
        unregistered: ``{"holder", "shape"}`` of tensors that may be experts and that nobody has registered.
        said: lines of the guard in these runs. notes: what ``attach`` says of bits.
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
        """Whether the verdict is ``"right"``."""
        return self.verdict == "right"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of ``eplb-runtime verify --json``."""
        found, single = self.difference, self.single
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "steps": self.steps,
            "ranks": self.ranks,
            "tensors": self.tensors,
            "repeats": self.repeats,
            "moved": {
                "equal": self.moved,
                "step": found.step if found else None,
                "tensor": found.tensor if found else None,
                "expert": found.expert if found else None,
                "rank": found.rank if found else None,
                "hint": found.hint if found else "",
                "rounding": asdict(self.moved_rounding) if self.moved_rounding else None,
            },
            "single": {
                "equal": single.equal if single else None,
                "worst": single.worst if single else None,
                "tensor": single.tensor if single else None,
                "step": single.step if single else None,
                "reason": self.single_reason,
            },
            "unregistered": list(self.unregistered),
            "said": list(self.said),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        if self.verdict != "right":
            lines = [f"{self.verdict}: {self.reason}"]
        else:
            lines = [f"right: {self.steps} steps, {self.ranks} ranks: {'; '.join(self._shown())}."]
        lines += [f"  not registered: {one['holder']}, shape {one['shape']}" for one in self.unregistered]
        lines += [f"  said in the job: {line}" for line in self.said if line not in self.reason]
        lines += [f"  bits: {line}" for line in self.notes]
        return "\n".join(lines)

    def _shown(self) -> list[str]:
        """What a right job has shown."""
        shown = []
        if self.moved:
            shown.append(f"moved homes gave the same bits in {self.tensors} tensors")
        if (rounding := self.moved_rounding) is not None:
            what = "replicas gave" if self.moved else "moved homes gave"
            shown.append(f"{what} the same to rounding (worst {rounding.worst:.1g} of {rounding.tensor})")
        if self.single is not None:
            worst = f"worst {self.single.worst:.1g} of {self.single.tensor}"
            shown.append(f"all experts on each rank give the same to rounding ({worst}, {self.single.steps} steps)")
        else:
            shown.append(f"not compared with all experts on each rank: {self.single_reason}")
        return [*shown, "the job repeats itself"]


def text_of(difference: Difference) -> str:
    """A difference in words."""
    when = "before the first step" if difference.step == 0 else f"after step {difference.step}"
    of = "" if difference.expert is None else f" of expert {difference.expert}"
    hint = f"; {difference.hint}" if difference.hint else ""
    return f"{when} {difference.tensor}{of} differs on rank {difference.rank}{hint}"
