"""What every batch does on the device: right, without a host sync, and in memory that CUDA graphs can hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device import DEVICE, no_host_sync

from eplb_runtime import Placement
from eplb_runtime.hosts.transformers.describe import describe
from eplb_runtime.load.aggregate import HostCopy
from eplb_runtime.load.counter import LoadCounter
from eplb_runtime.moe.experts.compute import SlotCounts, run_rows
from eplb_runtime.moe.experts.record import RecordFormat
from eplb_runtime.moe.experts.registry import ExpertTensor
from eplb_runtime.moe.routing.lookup import SlotTable
from eplb_runtime.moe.routing.splitter import BatchSplitter, SplitSettings
from eplb_runtime.utils.checksums import as_bytes, checksum

pytestmark = pytest.mark.gpu
LAYERS, EXPERTS, RANKS, TOKENS, TOP_K = 3, 16, 4, 512, 4


def choices(seed: int, tokens: int = TOKENS) -> torch.Tensor:
    """Logical ids ``[T, K]`` on the CPU, the first experts more often."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.arange(EXPERTS, 0, -1, dtype=torch.float64).expand(tokens, -1)
    return torch.multinomial(weight, TOP_K, generator=generator)


def counter() -> LoadCounter:
    return LoadCounter(LAYERS, EXPERTS, 8, DEVICE)


def captured(work: object) -> torch.cuda.CUDAGraph:
    """A graph of ``work``, which has run once before on a side stream, as capture wants it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()  # type: ignore[operator]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()  # type: ignore[operator]
    return graph


def test_counting_and_closing_a_step_never_wait_for_the_device() -> None:
    counting = counter()
    ids, real = choices(0).to(DEVICE), torch.ones(TOKENS, dtype=torch.bool, device=DEVICE)
    counting.count(0, ids, real)
    with no_host_sync():
        for _ in range(3):
            for layer in range(LAYERS):
                counting.count(layer, ids)
                counting.count(layer, ids, real)
            counting.advance()
        HostCopy(counting.take())


def test_a_captured_graph_goes_on_counting() -> None:
    counting = counter()
    ids, real = choices(0).to(DEVICE), torch.ones(TOKENS, dtype=torch.bool, device=DEVICE)

    def work() -> None:
        counting.count(0, ids)
        counting.count(1, ids, real)

    graph = captured(work)
    counting.advance()
    counting.take()
    expected = torch.zeros(EXPERTS, dtype=torch.int64)
    for seed in range(1, 4):
        ids.copy_(choices(seed))
        graph.replay()
        expected += torch.bincount(choices(seed).reshape(-1), minlength=EXPERTS)
    counts = counting.counts.cpu()
    assert torch.equal(counts[0], expected)
    assert torch.equal(counts[1], expected)
    assert not counts[2].any()


def rotated(placement: Placement, by: int) -> Placement:
    """Every expert ``by`` slots further."""
    map_ = np.roll(placement.physical_to_logical, by, axis=1)
    return Placement(map_, EXPERTS, RANKS, map_.argsort(axis=1), placement.epoch + 1)


def test_a_captured_graph_follows_a_committed_placement() -> None:
    first = Placement.initial(LAYERS, EXPERTS, RANKS)
    table = SlotTable(first, DEVICE)
    ids = choices(0).to(DEVICE)
    slots = torch.empty_like(ids)
    graph = captured(lambda: slots.copy_(table.slots(1, ids)))
    for placement in (first, rotated(first, 3), rotated(first, 7)):
        table.update(placement)
        graph.replay()
        assert placement.home is not None
        assert torch.equal(slots.cpu(), torch.from_numpy(placement.home[1].astype("int64"))[choices(0)])


def with_copies() -> Placement:
    """Two replica slots a rank: the busy experts are copied to the ranks after their own."""
    map_ = Placement.initial(LAYERS, EXPERTS, RANKS, 2).physical_to_logical.copy().reshape(LAYERS, RANKS, -1)
    for rank in range(RANKS):
        others = [expert for expert in range(EXPERTS) if expert // (EXPERTS // RANKS) != rank]
        map_[0, rank, -2:] = others[:2]
        map_[1, rank, -1] = others[0]
    home = Placement.initial(LAYERS, EXPERTS, RANKS, 2).home
    return Placement(map_.reshape(LAYERS, -1), EXPERTS, RANKS, home)


def splitter(device: torch.device, rank: int) -> BatchSplitter:
    return BatchSplitter(with_copies(), device, rank, SplitSettings(ranks_per_node=2, least_tokens=64))


def test_splitting_a_batch_never_waits_for_the_device() -> None:
    on_device = splitter(DEVICE, 1)
    ids = choices(1).to(DEVICE)
    counts_RE = np.stack([on_device.counts(choices(rank).to(DEVICE))[0].cpu().numpy() for rank in range(RANKS)])
    with no_host_sync():
        on_device.counts(ids)
        on_device.route(0, ids, counts_RE)


# -- Whether an expert's numbers depend on where it stands, for each implementation and dtype on this GPU


ROWS_OF_EXPERT = (0, 1, 3, 17, 64, 129, 5, 200)
WIDTH, INNER = 256, 128


def expert_layer(implementation: str, dtype: torch.dtype):
    import transformers as hf

    torch.manual_seed(0)
    config = hf.OlmoeConfig(
        vocab_size=32,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_experts=len(ROWS_OF_EXPERT),
        num_experts_per_tok=2,
        pad_token_id=0,
    )
    model = hf.OlmoeForCausalLM(config).to(DEVICE, dtype)
    model.set_experts_implementation(implementation)
    return describe(model).layers[0]


def run(layer, dtype: torch.dtype, order: list[int]) -> dict[str, torch.Tensor]:
    """Outputs and gradients by logical expert, with the experts in the slots that ``order`` names."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(n, WIDTH, generator=generator).to(DEVICE, dtype) for n in ROWS_OF_EXPERT]
    seeds = [torch.randn(n, WIDTH, generator=generator).to(DEVICE, dtype) for n in ROWS_OF_EXPERT]
    weights = [getattr(layer.experts, name).detach()[order].requires_grad_() for name in layer.parameters]
    rows_MD = torch.cat([rows[expert] for expert in order]).requires_grad_()
    sizes = [ROWS_OF_EXPERT[expert] for expert in order]
    router = [torch.rand(n, generator=generator).to(DEVICE, dtype) for n in ROWS_OF_EXPERT]
    router_M = torch.cat([router[expert] for expert in order]).requires_grad_()
    out_MD = run_rows(layer.compute, rows_MD, SlotCounts.of(sizes, DEVICE), weights, router_M)
    out_MD.backward(torch.cat([seeds[expert] for expert in order]))
    found = {}
    for slot, expert in enumerate(order):
        found[f"output of expert {expert}"] = out_MD.detach().split(sizes)[slot]
        found[f"input gradient of expert {expert}"] = rows_MD.grad.split(sizes)[slot]
        found[f"router weights' gradient of expert {expert}"] = router_M.grad.split(sizes)[slot]
        for name, weight in zip(layer.parameters, weights, strict=True):
            found[f"{name} gradient of expert {expert}"] = weight.grad[slot]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "batched_mm"])
