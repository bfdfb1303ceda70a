"""Memory as an array, and hashes of its blocks, which notice what a wire, or a row never written, can do to them."""

import ast
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eplb_runtime.placement import Placement, PlacementError
from eplb_runtime.tools.formats.convert import write_placement
from eplb_runtime.tools.formats.loads import write_load
from eplb_runtime.utils import jit as module
from eplb_runtime.utils import worker
from eplb_runtime.utils.checksums import block_hashes, checksum, hashed_blocks, host_array
from eplb_runtime.utils.files import FileError, require_readable, require_writable, write_file
from eplb_runtime.utils.jit import folder_for, remove_older
from eplb_runtime.utils.worker import Worker

BLOCKS = 4


def data(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (BLOCKS * 1024,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, BLOCKS * 1024 - 1), st.integers(0, 7))
def test_one_flipped_bit_changes_the_hash_of_its_block_and_of_no_other(byte: int, bit: int) -> None:
    row = data()
    before = block_hashes(row)
    row[byte] ^= 1 << bit
    changed = (block_hashes(row) != before).nonzero().flatten().tolist()
    assert changed == [byte // 1024]


@given(st.integers(1, BLOCKS * 1024), st.data())
def test_a_flipped_bit_blocks_that_change_places_and_another_end_change_a_devices_checksum(
    nbytes: int, chosen: st.DataObject
) -> None:
    row = data()[:nbytes].clone()
    before = hashed_blocks([row])
    assert torch.equal(hashed_blocks([torch.cat([data(1)[:3], row])[3:]]), before), "wherever it lies"
    row[chosen.draw(st.integers(0, nbytes - 1))] ^= 1 << chosen.draw(st.integers(0, 7))
    assert not torch.equal(hashed_blocks([row]), before)
    whole, cut = data(), chosen.draw(st.integers(1, 4095))
    parts = hashed_blocks([whole[:cut], whole[cut:]])
    assert not torch.equal(hashed_blocks([whole]), parts) and not torch.equal(hashed_blocks([whole.roll(1024)]), parts)
    assert not torch.equal(parts, hashed_blocks([whole[cut:], whole[:cut]]))
    assert not torch.equal(hashed_blocks([torch.zeros(cut, dtype=torch.uint8)]), hashed_blocks([whole[:0]]))


def test_memory_that_was_hashed_stays_resizable() -> None:
    source = torch.zeros(1 << 21, dtype=torch.uint8)
    checksum([source])
    assert source.untyped_storage().resizable()
    assert host_array(source[3:5]).tolist() == [0, 0] and host_array(source[:0]).size == 0
    host_array(source)[3] = 7
    assert source[3] == 7, "it is the same memory"
    view = source[3:5]
    source.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="freed"):
        host_array(view)
    source = torch.zeros(8, dtype=torch.uint8)
    source.numpy()
    assert not source.untyped_storage().resizable(), "control: torch marks what NumPy was given"


# -- Compiled code on the disk: nothing is loaded that another version of the sources has left


CALLEE = "from .utils.jit import jit\n\n\n@jit\ndef twice(x):\n    return {} * x\n"
CALLER = "from .utils.jit import jit\nfrom .callee import twice\n\n\n@jit\ndef thrice(x):\n    return twice(x) + x\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of a caller and a callee, each in a file of its own."""
    package = tmp_path / "small"
    (package / "utils").mkdir(parents=True)
    for folder in (package, package / "utils"):
        (folder / "__init__.py").touch()
    shutil.copy(str(module.__file__), package / "utils" / "jit.py")
    (package / "callee.py").write_text(CALLEE.format(2))
    (package / "caller.py").write_text(CALLER)
    return package


def thrice(package: Path, first: str = "") -> str:
    # Python would take its own bytecode for a file of the same size that was written in the same second.
    command = [sys.executable, "-Bc", f"{first}from small.caller import thrice as f; print(f(1), f._cache.cache_path)"]
    return subprocess.run(command, cwd=package.parent, check=True, capture_output=True, text=True).stdout.strip()


def test_a_caller_is_compiled_anew_when_what_it_calls_has_changed(package: Path) -> None:
    first = thrice(package).split()
    (package / "callee.py").write_text(CALLEE.format(7))
    second = thrice(package).split()
    assert (first[0], second[0]) == ("3", "8")
    assert first[1] != second[1]


def test_files_that_are_cut_off_and_cannot_be_written_cost_a_compilation_and_no_more(package: Path) -> None:
    for file in Path(thrice(package).split()[1]).iterdir():
        file.write_bytes(file.read_bytes()[:9])
    assert thrice(package, "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (9, 9)); ").split()[0] == "3"


