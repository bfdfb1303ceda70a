"""`nccl.ep` without a GPU: the double is called as the real package would be, and refusals say why in a line."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import zipfile
from enum import EnumType
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import nccl_ep_double as double
import pytest
import torch

from eplb_runtime.config import BalancerConfig, ConfigError
from eplb_runtime.dispatch import choosing, nccl_ep_package
from eplb_runtime.dispatch.carried import Carried, CarriedByRank
from eplb_runtime.dispatch.choosing import Choice, choose, maker
from eplb_runtime.dispatch.nccl_ep import NcclEPCarrier
from eplb_runtime.doctor import machine
from eplb_runtime.migration.transports import packages
from eplb_runtime.topology import Topology

SOURCE = "EPLB_RUNTIME_NCCL_EP_SOURCE"
"""A wheel of the package, of ``pip download --no-deps nccl-extensions``, if it is not installed."""
ENUMS = ("Algorithm", "Layout", "PassDir", "ExpertIdKind", "DispatchQuantizationRecipe")
CONFIGS = ("GroupConfig", "LayoutInfo", "DispatchConfig", "DispatchInputs", "DispatchOutputs")
VALUES = (*CONFIGS, "CombineInputs", "CombineOutputs")
FILES = {
    **dict.fromkeys(ENUMS, "enums.py"),
    **dict.fromkeys(VALUES, "handle.py"),
    "GroupConfig": "group.py",
    "Group": "group.py",
    "Handle": "handle.py",
    "Tensor": "tensor.py",
}
METHODS = {
    "Group": ("create", "create_handle", "destroy"),
    "Handle": ("update", "dispatch", "combine", "destroy"),
    "Tensor": ("__init__",),
}


@cache
def source(file: str) -> ast.Module:
    """A file of the package as it is written; nothing is imported, for that needs a GPU."""
    if SOURCE in os.environ:
        with zipfile.ZipFile(os.environ[SOURCE]) as wheel:
            return ast.parse(wheel.read(f"nccl/ep/{file}"))
    if nccl_ep_package.there():
        folder = nccl_ep_package.util.find_spec("nccl.ep").submodule_search_locations[0]
        return ast.parse((Path(folder) / file).read_text())
    pytest.skip(f"no sources of nccl.ep here: install nccl-extensions or set {SOURCE} to its wheel")


def real(name: str) -> ast.ClassDef:
    found = source(FILES[name])
    return next(node for node in found.body if isinstance(node, ast.ClassDef) and node.name == name)


def written_values(name: str) -> list[str]:
    return [node.target.id for node in real(name).body if isinstance(node, ast.AnnAssign)]


@pytest.mark.parametrize("name", ENUMS)
def test_the_double_counts_as_the_real_package(name: str) -> None:
    written = {node.targets[0].id: node.value.value for node in real(name).body if isinstance(node, ast.Assign)}
    kind: EnumType = getattr(double, name)
    assert {one.name: one.value for one in kind} == written


@pytest.mark.parametrize("name", VALUES)
def test_what_is_handed_over_has_the_names_of_the_real_package(name: str) -> None:
    given = [one.name for one in dataclasses.fields(getattr(double, name))]
    written = written_values(name)
    assert [one for one in written if one in given] == given
    assert all(node.value is not None for node in real(name).body if isinstance(node, ast.AnnAssign)), "with defaults"


@pytest.mark.parametrize(("name", "method"), [(name, method) for name in METHODS for method in METHODS[name]])
def test_the_double_has_the_signatures_of_the_real_package(name: str, method: str) -> None:
    written = next(node for node in real(name).body if isinstance(node, ast.FunctionDef) and node.name == method)
    assert_called_alike(written, getattr(getattr(double, name), method))


def test_a_communicator_is_asked_for_as_the_real_package_wants_it() -> None:
    wanted = "get_nccl_comm_from_group"
    found = source("interop/torch.py")
    written = next(node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == wanted)
    assert_called_alike(written, double.interop.torch.get_nccl_comm_from_group)


def assert_called_alike(written: ast.FunctionDef, given: object) -> None:
    """The double takes no more than the real function, and all that the real one must have; keywords are keywords."""
    mine = inspect.signature(given).parameters.values()  # type: ignore[arg-type]
    places = [one.name for one in mine if one.kind is one.POSITIONAL_OR_KEYWORD and one.name not in ("self", "cls")]
    words = [one.name for one in mine if one.kind is one.KEYWORD_ONLY]
    in_place = [argument.arg for argument in written.args.args if argument.arg not in ("self", "cls")]
    by_word = [argument.arg for argument in written.args.kwonlyargs]
    assert places == in_place[: len(places)] and [one for one in by_word if one in words] == words
    needed = in_place[: len(in_place) - len(written.args.defaults)]
    defaults = zip(written.args.kwonlyargs, written.args.kw_defaults, strict=True)
    assert set(needed) <= set(places) and {one.arg for one, default in defaults if default is None} <= set(words)


def test_control_a_parameter_that_is_not_there_is_noticed() -> None:
    written = ast.parse("def combine(self, inputs, outputs, *, stream): ...").body[0]
    assert isinstance(written, ast.FunctionDef)
    with pytest.raises(AssertionError):
        assert_called_alike(written, lambda inputs, *, stream: None)
    with pytest.raises(AssertionError):
        assert_called_alike(written, lambda inputs, outputs, *, streams: None)


# -- what is refused, and what is chosen -------------------------------------------------------------------------------


def test_a_model_on_a_cpu_is_refused() -> None:
    why = choosing.lacks("nccl_ep", torch.device("cpu"), 4, 4)
    assert why == "it carries between GPUs, and this model is on cpu"
    assert choose("nccl_ep", ["", why]).problem == f"dispatch='nccl_ep': rank 1: {why}"


@pytest.mark.parametrize(
    ("ranks", "per_node", "said"),
    [(1, 1, ""), (8, 8, ""), (6, 8, ""), (64, 8, ""), (9, 9, "9 on each node"), (72, 8, "not 72")],
)
def test_ranks_that_it_is_not_for_are_named(ranks: int, per_node: int, said: str) -> None:
    found = nccl_ep_package.unfit(ranks, per_node)
    assert said in found and bool(said) == bool(found) and "\n" not in found


def on_hopper(monkeypatch: pytest.MonkeyPatch, *, there: bool) -> None:
    monkeypatch.setattr(packages, "no_gpu", lambda device: "")
    monkeypatch.setattr(nccl_ep_package, "there", lambda: there)


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    on_hopper(monkeypatch, there=False)
    assert "pip install 'eplb-runtime[nccl-ep-cu13]'" in nccl_ep_package.missing()
    assert "\n" not in nccl_ep_package.missing()


def test_a_compiler_is_looked_for_where_the_package_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_hopper(monkeypatch, there=True)
    nowhere = {"PATH": str(tmp_path)}
    monkeypatch.setattr(nccl_ep_package, "launcher_environment", lambda: nowhere)
    assert "set CUDA_HOME" in nccl_ep_package.missing()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("")
    nvcc.chmod(0o755)
    found = [
        {"CUDA_HOME": str(tmp_path)},
        {"CUDA_PATH": str(tmp_path)},
        {"NVCC": str(nvcc)},
        {"NCCL_EP_JIT_NVCC": str(nvcc)},
        {"PATH": str(nvcc.parent)},
    ]
    assert all(nccl_ep_package.has_compiler({**nowhere, **one}) for one in found)
    assert not nccl_ep_package.has_compiler({**nowhere, "NVCC": str(tmp_path / "none")})


def test_a_package_that_cannot_be_loaded_is_something_that_a_rank_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise RuntimeError("cuda.bindings 12.x or 13.x must be installed\nat some length")

    on_hopper(monkeypatch, there=True)
    monkeypatch.setattr(nccl_ep_package, "has_compiler", lambda environment: True)
    monkeypatch.setattr(packages.importlib, "import_module", broken)
    why = choosing.lacks("nccl_ep", torch.device("cuda"), 8, 8)
    assert "cuda.bindings 12.x or 13.x must be installed" in why and "\n" not in why
    monkeypatch.setattr(packages.importlib, "import_module", lambda name: double)
    assert choosing.lacks("nccl_ep", torch.device("cuda"), 8, 8) == ""


def test_more_slots_than_it_knows_are_refused() -> None:
    group = SimpleNamespace(size=lambda: 2)
    NcclEPCarrier(group, 256, 20, package=double)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="up to 256 slots a rank, not 257"):
        NcclEPCarrier(group, 257, 20, package=double)  # type: ignore[arg-type]


def test_the_order_of_sums_picks_the_kind() -> None:
    for order, kind in {"logical": Carried, "by_rank": CarriedByRank}.items():
        config = BalancerConfig(dispatch="nccl_ep", combine_order=order, dispatch_dtype="float8", dispatch_sms=24)
        made = maker(config, Choice("nccl_ep", ""), Topology(8, 4))
        assert made.func is kind  # type: ignore[attr-defined]
        keywords = made.keywords  # type: ignore[attr-defined]
        assert keywords["make_carrier"] is NcclEPCarrier and keywords["in_float8"] and keywords["num_sms"] == 24


def test_auto_does_not_take_it_and_the_doctor_says_why() -> None:
    assert choose("auto", ["", ""]).name == "deepep"
    assert choose("auto", ["no deep_ep"]).name == "all_to_all"
    found = next(one for one in machine.backends() if one.name == "nccl.ep")
    assert "'auto' does not take it, since it has not been run on GPUs yet" in found.why
    if not torch.cuda.is_available():
        assert not found.usable and found.why.startswith("torch sees no CUDA device")
