"""Which forward a recompute repeats: known when it is alone, and then the same on every rank."""

from __future__ import annotations

import pytest
import torch

from eplb_runtime.moe.dispatch.recompute import AsyncMismatchFlag, RecomputeCache, RecomputeError

IDS = torch.tensor([[0, 3], [2, 1]])


def forward(in_flight: RecomputeCache, metadata: str, *, step: int = 0, ids: torch.Tensor = IDS, training: bool = True):
    in_flight.begin(step)
    out = torch.ones(2, 4, requires_grad=torch.is_grad_enabled()) * 1.0
    return in_flight.track_backward(out, ids, metadata, training)


def test_a_forward_alone_in_flight_is_the_one_until_its_backward() -> None:
    in_flight = RecomputeCache()
    out = forward(in_flight, "first")
    assert in_flight.repeated(IDS) == "first"
    assert in_flight.repeated(IDS) == "first", "nested checkpoints repeat it more than once"
    out.sum().backward()
    assert in_flight.repeated(IDS) is None
    forward(in_flight, "second")
    assert in_flight.repeated(IDS) == "second"


def test_of_several_none_is_the_one_until_all_are_over() -> None:
    in_flight = RecomputeCache()
    outs = [forward(in_flight, name) for name in ("first", "second")]
    for out in outs:
        assert in_flight.repeated(IDS) is None
        out.sum().backward()
    forward(in_flight, "third")
    assert in_flight.repeated(IDS) == "third"


def test_a_forward_without_a_backward_is_forgotten_with_its_step() -> None:
    in_flight = RecomputeCache()
    lost = forward(in_flight, "lost")
    forward(in_flight, "second")
    assert in_flight.repeated(IDS) is None
    forward(in_flight, "next step", step=1)
    assert in_flight.repeated(IDS) == "next step"
    lost.sum().backward()
    assert in_flight.repeated(IDS) == "next step"


def test_a_second_backward_of_one_forward_counts_once() -> None:
    in_flight = RecomputeCache()
    out = forward(in_flight, "first")
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    forward(in_flight, "second")
    forward(in_flight, "third")
    assert in_flight.repeated(IDS) is None


def test_a_forward_without_gradients_in_training_may_be_one_of_reentrant_checkpointing() -> None:
    in_flight = RecomputeCache()
    with torch.no_grad():
        forward(in_flight, "unseen")
    forward(in_flight, "seen")
    assert in_flight.repeated(IDS) is None


def test_an_evaluation_is_not_waited_for() -> None:
    in_flight = RecomputeCache()
    with torch.no_grad():
        forward(in_flight, "evaluation", training=False)
    forward(in_flight, "training")
    assert in_flight.repeated(IDS) == "training"


@pytest.mark.parametrize("ids", [IDS.flip(0), IDS[:1]], ids=["other choices", "other tokens"])
def test_a_recompute_with_other_choices_is_an_error(ids: torch.Tensor) -> None:
    in_flight = RecomputeCache()
    forward(in_flight, "first")
    with pytest.raises(RecomputeError, match="other experts"):
        in_flight.repeated(ids)


def test_what_the_host_is_told_late_is_not_lost() -> None:
    """A copy to the host that is not over when the next forward looks, and then is."""
    in_flight = RecomputeCache()
    forward(in_flight, "first")
    in_flight._differed = told = AsyncMismatchFlag(IDS.device)
    told.on_host = torch.zeros((), dtype=torch.bool)  # of another memory than what the device has found
    told._found.fill_(True)
    forward(in_flight, "second", step=1)
    told.note(torch.tensor(False))
    with pytest.raises(RecomputeError, match="other experts"):
        forward(in_flight, "third", step=2)
    assert forward(in_flight, "fourth", step=3) is not None, "once it was said"


def test_the_choices_are_compared_as_they_were() -> None:
    in_flight, ids = RecomputeCache(), IDS.clone()
    forward(in_flight, "first", ids=ids)
    ids.zero_()
    assert in_flight.repeated(IDS) == "first"


def test_beside_another_batch_none_is_the_one_whichever_comes_first() -> None:
    """A forward of the layer beside the backward pass that repeats one may be earlier on one rank, later on another."""
    is_overlapping = False
    in_flight = RecomputeCache(lambda: is_overlapping)
    forward(in_flight, "alone")
    is_overlapping = True
    before = in_flight.repeated(IDS)
    forward(in_flight, "beside")
    assert before is None and in_flight.repeated(IDS) is None
