"""The double of NVSHMEM is called as nvshmem4py would be, by its sources; nothing of it is imported."""

from __future__ import annotations

import ast
import inspect
import os
import re
from importlib import util
from pathlib import Path

import pytest
from nvshmem_double import Double

SOURCE = "EPLB_RUNTIME_NVSHMEM_SOURCE"
"""The folder ``nvshmem`` of nvshmem4py's sources, if the package is not installed."""
CORE = {"get_unique_id": "core/init_fini.py", "init": "core/init_fini.py", "tensor": "core/interop/torch.py"}
BINDINGS = ("putmem_on_stream", "quiet_on_stream")


def sources() -> Path:
    found = util.find_spec("nvshmem")
    folders = [*(found.submodule_search_locations or ())] if found is not None else []
    folders += [os.environ[SOURCE]] if SOURCE in os.environ else []
    for folder in folders:
        if (Path(folder) / "core").is_dir():
            return Path(folder)
    pytest.skip(f"no sources of nvshmem4py here: install it or set {SOURCE}")


def given(name: str) -> list[str]:
    return list(inspect.signature(getattr(Double, name)).parameters)[1:]


@pytest.mark.parametrize("name", CORE)
def test_functions_of_the_core(name: str) -> None:
    tree = ast.parse((sources() / CORE[name]).read_text())
    written = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    parameters = [argument.arg for argument in written.args.args]
    assert [parameter for parameter in parameters if parameter in given(name)] == given(name)
    assert set(parameters[: len(parameters) - len(written.args.defaults)]) <= set(given(name))


@pytest.mark.parametrize("name", BINDINGS)
def test_functions_of_the_bindings(name: str) -> None:
    path = sources() / "bindings" / "nvshmem.pyx"
    if not path.exists():
        pytest.skip("the bindings came without their source")
    written = re.search(rf"^cpdef \w+ {name}\((.*?)\)", path.read_text(), re.MULTILINE)
    assert written is not None
    assert [parameter.split()[-1] for parameter in written[1].split(", ")] == given(name)
