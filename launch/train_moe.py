"""Train a small MoE on real text three times from the same seed - experts fixed, rebalanced, rebalanced with a replica
slot a rank - and compare. Rebalancing changes no bit; replicas change the order of sums, and so the last bits.

    torchrun --nproc-per-node 4 launch/train_moe.py
    torchrun --nproc-per-node 8 launch/train_moe.py --device cuda --backend nccl

The text is what every Python ships: first its documentation, then the standard library's source code, so that the
load of the experts shifts half way. Ends with a table and ``<out>/summary.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
import sysconfig
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import profile, schedule

import eplb_runtime as eplb
from eplb_runtime.events import Event, LoadMeasured, RebalanceAborted, RebalanceCommitted
from eplb_runtime.observe.metrics import summary_text

SOURCE_BYTES = 4 << 20
CLIP_NORM = 1.0


@dataclass
class Run:
    """What one training run leaves behind. ``losses``: mean over ranks; ``own_losses``: this rank's, for comparing.
    ``state``: a digest of each parameter and optimizer tensor, and its number of elements."""

    losses: list[float]
    own_losses: torch.Tensor
    state: dict[str, tuple[str, int]]
    imbalance: list[list[float]]
    migrations: int
    experts_moved: int
    bytes_moved: int
    aborted: int
    seconds: float


def profiler_of(folder: Path, steps: int, skip: int) -> profile:
    """A profiler that records some steps of this rank, threads of gloo and of the balancer too: ``rank<N>.json.gz``."""
    folder.mkdir(parents=True, exist_ok=True)
    return profile(
        schedule=schedule(wait=skip, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda recorded: recorded.export_chrome_trace(str(folder / f"rank{dist.get_rank()}.json.gz")),
        experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
    )


def repeat_every_bit() -> None:
    """Let a GPU compute the same bits each time; call it before the first kernel.

    ``torch.use_deterministic_algorithms(True, warn_only=True)`` alone leaves the backward passes of flash and
    memory-efficient attention as they are, which add in any order; so attention is computed by plain matrix products.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_math_sdp(True)


def documentation() -> bytes:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def source_code() -> bytes:
    folder = Path(sysconfig.get_paths()["stdlib"])
    collected = bytearray()
    for path in sorted(folder.glob("*.py")):
        collected += path.read_bytes()
        if len(collected) >= SOURCE_BYTES:
            break
    return bytes(collected[:SOURCE_BYTES])


