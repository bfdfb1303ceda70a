"""DeepEP without a GPU: the double is called as the real buffer would be, rows keep their bits, refusals say why."""

import ast
import inspect
import os
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import deepep_double

from eplb_runtime.config import BalancerConfig, ConfigError, DispatchConfig
from eplb_runtime.distributed.transports import deepep, nvshmem
from eplb_runtime.moe.dispatch import choosing
from eplb_runtime.moe.dispatch import deepep as dispatch
from eplb_runtime.moe.dispatch.all_to_all import AllToAll
from eplb_runtime.moe.dispatch.base import DispatchContext
from eplb_runtime.moe.dispatch.deepep import DeepEPDispatcher, LowLatency
from eplb_runtime.topology import Topology

SOURCE = "EPLB_RUNTIME_DEEPEP_SOURCE"
"""A folder with DeepEP's Python sources, if the package is not installed."""
FILES = ("buffers/legacy.py", "buffer.py")
SETTINGS = ("set_num_sms", "get_dispatch_config", "get_combine_config", "get_low_latency_rdma_size_hint")
LOW_LATENCY = ("low_latency_dispatch", "low_latency_combine")
CALLED = ("__init__", *SETTINGS, "get_dispatch_layout", "dispatch", "combine", *LOW_LATENCY)


def real_buffer() -> ast.ClassDef:
    """The class as it is written; nothing is imported, for that needs a GPU."""
    found = util.find_spec("deep_ep")
    folders = list(found.submodule_search_locations or []) if found is not None else []
    folders += [os.environ[SOURCE]] if SOURCE in os.environ else []
    for path in (Path(folder) / file for folder in folders for file in FILES):
        for node in ast.parse(path.read_text()).body if path.exists() else ():
            if isinstance(node, ast.ClassDef) and node.name == "Buffer":
                return node
    pytest.skip(f"no sources of DeepEP here: install it or set {SOURCE}")


@pytest.mark.parametrize("method", CALLED)
def test_the_double_has_the_signatures_of_the_real_buffer(method: str) -> None:
    written = next(node for node in real_buffer().body if isinstance(node, ast.FunctionDef) and node.name == method)
    parameters = [argument.arg for argument in written.args.args]
    given = list(inspect.signature(getattr(deepep_double.Buffer, method)).parameters)
    assert [parameter for parameter in parameters if parameter in given] == given, "the same names, in the same order"
    needed = parameters[: len(parameters) - len(written.args.defaults)]
    assert set(needed) <= set(given), "what the double leaves out may be left out"


# -- what is in a row --------------------------------------------------------------------------------------------------


def of_all_bits(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**31), 2**31, (rows, columns), generator=generator, dtype=torch.int64).view(dtype)


def test_rows_keep_every_bit() -> None:
    rows = of_all_bits(3, 4, torch.bfloat16)
    sent = dispatch.pack(rows, 2, in_float8=False)
    assert sent.shape == (6, 16), "a multiple of 32 bytes"
    back = dispatch.unpack(sent, torch.tensor([5, 0]), rows.shape[1])
    assert torch.equal(back.view(torch.uint8), rows[[2, 0]].view(torch.uint8))


def test_float8_keeps_some_bits_of_hidden_states() -> None:
    hidden = torch.randn(5, 384, generator=torch.Generator().manual_seed(0)).bfloat16() * 1000
    hidden[0], hidden[1, :128] = 0, float("inf")
    for times in (1, 3):
        rows, scales = dispatch.pack(hidden, times, in_float8=True)
        assert rows.dtype == dispatch.FLOAT8 and rows.shape == (5 * times, 384) and scales.shape[1] % 4 == 0
        back = dispatch.unpack((rows, scales), torch.arange(5) * times, 384)
        assert torch.equal(back[0], hidden[0]) and back[1, :128].isnan().all(), "what is not finite stays so"
        torch.testing.assert_close(back[2:], hidden[2:], rtol=1 / 16, atol=20)
        assert not torch.equal(back[2:], hidden[2:])


@pytest.mark.parametrize(
    ("width", "dtype", "in_float8", "said"),
    [
        (200, torch.bfloat16, False, ""),
        (9000, torch.bfloat16, False, "rows of 15360 bytes, and these hidden states have 9000 columns"),
        (256, torch.float32, False, "torch.float32, and weights are torch.float32: train in bfloat16"),
        (15360, torch.bfloat16, True, ""),
        (256, torch.float32, True, "torch.float32, and weights are torch.float32: train in bfloat16"),
        (200, torch.bfloat16, True, "a scale for 128 columns, and these hidden states have 200"),
        (15488, torch.bfloat16, True, "rows of 15360 bytes, and these hidden states have 15488 columns"),
    ],
)
def test_hidden_states_that_are_not_carried_are_refused(
    width: int, dtype: torch.dtype, in_float8: bool, said: str
) -> None:
    refused = dispatch.refusal(torch.empty(1, width, dtype=dtype), torch.empty(1, 8), in_float8)
    assert said in refused and bool(said) == bool(refused) and "\n" not in refused
    in_float64 = torch.empty(1, 8, dtype=torch.float64)
    assert "weights are torch.float64" in dispatch.refusal(torch.empty(1, width).bfloat16(), in_float64, in_float8)


