"""Whatever stands in a file, reading it ends with its content or with this room's own error in one line."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eplb_runtime.placement import Placement, PlacementError
from eplb_runtime.tools.formats.convert import convert, read_placement, write_placement
from eplb_runtime.tools.formats.loads import read_load, write_load
from eplb_runtime.tools.formats.reading import FormatError

PLACEMENT = Placement.initial(2, 4, 2, replica_slots=1)
LOAD = np.arange(1.0, 25).reshape(3, 2, 4)
TRACED = {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 1, "top_indices": [[0, 1], [1, 2]]}
SEEDS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "load.npz": (".npz", lambda path: write_load(path, LOAD)),
    "load.safetensors": (".safetensors", lambda path: write_load(path, LOAD)),
    "load.json": (".json", lambda path: write_load(path, LOAD)),
    "placement.json": (".json", PLACEMENT.save),
    "placement.safetensors": (".safetensors", PLACEMENT.save),
    "sglang.json": (".json", lambda path: write_placement(path, PLACEMENT, "sglang")),
    "sglang.pt": (".pt", lambda path: torch.save({"physical_to_logical_map": torch.tensor([[0, 1]])}, path)),
    "sglang load.pt": (".pt", lambda path: torch.save({"logical_count": torch.from_numpy(LOAD)}, path)),
    "vllm.json": (".json", lambda path: write_placement(path, PLACEMENT, "vllm")),
    "router trace.jsonl": (".jsonl", lambda path: path.write_text(f"{json.dumps(TRACED)}\n{json.dumps(TRACED)}\n")),
}
WHOLE: dict[str, bytes] = {}
ENDINGS = [".npz", ".safetensors", ".json", ".pt", ".jsonl"]
calm = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


def whole(seed: str) -> bytes:
    if seed not in WHOLE:
        with TemporaryDirectory() as folder:
            path = Path(folder) / f"seed{SEEDS[seed][0]}"
            SEEDS[seed][1](path)
            WHOLE[seed] = path.read_bytes()
    return WHOLE[seed]


def read_every_way(ending: str, content: bytes) -> int:
    """How many ways of reading were refused, each in one line that names the file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"in{ending}"
        path.write_bytes(content)
        ways: list[tuple[Callable[[], object], tuple[type[Exception], ...]]] = [
            (lambda: read_load(path), (FormatError,)),
            (lambda: read_placement(path, 2), (FormatError, PlacementError)),
            (
                lambda: convert(path, path.with_name("out.json"), num_ranks=2, dense_layers=0),
                (FormatError, PlacementError),
            ),
            (lambda: Placement.load(path), (PlacementError,)),
        ]
        refused = 0
        for way, errors in ways:
            try:
                way()
            except errors as error:
                said = str(error)
                assert said.startswith(f"{path}: ") and "\n" not in said and len(said) < 1000, said
                refused += 1
    return refused


@pytest.mark.parametrize("seed", SEEDS)
def test_the_seeds_are_read_one_way_or_the_other(seed: str) -> None:
    assert read_every_way(SEEDS[seed][0], whole(seed)) < 4


@pytest.mark.parametrize("seed", SEEDS)
@given(data=st.data())
@calm
def test_a_file_that_breaks_off(seed: str, data: st.DataObject) -> None:
    content = whole(seed)
    read_every_way(SEEDS[seed][0], content[: data.draw(st.integers(0, len(content) - 1))])


@pytest.mark.parametrize("seed", SEEDS)
@given(data=st.data())
@calm
def test_a_file_with_wrong_bytes(seed: str, data: st.DataObject) -> None:
    content = bytearray(whole(seed))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content) - 1))
        content[start : start + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    read_every_way(SEEDS[seed][0], bytes(content))


@pytest.mark.parametrize("ending", ENDINGS)
@given(
    content=st.binary(max_size=200),
    start=st.sampled_from([b"", b"PK\x03\x04", b"\x80\x02", b"\x93NUMPY\x01\x00", b"{"]),
)
@calm
def test_random_bytes(ending: str, content: bytes, start: bytes) -> None:
    assert read_every_way(ending, start + content) == 4


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("opened", ["[", '{"load":'])
def test_deep_nesting(ending: str, opened: str) -> None:
    for depth in (5, 70, 2_000, 200_000):
        closing = {"[": "]", "{": "}"}.get(opened[0], "")
        assert read_every_way(ending, (opened * depth + "1" + closing * depth).encode()) == 4


# -- what is well-formed and still wrong -----------------------------------------------------------------------------


SAFETENSORS_HEADERS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 2**64)
    | st.sampled_from(["I64", "F32", "BF16", "x", "eplb-runtime-placement"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["load", "physical_to_logical", "home", "dtype", "shape", "data_offsets", "__metadata__", "format"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(header=SAFETENSORS_HEADERS, rest=st.binary(max_size=64))
@calm
def test_safetensors_headers_of_every_kind(header: object, rest: bytes) -> None:
    text = json.dumps(header).encode()
    read_every_way(".safetensors", struct.pack("<Q", len(text)) + text + rest)
