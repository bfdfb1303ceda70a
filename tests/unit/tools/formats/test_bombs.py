"""Few bytes that stand for many are refused by size before they are unpacked; so is what is no file at all."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.lib import format as npy

from eplb_runtime.tools.formats import arrays
from eplb_runtime.tools.formats.convert import ConvertError, convert
from eplb_runtime.tools.formats.errors import LoadFileError
from eplb_runtime.tools.formats.loads import read_load, write_load
from eplb_runtime.tools.formats.readers import pt, zip_archive
from eplb_runtime.utils.files import FileError

ENDINGS = [".npz", ".safetensors", ".json", ".pt", ".yaml"]
LOAD = np.arange(24).reshape(2, 3, 4)


def refusals(path: Path) -> list[str]:
    """What both ways in say."""
    said = []
    with pytest.raises(LoadFileError) as refusal:
        read_load(path)
    said.append(str(refusal.value))
    with pytest.raises(ConvertError) as refused:
        convert(path, path.with_name("out.json"), num_ranks=1)
    said.append(str(refused.value))
    assert all(str(path) in line and "\n" not in line and len(line) < 400 for line in said), said
    return said


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_device_is_not_read(tmp_path: Path, ending: str) -> None:
    (tmp_path / f"zero{ending}").symlink_to("/dev/zero")
    assert all("not a regular file" in line for line in refusals(tmp_path / f"zero{ending}"))


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_pipe_is_not_waited_for(tmp_path: Path, ending: str) -> None:
    os.mkfifo(tmp_path / f"pipe{ending}")
    assert all("not a regular file" in line for line in refusals(tmp_path / f"pipe{ending}"))


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_of_a_terabyte_is_not_read(tmp_path: Path, ending: str) -> None:
    with (tmp_path / f"huge{ending}").open("wb") as file:
        file.truncate(2**40)
    assert all("MiB, but such a file is read up to" in line for line in refusals(tmp_path / f"huge{ending}"))


# -- zip archives: .npz and .pt ------------------------------------------------------------------------------------


def test_an_npz_that_unpacks_to_more_than_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = np.zeros((1, 1, 2**22), dtype=np.int64)  # 32 MiB in 32 KiB
    np.savez_compressed(tmp_path / "bomb.npz", load=zeros)
    assert (tmp_path / "bomb.npz").stat().st_size < 2**16
    assert read_load(tmp_path / "bomb.npz").shape == zeros.shape, "the control: it is read where the limit allows"
    monkeypatch.setattr(arrays, "MOST_NUMBERS", 2**20)
    assert all("4,194,304 numbers, but up to 1,048,576 are read" in line for line in refusals(tmp_path / "bomb.npz"))
    monkeypatch.setattr(zip_archive, "MOST_BYTES", 2**20)
    assert all("32 MiB unpacked, but up to 1 MiB are read" in line for line in refusals(tmp_path / "bomb.npz"))


def test_an_npz_that_claims_four_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_load(tmp_path / "load.npz", LOAD)
    data = bytearray((tmp_path / "load.npz").read_bytes())
    contents = data.index(b"PK\x01\x02")
    struct.pack_into("<I", data, contents + 24, 0xFFFFFFF0)  # unpacked size in the table of contents
    (tmp_path / "claims.npz").write_bytes(data)
    monkeypatch.setattr(zip_archive, "MOST_BYTES", 2**30)
    assert all("4,096 MiB unpacked, but up to 1,024 MiB" in line for line in refusals(tmp_path / "claims.npz"))


@pytest.mark.parametrize("shape", [(2**40,), (2**27, 1, 1), (0, 2**62), (2**33, 2**33)])
def test_an_npz_whose_header_claims_more_than_there_is(tmp_path: Path, shape: tuple[int, ...]) -> None:
    member = io.BytesIO()
    npy.write_array_header_2_0(member, {"descr": "<f8", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(tmp_path / "claims.npz", "w") as archive:
        archive.writestr("load.npy", member.getvalue() + b"\0" * 64)
    refusals(tmp_path / "claims.npz")


def test_an_archive_with_a_huge_table_of_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "many.npz", "w") as archive:
        for index in range(1000):
            archive.writestr(f"{index:060d}", b"")
    monkeypatch.setattr(zip_archive._File, "most", 2**16)
    assert all("table of contents is too large" in line for line in refusals(tmp_path / "many.npz"))


def test_an_archive_packed_by_another_method(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "lzma.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("load.npy", b"\0" * 1000)
    assert all("packed by a method that is not read" in line for line in refusals(tmp_path / "lzma.npz"))


def test_a_pt_whose_entries_were_packed_tight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"logical_count": torch.zeros(1, 1, 2**20, dtype=torch.int64)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "tight.pt", "w", zipfile.ZIP_DEFLATED) as tight,
    ):
        for entry in plain.infolist():
            tight.writestr(entry.filename, plain.read(entry))
    assert (tmp_path / "tight.pt").stat().st_size < 2**16
    monkeypatch.setattr(zip_archive, "MOST_BYTES", 2**20)
    assert all("MiB unpacked" in line for line in refusals(tmp_path / "tight.pt"))


def test_a_pt_with_a_huge_structure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"logical_count": [list(range(100))] * 100}, tmp_path / "lists.pt")
    monkeypatch.setattr(pt, "MOST_STRUCTURE_BYTES", 64)
    assert all("beside its tensors" in line for line in refusals(tmp_path / "lists.pt"))


# -- one number, many times ----------------------------------------------------------------------------------------


def test_a_tensor_that_repeats_one_number(tmp_path: Path) -> None:
    torch.save({"logical_count": torch.ones(1).expand(100_000, 61, 256)}, tmp_path / "stride0.pt")
    assert all("1,561,600,000 numbers, but up to" in line for line in refusals(tmp_path / "stride0.pt"))
    torch.save({"physical_to_logical_map": torch.zeros(1).long().expand(2**20, 2**10)}, tmp_path / "map.pt")
    refusals(tmp_path / "map.pt")


def test_a_few_repetitions_are_read(tmp_path: Path) -> None:
    torch.save({"logical_count": torch.ones(1).expand(2, 3, 4)}, tmp_path / "few.pt")
    assert read_load(tmp_path / "few.pt").tolist() == np.ones((2, 3, 4)).tolist()


def test_lists_that_mention_lists_many_times(tmp_path: Path) -> None:
    laughs: list = [1] * 100
    for _ in range(6):
        laughs = [laughs] * 100
    torch.save({"logical_count": laughs}, tmp_path / "laughs.pt")
    assert (tmp_path / "laughs.pt").stat().st_size < 2**14
    assert all("lists more than" in line for line in refusals(tmp_path / "laughs.pt"))


def test_a_list_that_holds_itself(tmp_path: Path) -> None:
    endless: list = [1]
    endless.append(endless)
    torch.save({"logical_count": endless}, tmp_path / "endless.pt")
    assert all("nested too deep" in line for line in refusals(tmp_path / "endless.pt"))


def test_a_long_text_among_many_short_ones(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text('{"load": [["' + "a" * 10**6 + '"' + ', "b"' * 10**5 + "]]}")
    assert all("load holds str; it must hold numbers" in line for line in refusals(tmp_path / "text.json"))


# -- yaml ----------------------------------------------------------------------------------------------------------


def test_yaml_aliases(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 2]"] + [f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]" for n in range(9)]
    (tmp_path / "laughs.yaml").write_text("\n".join([*lines, "initial_global_assignments: *a9"]))
    assert all("aliases" in line for line in refusals(tmp_path / "laughs.yaml"))


@pytest.mark.parametrize("opened", ["[", "{a: ", "- "])
def test_yaml_of_200_000_levels(tmp_path: Path, opened: str) -> None:
    (tmp_path / "deep.yaml").write_text("initial_global_assignments: " + opened * 200_000)
    assert all("levels" in line or "not YAML" in line for line in refusals(tmp_path / "deep.yaml"))


def test_every_refusal_is_of_one_kind() -> None:
    assert issubclass(LoadFileError, FileError) and issubclass(ConvertError, FileError)