def test_an_experts_bits_do_not_depend_on_its_slot(implementation: str, dtype: torch.dtype) -> None:
    layer = expert_layer(implementation, dtype)
    in_order = run(layer, dtype, list(range(len(ROWS_OF_EXPERT))))
    differ: dict[str, int] = {}
    generator = torch.Generator().manual_seed(2)
    for _ in range(8):
        moved = run(layer, dtype, torch.randperm(len(ROWS_OF_EXPERT), generator=generator).tolist())
        for name, value in in_order.items():
            count = int((value != moved[name]).sum())
            if count:
                differ[name] = max(count, differ.get(name, 0))
    print(f"{implementation} in {dtype}: {len(differ)} of {len(in_order)} tensors depend on the slot")
    assert not differ


def beside(layer, dtype: torch.dtype, neighbours: int) -> dict[str, torch.Tensor]:
    """One expert's output and gradients, for 64 rows of its own, beside seven experts of so many rows each."""
    generator = torch.Generator().manual_seed(1)
    own, seed = (torch.randn(64, WIDTH, generator=generator).to(DEVICE, dtype) for _ in range(2))
    counts = [neighbours] * 3 + [64] + [neighbours] * 4
    others = torch.randn(sum(counts) - 64, WIDTH, generator=generator).to(DEVICE, dtype)
    first = 3 * neighbours
    rows_MD = torch.cat([others[:first], own, others[first:]]).requires_grad_()
    weights = [getattr(layer.experts, name).detach().clone().requires_grad_() for name in layer.parameters]
    out_MD = layer.compute(rows_MD, SlotCounts.of(counts, DEVICE), weights)
    gradient = torch.zeros_like(out_MD)
    gradient[first : first + 64] = seed
    out_MD.backward(gradient)
    found = {"output": out_MD.detach()[first : first + 64], "input gradient": rows_MD.grad[first : first + 64]}
    return found | {f"{name} gradient": w.grad[3] for name, w in zip(layer.parameters, weights, strict=True)}


# -- Experts become bytes and experts again on the device; the checksum notices what a wire can do to them


def tensors() -> list[ExpertTensor]:
    """Rows of many sizes and dtypes, as of a model with its optimizer state; some are no multiple of the alignment."""
    generator = torch.Generator().manual_seed(0)

    def make(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> ExpertTensor:
        values = torch.randint(0, 256, (4, *shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
        return ExpertTensor(name, values.view(dtype).squeeze(-1).to(DEVICE), "parameter")

    return [
        make("weight", (33, 7), torch.bfloat16),
        make("weight/master", (33, 7), torch.float32),
        make("weight/exp_avg", (33, 7), torch.float64),
        make("bias", (3,), torch.float16),
        make("scale", (), torch.float8_e4m3fn),
        make("step", (), torch.int64),
        make("wide", (600, 1000), torch.float32),
    ]


@pytest.mark.parametrize("pinned", [False, True], ids=["on the device", "through pinned memory"])
def test_a_record_brings_every_bit_to_another_slot(pinned: bool) -> None:
    experts = tensors()
    record_format = RecordFormat(tuple(experts))
    device = torch.device("cpu") if pinned else DEVICE
    record = torch.empty(record_format.nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
    before = [t.tensor.clone() for t in experts]
    addresses = [t.tensor.data_ptr() for t in experts]
    record_format.row(1).pack(record)
    record_format.row(3).unpack(record)
    for t, old in zip(experts, before, strict=True):
        for slot, source in enumerate((0, 1, 2, 1)):
            assert torch.equal(as_bytes(t.tensor[slot]), as_bytes(old[source])), f"{t.name}, slot {slot}"
    assert [t.tensor.data_ptr() for t in experts] == addresses


@pytest.mark.parametrize("nbytes", [1, 15, 16, 1023, 1024, 1025, 70_001])
def test_a_single_flipped_bit_is_noticed(nbytes: int) -> None:
    row = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))
    row = row.to(DEVICE)
    whole = checksum([row])
    for at in {0, nbytes // 3, nbytes // 2, nbytes - 1}:
        for bit in (1, 128):
            row[at] ^= bit
            assert checksum([row]) != whole, f"byte {at}"
            row[at] ^= bit
    assert checksum([row]) == whole
