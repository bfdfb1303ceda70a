"""Placements and loads survive the way to every engine's format and back; each file meets its reader's demands."""

import json
import tracemalloc
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_runtime.cli import main
from eplb_runtime.placement import EMPTY, Placement
from eplb_runtime.tools.formats.convert import FORMATS, convert, fill_empty_slots, read_placement, write_placement
from eplb_runtime.tools.formats.loads import read_load, read_record
from eplb_runtime.utils.files import FileError

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
        (tmp_path / "load.json", {"num_ranks": 2}, "it holds a load, which has no ranks: leave --ranks out"),
        (tmp_path / "own.json", {"to": "excel"}, "choose one of: eplb-runtime, sglang"),
        (tmp_path / "own.json", {"to": "vllm", "dense_layers": 1}, "neither eplb-runtime nor vllm files number dense"),
    ]
    for source, arguments, says in cases:
        with pytest.raises(FileError) as refusal:
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
        except FileError as refusal:
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
        "ragged": (write("ragged.json", '{"load": [[1, 2], [3]]}'), "not an array of numbers"),
        "words": (write("words.json", '{"load": [["a", "b"]]}'), "not an array of numbers"),
        "one axis": (write("axis.json", '{"load": [1, 2]}'), "[layers, experts] or [windows, layers, experts]"),
        "empty": (write("empty.json", '{"load": [[], []]}'), "not empty"),
        "NaN": (write("nan.json", '{"load": [[1, NaN]]}'), "window 0, layer 0, expert 1 is nan"),
        "negative": (write("negative.json", '{"load": [[1, 2], [-3, 4]]}'), "layer 1, expert 0 is -3.0"),
        "code in a .pt": (folder / "code.pt", "not a torch file of tensors and plain values"),
        "another .pt": (folder / "other.pt", "it holds 'weights': store tokens per expert as \"load\""),
        "single passes": (folder / "passes.pt", "record with --expert-distribution-recorder-mode stat"),
        "empty folder": (folder / "empty", "has no router_trace_rank*.jsonl of Megatron and no *.pt"),
    }


def test_bad_files_are_refused_in_one_line_that_names_the_file(tmp_path: Path) -> None:
    for name, (path, says) in bad_files(tmp_path).items():
        with pytest.raises(FileError) as refusal:
            read_load(path)
        message = str(refusal.value)
        assert str(path) in message and says in message and "\n" not in message, f"{name}: {message}"


@pytest.mark.parametrize("count", [2.0**53, 1e19, 1e300])
def test_counts_beyond_whole_numbers_of_a_float_are_refused(count: float, tmp_path: Path) -> None:
    np.savez(tmp_path / "load.npz", load=np.array([[1.0, count]]))
    with pytest.raises(FileError, match=r"load goes up to .*token counts"):
        read_load(tmp_path / "load.npz")
    np.savez(tmp_path / "load.npz", load=np.array([[1.0, 2.0**53 - 1]]))
    assert read_load(tmp_path / "load.npz").max() == 2.0**53 - 1


# -- Megatron's router trace is read as tokens per expert by step and layer, over all ranks and micro-batches


def line(step: int, layer: int, top_indices: list[list[int]], **more: Any) -> dict[str, Any]:
    """As Megatron-LM writes it."""
    sizes = {"num_tokens": len(top_indices), "topk": 2}
    known = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": 0}
    return {**known, **sizes, "top_indices": top_indices, **more}


