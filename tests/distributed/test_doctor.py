"""What the doctor says of a model before it is built, held against the model when it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training

import eplb_runtime as eplb
from eplb_runtime.cli import main
from eplb_runtime.distributed.transports import TRANSPORTS
from eplb_runtime.tools.doctor import links as doctor_links
from eplb_runtime.tools.doctor import memory_of, try_transports

RANKS = 2


def model() -> torch.nn.Module:
    """An expert is 3 MiB: what travels is one row and not a block of small ones."""
    return make_model("olmoe", experts=8, width=512)


def nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def measured(rank: int, optimizer: str) -> dict[str, int]:
    whole = model()
    step = torch.optim.AdamW if optimizer == "adamw" else torch.optim.SGD
    optimizer_ = step(whole.parameters(), **({} if optimizer == "adamw" else {"momentum": 0.9}))
    slots = eplb.Placement.initial(2, 8, RANKS, 1).physical_to_logical.copy()
    slots[:, [4, 9]] = [5, 1]
    balancer = training.attach(
        whole,
        optimizer_,
        replica_slots=1,
        policy="static",
        initial_placement=eplb.Placement(slots, 8, RANKS, eplb.Placement.initial(2, 8, RANKS, 1).home),
        split="even",
    )
    with balancer.no_sync():
        whole(input_ids=batch_of(rank, 0), labels=batch_of(rank, 0)).loss.backward()
    optimizer_.step()
    experts = [p for name, p in whole.named_parameters() if name in balancer.layer_of_parameter]
    dense = [p for name, p in whole.named_parameters() if name not in balancer.layer_of_parameter]
    state = {
        id(p): [t for t in values.values() if isinstance(t, torch.Tensor)] for p, values in optimizer_.state.items()
    }
    banks = balancer._runtime.maps.replicas._banks.values()
    rows = {t.data_ptr(): t for bank in banks for t in [*bank.replicas, *bank._leaving]}
    result = {
        "homes_weights": nbytes(experts),
        "homes_gradients": nbytes(p.grad for p in experts),
        "homes_optimizer_state": sum(nbytes(state[id(p)]) for p in experts),
        "dense_weights": nbytes(dense),
        "dense_gradients": nbytes(p.grad for p in dense),
        "dense_optimizer_state": sum(nbytes(state[id(p)]) for p in dense),
        "copies_kept": nbytes(rows.values()),
    }
    result["copies_kept_no_sync"] = sum(nbytes(bank._held) for bank in banks)
    balancer.close()
    return result


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_figures_are_those_of_the_attached_model(optimizer: str, tmp_path: Path) -> None:
    model().config.save_pretrained(tmp_path)
    _, memory = memory_of(tmp_path, ranks=RANKS, replica_slots=1, dtype="float32", optimizer=optimizer)
    said = {item.key: item.nbytes for item in memory}
    for result in run_ranks(RANKS, measured, optimizer):
        for key, value in result.items():
            assert abs(value - said[key]) <= 4 * 100, f"{key}: beside it only Adam's step counts, four bytes each"


def on_the_command_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["doctor", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_model_of_hundred_billions_is_answered_without_its_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers as hf

    hf.GptOssConfig().save_pretrained(tmp_path)
    status, out, _ = on_the_command_line(
        capsys, "--model-config", str(tmp_path), "--ranks", "8", "--replica-slots", "1", "--json"
    )
    said = json.loads(out)
    assert status == 0
    assert said["model"].startswith("GptOssForCausalLM: 116.8 billion parameters")
    assert said["memory_bytes"]["homes_weights"] * 8 + said["memory_bytes"]["dense_weights"] == 2 * 116_829_156_672
    assert said["memory_bytes"]["copies_kept"] < said["memory_bytes"]["copies_kept_no_sync"]
    status, out, _ = on_the_command_line(capsys, "--model-config", str(tmp_path), "--ranks", "8")
    assert status == 0
    assert "GiB" in out
    assert "copies:" not in out


def test_without_a_model_it_looks_at_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = on_the_command_line(capsys, "--json")
    said = json.loads(out)
    assert status == 0
    assert said["model"] == "" and said["memory_bytes"] == {}
    assert said["versions"]["torch"] == torch.__version__
    usable = {backend["name"]: backend["usable"] for backend in said["backends"]}
    assert usable["gloo"] == dist.is_gloo_available()
    assert usable["nccl"] == torch.cuda.is_available()
    assert all(backend["why"] for backend in said["backends"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model-config", "nowhere"], "needs --ranks"),
        (["--model-config", "nowhere", "--ranks", "2"], "no such file"),
        (["--model-config", "MODEL", "--ranks", "3"], "8 experts cannot be spread evenly over 3 ranks"),
        (["--model-config", "DENSE", "--ranks", "2"], "has no MoE layer"),
        (["--model-config", "MODEL", "--ranks", "1", "--replica-slots", "1"], "only 0 experts of other ranks"),
        (["--model-config", "HEADLESS", "--ranks", "2"], "no causal language model can be made of it"),
        (["--model-config", "NEGATIVE", "--ranks", "2"], "no causal language model can be made of it"),
        (["--model-config", "GREEDY", "--ranks", "2"], "it picks 9 of 8 experts for a token"),
    ],
)
def test_bad_input_gets_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers as hf

    make_model("olmoe", experts=8).config.save_pretrained(tmp_path / "MODEL")
    hf.LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path / "DENSE")
    for name, wrong in (
        ("HEADLESS", {"num_attention_heads": 0}),
        ("NEGATIVE", {"hidden_size": -64}),
        ("GREEDY", {"num_experts_per_tok": 9}),
    ):
        known = json.loads((tmp_path / "MODEL" / "config.json").read_text())
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**known, **wrong}))
    given = [str(tmp_path / text) if text.isupper() else text for text in arguments]
    status, out, err = on_the_command_line(capsys, *given)
    assert status == 2 and out == ""
    assert words in err and err.count("\n") == 1


def links(rank: int) -> list[Any]:
    def one_rank_cannot(*arguments: Any) -> Any:
        if rank == 1:
            raise ImportError("pip install wire")
        return TRANSPORTS["torch"](*arguments)

    names = {"torch": TRANSPORTS["torch"], "half": one_rank_cannot}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor_links, "TRANSPORTS", names)
        return [*try_transports(torch.device("cpu"))]


def test_links_are_measured_on_all_ranks_and_a_transport_is_usable_on_all_or_none() -> None:
    one, other = run_ranks(2, links)
    assert one == other
    torch_, half = one
    assert torch_.usable and torch_.intra_node_gb_per_second > 0 and torch_.inter_node_gb_per_second is None
    assert (half.usable, half.why) == (False, "rank 1: pip install wire")
