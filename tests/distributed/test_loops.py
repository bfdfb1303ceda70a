"""Whatever a loop does between backward passes and steps, it trains as one process does, to the rounding of float64:
each contribution to a gradient is reduced once, replicas and slices of experts change nothing, homes may move."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
import torch
from support.loops import EXPERTS, Layout, Spread, any_scripts, far_off
from support.moe_models import FAMILIES
from support.ranks import run_ranks
from support.seen import said_by
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import eplb_runtime as eplb
from eplb_runtime.moe.experts.compute import SlotCounts

LOOPS = {
    "a norm looked at after each micro-batch": "BNBNS Z BNBNS Z BS",
    "clipped after each micro-batch": "BCBCBCS Z BCBCS",
    "reduced after each micro-batch": "BRBRBS Z BRRBS",
    "another loss of the same forward after a look": "BNAS Z BCAS Z BNANAS",
    "held back and looked at": "HNHBNS Z HHNBCS Z HNS",
    "a parameter that joins, then clipped before the step": "BS Z PBAS Z BACS ZBANS",
    "a parameter that joins between backward and clipping": "BA P CS Z BANS",
    "changed by hand between": "BhBCS Z BhhAS",
    "by a closure": "K K",
    "a forward between backward and step": "BfCS Z BCfS",
    "clipped by parts": "BLS Z B1LCS Z BL BLBS",
    "clipped by value": "BVS Z BVBVS Z BNVBCS",
    "summed by hand": "++ = S Z ++ = CS Z ++ = RS Z + B o S Z +R = S Z +R+R = CS",
    "reduced, then summed by hand": "** = S Z *** = S Z * BR o S",
    "added by hand after a look": "GCGS Z BNGCS Z GNBGS Z BGS",
    "frozen between backward and step": "BF S F Z BS Z BF CS F Z BS",
}
PUT_ASIDE = {
    "before a look, and back after it": "B p N Z = S",
    "between looks": "BN Bp N = CS",
    "after the reduction": "BR p Z = S Z BR p N = NS",
}
UNZEROED = {
    "never zeroed": "BSBSBNS BAS",
    "zeroed each second step": "BSBS z BSBCS Z BSBS",
    "stepped twice": "BSS Z BCSS BS",
    "decayed by hand": "BS d BS d BNS",
    "decayed, and stepped once more": "BS d S",
    "stepped once more on zeros": "BS z S BS",
}
ZEROED = {"zeroed before the move": "BSZM BS zM BS", "zeroed after the move": "BSM Z BS M z BS M z S BNS"}
SCRIPTS = [*LOOPS.values(), *UNZEROED.values()]
OF_EDP = [*SCRIPTS[::3], "BS d S", *PUT_ASIDE.values()]
EDP, ALONE = Layout(2, 2), Layout(2, 1, divisor=1)


REPLICAS = [
    "BCS cBCS BACS",
    "BBCS HBCS Z HHBS",
    "2S H2CS TS",
    "BAS wEbCS EBCS",
    "BZ HZ BCS Z BzHzBCS",
    "iCS BIS iIS",
    "yBS y HyBCS",
    "BF S F Z BF CS F Z BCS",
    "JCS jCS BgCS",
    "BSZM BCSZM BCS",
    "BCS HZM BCS",
    "BS HZS BCS",
    "cBfACS BCS",
]
SLICES = Layout(2, 2, family="gpt_oss", sliced=True)
SLICED = replace(SLICES, slots=1)
PLACED = {
    **{family: (Layout(2, family=family), ["BNAS BCS"]) for family in FAMILIES},
    "replicas": (Layout(2, slots=1), REPLICAS),
    "replicas that hang on replicas": (Layout(4, slots=2, ranks_per_node=2), REPLICAS[:2]),
    "replicas that end": (Layout(2, slots=1), ["BS HXBS"]),
    "replicas of slices that end": (SLICED, ["BX BCS"]),
    "replicas, EP 2 x EDP 2": (Layout(2, 2, slots=1), ["JCS jCS BgCS", "BCSZM BACSZM JCS"]),
    "EDP 2": (Layout(1, 2), ["JCS jCS BgCS", "BS uBCS"]),
    "slices": (SLICES, ["BCSZM qBCSZM BCS", "EBCS O BCSZM eBCS"]),
    "replicas of slices": (SLICED, ["HZ BCSZM Hz BCSZM", "EqBCSZM eqBCS", "cHBCS O HBCSZM BCS"]),
    "replicas of slices, some frozen": (
        replace(SLICED, frozen=("model.layers.0.self_attn", "layers.0.mlp.router", "embed", "down_proj")),
        ["QBCS QQBCSZM", "BCX S"],
    ),
}


@pytest.mark.parametrize("name", PLACED)
def test_wherever_experts_are_they_train_as_in_one_process(name: str) -> None:
    assert far_off(*PLACED[name]) == {}


def test_replicas_of_slices_are_computed_in_the_precision_that_fsdp_computes_in() -> None:
    """Float32 of float64: half as many bits."""
    half = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    (off,) = far_off(replace(SLICED, policy=half), ["BCSZM BCS"]).values()
    assert off < 5e-4


@pytest.mark.parametrize(
    ("layout", "scripts"), [(EDP, OF_EDP), (ALONE, [*PUT_ASIDE.values(), *SCRIPTS])], ids=["EP 2 x EDP 2", "EP 2"]
)
def test_a_loop_that_looks_at_gradients_trains_as_one_process(layout: Layout, scripts: list[str]) -> None:
    assert far_off(layout, scripts) == {}


def test_the_guard_takes_no_sum_by_hand_for_clipping() -> None:
    """In the first steps, in which it raises."""
    assert far_off(Layout(2, 1), ["++ = S", "+++ = CS", "+ B o S", *PUT_ASIDE.values()]) == {}


def test_gradients_that_are_zeroed_need_not_move() -> None:
    assert far_off(EDP, list(ZEROED.values())) == {}


REFUSED = {
    "BSM B": "experts have moved since the last step",
    "BSM S": "experts have moved since the last step",
    "BSM N": "experts have moved since the last step",
    "BSM d B": "experts have moved since the last step",
}
REFUSED_WITH_REPLICAS = {
    "H x S": "call balancer.reduce_gradients() first",
    "H d B": "call balancer.reduce_gradients() first",
    "G": "come home in .grad alone; call backward()",
    "u": "name all of a layer",
    "wWb": "experts changed places, or copies ended, between a forward and its backward pass",
    "wXb": "experts changed places, or copies ended, between a forward and its backward pass",
}
REFUSED_WITH_SLICES = {"qM": "between a backward pass and the optimizer's step"}
REFUSALS = [(EDP, REFUSED), (Layout(2, slots=1), REFUSED_WITH_REPLICAS), (SLICES, REFUSED_WITH_SLICES)]


def refused(rank: int, layout: Layout, scripts: Iterable[str]) -> list[str]:
    job, said = Spread(rank, layout), []
    for script in scripts:
        said.append(said_by(lambda script=script: job.run(script)))
        if "X" not in script:
            job.run("BS")
    job.balancer.close()
    return said


@pytest.mark.parametrize(("layout", "scripts"), REFUSALS, ids=["homes", "replicas", "slices"])
def test_gradients_that_nobody_can_tell_are_refused_in_one_line_on_all_ranks(layout: Layout, scripts: dict) -> None:
    first, *others = run_ranks(layout.ranks, refused, layout, list(scripts))
    assert all(other == first for other in others)
    for said, expected in zip(first, scripts.values(), strict=True):
        assert expected in said and "\n" not in said


NORMS = (1, 2, 3.0, math.inf)


class Gained(nn.Module):
    """Experts with a parameter of one number each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(8, EXPERTS)
        self.phase = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128))
        self.experts = nn.Module()
        self.experts.up = nn.Parameter(torch.randn(EXPERTS, 8, 8))
        self.experts.gain = nn.Parameter(torch.randn(EXPERTS))
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        probabilities, ids = self.router(tokens).softmax(-1).topk(2)
        return self.mix(tokens=tokens, ids=ids, probabilities=probabilities)

    def mix(self, tokens: Tensor, ids: Tensor, probabilities: Tensor) -> Tensor:
        rows = torch.einsum("td,tkdf->tkf", tokens, self.experts.up[ids]) * self.experts.gain[ids].unsqueeze(-1)
        return (rows * probabilities.unsqueeze(-1)).sum(dim=1)


