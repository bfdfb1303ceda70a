"""Fields of a checkpoint that are wrong under right checksums: refused in a line, before anything is changed."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import eplb_runtime as eplb
from eplb_runtime.checkpoint import CheckpointError
from eplb_runtime.checkpoint.manifest import index_checksum
from eplb_runtime.checkpoint.schema import covers
from eplb_runtime.checkpoint.tensor_file import header_checksum
from eplb_runtime.load.series import encode

TEXTS = ("sizes", "optimizer", "checksums")
"""JSON within the JSON of a header."""
Place = tuple[str | int, ...]


class Folder:
    """A checkpoint as fields, and as files with right checksums."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = json.loads((path / "checkpoint.json").read_text())
        del self.index["checksum"]
        (file,) = path.glob("*.safetensors")
        content = file.read_bytes()
        self.name, begin = file.name, 8 + int.from_bytes(content[:8], "little")
        self.header, self.data = json.loads(content[8:begin]), content[begin:]
        for text in TEXTS:
            self.header["__metadata__"][text] = json.loads(self.header["__metadata__"][text])

    def fields(self) -> dict[str, Any]:
        return copy.deepcopy({"index": self.index, "header": self.header})

    def write(self, path: Path, fields: dict[str, Any]) -> None:
        """What of the folder is given; whatever is no text stays as it is."""
        index, header = copy.deepcopy(fields["index"]), copy.deepcopy(fields["header"])
        if isinstance(header, dict) and isinstance(header.get("__metadata__"), dict):
            inside = header["__metadata__"]
            inside.update({text: json.dumps(inside[text]) for text in TEXTS if text in inside})
        text = json.dumps(header).encode()
        head = len(text).to_bytes(8, "little") + text
        (path / self.name).write_bytes(head + self.data)
        if isinstance(index, dict):
            known = index.get("files")
            if isinstance(known, list) and known and isinstance(known[0], dict):
                for field, right in (("bytes", len(head + self.data)), ("checksum", header_checksum(head).hex())):
                    if known[0].get(field) == self.index["files"][0][field]:
                        known[0][field] = right
            index["checksum"] = index_checksum(index)
        (path / "checkpoint.json").write_text(json.dumps(index))


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


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key], other[key]) if isinstance(one[key], Tensor) else one[key] == other[key] for key in one
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    path = tmp_path_factory.mktemp("saved")
    eplb.checkpoint.save(path, *model_and_optimizer(0))
    found = Folder(path)
    placement = eplb.Placement.initial(1, 4, 2)
    load = {"steps_per_bucket": 1, "open": encode(np.ones((1, 1, 4), dtype=np.int64)), "open_steps": 1}
    found.index["balancer"] = {"step": 3, "placement": placement.to_json(), "load": load}
    return found


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, -1, 2**63 - 1, float("nan"), float("inf")]),
    st.text(max_size=5),
    st.sampled_from(["", "\n", "../x", "F32", "I64", "0" * 32, "model.@", "{"]),
    st.lists(st.integers(-2, 5), max_size=3),
    st.dictionaries(st.sampled_from(["tensor", "dtype", "a"]), st.sampled_from([1, "F32", [1, 2]]), max_size=2),
)


@settings(max_examples=60)
@given(data=st.data())
def test_a_field_that_is_wrong_is_refused_in_a_line_and_nothing_is_changed(folder: Folder, data: st.DataObject) -> None:
    fields = folder.fields()
    for _ in range(data.draw(st.integers(1, 2), "how many")):
        where = data.draw(st.sampled_from(sorted(places(fields), key=str)), "where")
        inside: Any = fields
        for key in where[:-1]:
            inside = inside[key]
        if data.draw(st.booleans(), "drop"):
            del inside[where[-1]]
        else:
            inside[where[-1]] = data.draw(ODD, "put")
        if len(where) == 1:
            break
    path = folder.path.parent / "changed"
    path.mkdir(exist_ok=True)
    folder.write(path, {"index": None, "header": None, **fields})
    model, optimizer = model_and_optimizer(1)
    before = everything(model, optimizer)
    try:
        eplb.checkpoint.load(path, model, optimizer)
    except CheckpointError as error:
        assert "\n" not in str(error)
        assert same(before, everything(model, optimizer))


