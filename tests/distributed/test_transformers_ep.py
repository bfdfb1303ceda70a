"""Transformers' own expert parallelism with ``ep_implementation="eplb"``: training whose homes all move after each step
has the very bits of training whose experts stay, and what the library saves then is in logical order."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from support import training
from support.job import Job, Run, alone, of_next_tokens
from support.moe_models import batch_of, make_model
from support.ranks import run_ranks
from support.seen import differing, digests, said_by
from support.shuffle import plan_by, plan_shuffle
from test_trainer import Moving, trainer_of
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from transformers import Trainer, TrainerCallback

import eplb_runtime as eplb
from eplb_runtime.distributed.consensus import gather_rows
from eplb_runtime.events import LoadMeasured
from eplb_runtime.hosts.trainer import BalancedTrainer
from eplb_runtime.hosts.transformers.expert_parallel import InRankOrder
from eplb_runtime.tools.formats.loads import read_record

EXPERTS = 8


@dataclass(frozen=True)
class Row:
    """A training: ``ep`` of ``ranks`` ranks share the experts, FSDP2 divides an EP rank's over the others."""

    family: str = "qwen3_moe"
    ep: int = 2
    ranks: int = 2
    tp: int = 1
    implementation: str = "grouped_mm"
    dtype: torch.dtype = torch.float32
    optimizer: str = "AdamW"
    micro_batches: int = 1
    recompute: bool = False
    mixed: bool = False
    replicas: int = 1
    evaluates: bool = False
    steps: int = 3


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=3e-2, momentum=0.9),
}
ROWS = {
    "grouped_mm, bfloat16": Row(dtype=torch.bfloat16),
    "eager, bfloat16": Row("gpt_oss", implementation="eager", dtype=torch.bfloat16),
    "batched_mm": Row("olmoe", implementation="batched_mm"),
    "accumulated, recomputed, evaluated": Row("olmoe", micro_batches=2, recompute=True, evaluates=True),
    "one batch on both ranks": Row(tp=2),
    "two replicas of the model": Row(ranks=4, replicas=2),
    "tp 2 x fsdp 2, ep 4": Row("olmoe", ranks=4, ep=4, tp=2),
    "ep 2 x fsdp 2, computed in bfloat16": Row(ranks=4, mixed=True),
    "ep 2 x fsdp 2, all together": Row(
        "gpt_oss", ranks=4, implementation="eager", dtype=torch.bfloat16, micro_batches=2, recompute=True
    ),
    "ep 2 x fsdp 4": Row(ranks=8),
}


def folder_of(family: str, root: Path) -> str:
    folder = root / family
    if not folder.exists():
        make_model(family, experts=EXPERTS, top_k=3).save_pretrained(folder)
    return str(folder)


def load(folder: str, row: Row, name: str = "eplb") -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    sizes = {"fsdp_size": row.ranks // row.tp // row.replicas, "tp_size": row.tp, "ep_size": row.ep}
    sizes |= {"dp_replicate_size": row.replicas, "fsdp_mixed_precision": row.mixed}
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        distributed_config=DistributedConfig(**sizes, ep_implementation=name),
        experts_implementation=row.implementation,
        dtype=row.dtype,
    ).train()
    if row.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def attached(folder: str, row: Row, moving: bool, **settings: Any) -> tuple[nn.Module, Any, eplb.Balancer]:
    model = load(folder, row)
    optimizer = OPTIMIZERS[row.optimizer](model.parameters())
    settings = {"interval": 1, "lag": 0, "gate": "always", "dense_gradients": "host", **settings}
    policy = "incremental" if moving else "static"
    return model, optimizer, training.attach(model, optimizer, moving=moving, policy=policy, **settings)


