"""Megatron-Core's newest supported version: rows of the installed one, and what only it has: a layer of MTP that is
passed twice, and Muon, which takes Newton-Schulz from emerging-optimizers."""

import importlib.util
from dataclasses import fields, replace
from typing import Any

import pytest
import test_megatron
from support import megatron_standins as standins
from support.megatron_jobs import Row, assert_moved_without_a_change, traces
from support.newer_megatron import MUON, MUON_VERSION, NEWER, WHY_NOT, on_newer
from support.ranks import rows_of, run_ranks
from test_megatron_rows import ROWS as OLDER
from test_megatron_rows import TOP_3

pytestmark = [pytest.mark.long, pytest.mark.skipif(not NEWER.is_dir(), reason=WHY_NOT)]
SHORT = "grouped experts"
OF_DEEPSEEK = {
    "muon_nesterov": True,
    "muon_scale_mode": "unit_rms_norm",
    "muon_fp32_matmul_prec": "highest",
    "muon_extra_scale_factor": 0.2,
}
KEPT = frozenset({"weight", "param", "momentum_buffer"})


def of_muon(optimizer: str, layer_wise: bool = False, options: Any = (), **stepped: Any) -> dict[str, Any]:
    own = {"optimizer": optimizer, **({"use_layer_wise_distributed_optimizer": True} if layer_wise else {})}
    return {**TOP_3, "distributed": False, "stepped": {**own, **stepped}, **dict(options)}


MUONS = {
    "muon": Row(of_muon("muon", **OF_DEEPSEEK)),
    "layer-wise": Row(of_muon("dist_muon", options={"num_layers": 3}, muon_nesterov=True), saves=True),
    "layer-wise, laid out as Megatron-LM does": Row(of_muon("muon", True, {"laid_out": True}), steps=4),
}
OWN = {
    "a layer of MTP that is passed twice": Row(
        {"mtp_num_layers": 2, "mtp_use_repeated_layer": True, **TOP_3}, ("cpu",)
    ),
}
MUONS = {
    name: replace(row, standins=("cpu", "gathers_of_any_sizes"), kinds=KEPT, newer=True) for name, row in MUONS.items()
}
SAME = (
    *(SHORT, "distributed optimizer, all-gather", "optimizer of float16, shared experts"),
    *("tensor and sequence parallelism", "interleaved"),
)
ROWS = {name: replace(row, newer=True) for name, row in {**{name: OLDER[name] for name in SAME}, **OWN}.items()} | MUONS


@pytest.mark.parametrize("name", rows_of([name for name in ROWS if name not in MUONS], SHORT))
def test_experts_move_and_no_bit_changes(name: str) -> None:
    assert_moved_without_a_change(ROWS[name], traces(__name__, name))


@pytest.mark.long
@pytest.mark.skipif(
    not (MUON.is_dir() or importlib.util.find_spec("emerging_optimizers")) or not importlib.util.find_spec("triton"),
    reason=f"no emerging-optimizers {MUON_VERSION} in {MUON}: launch/test.sh fetches it; or no triton",
)
@pytest.mark.parametrize("name", MUONS)
def test_experts_move_under_muon_and_no_bit_changes(name: str) -> None:
    assert_moved_without_a_change(ROWS[name], traces(__name__, name))


def settings(rank: int, folder: str) -> dict[str, Any]:
    """And those with other defaults in Megatron than here (Megatron's first), or that it does not have."""
    standins.cpu()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    from eplb_runtime.hosts.megatron.settings import DEFAULTS, DTYPES

    kinds = (DistributedDataParallelConfig, OptimizerConfig, TransformerConfig)
    theirs = {field.name: field.default for kind in kinds for field in fields(kind)}
    theirs |= {name: str(theirs[name]).removeprefix("torch.") for name in DTYPES}
    theirs["expert_tensor_parallel_size"] = 1  # None is the tensor-parallel size
    pairs = {name: (theirs.get(name, "missing"), default) for name, default in DEFAULTS.items()}
    del pairs["moe_use_legacy_grouped_gemm"]  # 0.16.1 has it
    odd = {name: pair for name, pair in pairs.items() if pair[0] == "missing" or pair[0] != pair[1]}
    return {"defaults": odd, **test_megatron.settings(rank, folder)}


def test_defaults_are_megatrons_and_a_live_job_has_the_settings_of_its_command_line(tmp_path: Any) -> None:
    results = run_ranks(2, on_newer, settings, str(tmp_path))
    assert results[0]["defaults"] == {}
    test_megatron.assert_same_settings(results)
