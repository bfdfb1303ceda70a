"""``doctor --recipe``: scripts, overrides, JSON and config functions are read as their frameworks would read them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eplb_runtime.cli import main
from eplb_runtime.hosts.megatron.settings import MUST_BE_DEFAULT
from eplb_runtime.hosts.torchtitan.settings import TitanSettings, notes, refusals
from eplb_runtime.tools.recipes import answer, read_recipe
from eplb_runtime.utils.files import FileError

SLIME = """#!/bin/bash
# --num-distributed-optimizer-instances 9
MODEL_ARGS=( --num-experts 128 --moe-router-topk 8 )
EP=${EP:-8}
NODES=2
PERF_ARGS=(
   --tensor-model-parallel-size 2
   # --expert-model-parallel-size 4
   --expert-model-parallel-size ${EP} --expert-tensor-parallel-size 1
)
PERF_ARGS+=( --pipeline-model-parallel-size 2
   --num-distributed-optimizer-instances 2 )
ray start --head --num-gpus 8
ray job submit --address="http://127.0.0.1:8265" \\
   -- python3 train.py --actor-num-nodes ${NODES} --actor-num-gpus-per-node 8 --colocate \\
   ${MODEL_ARGS[@]} "${PERF_ARGS[@]}" --wandb-key ${WANDB_KEY}
"""
VERL = """
offload=True
python3 -m verl.trainer.main_ppo \\
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    actor_rollout_ref.actor.megatron.param_offload=${offload} \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion=True \\
    +actor_rollout_ref.actor.optim.override_optimizer_config.use_precision_aware_optimizer=True \\
    trainer.n_gpus_per_node=8 trainer.nnodes=1
"""
MEGATRON = {"host": "megatron", "num_experts": 8, "ep": 8, "top_k": 2, "gpus": 8}
BF16, PRECISE = {"bf16": True}, {"use_precision_aware_optimizer": True}
OTHER = {False: True, 1: 2, None: 1.5}
"""A value that is not the default."""
LONG = {f"{kind[0]}p": f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert")}
LONG |= {"num_experts": "num_moe_experts", "top_k": "moe_router_topk", "etp": "expert_tensor_parallel_size"}
LONG["gpus"] = "world_size"
TORCHTITAN = TitanSettings(expert_parallel_degree=4, top_k=2, expert_data_parallel_size=2)
TENSOR_PARALLEL = "parallelism_config: {parallelism_config_tp_size: 2}"


def judged(folder: Path, text: str, name: str = "run.sh") -> dict[str, Any]:
    (folder / name).write_text(text)
    return answer(read_recipe(str(folder / name)))


def judged_fields(folder: Path, base: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return judged(folder, json.dumps(in_full({**base, **fields})), "one.json")


def in_full(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by Megatron's own names."""
    return {LONG.get(name, name): value for name, value in fields.items()}


def refusals_of(found: Mapping[str, Any]) -> list[str]:
    return [one["setting"] for one in found["refused"]]


def test_a_script_is_read_with_its_variables_and_arrays(tmp_path: Path) -> None:
    found = judged(tmp_path, SLIME)
    assert refusals_of(found) == ["num_distributed_optimizer_instances"] and found["refused"][0]["value"] == 2
    assert found["exact"] is None and found["assumed"]["use_distributed_optimizer"] is True and found["unknown"] == {}
    again = judged(tmp_path, SLIME.replace("instances 2", "instances 2 --num-distributed-optimizer-instances 4"))
    assert again["unknown"]["num_distributed_optimizer_instances"] == "given twice"


def test_settings_that_a_missing_file_may_hold_are_unknown_and_leave_the_answer_open(tmp_path: Path) -> None:
    elsewhere = SLIME.replace("MODEL_ARGS=(", "MODEL=(")
    found = judged(tmp_path, elsewhere.replace("--num-distributed-optimizer-instances 2", ""))
    assert found["attaches"] is None and found["refused"] == []
    assert found["unknown"]["num_distributed_optimizer_instances"] == "may be in ${MODEL_ARGS[@]}"


@pytest.mark.parametrize(
    ("lines", "size"),
    [
        ("PP=4", 4),
        ("A=4\nPP=${PP:-$A}", 4),
        ("PP=$((2 * 2))", None),
        ('if [ "$HOST" = "a" ]; then PP=4; else PP=2; fi', None),
        ("PP=$(cat stages)", None),
    ],
)
def test_a_variable_is_resolved_where_it_is_a_constant(tmp_path: Path, lines: str, size: int | None) -> None:
    command = "python pretrain_gpt.py --num-experts 8 --moe-router-topk 2 --num-distributed-optimizer-instances $PP"
    found = judged(tmp_path, f"{lines}\n{command} --expert-model-parallel-size 8\n")
    if size is None:
        assert found["attaches"] is None and "num_distributed_optimizer_instances" in str(found["unknown"])
    else:
        assert found["refused"][0]["value"] == size