def step(model: nn.Module, optimizer: Any, row: Row, number: int, clip: Callable[[], Any]) -> list[float]:
    found = []
    for micro in range(row.micro_batches):
        if row.micro_batches > 1:
            model.set_requires_gradient_sync(micro == row.micro_batches - 1)
        ids = batch_of(dist.get_rank() // row.tp, number * row.micro_batches + micro)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss / row.micro_batches
        loss.backward()
        found.append(loss.item())
    if row.evaluates:  # after it FSDP2 has whole weights in some modules, which no step writes
        with torch.no_grad():
            found.append(model.eval()(input_ids=ids, labels=ids, use_cache=False).loss.item())
        model.train()
    norm = clip()
    optimizer.step()
    optimizer.zero_grad()
    return [*found, float(norm)]


def state_of(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """What torch's checkpoints take, whole, on every rank."""
    found = dict(model.state_dict())  # first: it lets FSDP put back its parameters, as after an evaluation
    whole = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=whole)
    found |= {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {n: v.full_tensor() if hasattr(v, "full_tensor") else v.detach().clone() for n, v in found.items()}


def trained(row: Row, folder: str, moving: bool) -> dict[str, Any]:
    model, optimizer, balancer = attached(folder, row, moving)
    lines = [step(model, optimizer, row, n, lambda: balancer.clip_grad_norm_(0.3)) for n in range(row.steps)]
    found = {"lines": lines, **digests(state_of(model, optimizer))}
    moved = balancer.placement.epoch
    balancer.close()
    return {"seen": found, "moved": moved}


def of_rows(rank: int, rows: dict[str, Row], folders: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    return {name: [trained(row, folders[row.family], moving) for moving in (False, True)] for name, row in rows.items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.long)])
def test_no_bit_depends_on_where_experts_are(ranks: int, root: Path) -> None:
    rows = {name: row for name, row in ROWS.items() if row.ranks == ranks}
    folders = {row.family: folder_of(row.family, root) for row in rows.values()}
    for found in run_ranks(ranks, of_rows, rows, folders):
        for name, (static, moving) in found.items():
            assert (static["moved"], moving["moved"] >= 2) == (0, True), name
            assert differing(static["seen"], moving["seen"]) == [], name
            assert all(line[-1] > 0.3 for line in moving["seen"]["lines"]), "clipping was not active"


def sums(rank: int) -> list[bool]:
    """Whether a rank's sum has the same bits in another chunk: by ours, and by torch's ring."""
    chunks = torch.randn(4, 999, generator=torch.Generator().manual_seed(rank))
    same = []
    for reduce in (InRankOrder(), DefaultReduceScatter()):
        outs = [torch.empty(999) for _ in range(2)]
        for out, source in zip(outs, (chunks, chunks.roll(1, 0)), strict=True):
            reduce(out, source.reshape(-1).clone(), dist.group.WORLD, dist.ReduceOp.SUM)
        same.append(torch.equal(gather_rows(outs[0], dist.group.WORLD)[rank - 1], outs[1]))
    return same


@pytest.mark.long
def test_gradients_of_more_than_two_ranks_add_up_in_one_order_wherever_a_row_is() -> None:
    ours, rings = zip(*run_ranks(4, sums), strict=True)
    assert all(ours) and not all(rings)


# -- against one process -----------------------------------------------------------------------------------------------

EXACT = {
    "ep 2": Row(optimizer="SGD", micro_batches=2),
    "one batch on both ranks": Row(tp=2, optimizer="SGD", implementation="eager", dtype=torch.float64),
    "ep 2 x fsdp 2": Row("gpt_oss", ranks=4, optimizer="SGD", implementation="eager", dtype=torch.float64),
    "tp 2 x fsdp 2, ep 4": Row("olmoe", ranks=4, ep=4, tp=2, optimizer="SGD", implementation="eager"),
}
"""In float64 FSDP divides gradients twice on a mesh of one rank, as ``efsdp`` is with all ranks in one EP group."""


def in_one_process(row: Row, folder: str) -> Run:
    """The same training where one process has all experts and all batches."""
    from transformers import AutoModelForCausalLM

    def whole(job: Job) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager", dtype=row.dtype)

    def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
        return of_next_tokens(model, ids) / row.micro_batches

    job = Job(model=whole, loss=loss, optimizer=OPTIMIZERS[row.optimizer], at_once=row.micro_batches, clip=0.5)
    return alone(job, row.ranks // row.tp).train(row.steps)


def beside_one_process(rank: int, row: Row, folder: str) -> tuple[float, set[int]]:
    """How far norms and weights are apart, with experts that move; how many choices a layer counts in a step."""
    whole = in_one_process(row, folder)
    norms, weights = whole.norms, dict(whole.model.named_parameters())
    model, optimizer, balancer = attached(folder, row, moving=True)
    counted: set[int] = set()

    def count(event: Any) -> None:
        if isinstance(event, LoadMeasured) and event.load is not None:
            counted.update(event.load.sum(axis=-1).ravel().tolist())

    balancer.events.subscribe(count)
    clip = partial(balancer.clip_grad_norm_, 0.5)
    off = max(abs(step(model, optimizer, row, n, clip)[-1] - norms[n]) for n in range(row.steps))
    state = state_of(model, optimizer)
    ids = batch_of(dist.get_rank() // row.tp, 0)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    off = max(off, *(float((state[name] - weight).abs().max()) for name, weight in weights.items()))
    balancer.close()
    return off, counted


@pytest.mark.long
@pytest.mark.parametrize("name", EXACT)
def test_it_trains_to_what_one_process_trains_to(name: str, root: Path) -> None:
    row = EXACT[name]
    for off, counted in run_ranks(row.ranks, beside_one_process, row, folder_of(row.family, root)):
        assert off < (1e-9 if row.dtype == torch.float64 else 1e-5)
        texts, choices = row.ranks // row.tp, 3
        padded = texts * (5 + 12) * choices
        assert counted == {texts * row.micro_batches * 2 * 12 * choices, padded}


def save_and_read(rank: int, row: Row, other: Row, folder: str, out: Path) -> dict[str, Any]:
    """Train with experts that move; read what is saved without us, and with us in another layout, and go on."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import checkpoint as library

    model, optimizer, balancer = attached(folder, row, moving=True)
    for number in range(2):
        step(model, optimizer, row, number, lambda: balancer.clip_grad_norm_(0.5))
    saved = state_of(model, optimizer)
    model.save_pretrained(out / "folder")
    model.save_pretrained(out / "sharded", distributed_checkpoint=True)
    library.save_optimizer_distributed(model, optimizer, str(out / "optimizer"))
    ids = batch_of(0, 0)[:, :4]
    written = model.eval().generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False).tolist()
    dist.barrier()
    plain = AutoModelForCausalLM.from_pretrained(out / "folder", dtype=row.dtype).eval()
    same = written == plain.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False).tolist()
    found = {"moved": balancer.placement.epoch, "generates": same, "plain": differ(plain.state_dict(), saved)}
    balancer.close()
    stock = load(str(out / "sharded"), other, "all_to_all")
    of_stock = OPTIMIZERS[row.optimizer](stock.parameters())
    library.load_optimizer_distributed(stock, of_stock, str(out / "optimizer"))
    found["another layout, without us"] = differ(state_of(stock, of_stock), saved)
    model, optimizer, balancer = attached(str(out / "folder"), other, moving=True)
    again = []
    for _ in range(2):  # as it is made, and from a placement to which experts have moved
        library.load_optimizer_distributed(model, optimizer, str(out / "optimizer"))
        library._load_model_checkpoint_distributed(model.train(), str(out / "sharded"))
        found[f"at epoch {balancer.placement.epoch}"] = differ(state_of(model, optimizer), saved)
        again.append([step(model, optimizer, other, n, lambda: balancer.clip_grad_norm_(0.5)) for n in (2, 3)])
    found["goes on"] = again[0] != again[1]
    balancer.close()
    return found


def differ(found: Mapping[str, Any], saved: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in found.items() if not torch.equal(tensor, saved[name])]


@pytest.mark.parametrize(("row", "other"), [(Row(ranks=4), Row(ranks=4, ep=4)), (Row("gpt_oss"), Row("gpt_oss"))])
def test_what_the_library_saves_is_in_logical_order(row: Row, other: Row, root: Path, tmp_path: Path) -> None:
    for found in run_ranks(row.ranks, save_and_read, row, other, folder_of(row.family, root), tmp_path):
        assert found.pop("moved") == 2 and found.pop("generates")
        assert {name for name in found if name.startswith("at epoch")} == {"at epoch 0", "at epoch 2"}
        assert not any(found.values()), found


def attaching(*, balancer_config: Any, **options: Any) -> Trainer:
    """The library's own, and a callback that attaches."""

    def attach(*_: Any, model: nn.Module, optimizer: Any, **__: Any) -> None:
        trainer.balancer = eplb.attach(model, optimizer, config=balancer_config)
        plan_by(trainer.balancer, plan_shuffle)

    trainer = Trainer(**options)
    trainer.add_callback(type("Attaches", (TrainerCallback,), {"on_train_begin": staticmethod(attach)})())
    return trainer


def by_the_trainer(rank: int, folder: str, out: Path, row: Row) -> dict[str, Any]:
    """Padded texts, accumulated, evaluated and saved every two steps; resumed in the middle."""

    def train_by(kind: type[Any], name: str, *, resume: str | None = None, **settings: Any) -> Any:
        options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
        settings = {"lag": 0, "interval": 1, **settings}
        trainer = trainer_of(kind, out / name, settings, load(folder, row), save_only_model=True, **options)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    with patch.object(ParallelismConfig, "_validate_accelerator"):  # it knows no tensor parallelism on CPUs
        jobs = {
            "still": train_by(BalancedTrainer, "still", policy="static"),
            "moving": train_by(Moving, "moving"),
            "the library's": train_by(attaching, "plain"),
            "resumed": train_by(Moving, "moving", resume=str(out / "moving" / "checkpoint-4")),
        }
    seen = {}
    for name, job in jobs.items():
        kinds, epoch = ("loss", "grad_norm", "eval_loss"), job.balancer.placement.epoch
        values = {kind: [entry[kind] for entry in job.state.log_history if kind in entry] for kind in kinds}
        seen[name] = {**values, **digests(state_of(job.model, job.optimizer.optimizer)), "epoch": epoch}
        job.balancer.close()
    return seen


@pytest.mark.long
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_trainer_trains_evaluates_and_resumes_to_the_same_bits(tp: int, root: Path, tmp_path: Path) -> None:
    for found in run_ranks(2, by_the_trainer, folder_of("qwen3_moe", root), tmp_path, Row(tp=tp)):
        still = found.pop("still")
        assert still.pop("epoch") == 0 and len(still["eval_loss"]) == 3 and min(still["grad_norm"]) > 0.3
        for name, seen in found.items():
            assert seen.pop("epoch") >= 2, name
            assert differing(still, seen) == [], name


def recorded(rank: int, folder: str, out: Path) -> None:
    """The library's own implementation, watched."""
    model, row = load(folder, Row(), "all_to_all"), Row()
    optimizer = torch.optim.AdamW(model.parameters())
    with eplb.record(model, str(out), optimizer, interval=1):
        for number in range(2):
            step(model, optimizer, row, number, lambda: 0.0)


def test_a_job_is_recorded_as_it_is(root: Path, tmp_path: Path) -> None:
    run_ranks(2, recorded, folder_of("qwen3_moe", root), tmp_path)
    found = read_record(tmp_path)
    assert (found.load.sum(axis=-1) == 2 * 2 * 12 * 3).all() and found.load.shape[-1] == EXPERTS
    assert (found.job.ep_size, found.job.expert_bytes, found.job.optimizer_bytes) == (2, 3 * 32**2 * 4, 6 * 32**2 * 4)


def adapted(model: nn.Module) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_parameters=["mlp.experts.down_proj"]))


def refused(rank: int, folder: str) -> list[str]:
    stock, row = partial(load, name="all_to_all"), Row()
    cases: list[tuple[Callable[..., Any], Callable[[Any], Any], dict[str, Any]]] = [
        (stock, lambda model: model, {}),
        (load, lambda model: model, {"replica_slots": 1}),
        (load, lambda model: model, {"dispatch": "hierarchical"}),
        (load, lambda model: model, {"overlap": True}),
        (load, adapted, {}),
        (load, lambda model: [one.register_buffer("scale", torch.ones(4)) for one in spread(model)] and model, {}),
    ]
    lines = []
    for make, change, settings in cases:
        model = change(make(folder, row))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        lines.append(
            said_by(lambda m=model, o=optimizer, s=settings: training.attach(m, o, dense_gradients="host", **s))
        )
    model = load(folder, row)
    model.config.save_pretrained(folder)
    return [*lines, moved_before_its_backward(rank, folder)]


def moved_before_its_backward(rank: int, folder: str) -> str:
    model, _, balancer = attached(folder, Row(), moving=True, interval=1000)
    loss = model(input_ids=batch_of(rank, 0), labels=batch_of(rank, 0), use_cache=False).loss
    balancer.declare(torch.ones(2, EXPERTS))
    assert balancer.rebalance()
    line = said_by(loss.backward)
    balancer.close()
    return line


def spread(model: nn.Module) -> list[nn.Module]:
    return [one for one in model.modules() if getattr(one, "_is_expert_parallel", False)]


def test_what_it_cannot_follow_is_refused_in_a_line(root: Path) -> None:
    wanted = (
        "ep_implementation=all_to_all",
        "replica_slots=1",
        "dispatch",
        "overlap=True",
        "adapts experts",
        "quantised",
        "experts changed places, or copies ended, between a forward and its backward pass",
    )
    for lines in run_ranks(2, refused, folder_of("qwen3_moe", root)):
        for line, words in zip(lines, wanted, strict=True):
            assert words in line and "\n" not in line


@pytest.mark.parametrize("first", ["eplb_runtime", "transformers"])
def test_importing_the_package_registers_it_before_or_after_the_library(first: str) -> None:
    second = {"eplb_runtime": "transformers", "transformers": "eplb_runtime"}[first]
    script = (
        f"import {first}, sys\nassert 'torch' not in sys.modules or {first!r} != 'eplb_runtime'\n"
        + ("import transformers.distributed.expert_parallel\n" if first == "transformers" else "")
        + f"import {second}\nfrom transformers.distributed.expert_parallel import EPImplementationInterface as E\n"
        "assert 'eplb' in E()\nassert 'eplb_runtime.hosts' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