def test_constants_that_are_compiled_in_are_of_modules_that_the_digest_covers() -> None:
    """Else compiled code of before a change of one would be loaded."""
    marked = {path for path in module._PACKAGE.rglob("*.py") if module._MARK in path.read_bytes()}
    constants = 0
    for path in marked:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.ImportFrom) and node.level else []
            if any(name.isupper() for name in names):
                constants += 1
                source = path.parents[node.level - 1].joinpath(*str(node.module).split("."))
                assert source.with_suffix(".py") in marked, f"{path} has constants of {source}"
    assert constants > 0


def test_the_folder_is_where_it_can_be_written(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert folder_for(package).parent == package / "__pycache__"
    shutil.rmtree(package / "__pycache__")
    (package / "__pycache__").touch()  # no folder can be made in there
    assert folder_for(package).parent == tmp_path / "cache" / "small"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    assert folder_for(package).parent == tmp_path / "numba"


def test_what_earlier_sources_left_is_removed_and_nothing_else(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    earlier = folder_for(package)
    (package / "callee.py").write_text(CALLEE.format(7))
    here, of_another_python = folder_for(package), earlier.parent / "numba-cpython-99-0123"
    of_another_python.mkdir()
    monkeypatch.setattr(module, "_PACKAGE", package)
    monkeypatch.setattr(module, "cache_folder", lambda: here)
    remove_older()
    assert not earlier.exists() and here.exists() and of_another_python.exists()


# -- Threads that use a GPU beside one that captures a CUDA graph say that they have no part in it


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """By thread, as CUDA's driver holds them; 0, its default, forbids calls beside others' captures."""
    found: dict[int, int] = {}

    def exchange(mode: Any) -> int:
        found[threading.get_ident()] = mode._obj.value
        return 0

    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(worker, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return found


def test_a_worker_has_no_part_in_captures_of_others(modes: dict[int, int]) -> None:
    worker = Worker("a test's")
    assert worker.do(lambda: modes.get(threading.get_ident()), 10.0) == 1
    worker.close(10.0)
    assert threading.get_ident() not in modes, "the thread that trains keeps its own"


# -- Every output is written whole or not at all and never through a link; what cannot be a file of ours is not read


PLACEMENT = Placement.initial(2, 4, 2, replica_slots=1)
LOAD = np.arange(1.0, 25).reshape(3, 2, 4)


def to_engine(name: str) -> Callable[[Path], object]:
    return lambda path: write_placement(path, PLACEMENT, name)


WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "placement.json": ("p.json", PLACEMENT.save),
    "load.npz": ("l.npz", lambda path: write_load(path, LOAD)),
    "sglang map": ("m.json", to_engine("sglang")),
    "vllm": ("m.json", to_engine("vllm")),
    "tensorrt-llm": ("m.yaml", to_engine("tensorrt-llm")),
}
each_writer = pytest.mark.parametrize("writer", WRITERS)


@each_writer
def test_no_output_goes_through_a_link_that_was_planted(tmp_path: Path, writer: str) -> None:
    name, write = WRITERS[writer]
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    folder = tmp_path / "out"
    folder.mkdir()
    for planted in (name, name + ".partial", f".{name}.partial", name + ".tmp"):
        (folder / planted).symlink_to(victim)
    write(folder / name)
    assert victim.read_text() == "untouched"
    assert (folder / name).is_file() and not (folder / name).is_symlink()


@each_writer
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, write = WRITERS[writer]
    (tmp_path / name).write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / name)
    assert (tmp_path / name).read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_that_is_replaced_keeps_its_permissions_and_a_new_one_gets_the_usual(tmp_path: Path) -> None:
    (tmp_path / "secret").touch(0o600)
    write_file(tmp_path / "secret", "x")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    (tmp_path / "usual").touch()
    write_file(tmp_path / "new", "x")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_destination_that_will_not_do_is_noticed_beforehand(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").touch()
    require_writable(tmp_path / "new.json", [".json"])
    with pytest.raises(FileError, match=r"must end in \.json or \.csv"):
        require_writable(tmp_path / "new.xls", [".json", ".csv"])
    with pytest.raises(FileNotFoundError):
        require_writable(tmp_path / "none" / "new.json")
    with pytest.raises(NotADirectoryError):
        require_writable(tmp_path / "file" / "new.json")
    with pytest.raises(IsADirectoryError):
        require_writable(tmp_path / "folder.json")


def test_a_device_or_pipe_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("zero.json", "pipe.json"):
        with pytest.raises(FileError, match="not a regular file"):
            require_readable(tmp_path / name, 1)
        with pytest.raises(PlacementError, match="not a regular file"):
            Placement.load(tmp_path / name)
