"""Placements and loads survive the way to every engine's format and back; each file meets its reader's demands."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_runtime.placement import EMPTY, Placement, PlacementError
from eplb_runtime.tools.formats.convert import FORMATS, convert, fill_empty_slots, read_placement, write_placement
from eplb_runtime.tools.formats.loads import read_load
from eplb_runtime.tools.formats.reading import FormatError

LAYERS, EXPERTS, RANKS, DENSE = 3, 8, 4, 2
READ = [name for name in FORMATS if name != "tensorrt-llm"]
ENDING = {"eplb-runtime": ".json", "tensorrt-llm": ".yaml"}


def free_placement(seed: int = 0, layers: int = LAYERS, experts: int = EXPERTS, ranks: int = RANKS) -> Placement:
    """Every expert once and a second copy of some, in any order; slots a multiple of the ranks."""
    random = np.random.default_rng(seed)
    slots = -(-experts // ranks) * ranks + ranks
    rows = [random.permutation(np.arange(slots) % experts) for _ in range(layers)]
    return Placement(rows, experts, ranks)


@pytest.mark.parametrize("to", READ)
@pytest.mark.parametrize("via", READ)
def test_a_free_placement_goes_through_any_two_formats_unchanged(tmp_path: Path, via: str, to: str) -> None:
    placement = free_placement()
    paths = [tmp_path / f"{number}{ENDING.get(name, '.json')}" for number, name in enumerate((via, to))]
    dense = DENSE if "sglang" in (via, to) else 0
    write_placement(paths[0], placement, via, dense)
    done = convert(paths[0], paths[1], to=to, num_ranks=RANKS, dense_layers=dense)
    assert (done.kind, done.source_format, done.format, done.filled_slots) == ("placement", via, to, 0)
    assert read_placement(paths[1], RANKS, dense) == placement


# -- what each reader demands --------------------------------------------------------------------------------------


def test_sglang_map_stands_alone_and_has_a_row_for_every_layer_of_the_model(tmp_path: Path) -> None:
    write_placement(tmp_path / "map.json", free_placement(), "sglang", dense_layers=DENSE)
    content = json.loads((tmp_path / "map.json").read_text())
    assert list(content) == ["physical_to_logical_map"], "its reader passes every key on as an argument"
    rows = np.array(content["physical_to_logical_map"])
    assert rows.shape == (DENSE + LAYERS, 12)
    assert all(set(row) == set(range(EXPERTS)) for row in rows.tolist()), "dense rows too must be valid"
    assert np.array_equal(rows[DENSE:], free_placement().physical_to_logical)


def test_tensorrt_llm_configuration_has_its_three_keys_and_model_layer_numbers(tmp_path: Path) -> None:
    write_placement(tmp_path / "map.yaml", free_placement(), "tensorrt-llm", dense_layers=DENSE)
    content = yaml.safe_load((tmp_path / "map.yaml").read_text())
    assert set(content) == {"num_slots", "layer_updates_per_iter", "initial_global_assignments"}
    assert content["num_slots"] == 12 and content["layer_updates_per_iter"] == 0
    assert list(content["initial_global_assignments"]) == [2, 3, 4]
    for row in content["initial_global_assignments"].values():
        assert len(row) == 12 and set(row) == set(range(EXPERTS))


@pytest.mark.parametrize("to", ["sglang", "vllm", "tensorrt-llm"])
def test_no_engine_gets_an_empty_slot(tmp_path: Path, to: str) -> None:
    path = tmp_path / f"map{ENDING.get(to, '.json')}"
    filled = write_placement(path, Placement.initial(LAYERS, EXPERTS, RANKS, replica_slots=1), to)
    assert filled == LAYERS * RANKS and str(EMPTY) not in path.read_text()


def test_empty_slots_get_the_rarest_experts_and_none_twice_on_a_rank() -> None:
    rows = fill_empty_slots(Placement.initial(1, EXPERTS, RANKS, replica_slots=2))
    by_rank = rows.reshape(RANKS, -1)
    assert np.bincount(rows[0]).tolist() == [2] * EXPERTS
    assert all(len(set(rank)) == len(rank) for rank in by_rank.tolist())


# -- loads ---------------------------------------------------------------------------------------------------------


def test_what_a_load_has_not_is_refused_and_not_ignored(tmp_path: Path) -> None:
    (tmp_path / "load.json").write_text('{"load": [[1, 2]]}')
    with pytest.raises(FormatError, match="it holds a load, which has no ranks: leave --ranks out"):
        convert(tmp_path / "load.json", tmp_path / "out.json", num_ranks=2)
    assert not (tmp_path / "out.json").exists()


# -- refusals ------------------------------------------------------------------------------------------------------


def test_what_cannot_be_converted_is_refused_in_one_line_that_names_the_file(tmp_path: Path) -> None:
    def text(name: str, content: str) -> Path:
        (tmp_path / name).write_text(content)
        return tmp_path / name

    Placement.initial(1, 4, 2).save(tmp_path / "own.json")
    (tmp_path / "load.json").write_text('{"load": [[1, 2]]}')
    out, sglang = tmp_path / "out.json", '{"physical_to_logical_map": [[0, 1], [1, 0]]}'
    cases: list[tuple[Path, dict[str, object], str]] = [
        (tmp_path / "missing.json", {}, "No such file"),
        (text("sglang.json", sglang), {}, "does not say how many ranks it is for: give --ranks R"),
        (text("dense.json", sglang), {"num_ranks": 2, "dense_layers": 2}, "2 dense layers of 2: none would be left"),
        (text("three.json", "[[0, 1, 2]]"), {"num_ranks": 2}, "3 slots cannot be spread evenly over 2 ranks"),
        (text("gap.json", "[[0, 2, 2]]"), {"num_ranks": 1}, "expert 1 is in no slot"),
        (text("ragged.json", "[[0, 1], [0]]"), {"num_ranks": 1}, "ragged"),
        (text("flat.json", "[0, 1]"), {"num_ranks": 1}, "must be [layers, slots]"),
        (text("words.json", '[["a"]]'), {"num_ranks": 1}, "must be [layers, slots] of expert ids"),
        (text("else.json", '{"weights": 1}'), {}, "neither a placement nor a load: it holds 'weights'"),
        (text("broken.json", "{"), {}, "not JSON"),
        (text("other.yaml", "num_slots: 3"), {}, "cannot tell what kind of file this is"),
        (tmp_path / "own.json", {"num_ranks": 4}, "the placement is for 2 ranks, not 4"),
        (tmp_path / "load.json", {"to": "vllm"}, "vllm reads no load file"),
        (tmp_path / "own.json", {"to": "excel"}, "choose one of: eplb-runtime, sglang"),
        (tmp_path / "own.json", {"to": "vllm", "dense_layers": 1}, "neither eplb-runtime nor vllm files number dense"),
    ]
    for source, arguments, says in cases:
        with pytest.raises((FormatError, PlacementError)) as refusal:
            convert(source, out, **arguments)  # type: ignore[arg-type]
        message = str(refusal.value)
        assert says in message and "\n" not in message, message
        if "to" not in arguments:
            assert str(source) in message, message
    assert not out.exists()


LEAF = (
    st.none() | st.booleans() | st.integers(-3, 10) | st.floats() | st.just("eplb-runtime-placement") | st.just(10**30)
)
ROWS = st.lists(st.lists(st.integers(-1, 4), min_size=2, max_size=3), min_size=1, max_size=3)
MAP_KEYS = ["physical_to_logical_map", "3"]
LOAD_KEYS = ["load", "logical_count", "records", "last_physical_to_logical_map"]
OWN_KEYS = ["format", "version", "layers", "experts", "ranks", "slots_per_rank", "epoch", "physical_to_logical", "home"]
KEYS = st.sampled_from(MAP_KEYS + LOAD_KEYS + OWN_KEYS)
ANYTHING = st.recursive(
    LEAF | ROWS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=12
)


@given(
    content=ANYTHING,
    to=st.sampled_from([*FORMATS]),
    dense=st.sampled_from([None, 0, 1, 2]),
    ranks=st.sampled_from([None, 1, 2]),
)
@settings(max_examples=100, deadline=None)
def test_no_content_gets_more_than_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, content: object, to: str, dense: int | None, ranks: int | None
) -> None:
    folder = tmp_path_factory.mktemp("anything")
    (folder / "in.json").write_text(json.dumps(content))
    torch.save(content, folder / "in.pt")
    for source in ("in.json", "in.pt"):
        out = folder / f"out{ENDING.get(to, '.json')}"
        try:
            convert(folder / source, out, to=to, num_ranks=ranks, dense_layers=dense)
        except (FormatError, PlacementError) as refusal:
            assert "\n" not in str(refusal)


# -- Load files are read whatever wrote them, and bad ones are refused in one line that names the file


LOAD = np.arange(24).reshape(2, 3, 4)


class NotPlain:
    """Nobody can have told torch that it is safe, as checkpoint libraries do of paths."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.int8, torch.uint16])