def compute_gained(rows: Tensor, counts: SlotCounts, weights: Mapping[str, Tensor]) -> Tensor:
    parts = rows.split(list(counts.known()))
    return torch.cat([part @ weights["up"][slot] * weights["gain"][slot] for slot, part in enumerate(parts)])


def gained(rank: int) -> list[float]:
    """Norms of all, one of the numbers alone, and those past what was clipped."""
    model = Gained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = eplb.BalancerConfig(interval=1000, dense_gradients="allreduce")
    layer = eplb.MoE("experts", run="mix", compute=compute_gained)
    balancer = eplb.attach(model, optimizer, layers=[layer], config=config)
    model.train()
    gained_loss(model, rank).backward()
    found = [balancer.clip_grad_norm_(1e9, None, p).item() for p in NORMS]
    found += [balancer.clip_grad_norm_(0.01, model.experts.gain).item()]
    with pytest.raises(ValueError, match="is no parameter of the attached model"):
        balancer.clip_grad_norm_(1.0, [torch.zeros(3)])
    found += [balancer.clip_grad_norm_(0.5, norm_type=p).item() for p in NORMS]
    optimizer.step()
    balancer.close()
    return found


def gained_loss(model: Gained, rank: int) -> Tensor:
    tokens = torch.randn(12, 8, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return model(tokens).square().mean() * model.phase.abs().sum()


@pytest.mark.long
def test_experts_of_one_number_are_clipped() -> None:
    model = Gained()
    (sum(gained_loss(model, rank) for rank in range(2)) / 2).backward()
    clip = nn.utils.clip_grad_norm_
    expected = [clip(model.parameters(), 1e9, p) for p in NORMS] + [clip(model.experts.gain, 0.01)]
    expected += [clip(model.parameters(), 0.5, p) for p in NORMS]
    for found in run_ranks(2, gained):
        assert found == pytest.approx([norm.item() for norm in expected], rel=1e-9)


ANY = {"EP 2 with copies": Layout(2, 1, slots=1), "EDP 2, no divisor": Layout(1, 2, divisor=1)}


@pytest.mark.parametrize("layout", ANY)
def test_any_loop_trains_as_one_process(layout: str) -> None:
    assert far_off(ANY[layout], any_scripts(ANY[layout].ranks, count=6)) == {}