def write(folder: Path, *ranks: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, lines in enumerate(ranks):
        text = "".join(json.dumps(one) + "\n" for one in lines)
        (folder / f"router_trace_rank{rank}.jsonl").write_text(text)
    return folder


def test_tokens_are_summed_over_ranks_and_micro_batches(tmp_path: Path) -> None:
    first = [line(0, 3, [[0, 1], [0, 2]]), line(0, 3, [[3, 1]]), line(1, 3, [[0, 1]])]
    second = [line(0, 3, [[2, 3]]), line(1, 3, [])]
    assert read_load(write(tmp_path, first, second)).tolist() == [[[2, 2, 2, 2]], [[1, 1, 0, 0]]]


def test_layers_of_pipeline_stages_and_of_token_prediction_are_put_in_order(tmp_path: Path) -> None:
    """Layers of multi-token prediction have numbers that layers of the decoder have, too."""
    late = [line(0, 9, [[0, 1]]), line(0, 1, [[2, 3]], block="mtp", mtp_idx=0)]
    early = [line(0, 1, [[1, 2]])]
    load = read_load(write(tmp_path, late, early))
    assert load.tolist() == [[[0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1]]]


def test_a_step_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path, [line(0, 1, [[0, 1]]), line(0, 2, [[0, 1]]), line(1, 1, [[0, 1]])])
    with open(folder / "router_trace_rank0.jsonl", "a") as file:
        file.write(json.dumps(line(1, 2, [[0, 1]]))[:-20])
    assert read_load(folder).shape == (1, 2, 2)


def test_dropped_tokens_and_other_stages_do_not_count(tmp_path: Path) -> None:
    lines = [line(0, 1, [[0, -1], [-1, -1]]), line(0, 1, [[1, 1]], stage="post_dispatch"), line(0, 1, [[1, 0]])]
    assert read_load(write(tmp_path, lines)).tolist() == [[[2, 1]]]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("[]", "no line of a router trace (it holds a list)"),
        ("{", "no line of a router trace"),
        ('{"step": 0, "layer": 1}', "a router trace has 'top_indices' in each line"),
        (json.dumps(line(0, 1, [[0, 1], [2]])), "ragged"),
        (json.dumps({**line(0, 1, []), "top_indices": [[0.5]]}), "expert ids"),
        (json.dumps(line(0, 1, [[1 << 40]])), f"expert {1 << 40}"),
        (json.dumps(line(0, 1, [[0, 1]], logit_shape=[2, 1 << 80])), f"expert {(1 << 80) - 1}"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, content: str, part: str) -> None:
    folder = write(tmp_path, [line(0, 1, [[0, 1]])])
    with open(folder / "router_trace_rank0.jsonl", "a") as file:
        file.write(content + "\n")
    with pytest.raises(FileError) as caught:
        read_load(folder)
    assert part in str(caught.value) and "router_trace_rank0.jsonl, line 2" in str(caught.value)


def test_some_ranks_alone_of_a_trace_are_refused_where_no_step_is_whole(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="give the files of all ranks"):
        read_load(write(tmp_path, [line(0, 1, [[0, 1]]), line(1, 2, [[0, 1]])]))


def skewed(folder: Path) -> Path:
    """24 steps on four ranks; experts 0 and 1 of eight get most tokens of both layers."""
    generator = np.random.default_rng(0)
    ids = generator.choice(8, (4, 24, 2, 256, 1), p=[0.3, 0.3, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05])
    ranks = [
        [line(step, layer, ids[rank, step, layer].tolist(), rank=rank) for step in range(24) for layer in range(2)]
        for rank in range(4)
    ]
    return write(folder, *ranks)