def batch_source(args: argparse.Namespace, rank: int, device: torch.device) -> Callable[[int], torch.Tensor]:
    """``step -> token ids [batch, length]``: random windows, the same for the same step and rank."""
    texts = [torch.frombuffer(bytearray(text()), dtype=torch.uint8) for text in (documentation, source_code)]

    def batch(step: int) -> torch.Tensor:
        text = texts[0] if step < args.steps // 2 else texts[1]
        generator = torch.Generator().manual_seed((args.seed * 1_000_003 + step) * 4099 + rank)
        starts = torch.randint(len(text) - args.length, (args.batch,), generator=generator)
        rows = starts[:, None] + torch.arange(args.length)
        return text[rows].long().to(device)

    return batch


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    torch.manual_seed(args.seed)
    return OlmoeForCausalLM(
        OlmoeConfig(
            vocab_size=256,
            hidden_size=args.width,
            intermediate_size=args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_experts=args.experts,
            num_experts_per_tok=args.top_k,
            max_position_embeddings=args.length,
            router_aux_loss_coef=0.0,
            pad_token_id=None,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def train(args: argparse.Namespace, name: str, policy: str, replica_slots: int, device: torch.device) -> Run:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.1)
    balancer = eplb.attach(
        model,
        optimizer,
        config=eplb.BalancerConfig(
            policy=policy,
            interval=args.interval,
            window=2 * args.interval,
            replica_slots=replica_slots,
            dense_gradients="allreduce",
            run=args.out / args.started / name,
            listen=args.listen,
        ),
    )
    imbalance: list[list[float]] = []

    def measured(event: Event) -> None:
        if isinstance(event, LoadMeasured):
            imbalance.extend(map(list, event.imbalance))

    balancer.events.subscribe(measured)
    batch = batch_source(args, rank, device)
    model.train()
    losses = torch.zeros(args.steps, device=device)
    started = time.perf_counter()
    # Recorded from a decision to the next, experts having moved a few times by then.
    skip = max(0, min(4 * args.interval, args.steps // 2 - args.interval) - 1)
    with profiler_of(args.profile / name, args.interval, skip) if args.profile else nullcontext() as profiler:
        for step in range(args.steps):
            ids = batch(step)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            balancer.clip_grad_norm_(CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.detach()
            if profiler is not None:
                profiler.step()
            if rank == 0 and (step + 1) % args.interval == 0:
                report_progress(name, step + 1, args.steps, losses[step].item(), balancer, started)
    seconds = time.perf_counter() - started
    state = {name: digest_of(tensor) for name, tensor in eplb.logical_state_dict(model, optimizer).items()}
    balancer.close()
    mean_losses = losses.clone()
    dist.all_reduce(mean_losses)
    committed = balancer.events.of_type(RebalanceCommitted)
    bytes_moved = torch.tensor([sum(event.received_bytes for event in committed)], device=device)
    dist.all_reduce(bytes_moved)
    return Run(
        losses=(mean_losses / world_size).tolist(),
        own_losses=losses.cpu(),
        state=state,
        imbalance=imbalance,
        migrations=len(committed),
        experts_moved=sum(event.moved_experts for event in committed),
        bytes_moved=int(bytes_moved.item()),
        aborted=len(balancer.events.of_type(RebalanceAborted)),
        seconds=seconds,
    )


def digest_of(tensor: torch.Tensor) -> tuple[str, int]:
    """All bits of a tensor in a few, and its number of elements: one run's tensors need not outlive it."""
    flat = tensor.detach().cpu().reshape(-1).contiguous()
    return hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest(), flat.numel()


def report_progress(name: str, step: int, steps: int, loss: float, balancer: eplb.Balancer, started: float) -> None:
    measured = balancer.events.of_type(LoadMeasured)
    imbalance = f"{mean(measured[-1].imbalance):.3f}" if measured else "  -  "
    moved = sum(event.moved_experts for event in balancer.events.of_type(RebalanceCommitted))
    print(
        f"{name:<12} step {step:>4}/{steps}   loss {loss:.3f}   imbalance {imbalance}   experts moved {moved:>4}"
        f"   {time.perf_counter() - started:6.1f} s",
        flush=True,
    )


def mean(rows: list[list[float]] | tuple[tuple[float, ...], ...]) -> float:
    values = [value for row in rows for value in row]
    return sum(values) / len(values) if values else math.nan


def same_bits(static: Run, balanced: Run) -> bool:
    """Losses of every rank, every parameter and every optimizer tensor, compared on every rank."""
    same = torch.equal(static.own_losses, balanced.own_losses) and static.state == balanced.state
    verdict = torch.tensor([int(same)])
    verdict = verdict.cuda() if dist.get_backend() == "nccl" else verdict
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    return bool(verdict.item())


def print_table(summary: dict, runs: dict[str, Run], parameters: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{summary['world_size']} ranks, {summary['steps']} steps, {parameters / 1e6:.1f} M parameters")
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    half = summary["steps"] // 2
    rows = {
        "imbalance, max / mean rank load (second half)": lambda run: f"{mean(run.imbalance[half:]):.3f}",
        "last loss": lambda run: f"{run.losses[-1]:.6f}",
        "migrations": lambda run: str(run.migrations),
        "experts moved": lambda run: str(run.experts_moved),
        "bytes moved": lambda run: f"{run.bytes_moved / 2**20:.1f} MiB",
    }
    for title, value in rows.items():
        table.add_row(title, *(value(run) for run in runs.values()))
    console = Console()
    console.print(table)
    console.print(
        f"static and balanced bit-identical: {'yes' if summary['bit_identical'] else 'NO'} "
        f"(losses of all ranks, {len(runs['static'].state)} parameter and optimizer tensors)"
    )


def print_run(folder: Path, world_size: int) -> None:
    """What the balancer itself says of a run, and how to look at it."""
    print("\nbalanced: " + summary_text(json.loads((folder / "summary.json").read_text()), folder))
    cores = os.cpu_count() or 1
    if world_size > cores:
        print(
            f"  ({world_size} ranks share {cores} cores here: while one has less to do, another computes. So wall\n"
            "  time cannot show what balance gains where each rank has a device of its own)"
        )
    print(f"the same as a page: eplb-runtime report {folder} -o report.html")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=160, help="optimizer steps of each run (default %(default)s)")
    parser.add_argument("--interval", type=int, default=10, help="steps between rebalance decisions")
    parser.add_argument(
        "--replica-slots", type=int, default=1, help="replica slots a rank in the third run; 0: no such run"
    )
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--length", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--layers", type=int, default=4, help="MoE layers")
    parser.add_argument("--experts", type=int, default=16, help="experts per layer; the ranks must divide it")
    parser.add_argument("--top-k", type=int, default=2, help="experts per token")
    parser.add_argument("--width", type=int, default=128, help="hidden width, and width of each expert")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument(
        "--profile", type=Path, help="folder for profiler traces: <run>/rank<N>.json.gz, of a few steps of each run"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for summary.json and the runs")
    parser.add_argument("--listen", type=int, metavar="PORT", help="show each run on http://127.0.0.1:PORT/ as it goes")
    args = parser.parse_args()
    args.started = time.strftime("%Y%m%d-%H%M%S")
    return args


def main() -> None:
    args = parse_arguments()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = (
        torch.device(args.device, local_rank % torch.cuda.device_count())
        if args.device == "cuda"
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
        repeat_every_bit()
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.backend == "nccl" else "gloo")

    runs = {
        "static": train(args, "static", "static", 0, device),
        "balanced": train(args, "balanced", "incremental", 0, device),
    }
    if args.replica_slots:
        runs["replicas"] = train(args, "replicas", "incremental", args.replica_slots, device)
    static, balanced = runs["static"], runs["balanced"]
    identical = same_bits(static, balanced)
    half = args.steps // 2
    summary = {
        "world_size": dist.get_world_size(),
        "steps": args.steps,
        "migrations": balanced.migrations,
        "experts_moved": balanced.experts_moved,
        "bytes_moved": balanced.bytes_moved,
        "bit_identical": identical,
        **{f"imbalance_{name}": mean(run.imbalance[half:]) for name, run in runs.items()},
        **{f"loss_{name}": run.losses for name, run in runs.items()},
    }
    if dist.get_rank() == 0:
        parameters = sum(numel for name, (_, numel) in static.state.items() if name.startswith("model."))
        print_table(summary, runs, parameters)
        print_run(args.out / args.started / "balanced", dist.get_world_size())
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "summary.json").write_text(json.dumps(summary, indent=2))
        print(f"written: {args.out / 'summary.json'}")
    dist.barrier()
    dist.destroy_process_group()
    raise SystemExit(0 if identical else 1)


if __name__ == "__main__":
    main()
