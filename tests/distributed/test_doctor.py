"""What the doctor finds usable, on one rank and on two."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import PRELOAD, run_ranks

from eplb_runtime.cli import main
from eplb_runtime.distributed.transports import TRANSPORTS
from eplb_runtime.tools.doctor import links as doctor_links
from eplb_runtime.tools.doctor.links import try_transports


def test_it_looks_at_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["versions"]["torch"] == torch.__version__
    usable = {backend["name"]: backend["usable"] for backend in said["backends"]}
    assert usable["gloo"] == dist.is_gloo_available()
    assert usable["nccl"] == torch.cuda.is_available()
    assert all(backend["why"] for backend in said["backends"])


def links(rank: int) -> list[Any]:
    def one_rank_cannot(*arguments: Any) -> Any:
        if rank == 1:
            raise ImportError("pip install wire")
        return TRANSPORTS["torch"](*arguments)

    names = {"torch": TRANSPORTS["torch"], "half": one_rank_cannot}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor_links, "TRANSPORTS", names)
        return [*try_transports(torch.device("cpu"))]


def test_links_are_measured_on_all_ranks_and_a_transport_is_usable_on_all_or_none() -> None:
    one, other = run_ranks(2, links)
    assert one == other
    torch_, half = one
    assert torch_.usable and torch_.intra_node_gb_per_second > 0 and torch_.inter_node_gb_per_second is None
    assert (half.usable, half.why) == (False, "rank 1: pip install wire")


# -- What the other tests' ranks are forked from, and that ranks which hang do not keep what others saw


def missing(rank: int) -> list[str]:
    return [name for name in PRELOAD if name not in sys.modules]


def test_ranks_are_forked_from_a_process_that_has_loaded_everything() -> None:
    """What it does not find it passes over in silence, and every test takes seconds longer."""
    assert run_ranks(1, missing) == [[]]


def fail_or_wait_for_ever(rank: int, failing: int) -> None:
    if rank == failing:
        raise ValueError("the reason")
    threading.Event().wait()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_is_not_waited_for_by_the_others_without_end(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "FINISH_AFTER_FAILURE_SECONDS", 0.5)
    with pytest.raises(AssertionError, match="the reason") as error:
        run_ranks(2, fail_or_wait_for_ever, failing)
    assert f"rank {1 - failing}:\ndid not finish" in str(error.value)
