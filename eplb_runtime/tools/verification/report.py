"""What a verification found, as a value: for people as text, for programs as a dict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["identical", "different", "not repeatable", "nothing proved"]


@dataclass(frozen=True)
class Difference:
    """The first thing that was not the same bits.

    Args:
        step: after which it was seen first; 0: before training began.
        tensor: its name, as in ``logical_state_dict``.
        layer, expert: MoE layer and logical expert, where the tensor has experts.
        rank: that held it in the run with migrations.
        largest: the largest difference of one of its values at the end of the run.
        relative: the same as a share of the largest value there.
    """

    step: int
    tensor: str
    layer: int | None
    expert: int | None
    rank: int
    largest: float
    relative: float

    def __str__(self) -> str:
        where = self.tensor
        if self.expert is not None:
            where += f", MoE layer {self.layer}, expert {self.expert}"
        when = "before the first step" if self.step == 0 else f"after step {self.step}"
        return (
            f"first difference {when}: {where} (rank {self.rank}); at the end of the run it is off by "
            f"{self.largest:.3g}, {self.relative:.3g} of its largest value"
        )


@dataclass(frozen=True)
class ReplicaCheck:
    """Every step of a run with copies done twice from the same weights: tokens split over copies, and all at home.

    Args:
        steps: that had copies and were compared.
        copies: replica slots that were filled at the end, over all layers and ranks.
        summands: the most terms of one sum: tokens of the busiest expert, plus the width of the widest matrix product.
        parts: the most copies of an expert, home included, whose gradients were added.
        dtype, accumulation_dtype: of the weights, and what sums are made in.
        bound: largest difference allowed, relative to the largest gradient of a tensor.
        gradient_difference: the largest found, relative likewise; ``tensor`` and ``step`` say where.
        loss_difference: the largest of a loss, relative to it.
        passed: copies were used, and both differences are within the bound.
    """

    steps: int
    copies: int
    summands: int
    parts: int
    dtype: str
    accumulation_dtype: str
    bound: float
    gradient_difference: float
    tensor: str
    step: int
    loss_difference: float
    passed: bool

    def __str__(self) -> str:
        if not self.steps:
            return "with copies: nothing proved - no step was split over copies"
        verdict = "within the bound" if self.passed else "NOT WITHIN THE BOUND"
        lines = [
            f"with {self.copies} copies: {verdict} in {self.steps} steps, split over copies and again all at home: "
            f"gradients differ by {self.gradient_difference:.3g} ({self.tensor}, step {self.step}), losses by "
            f"{self.loss_difference:.3g}; allowed {self.bound:.3g}",
            "  why they differ at all: copies part an expert's tokens, so the same terms are added in another order; "
            f"allowed is 2 x {self.summands} summands x eps of {self.accumulation_dtype} + 2 x {self.parts} rounded "
            f"parts x eps of {self.dtype}, relative to a tensor's largest gradient",
        ]
        if self.bound > 0.01:
            lines.append(f"  that is wide: {self.dtype} is coarse; a run in float32 or float64 says more")
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """What ``verify`` found; equal on every rank.

    Args:
        verdict: ``"identical"``, ``"different"``, ``"not repeatable"`` (the run without migrations does not even equal
            itself) or ``"nothing proved"`` (too few migrations).
        steps, ranks, interval: of each run; ranks of the job; steps between migrations.
        migrations: that were committed; each moved experts.
        experts_moved, bytes_moved: in all of them; bytes that went from rank to rank, over all ranks.
        dropped: why migrations were dropped, if any.
        tensors: compared after each step, with all experts of a tensor counted as one.
        tensors_different: of these at the end of the run.
        first_difference: None when there is none.
        first_loss_step: the step (from 1) whose loss differs first on any rank, or None.
        replicas: None when no replica slots were asked for.
        notes: what this run could not show.
    """

    verdict: Verdict
    steps: int
    ranks: int
    interval: int
    migrations: int
    experts_moved: int
    bytes_moved: int
    dropped: tuple[str, ...]
    tensors: int
    tensors_different: int
    first_difference: Difference | None
    first_loss_step: int | None
    replicas: ReplicaCheck | None
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Identical, and with replica slots within the bound."""
        return self.verdict == "identical" and (self.replicas is None or self.replicas.passed)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; ``passed`` first."""
        return {"passed": self.passed, **asdict(self)}

    def __str__(self) -> str:
        moved = (
            f"{self.migrations} migrations ({self.experts_moved} experts moved, {self.bytes_moved / 2**20:.1f} MiB "
            f"between {self.ranks} ranks)"
        )
        compared = f"losses of every rank and {self.tensors} tensors, compared after each of {self.steps} steps"
        said = {
            "identical": f"bit-identical: training with {moved} gave the very bits of training without\n  {compared}",
            "different": f"DIFFERENT: training with {moved} is not training without\n  {compared}",
            "not repeatable": (
                "NOT REPEATABLE: two runs without any migration differ already, so nothing can be said about "
                "migrations\n  make_model must give the same weights and make_batch(step) the same batch each time; on "
                "a GPU call torch.use_deterministic_algorithms(True)"
            ),
            "nothing proved": f"NOTHING PROVED: no difference, but only {moved}",
        }
        lines = [said[self.verdict]]
        if self.first_difference is not None:
            lines.append(f"  {self.first_difference}")
            lines.append(f"  {self.tensors_different} of {self.tensors} tensors differ at the end")
            if self.first_loss_step is None:
                lines.append("  no loss differs")
            else:
                lines.append(f"  losses differ from step {self.first_loss_step} on")
        lines += [f"  a migration was dropped: {cause}" for cause in self.dropped]
        if self.replicas is not None:
            lines.append(str(self.replicas))
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)
