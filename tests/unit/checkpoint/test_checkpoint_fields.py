"""Fields of a checkpoint that are wrong under right checksums: refused in a line, before anything is changed."""

import copy
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.seen import same
from torch import nn

import eplb_runtime as eplb
from eplb_runtime.checkpoint import CheckpointError, disk
from eplb_runtime.checkpoint.state import JointAccess

Place = tuple[str | int, ...]


def write(folder: Path, numbers: Any) -> None:
    """Put other numbers into a folder, with a right checksum."""
    marker = disk.read_marker(folder) | numbers
    (folder / disk.MARKER).write_text(json.dumps({**marker, "checksum": disk.checksum_of(marker)}))


def places(value: Any, here: Place = ()) -> Iterator[Place]:
    """Where each field is."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*here, key)
        yield from places(inner, (*here, key))


def model_and_optimizer(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": torch.tensor(0.5)}, {"params": model[1].parameters()}], lr=0.25
    )
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {**eplb.logical_state_dict(model, optimizer), "options": copy.deepcopy(options)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint and its numbers."""
    path = tmp_path_factory.mktemp("saved")
    eplb.checkpoint.save(path, *model_and_optimizer(0))
    numbers = {name: disk.read_marker(path)[name] for name in ("layout", "param_groups", "numbers", "balancer")}
    numbers["layout"]["model.0.weight"] = {"names": ["0.weight"], "experts": 0, "sizes": [2], "dim": 0}
    return path, numbers


ODD = st.one_of(
    st.none(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, -1, 2**63 - 1, float("nan"), "", "\n", "../x", "float32", "load", "model.0.weight", "{"]),
    st.lists(st.integers(-2, 5), max_size=3),
    st.dictionaries(st.sampled_from(["tensor", "dtype", "a"]), st.sampled_from([1, "float32", [1, 2]]), max_size=2),
)


@settings(max_examples=60)
@given(data=st.data())
def test_a_field_that_is_wrong_is_refused_in_a_line_and_nothing_is_changed(
    folder: tuple[Path, Any], data: st.DataObject
) -> None:
    path, numbers = folder[0], copy.deepcopy(folder[1])
    where = data.draw(st.sampled_from(sorted(places(numbers), key=str)), "where")
    inside: Any = numbers
    for key in where[:-1]:
        inside = inside[key]
    if data.draw(st.booleans(), "drop"):
        del inside[where[-1]]
    else:
        inside[where[-1]] = data.draw(ODD, "put")
    write(path, numbers)
    model, optimizer = model_and_optimizer(1)
    before = everything(model, optimizer)
    try:
        eplb.checkpoint.load(path, model, optimizer)
    except CheckpointError as error:
        assert "\n" not in str(error)
        assert same(before, everything(model, optimizer))


def test_what_was_registered_and_is_not_now_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = model_and_optimizer(1)
    whole = {**eplb.logical_state_dict(model), "extra.0.weight/ema": torch.ones(2, 3)}
    eplb.load_logical_state_dict(model, None, whole)
    eplb.load_logical_state_dict(model, None, {**whole, "extra.0.weight/fast": torch.ones(2, 3)})
    alone, two = caplog.messages
    assert alone.startswith("0.weight/ema in the checkpoint is not loaded: call balancer.register")
    assert two.startswith("0.weight/ema and 1 more in the checkpoint is not loaded")


def trained(seed: int, steps: int = 2) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(model[0].parameters(), lr=0.1 + seed),
        torch.optim.SGD(model[1].parameters(), lr=0.2, momentum=0.9),
    ]
    for _ in range(steps):
        model(torch.randn(4, 3)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizers


@pytest.mark.parametrize("steps", [0, 2], ids=["optimizers without state", "optimizers with state"])
def test_each_takes_its_own_back(steps: int) -> None:
    model, optimizers = trained(0)
    state = eplb.logical_state_dict(model, optimizers)
    fresh, fresh_optimizers = trained(1, steps)
    assert not same(state, eplb.logical_state_dict(fresh, fresh_optimizers))
    eplb.load_logical_state_dict(fresh, fresh_optimizers, state)
    assert same(state, eplb.logical_state_dict(fresh, fresh_optimizers))


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_a_folder_keeps_all_of_them(format: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "eplb_runtime")
    model, optimizers = trained(0)
    eplb.checkpoint.save(tmp_path / "at", model, optimizers, format=format)  # type: ignore[arg-type]
    assert f"checkpoint saved to {tmp_path / 'at'}" in caplog.messages
    fresh, fresh_optimizers = trained(1)
    eplb.checkpoint.load(tmp_path / "at", fresh, fresh_optimizers)
    assert f"checkpoint loaded from {tmp_path / 'at'}" in caplog.messages
    assert same(eplb.logical_state_dict(model, optimizers), eplb.logical_state_dict(fresh, fresh_optimizers))
    assert fresh_optimizers[0].param_groups[0]["lr"] == 0.1
    eplb.checkpoint.load(tmp_path / "at", fresh, fresh_optimizers[0])
    assert any(line.startswith("give the optimizer of 1.bias and 1 more, too") for line in caplog.messages)


def test_what_fits_no_optimizer_is_refused_in_one_line() -> None:
    model, optimizers = trained(0)
    state = {**eplb.logical_state_dict(model, optimizers), "optimizer.0.weight.exp_avg": torch.ones(3, 2)}
    with pytest.raises(CheckpointError, match=r"exp_avg has shape \(3, 2\) in the state, \(3, 3\) in the model"):
        eplb.load_logical_state_dict(model, optimizers, state)


def test_a_rank_that_fails_says_its_own_error_also_where_others_do_not_come() -> None:
    alone = JointAccess(None, torch.device("cpu"))
    alone.gather = lambda mine: [][0]  # type: ignore[method-assign]
    with pytest.raises(FileNotFoundError):
        alone.together("it was not saved", Path("none").stat)
