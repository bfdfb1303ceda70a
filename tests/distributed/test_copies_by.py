"""What carries copies changes no bit: training whose copies are refreshed by copy engines (a double of torch's
symmetric memory; gradients come home by it, too) is training in which torch.distributed does it."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import symmetric_memory_double as double
from support import training
from support.loops import Layout, spread
from support.moe_models import batch_of, make_model
from support.ranks import run_ranks
from support.seen import assert_refused, same
from support.shuffle import with_replicas

from eplb_runtime.distributed.transports import symmetric
from eplb_runtime.distributed.transports.symmetric import NodeMemory
from eplb_runtime.hosts.attaching import attach

CARRIED = {"bytes": 0}
"""To or from copies of this rank, not by torch."""


def use_the_doubles() -> None:
    attach.measure = lambda topology, *_: topology  # plans go by it, and no two measurements are the same
    attach.why_not = lambda device: ""
    attach.NodeMemory = partial(NodeMemory, package=double)
    of_peer = NodeMemory.of_peer

    def counted(self: NodeMemory, peer: int, own: torch.Tensor) -> torch.Tensor:
        CARRIED["bytes"] += own.nbytes
        return of_peer(self, peer, own)

    NodeMemory.of_peer = counted


SCRIPTS = ["BBCS HBCS Z HHBS", "BCSZM DBCS EBCSZM", "BZ DH O BCSZM BACS", "2S H2CS BCS"]
"""Of all sorts (`support.loops`): accumulated, clipped, left out, interrupted, evaluated, weights written, moved."""


def train_both_ways(rank: int) -> tuple[bool, int]:
    """Whether bits are those of torch, and how many bytes copy engines have carried."""
    use_the_doubles()
    one, other = (
        spread(rank, Layout(4, slots=2, ranks_per_node=2), SCRIPTS, {"replica_transport": way})
        for way in ("torch", "copy_engine")
    )
    equal = [
        norms == others and same(weights, theirs) for (norms, weights), (others, theirs) in zip(one, other, strict=True)
    ]
    return all(equal), CARRIED["bytes"]


def test_training_is_as_it_is_by_torch_to_the_bit() -> None:
    """On two nodes, with replicas that hang on replicas."""
    equal, carried = zip(*run_ranks(4, train_both_ways), strict=True)
    assert all(equal) and sum(carried) > 0


def lose_a_signal(rank: int, folder: Path) -> None:
    """Leaves what it heard and ends, as a rank with an error does: the other may be in a collective by then."""
    use_the_doubles()
    attach.NodeMemory = lambda node, device, _: NodeMemory(node, device, 2.0, package=double)
    model = make_model("gpt_oss").train()
    optimizer, start = torch.optim.AdamW(model.parameters()), with_replicas(8, 2, {0: 5, 1: 1})
    balancer = training.attach(
        model, optimizer, replica_slots=1, replica_transport="copy_engine", initial_placement=start
    )
    if rank == 1:
        double.LOST.extend((0, channel) for channel in range(64))
    try:
        for step in range(3):
            model(input_ids=(ids := batch_of(rank, step)), labels=ids).loss.backward()
            balancer.runtime.maps.replicas.refresh()
            balancer.runtime.maps.replicas.wait_all()
    except RuntimeError as error:
        (folder / f"{rank}.said").write_text(str(error))
    os._exit(1)


def test_a_signal_that_does_not_come_is_an_error_and_no_wait_for_ever(tmp_path: Path) -> None:
    run_ranks(2, lose_a_signal, tmp_path, expect_exit=(0, 1))
    said = [file.read_text() for file in tmp_path.glob("*.said")]
    assert len(said) == 2 and any("trapped" in of_rank for of_rank in said)


def attach_and_close() -> None:
    model = make_model("gpt_oss")
    training.attach(
        model, torch.optim.AdamW(model.parameters()), replica_slots=1, replica_transport="copy_engine"
    ).close()


def refusals(rank: int) -> None:
    """One obstacle after another; at last there is none."""
    copied = double.SymmetricMemory.get_remote_tensor
    obstacles: list[tuple[str, Any, str, Any]] = [
        ("room for 2", double, "PAD_BYTES", 16),
        ("different sizes", double, "PAD_BYTES", 2048 + 1024 * rank),
        ("different ones", symmetric, "node_of_this_rank", lambda: f"node of {rank}"),
        ("node of its own", os, "environ", {**os.environ, "LOCAL_WORLD_SIZE": "1"}),
        ("did not arrive", double.SymmetricMemory, "get_remote_tensor", lambda *given: copied(*given).clone()),
    ]
    assert_refused({"replica_transport='copy_engine': ": attach_and_close, "not on cpu": attach_and_close})
    use_the_doubles()
    for why, where, name, value in obstacles:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, name, value)
            assert_refused({"replica_transport='copy_engine': ": attach_and_close, why: attach_and_close})
    attach_and_close()


def test_where_a_way_cannot_be_had_every_rank_says_why_in_a_line() -> None:
    run_ranks(2, refusals)
