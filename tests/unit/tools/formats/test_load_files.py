"""Load files are read whatever wrote them, and bad ones are refused in one line that names the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from eplb_runtime.tools.formats.loads import read_load, write_load
from eplb_runtime.tools.formats.reading import FormatError

LOAD = np.arange(24).reshape(2, 3, 4)


class NotPlain:
    """Nobody can have told torch that it is safe, as checkpoint libraries do of paths."""


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write_load(tmp_path / "load.npz", LOAD)
    read = read_load(tmp_path / "load.npz")
    assert read.dtype == np.float64
    assert np.array_equal(read, LOAD)


@pytest.mark.parametrize("dtype", ["<f8", ">f8", "<i4", ">i2", "u1", "<f2", "g"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npz_arrays_of_every_number_type_and_order_are_read(
    tmp_path: Path, dtype: str, save: Callable[..., None], order: Literal["C", "F"]
) -> None:
    save(tmp_path / "load.npz", load=np.array(LOAD, dtype=dtype, order=order), other=np.arange(3))
    assert np.array_equal(read_load(tmp_path / "load.npz"), LOAD)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.int8, torch.uint16])
def test_tensors_of_every_number_type_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    small = torch.from_numpy(LOAD % 8)
    torch.save({"load": small.to(dtype), "logical_count": small.to(dtype)}, tmp_path / "load.pt")
    assert np.array_equal(read_load(tmp_path / "load.pt"), small)


def test_dense_layers_are_left_out(tmp_path: Path) -> None:
    with_dense = np.concatenate([np.zeros((2, 1, 4)), LOAD + 1], axis=1)
    write_load(tmp_path / "load.npz", with_dense)
    assert np.array_equal(read_load(tmp_path / "load.npz", dense_layers=1), LOAD + 1)


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


def test_shared_series_reads_as_windows_layers_experts(shared_data: Path) -> None:
    load = read_load(shared_data / "gpt_oss_20b_expert_load_shuffled.npz")
    assert load.shape[1:] == (24, 32)
    assert set(load.sum(axis=2).ravel()) == {4000.0}, "1,000 tokens a window, 4 experts a token"