SCRIPT = """
python train.py --num-experts 8 --expert-model-parallel-size 8 --moe-router-topk 2 --moe-grouped-gemm ${ARGS[@]}
"""


@pytest.mark.parametrize("size", ["0", "abc", "-8", "2.5"])
def test_a_size_that_is_none_is_one_line(tmp_path: Path, size: str) -> None:
    with pytest.raises(FileError, match=r"expert_model_parallel_size is .*, and must be a whole number of at least 1"):
        judged(tmp_path, SCRIPT.replace("size 8", f"size {size}"))
    with pytest.raises(FileError, match="world_size is 0, and must be"):
        judged_fields(tmp_path, MEGATRON, gpus=0)


def test_overrides_of_verls_actor_count_and_those_of_its_rollout_do_not(tmp_path: Path) -> None:
    found = judged(tmp_path, VERL)
    assert refusals_of(found) == [] and found["assumed"]["tensor_model_parallel_size"] == 1
    assert "moe_permute_fusion" not in found["unknown"] and found["exact"] is None, "top-k is the model's"


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        *(({name: OTHER[default], "gpus": 16}, name) for name, (default, _) in MUST_BE_DEFAULT.items()),
        ({"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "ncclep"}, "moe_flex_dispatcher_backend"),
        ({"cuda_graph_impl": "full_iteration"}, "cuda_graph_impl"),
        ({"cuda_graph_impl": "transformer_engine"}, "cuda_graph_modules"),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "attn,moe"}, "cuda_graph_modules"),
        ({"fp8": "e4m3"}, "fp8_recipe"),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True}, "fp8_param_gather"),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}, "optimizer_offload_fraction"),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "moe_preprocess"}, "cuda_graph_modules"),
        ({"expert_tensor_parallel_num_weight_shards": 2}, "expert_tensor_parallel_num_weight_shards"),
        ({"optimizer": "lion"}, "optimizer"),
        ({"optimizer": "muon", "use_distributed_optimizer": True}, "use_distributed_optimizer"),
        ({"optimizer": "dist_muon", "gpus": 16, **BF16}, "optimizer"),
        ({"optimizer": "dist_muon"}, "bf16"),
        ({"ep": 1}, "expert_model_parallel_size"),
        ({**PRECISE, "exp_avg_sq_dtype": "fp8"}, "exp_avg_sq_dtype"),
        ({**PRECISE, "use_distributed_optimizer": True, "gpus": 16, "main_params_dtype": "fp16"}, "main_params_dtype"),
        ({"lora": True}, "lora"),
        ({"lora": True, "lora_target_modules": ["linear_qkv", "linear_fc1"]}, "lora"),
    ],
)
def test_each_rule_of_megatron_refuses_its_setting_and_no_other(
    tmp_path: Path, fields: Mapping[str, Any], setting: str
) -> None:
    assert judged_fields(tmp_path, {**MEGATRON}, pp=2, gpus=16)["attaches"] is True
    assert judged_fields(tmp_path, MEGATRON)["attaches"] is True
    found = judged_fields(tmp_path, MEGATRON, **fields)
    assert refusals_of(found) == [setting] and found["attaches"] is False
    assert fields != {"ep": 1} or "#5916" in found["refused"][0]["why"], "a fault of Megatron's own"


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        ({"expert_parallel_degree": 1}, "expert_parallel_degree"),
        ({"compiled": True}, "compiled"),
        ({"moe_comm_backend": "hybridep"}, "moe_comm_backend"),
        ({"optimizers": ("Muon",)}, "optimizers"),
    ],
)
def test_each_rule_of_torchtitan_refuses_its_setting_and_no_other(fields: Mapping[str, Any], setting: str) -> None:
    assert not any(refusals(TORCHTITAN)) and not any(refusals(replace(TORCHTITAN, replica_slots=1)))
    (line,) = refusals(replace(TORCHTITAN, **fields))
    assert line.setting == setting