CHANGES: dict[str, tuple[Place, Any]] = {
    "has no 'files'": (("index", "files"), ...),
    "files is empty": (("index", "files"), []),
    "files[0].name is '../x', not tensors-00000-of-00001": (("index", "files", 0, "name"), "../x"),
    "files[0].bytes is '12', not a whole number": (("index", "files", 0, "bytes"), "12"),
    "balancer.step is inf, not a whole number": (("index", "balancer", "step"), float("inf")),
    "balancer.placement: not a JSON placement": (("index", "balancer", "placement"), "{"),
    "one of open and open_steps without the other": (("index", "balancer", "load", "open_steps"), ...),
    "has no 'sizes'": (("header", "__metadata__", "sizes"), ...),
    "sizes has no 'model.0.bias'": (("header", "__metadata__", "sizes", "model.0.bias"), ...),
    "ends outside of its tensor of [1]": (("header", "__metadata__", "sizes", "model.0.bias"), [1]),
    "parts of model.0.bias are missing, or overlap": (("header", "__metadata__", "sizes", "model.0.bias"), [3]),
    "dtype is 'F99'": (("header", "model.0.bias@0", "dtype"), "F99"),
    "are 8 bytes, for [2] of F64": (("header", "model.0.bias@0", "dtype"), "F64"),
    "'0.bias' is in 2 param_groups": (
        ("header", "__metadata__", "optimizer", "param_groups", 0, "params"),
        ["0.bias", "0.bias"],
    ),
    "optimizer's lr was saved as 'fast'": (("header", "__metadata__", "optimizer", "param_groups", 1, "lr"), "fast"),
    "has no 'param_groups'": (("header", "__metadata__", "optimizer", "param_groups"), ...),
}


@pytest.mark.parametrize("words", CHANGES)
def test_a_line_names_the_field(folder: Folder, words: str, tmp_path: Path) -> None:
    (*above, last), value = CHANGES[words]
    fields = folder.fields()
    inside: Any = fields
    for key in above:
        inside = inside[key]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    folder.write(tmp_path, fields)
    model, optimizer = model_and_optimizer(1)
    before = everything(model, optimizer)
    with pytest.raises(CheckpointError) as raised:
        eplb.checkpoint.load(tmp_path, model, optimizer)
    assert words in str(raised.value) and "\n" not in str(raised.value)
    assert same(before, everything(model, optimizer))
    # The control: as it was, it loads.
    folder.write(tmp_path, folder.fields())
    eplb.checkpoint.load(tmp_path, model, optimizer)
    assert same(everything(*model_and_optimizer(0)), everything(model, optimizer))
    shutil.rmtree(tmp_path)


@given(data=st.data())
def test_boxes_cover_a_tensor_if_each_place_is_in_one(data: st.DataObject) -> None:
    size = tuple(data.draw(st.lists(st.integers(1, 3), max_size=3), "size"))
    whole = np.zeros(size, dtype=np.int64)
    boxes = []
    for _ in range(data.draw(st.integers(0, 4), "boxes")):
        ends = [sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in size]
        boxes.append((tuple(a for a, _ in ends), tuple(b - a for a, b in ends)))
        whole[tuple(slice(a, b) for a, b in ends)] += 1
    for place in np.argwhere(whole == 0)[: data.draw(st.sampled_from([0, 27]), "filled")]:
        boxes.append((tuple(map(int, place)), (1,) * len(size)))
        whole[tuple(place)] += 1
    assert covers(size, boxes) == bool((whole == 1).all())