def test_tensors_of_every_number_type_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    small = torch.from_numpy(LOAD % 8)
    torch.save({"load": small.to(dtype), "logical_count": small.to(dtype)}, tmp_path / "load.pt")
    assert np.array_equal(read_load(tmp_path / "load.pt"), small)


def test_sglang_summary_dump_drops_passes_that_were_never_filled(tmp_path: Path) -> None:
    ring = np.concatenate([LOAD, np.zeros((5, 3, 4), dtype=np.int64)])
    dump = {"rank": 0, "logical_count": torch.from_numpy(ring), "average_utilization_rate_over_window": None}
    torch.save(dump, tmp_path / "expert_distribution_recorder_1.pt")
    assert np.array_equal(read_load(tmp_path / "expert_distribution_recorder_1.pt"), LOAD)


def bad_files(folder: Path) -> dict[str, tuple[Path, str]]:
    def write(name: str, content: bytes | str) -> Path:
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    np.savez(folder / "other_name.npz", counts=LOAD)
    np.savez(folder / "objects.npz", load=np.array([object()]))
    with open(folder / "bare.npz", "wb") as file:
        np.save(file, LOAD)
    torch.save({"code": NotPlain()}, folder / "code.pt")
    torch.save({"weights": torch.zeros(2)}, folder / "other.pt")
    torch.save({"records": [], "last_physical_to_logical_map": torch.ones(1, 2)}, folder / "passes.pt")
    (folder / "empty").mkdir()
    return {
        "missing": (folder / "missing.npz", "No such file"),
        "unknown ending": (write("load.txt", "1 2"), "give .npz, .json, .pt"),
        "another array": (folder / "other_name.npz", "it holds 'counts': store tokens per expert as \"load\""),
        "python objects": (folder / "objects.npz", "not an .npz of plain numbers"),
        "bare array": (folder / "bare.npz", "not an .npz of plain numbers"),
        "no zip": (write("text.npz", "hello"), "not an .npz"),
        "cut zip": (write("cut.npz", (folder / "other_name.npz").read_bytes()[:90]), "not an .npz"),
        "no json": (write("text.json", "{"), "not JSON"),
        "bare list": (write("list.json", "[[1, 2]]"), 'it holds a list: store tokens per expert as "load"'),
        "ragged": (write("ragged.json", '{"load": [[1, 2], [3]]}'), "ragged"),
        "words": (write("words.json", '{"load": [["a", "b"]]}'), "it must hold numbers"),
        "one axis": (write("axis.json", '{"load": [1, 2]}'), "[layers, experts] or [windows, layers, experts]"),
        "empty": (write("empty.json", '{"load": [[], []]}'), "it must be"),
        "NaN": (write("nan.json", '{"load": [[1, NaN]]}'), "window 0, layer 0, expert 1: nan"),
        "negative": (write("negative.json", '{"load": [[1, 2], [-3, 4]]}'), "layer 1, expert 0: -3.0"),
        "code in a .pt": (folder / "code.pt", "not a torch file of tensors and plain values"),
        "another .pt": (folder / "other.pt", "it holds 'weights': store tokens per expert as \"load\""),
        "single passes": (folder / "passes.pt", "record with --expert-distribution-recorder-mode stat"),
        "empty folder": (folder / "empty", "has no router_trace_rank*.jsonl of Megatron and no *.pt"),
    }


def test_bad_files_are_refused_in_one_line_that_names_the_file(tmp_path: Path) -> None:
    for name, (path, says) in bad_files(tmp_path).items():
        with pytest.raises(FormatError) as refusal:
            read_load(path)
        message = str(refusal.value)
        assert str(path) in message and says in message and "\n" not in message, f"{name}: {message}"


@pytest.mark.parametrize("count", [2.0**53, 1e19, 1e300])
def test_counts_beyond_whole_numbers_of_a_float_are_refused(count: float, tmp_path: Path) -> None:
    np.savez(tmp_path / "load.npz", load=np.array([[1.0, count]]))
    with pytest.raises(FormatError, match=r"layer 0, expert 1: .* is no token count; counts are from 0 to 2\*\*53"):
        read_load(tmp_path / "load.npz")
    np.savez(tmp_path / "load.npz", load=np.array([[1.0, 2.0**53 - 1]]))
    assert read_load(tmp_path / "load.npz").max() == 2.0**53 - 1