@pytest.mark.parametrize(
    ("fields", "exact"),
    [
        ({"moe_comm_backend": "deepep", "top_k": 8, "deterministic": True}, "rounding"),
        ({"moe_comm_backend": "deepep", "top_k": 2}, "rounding"),
        ({"moe_comm_backend": "deepep", "top_k": 2, "deterministic": True}, "bit"),
    ],
)
def test_torchtitans_own_dispatchers_attach_with_homes_alone(fields: Mapping[str, Any], exact: str) -> None:
    job = replace(TORCHTITAN, **fields)
    assert not any(refusals(job)) and any(refusals(replace(job, replica_slots=1)))
    assert any(notes(job)) == (exact == "rounding")


def test_expert_tensor_parallelism_is_that_of_tensors_unless_it_is_given(tmp_path: Path) -> None:
    assert refusals_of(judged_fields(tmp_path, MEGATRON, tp=2, gpus=16)) == ["expert_tensor_parallel_size"]
    assert judged_fields(tmp_path, MEGATRON, tp=2, etp=1, gpus=16)["attaches"] is True


def test_a_live_configs_graphs_are_read_in_any_form() -> None:
    from enum import Enum

    from eplb_runtime.hosts.megatron.settings import settings_of

    class Scope(Enum):
        attn = 1
        moe_router = 2

    assert settings_of({"cuda_graph_scope": [Scope.moe_router, Scope.attn]}).cuda_graph_modules == "attn,moe_router"
    for whole in ({}, {"cuda_graph_scope": []}, {"cuda_graph_modules": []}, {"cuda_graph_scope": "full"}):
        assert settings_of(whole).cuda_graph_modules == "full"


def test_adapters_of_attention_leave_experts_as_they_are_and_attach(tmp_path: Path) -> None:
    targets = ["linear_qkv", "linear_proj"]
    assert judged_fields(tmp_path, MEGATRON, lora=True, lora_target_modules=targets)["attaches"] is True
    assert refusals_of(judged_fields(tmp_path, MEGATRON, lora=True)) == ["lora"]
    for targets, attaches in (("[linear_qkv,linear_proj]", True), ('["linear_qkv","linear_fc2"]', False)):
        overrides = f" actor_rollout_ref.model.lora.rank=8 'actor_rollout_ref.model.lora.target_modules={targets}'\n"
        assert judged(tmp_path, VERL.rstrip().rstrip("\\") + overrides)["attaches"] is attaches


def test_saves_by_place_are_refused_before_the_first_one(tmp_path: Path) -> None:
    torchrun = SCRIPT.replace("python", "torchrun --nproc-per-node 8")  # on one node, by torchrun's default
    saving = "--use-distributed-optimizer --bf16 --save checkpoints"
    found = judged(tmp_path, torchrun.replace("${ARGS[@]}", saving))
    assert refusals_of(found) == ["--save"] and found["refused"][0]["value"] == "checkpoints"
    assert "--dist-ckpt-optim-fully-reshardable" in found["refused"][0]["instead"]
    for more in ("--dist-ckpt-optim-fully-reshardable", "--no-save-optim", "--ckpt-format torch --no-save-optim"):
        assert judged(tmp_path, torchrun.replace("${ARGS[@]}", f"{saving} {more}"))["attaches"] is True
    for more in ("--ckpt-format torch", "--ckpt-format=torch --dist-ckpt-optim-fully-reshardable"):  # one file a rank
        assert refusals_of(judged(tmp_path, torchrun.replace("${ARGS[@]}", f"{saving} {more}"))) == ["--save"]
    assert judged(tmp_path, torchrun.replace("${ARGS[@]}", "--bf16 --save checkpoints"))["attaches"] is True