# -- what is refused, and what is chosen -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "per_node", "said"),
    [(8, 8, ""), (2, 8, ""), (16, 8, ""), (1, 1, "not 1"), (6, 8, "not 6"), (4, 2, "share a node"), (16, 4, "8 ranks")],
)
def test_ranks_that_deepep_cannot_serve_are_named(ranks: int, per_node: int, said: str) -> None:
    found = deepep.why_not_between(ranks, per_node)
    assert said in found and bool(found) == bool(said)


def test_nvshmem_is_started_once_whoever_makes_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem, "_world", [])
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(group.size())))
    monkeypatch.setattr(deepep, "imported", lambda: deepep_double)
    monkeypatch.setattr(deepep, "refuse_filled_memory", lambda: None)
    node, nodes = (SimpleNamespace(size=lambda size=size: size, rank=lambda: 0) for size in (8, 16))
    config = deepep_double.Config(20)
    for _ in range(2):  # a new connection of the transport shares its world
        assert nvshmem.claim("transport='nvshmem'", nodes, again=True) == ""  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"transport='nvshmem' has started .* a process starts it once"):
        deepep.new_buffer(deepep_double, nodes, config, config)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"transport='nvshmem' has started .*leave low_latency_tokens out"):
        LowLatency(DispatchContext.of(node, 4), 8, False)._buffer(2048)  # type: ignore[arg-type]
    nvshmem._world[:] = []
    assert nvshmem.claim("DeepEP between nodes", nodes) == ""  # type: ignore[arg-type]
    assert "DeepEP between nodes has started" in nvshmem.claim("transport='nvshmem'", nodes, again=True)  # type: ignore[arg-type]


def test_what_deepep_does_not_carry_is_refused_or_goes_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepep, "imported", lambda: deepep_double)
    of_group = DispatchContext.of(SimpleNamespace(size=lambda: 2, rank=lambda: 0), 4)  # type: ignore[arg-type]
    rows, weights, topology = torch.ones(3, 64), torch.ones(3, 2), Topology(2, 2)
    by_name, auto = (
        choosing.make_dispatcher(BalancerConfig(dispatch=name), "deepep", topology, of_group)
        for name in ("deepep", "auto")
    )
    for one in (by_name, auto):
        assert isinstance(one, DeepEPDispatcher) and one.carrier(rows.bfloat16(), weights) is one
    assert isinstance(auto.carrier(rows, weights), AllToAll)
    with pytest.raises(ConfigError, match="carries and sums bfloat16"):
        by_name.carrier(rows, weights)


@pytest.mark.parametrize("words", [(b"", b""), (b"", b"too old"), (b"no GPU", b"too old")])
def test_ranks_choose_together(monkeypatch: pytest.MonkeyPatch, words: tuple[bytes, ...]) -> None:
    rest: Any = None, Topology(2, 2), 4, torch.device("cpu"), 30.0
    monkeypatch.setattr(choosing, "gather_bytes", lambda *_: list(words))
    auto, named = (choosing.choose_together(BalancerConfig(dispatch=name), *rest) for name in ("auto", "deepep"))
    assert named.name == "deepep" and not auto.problem
    if not any(words):
        assert auto.name == "deepep" and not named.problem
        return
    first = "rank 0: no GPU" if words[0] else "rank 1: too old"
    assert auto == ("all_to_all", f"no deepep: {first}", "") and named.problem == f"dispatch='deepep': {first}"


def test_a_rank_tells_the_others_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    rest: Any = None, Topology(2, 2), 129, torch.device("cpu"), 30.0
    monkeypatch.setattr(choosing, "gather_bytes", lambda word, *_: [word])
    assert "128 slots a rank here, not 129" in choosing.choose_together(BalancerConfig(dispatch="auto"), *rest).why


def test_a_version_that_takes_no_bound_between_nodes_is_refused_there() -> None:
    def unbounded(self: object, x: torch.Tensor) -> None: ...

    buffer = SimpleNamespace(dispatch=unbounded, internode_dispatch=unbounded)
    buffer.get_dispatch_config = buffer.get_combine_config = lambda num_ranks: num_ranks
    package = SimpleNamespace(Buffer=buffer)
    assert deepep.settings(package, 8) == (8, 8)
    with pytest.raises(ConfigError, match=r"takes no num_worst_tokens between nodes: build it"):
        deepep.settings(package, 16)


def test_settings_that_cannot_work_are_refused() -> None:
    for tokens in (6, 512):
        with pytest.raises(ConfigError, match=f"low_latency_tokens={tokens}: give a multiple of 4 up to 508"):
            BalancerConfig(dispatch=DispatchConfig("deepep", combine_order="by_rank", low_latency_tokens=tokens))
    with pytest.raises(ConfigError, match="even"):
        BalancerConfig(dispatch=DispatchConfig(num_sms=7))
    with pytest.raises(ConfigError, match="combine_order='both' is unknown"):
        BalancerConfig(dispatch=DispatchConfig("deepep", combine_order="both"))  # type: ignore[arg-type]