def test_a_trace_is_assessed_with_as_many_ranks_as_wrote_it_and_without_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron's layers hold none."""
    folder = skewed(tmp_path)
    assert read_record(folder).job.ranks == 4
    assert main(["assess", str(folder), "--json", "--every", "4"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["pays"] is True and shown["imbalance"]["now"] > 2 and shown["imbalance"]["homes"] < 1.5
    assert shown["imbalance"]["replicas"] is None and shown["advice"] == "Next: BalancerConfig(interval=4)"


# -- slime's rollout data is read as tokens per expert by rollout and layer of the model


def write_slime(path: Path, *samples: Any, tokens: int | None = None) -> Path:
    """As slime's `save_debug_rollout_data` does, with some of what stands beside the routing in a sample."""
    known: dict[str, Any] = {"index": 0, "prompt": "2 + 2?", "response": "4", "status": "completed", "metadata": {}}
    known |= {} if tokens is None else {"tokens": [7] * tokens}
    routed = [{**known, "rollout_routed_experts": chosen} for chosen in samples]
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": int(path.stem), "samples": routed}, path)
    return path


def chosen(*tokens: list[list[int]]) -> torch.Tensor:
    """``[tokens, layers, topk]``"""
    return torch.tensor(tokens, dtype=torch.int32)


def test_tokens_are_summed_over_samples_and_rollouts_are_windows_in_their_order(tmp_path: Path) -> None:
    first = write_slime(tmp_path / "2.pt", chosen([[0, 1], [3, 2]], [[1, 2], [0, 1]]), [[[1, 0], [2, 3]]])
    write_slime(tmp_path / "10.pt", chosen([[0, 1], [0, 1]]))
    write_slime(tmp_path / "eval" / "0.pt", chosen([[2, 3], [2, 3]])).rename(tmp_path / "eval_2.pt")
    of_first = [[2, 3, 1, 0], [1, 1, 2, 2]]
    assert read_load(tmp_path).tolist() == [of_first, [[1, 1, 0, 0], [1, 1, 0, 0]]]
    assert read_load(first).tolist() == [of_first]


def test_a_sample_is_counted_in_the_memory_of_another(tmp_path: Path) -> None:
    ids = torch.arange(8, dtype=torch.uint8).repeat(4096, 16, 1)
    file = write_slime(tmp_path / "0.pt", ids, ids)
    read_load(file)
    tracemalloc.start()
    read_load(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < ids.nbytes * 1.5, "tensors are torch's and not traced; a layer at a time is counted"


def test_dense_layers_have_no_load_and_can_be_left_out(tmp_path: Path) -> None:
    file = write_slime(tmp_path / "0.pt", chosen([[0, 0], [0, 1]], [[0, 0], [2, 0]]))
    assert read_load(file).tolist() == [[[0, 0, 0], [2, 1, 1]]]
    assert read_load(file, dense_layers=1).shape == (1, 1, 3)
    one_choice = write_slime(tmp_path / "1.pt", chosen([[0], [1]]))
    assert read_load(one_choice).tolist() == [[[1, 0], [0, 1]]]


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([None], "sample 0 has no rollout_routed_experts: start slime with --use-rollout-routing-replay"),
        ([], "rollout 0 has no samples"),
        ([torch.zeros(2, 0, 2, dtype=torch.uint8)], "rollout 0 has no samples"),
        ([chosen([[0, 1]]), chosen([[0, 1], [0, 1]])], "sample 1 has 2 layers, those before have 1"),
        ([torch.zeros(3, 2, dtype=torch.int32)], r"must be \[tokens, layers, topk\] of expert ids"),
        ([chosen([[0, -1]])], "experts -1 to 0"),
        ([chosen([[0, 1 << 20]])], "experts 0 to 1048576"),
        (["/shm/routing.0"], "sample 0: rollout_routed_experts must be"),
        ([Fraction(1, 2)], r"not a torch file of tensors and plain values \(it holds a fractions\.Fraction\)$"),
    ],
)
def test_what_is_no_routing_is_one_line(tmp_path: Path, samples: list[Any], said: str) -> None:
    with pytest.raises(FileError, match=said):
        read_load(write_slime(tmp_path / "0.pt", *samples))


def test_arrays_are_read_and_a_sample_a_row_short_is_named(tmp_path: Path) -> None:
    assert read_load(write_slime(tmp_path / "0.pt", np.uint8([[[0, 1]]]), tokens=2)).tolist() == [[[1, 1]]]
    with pytest.raises(FileError, match="sample 0 has 1 rows of rollout_routed_experts and 3 tokens"):
        read_load(write_slime(tmp_path / "0.pt", chosen([[0, 1]]), tokens=3))


def test_rollouts_of_different_models_are_one_line(tmp_path: Path) -> None:
    write_slime(tmp_path / "0.pt", chosen([[0, 1]]))
    write_slime(tmp_path / "1.pt", chosen([[0, 1], [0, 1]]))
    with pytest.raises(FileError, match="rollout 1 has 2 layers, the first 1"):
        read_load(tmp_path)
    for other in ({"weights": torch.zeros(2)}, {"rollout_id": 1, "samples": None}):
        torch.save(other, tmp_path / "1.pt")
        with pytest.raises(FileError, match="of different kinds"):
            read_load(tmp_path)


def test_assess_takes_a_folder_of_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    hot = rng.dirichlet(np.full(16, 0.3), 2)
    for rollout in range(12):
        ids = np.stack([[rng.choice(16, 2, replace=False, p=layer) for layer in hot] for _ in range(200)])
        write_slime(tmp_path / f"{rollout}.pt", torch.from_numpy(ids))
    assert read_record(tmp_path).job.takes_no_replicas
    assert main(["assess", str(tmp_path), "--ranks", "4"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "homes alone are tried. 4 ranks: the busiest rank has" in shown
    assert main(["assess", str(tmp_path), "--ranks", "3", "--experts", "18"]) == 0, "two were never chosen"
    assert "3 ranks: the busiest rank has" in " ".join(capsys.readouterr().out.split())
    assert main(["assess", str(tmp_path), "--ranks", "4", "--experts", "8"]) == 2
    assert "has tokens of 16" in capsys.readouterr().err


# -- 61 layers meet 58: leading dense layers are left out, put back, or asked for; never taken for MoE layers


PLACEMENT = Placement([[3, 1, 2, 0], [1, 0, 3, 2]], 4, 2)


@pytest.fixture
def sglang(tmp_path: Path) -> Path:
    """A map of five layers, of which the first three are dense."""
    write_placement(tmp_path / "sglang.json", PLACEMENT, "sglang", dense_layers=3)
    return tmp_path / "sglang.json"


ASKED = r": sglang files number each layer of the model: give --dense-layers N, .* \(0: none\)"


@pytest.mark.parametrize(("to", "name"), [("eplb-runtime", "o.json"), ("vllm", "o.json"), (None, "o.yaml")])
def test_dense_layers_of_an_sglang_map_are_asked_for(sglang: Path, to: str | None, name: str) -> None:
    out = sglang.with_name(name)
    with pytest.raises(FileError, match=ASKED):
        convert(sglang, out, to=to, num_ranks=2)
    assert not out.exists()
    assert convert(sglang, out, to=to, num_ranks=2, dense_layers=3).shape == (2, 4)
    assert convert(sglang, out, to=to, num_ranks=2, dense_layers=0).shape == (5, 4)


def test_dense_layers_of_a_load_are_asked_for(tmp_path: Path) -> None:
    load = np.concatenate([np.zeros((2, 3, 4)), np.ones((2, 2, 4))], axis=1)
    (tmp_path / "dump.json").write_text(json.dumps({"logical_count": load.tolist()}))
    with pytest.raises(FileError, match=ASKED):
        convert(tmp_path / "dump.json", tmp_path / "load.npz")
    assert convert(tmp_path / "dump.json", tmp_path / "load.npz", dense_layers=3).shape == (2, 2, 4)
    assert convert(tmp_path / "dump.json", tmp_path / "load.npz", dense_layers=0).shape == (2, 5, 4)


def test_where_numbers_start_is_asked_for_where_they_are_written(tmp_path: Path) -> None:
    PLACEMENT.save(tmp_path / "own.json")
    with pytest.raises(FileError, match=r": tensorrt-llm files number each layer of the model: give --dense-layers N"):
        convert(tmp_path / "own.json", tmp_path / "o.yaml")
    convert(tmp_path / "own.json", tmp_path / "o.yaml", dense_layers=3)
    assert list(yaml.safe_load((tmp_path / "o.yaml").read_text())["initial_global_assignments"]) == [3, 4]
