"""The packages of docker/cuda.txt fit each other: what their libraries want of torch, NCCL and NVSHMEM is there.

Their wheels are gigabytes, so they are read where a folder has them: those of cuda.txt, and those of the base image
(torch, nvidia-nccl, nvidia-nvshmem, ...), by `EPLB_RUNTIME_WHEELS`.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import torch
from elf_symbols import Symbols, lacking, symbols_of

PINNED = Path(__file__).resolve().parents[2] / "docker" / "cuda.txt"
WHEELS = "EPLB_RUNTIME_WHEELS"
WANTED = ("_ZN3c10", "_ZNK3c10", "_ZN2at", "_ZNK2at", "_ZN5torch", "nccl", "nvshmem", "nixl")
"""How names begin that other packages of the image offer."""


def pinned() -> dict[str, str]:
    lines = [line for line in PINNED.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def wheels() -> dict[tuple[str, str], Path]:
    """By name and version."""
    folder = os.environ.get(WHEELS, "")
    if not folder:
        pytest.skip(f"no wheels of CUDA packages here: set {WHEELS} to a folder that has those of docker/cuda.txt")
    found = {tuple(path.name.split("-")[:2]): path for path in Path(folder).glob("*.whl")}
    return {(name.replace("_", "-").lower(), version): path for (name, version), path in found.items()}


def libraries_in(wheel: Path) -> dict[str, Symbols]:
    with zipfile.ZipFile(wheel) as files:
        names = [name for name in files.namelist() if ".so" in Path(name).name]
        return {name: symbols_of(files.read(name)) for name in names if files.read(name)[:4] == b"\x7fELF"}


def unresolved(wheel: Path, others: list[Path]) -> dict[str, list[str]]:
    """What libraries of a wheel want and nobody has."""
    own = libraries_in(wheel)
    all_of_them = [*own.values(), *(one for other in others for one in libraries_in(other).values())]
    found = {name: lacking(symbols, all_of_them, WANTED) for name, symbols in own.items()}
    return {name: names for name, names in found.items() if names}


def test_every_package_of_the_image_finds_the_symbols_that_it_wants() -> None:
    there = wheels()
    missing = [f"{name}=={version}" for name, version in pinned().items() if (name, version) not in there]
    if missing:
        pytest.skip(f"no wheels of {', '.join(missing)} in {os.environ[WHEELS]}")
    if not any(name == "torch" for name, _ in there):
        pytest.skip(f"no wheel of torch in {os.environ[WHEELS]}")
    for name, version in pinned().items():
        others = [path for key, path in there.items() if key != (name, version)]
        assert unresolved(there[name, version], others) == {}, name


def test_each_package_of_the_image_has_one_version() -> None:
    assert len(pinned()) == len({name.lower() for name in pinned()}) > 0


@pytest.fixture(scope="module")
def of_torch() -> dict[str, Symbols]:
    folder = Path(torch.__file__).parent / "lib"
    return {name: symbols_of((folder / name).read_bytes()) for name in ("libc10.so", "libshm.so")}


def as_wheel(path: Path, library: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as files:
        files.writestr("package/library.so", library)
        files.writestr("package/notes.so.txt", "no library")
    return path


def test_a_library_without_its_torch_lacks_symbols_and_with_it_none(tmp_path: Path) -> None:
    folder = Path(torch.__file__).parent / "lib"
    wants = as_wheel(tmp_path / "wants.whl", (folder / "libtorch.so").read_bytes())
    assert unresolved(wants, []) == {}  # it hands over to others and wants nothing by name
    shm = as_wheel(tmp_path / "shm.whl", (folder / "libshm.so").read_bytes())
    torch_cpu, c10 = (
        as_wheel(tmp_path / f"{n}.whl", (folder / f"{n}.so").read_bytes()) for n in ("libtorch_cpu", "libc10")
    )
    assert unresolved(shm, [torch_cpu, c10]) == {}
    alone = unresolved(shm, [])
    assert alone, "libshm wants c10's symbols"
    assert all(name.startswith(WANTED) for name in alone["package/library.so"])


def test_offered_and_wanted_are_told_apart(of_torch: dict[str, Symbols]) -> None:
    c10, shm = of_torch["libc10.so"], of_torch["libshm.so"]
    assert any(name.startswith("_ZN3c10") for name in c10.offered)
    assert shm.wanted & c10.offered
    assert not c10.offered & c10.wanted
    with pytest.raises(ValueError, match="no ELF library"):
        symbols_of(b"MZ" + bytes(60))