@pytest.mark.parametrize(
    ("fields", "exact"),
    [
        ({}, "bit"),
        ({"top_k": 8}, "rounding"),
        ({"top_k": 8, "moe_token_dispatcher_type": "alltoall"}, "bit"),
        ({"gpus": 16, "use_distributed_optimizer": True}, "bit"),
        ({"gpus": 24}, "rounding"),
        ({"gpus": None}, None),
        ({"top_k": None}, None),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}, "bit"),
    ],
)
def test_exactness_follows_dispatcher_top_k_offload_and_the_ranks_that_add_up(
    tmp_path: Path, fields: Mapping[str, Any], exact: str | None
) -> None:
    assert judged_fields(tmp_path, MEGATRON, **fields)["exact"] == exact


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("missing.sh", None, "No such file"),
        ("empty.sh", " \n", "no setting of experts"),
        ("dense.sh", "python pretrain_gpt.py --tensor-model-parallel-size 2 --num-layers 4", "no setting of experts"),
        ("dense.json", '{"host": "megatron", "expert_model_parallel_size": 1}', "no setting of experts"),
        ("other.json", '{"a": 1}', "no recipe: write an object with"),
        ("broken.json", "{", "not JSON"),
        ("size.json", '{"ep_size": "abc"}', "size: ep_size is 'abc', and must be a whole number of at least 1"),
        (
            "doubled.sh",
            "A0=ab\n" + "".join(f"A{n}=$A{n - 1}$A{n - 1}\n" for n in range(1, 50)),
            "no setting of experts",
        ),
        ("finetune.py", "from transformers import Trainer", "nor DistributedConfig: attach says"),
        ("open.sh", "python train.py --num-experts '8", "No closing quotation"),
    ],
)
def test_a_file_without_a_moe_recipe_is_one_line_and_status_2(
    tmp_path: Path, refused: Callable[..., str], name: str, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert said in refused("doctor", "--recipe", tmp_path / name)


def test_the_command_prints_the_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.json").write_text(json.dumps(in_full(MEGATRON)))
    (tmp_path / "two.json").write_text(json.dumps(in_full({**MEGATRON, "lora": True})))
    assert main(["doctor", "--json", "--recipe", str(tmp_path / "one.json")]) == 0
    keys = ["attaches", "exact", "refused", "undecided", "assumed", "unknown"]
    assert list(json.loads(capsys.readouterr().out)) == keys
    files = [str(tmp_path / f"{name}.json") for name in ("none", "two", "one")]
    assert main(["doctor", "--recipe", *files[1:]]) == 1
    assert main(["doctor", "--recipe", *files]) == 2, "and the others are judged"
    shown = capsys.readouterr()
    _, no, yes = shown.out.rsplit("o: no, it does not attach", 1)[0], *shown.out.rsplit("one: yes, it attaches", 1)
    assert "one adapter" in no and "equal" not in no.rpartition("two: ")[2] and "to the bit" in yes
    assert "assumed" not in shown.out and shown.err.count("\n") == 1


def test_the_defaults_are_megatrons_own() -> None:
    pytest.importorskip("megatron.core")
    from dataclasses import fields

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    from eplb_runtime.hosts.megatron.settings import DEFAULTS, DTYPES

    kinds = (DistributedDataParallelConfig, OptimizerConfig, TransformerConfig)
    theirs = {one.name: one.default for kind in kinds for one in fields(kind)}
    theirs |= {name: str(theirs[name]).removeprefix("torch.") for name in DTYPES}
    theirs |= {"cuda_graph_modules": "full", "expert_tensor_parallel_size": 1}
    assert {name: ours for name, ours in DEFAULTS.items() if theirs.get(name, ours) != ours} == {}
    assert not any(DEFAULTS[name] for name in DEFAULTS.keys() - theirs.keys()), "what a version lacks is off there"


@pytest.mark.parametrize(
    ("name", "text", "setting", "exact"),
    [
        ("a.json", '{"fsdp_size": 8, "ep_size": 4, OURS}', "", "bit"),
        ("a.json", '{"distributed_config": {"fsdp_size": 8, "ep_size": 2, OURS}}', "", "bit"),
        ("a.json", '{"fsdp_size": 2, "dp_replicate_size": 4, "ep_size": 2, OURS}', "", "rounding"),
        ("a.json", '{"fsdp_size": 8, "ep_size": 8}', "ep_implementation", None),
        ("a.json", '{"fsdp_size": 8, "ep_size": 1, OURS}', "ep_size", None),
        ("a.json", '{"fsdp_size": 8, "ep_size": 8, "fsdp_cpu_offload": true, OURS}', "fsdp_cpu_offload", None),
        ("a.json", '{"tp_size": 8, "ep_size": 8, "pp_size": 2, OURS}', "pp_size", None),
        ("a.yaml", "distributed_type: MULTI_GPU\nnum_processes: 8", "", "bit"),
        ("a.yml", "distributed_type: FSDP", "distributed_type", None),
        ("a.yml", f"distributed_type: NO\n{TENSOR_PARALLEL}", "parallelism_config", None),
    ],
)
def test_configs_of_transformers_and_accelerate(
    tmp_path: Path, name: str, text: str, setting: str, exact: str | None
) -> None:
    found = judged(tmp_path, text.replace("OURS", '"ep_implementation": "eplb"'), name)
    assert refusals_of(found) == ([setting] if setting else []) and found["exact"] == exact
    assert found["attaches"] is not bool(setting)
