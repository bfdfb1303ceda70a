"""Fixtures that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

LONGEST_FIRST = (
    "test_kernels_interpreted",
    "test_kernels",
    "test_static_policies",
    "test_figures_next_windows",
    "test_public_names",
    "test_house",
    "test_compile_ahead",
    "test_replicas",
    "test_transports",
    "test_dispatch",
    "test_export",
    "test_verify_and_benches",
    "test_most_tokens",
    "test_migration_beside_training",
    "test_stops_and_kills_beside_training",
    "test_reduced_once",
    "test_megatron_offload",
    "test_deepep",
    "test_torchtitan_context",
    "test_rollout_phases",
    "test_compiled_model",
    "test_one_rank",
    "test_faults",
    "test_megatron_newer_muon",
    "test_checkpoint",
    "test_soak",
    "test_training_is_bit_identical",
    "test_pipelining",
    "test_expert_data_parallel",
    "test_mixed_precision",
    "test_megatron_newer_muon_stages",
    "test_fully_shard",
    "test_lora_on_experts",
    "test_megatron_precision_aware",
    "test_settings_in_pairs",
    "test_megatron_slime_shape",
    "test_megatron_stages",
    "test_guard",
    "test_examples",
    "test_leaving",
    "test_resume",
)
"""Files whose tests take longest: they begin first, so that no worker waits at the end for another's long file."""

settings.register_profile("no clock", deadline=None)  # machines are busy; no test asserts how long something takes
settings.load_profile("no clock")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real measurements: ``EPLB_SHARED_DATA``, or ``../shared/data`` beside the project."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("EPLB_SHARED_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}: set EPLB_SHARED_DATA to the folder of measured loads")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
