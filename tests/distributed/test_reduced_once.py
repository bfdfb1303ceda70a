"""Each contribution to a gradient is reduced once, whatever a loop does between backward passes and steps: looks at the
norm, clips, reduces, goes on adding, never zeroes. Right is what one process computes, to the rounding of float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from random import Random

import pytest
import torch
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from support.shuffle import plan_by, plan_shuffle
from torch import Tensor, nn

import eplb_runtime as eplb
from eplb_runtime.moe.experts.compute import SlotCounts

EXPERTS = 6
TOLERANCE = 1e-9
"""Of weights and norms near 1; what is reduced twice is off by more than 1e-5."""


@dataclass(frozen=True)
class Layout:
    """How experts lie: ``ep`` ranks among which they are spread, ``edp`` that hold the same."""

    ep: int
    edp: int
    divisor: int | None = None
    slots: int = 0

    @property
    def ranks(self) -> int:
        return self.ep * self.edp

    def ranks_of(self, rank: int) -> eplb.hosts.Ranks:
        first = rank // self.ep * self.ep
        return eplb.hosts.Ranks(ep=tuple(range(first, first + self.ep)), gradient_divisor=self.divisor)


class Whole:
    """The model in one process, on all ranks' batches; its steps are words of one letter."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.of = list(range(layout.ranks))
        self.scale = 1 / (layout.divisor or layout.ranks)
        self.model = make_model("olmoe", experts=EXPERTS, width=16).double()
        self.model.set_experts_implementation("eager")
        self.model.temperature = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.extra = nn.Parameter(torch.full((16,), 0.1, dtype=torch.float64))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.5)
        self.batch = 0
        self.sums: dict[Tensor, Tensor] = {}
        self.losses: list[tuple[Tensor, Tensor]] = []

    def run(self, script: str) -> list[float]:
        """A script, from gradients of nothing on."""
        self.optimizer.zero_grad()
        self.norms = []
        for letter in script.replace(" ", ""):
            getattr(self, WORDS[letter])()
        return self.norms

    def backward(self) -> None:
        """A forward of the next batch, and the backward of its loss."""
        self.losses = []
        for rank in self.of:
            ids = batch_of(rank, self.batch)[:2, :6]
            out = self.model(input_ids=ids, labels=ids, output_hidden_states=True)
            second = out.logits.square().mean() + (out.hidden_states[-1] * self.extra).mean()
            self.losses.append((out.loss * self.model.temperature.sigmoid().sum(), second))
        self.batch += 1
        for first, _ in self.losses:
            (first * self.scale).backward(retain_graph=True)

    def again(self) -> None:
        """The backward of another loss of the same forward."""
        for _, second in self.losses:
            (second * self.scale).backward(retain_graph=True)

    def held_back(self) -> None:
        with self.no_sync():
            self.backward()

    def no_sync(self):
        return nullcontext()

    def look(self) -> None:
        self.norms.append(self.clip(1e9))

    def clipped(self) -> None:
        self.norms.append(self.clip(0.3))

    def clip(self, most: float, chosen: tuple[str, ...] = ("",)) -> float:
        """Those whose names end in this."""
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        named = [*self.model.named_parameters(), ("extra", self.extra)]
        return self.clip_all([p for name, p in named if name.endswith(chosen) and id(p) in held], most)

    def clip_all(self, parameters: list[nn.Parameter], most: float) -> float:
        return nn.utils.clip_grad_norm_(parameters, most).item()

    def clipped_layer(self) -> None:
        self.norms.append(self.clip(0.05, ("1.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj", "lm_head.weight")))

    def clipped_alone(self) -> None:
        """Each of these by itself."""
        for name in ("0.mlp.experts.down_proj", "1.mlp.experts.down_proj", "0.self_attn.q_proj.weight"):
            self.norms.append(self.clip(0.01, (name,)))

    def clipped_by_value(self) -> None:
        self.reduce()
        nn.utils.clip_grad_value_([*self.model.parameters(), self.extra], 0.003)

    def summed_by_hand(self) -> None:
        """A forward and its backward, whose gradients go to the loop's own sums."""
        self.backward()
        for parameter in [*self.model.parameters(), self.extra]:
            if parameter.grad is not None:
                before = self.sums.get(parameter, 0)
                self.sums[parameter], parameter.grad = before + parameter.grad, None

    def by_autograd_grad(self) -> None:
        """What `torch.autograd.grad` gives, added by the loop to what is there."""
        for rank in self.of:
            ids = batch_of(rank, self.batch)[:2, :6]
            loss = self.model(input_ids=ids, labels=ids).loss * self.scale
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            for parameter, gradient in zip(
                parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True
            ):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self.batch += 1

    def put_aside(self) -> None:
        """What is there, as it is."""
        parameters = [*self.model.parameters(), self.extra]
        self.sums = {parameter: parameter.grad.clone() for parameter in parameters if parameter.grad is not None}

    def write_sums(self) -> None:
        for parameter, total in self.sums.items():
            parameter.grad = total
        self.sums = {}

    def reduced_and_summed(self) -> None:
        self.backward()
        self.reduce()
        for parameter in [*self.model.parameters(), self.extra]:
            if parameter.grad is not None:
                before = self.sums.get(parameter, 0)
                self.sums[parameter] = before + parameter.grad
        self.optimizer.zero_grad()

    def write_sums_in_place(self) -> None:
        """Over the gradients of the last backward pass."""
        for parameter, total in self.sums.items():
            parameter.grad.copy_(total)
        self.sums = {}

    def reduce(self) -> None:
        pass

    def halve(self) -> None:
        """By hand, on all ranks alike."""
        self.reduce()
        self.decay()

    def decay(self) -> None:
        """By hand, what a step has left."""
        for parameter in [*self.model.parameters(), self.extra]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def zero(self) -> None:
        self.optimizer.zero_grad()

    def zero_in_place(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def step(self) -> None:
        self.optimizer.step()

    def step_by_closure(self) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            self.backward()
            return self.losses[0][0]

        self.optimizer.step(closure)

    def forward_alone(self) -> None:
        """Of a batch whose loss nobody looks at."""
        for rank in self.of:
            self.model(input_ids=batch_of(rank, 1000 + self.batch)[:2, :6])

    def close(self) -> None:
        pass

    def add(self) -> None:
        if len(self.optimizer.param_groups) == 1:
            self.optimizer.add_param_group({"params": [self.extra], "lr": 0.05})

    def freeze(self) -> None:
        """Between a backward pass and the step."""
        for name, parameter in self.model.named_parameters():
            if name.endswith(("0.mlp.experts.down_proj", "1.self_attn.q_proj.weight")):
                parameter.requires_grad_(not parameter.requires_grad)

    def move(self) -> None:
        pass

    def weights(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in [*self.model.named_parameters(), ("extra", self.extra)]}


WORDS = {
    "B": "backward",
    "A": "again",
    "H": "held_back",
    "N": "look",
    "C": "clipped",
    "R": "reduce",
    "h": "halve",
    "d": "decay",
    "Z": "zero",
    "z": "zero_in_place",
    "S": "step",
    "K": "step_by_closure",
    "f": "forward_alone",
    "X": "close",
    "P": "add",
    "F": "freeze",
    "M": "move",
    "L": "clipped_layer",
    "1": "clipped_alone",
    "V": "clipped_by_value",
    "+": "summed_by_hand",
    "*": "reduced_and_summed",
    "G": "by_autograd_grad",
    "p": "put_aside",
    "=": "write_sums",
    "o": "write_sums_in_place",
}


class Spread(Whole):
    """The same on a rank of the layout."""

    def __init__(self, rank: int, layout: Layout, **settings: bool | str) -> None:
        super().__init__(layout)
        self.of, self.scale = [rank], 1.0
        self.balancer = training.attach(
            self.model,
            self.optimizer,
            ranks=layout.ranks_of(rank),
            interval=1000,
            gate="always",
            replica_slots=layout.slots,
            **settings,
        )
        plan_by(self.balancer, plan_shuffle)
        self.model.train()

    def no_sync(self):
        return self.balancer.no_sync()

    def clip_all(self, parameters: list[nn.Parameter], most: float) -> float:
        every = len(parameters) > 10
        return self.balancer.clip_grad_norm_(most, None if every else parameters).item()

    def reduce(self) -> None:
        self.balancer.reduce_gradients()

    def close(self) -> None:
        self.balancer.close()

    def move(self) -> None:
        self.balancer.declare(torch.ones(2, EXPERTS))
        assert self.balancer.rebalance() or self.layout.ep == 1

    def weights(self) -> dict[str, Tensor]:
        layers, gather = self.balancer.layer_of_parameter, self.balancer.gather_experts
        found = {n: gather(layers[n], p) if n in layers else p for n, p in self.model.named_parameters()}
        return {n: p.detach().clone() for n, p in {**found, "extra": self.extra}.items()}


def spread(rank: int, layout: Layout, scripts: list[str], settings: dict) -> list:
    job = Spread(rank, layout, **settings)
    found = [(job.run(script), job.weights()) for script in scripts]
    job.balancer.close()
    return found


def far_off(layout: Layout, scripts: list[str], **settings: bool | str) -> dict:
    """Scripts that run one after the other: after which of them weights or norms differ from one process's by more than
    rounding, and by how much."""
    results = run_ranks(layout.ranks, spread, layout, scripts, settings)
    whole, found = Whole(layout), {}
    for position, script in enumerate(scripts):
        norms, weights = whole.run(script), whole.weights()
        off = 0.0
        for norms_here, weights_here in (results[rank][position] for rank in range(layout.ranks)):
            off = max([off, *(abs(a - b) / max(1, b) for a, b in zip(norms_here, norms, strict=True))])
            off = max([off, *((weights_here[name] - weights[name]).abs().max().item() for name in weights)])
        if not off <= TOLERANCE:
            found[script] = off
    return found


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
    "stepped once more on zeros": "BS z S BS",
}
MOVED = {
    "never zeroed, and moved": "BSM BSM BNAS M BS",
    "zeroed each second step, and moved": "BSBS M Z BSM BS M z BS",
    "stepped twice, moved between": "BSMS Z BSMMS BS",
    "moved after a look": "BSM NBS",
}
ZEROED = {
    "zeroed before the move": "BSZM BS zM BS",
    "zeroed after the move": "BSM Z BS M z BS M z S BNS",
}
SCRIPTS = [*LOOPS.values(), *UNZEROED.values()]
EDP, ALONE = Layout(2, 2), Layout(2, 1, divisor=1)


@pytest.mark.parametrize(("layout", "scripts"), [(EDP, SCRIPTS[::3]), (ALONE, SCRIPTS)], ids=["EP 2 x EDP 2", "EP 2"])
def test_a_loop_that_looks_at_gradients_trains_as_one_process(layout: Layout, scripts: list[str]) -> None:
    assert far_off(layout, scripts) == {}


def test_gradients_move_along_with_experts() -> None:
    assert far_off(EDP, [*MOVED.values(), *ZEROED.values()], move_gradients=True) == {}


def test_the_guard_takes_no_sum_by_hand_for_clipping() -> None:
    """In the first steps, in which it raises."""
    assert far_off(Layout(2, 1), ["++ = S", "+++ = CS", "+ B o S", *PUT_ASIDE.values()]) == {}


def test_a_loop_goes_on_after_a_close_in_the_first_steps() -> None:
    assert far_off(EDP, ["BCS", "BCS X", "Z BCS Z BNAS"]) == {}


def test_gradients_that_are_zeroed_need_not_move() -> None:
    assert far_off(EDP, list(ZEROED.values())) == {}


REFUSED = {
    "BSM B": "experts have moved since the last step",
    "BSM S": "experts have moved since the last step",
    "BSM N": "experts have moved since the last step",
    "BSM d B": "experts have moved since the last step",
    "BS d S": "rewritten in place",
    "B p N Z = S": "was summed over ranks, and then replaced",
}


def refused(rank: int) -> list[str]:
    job, said = Spread(rank, EDP), []
    for script in REFUSED:
        try:
            job.run(script)
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
        job.run("BS")
    job.balancer.close()
    return said


def test_gradients_that_nobody_can_tell_are_refused_in_one_line_on_all_ranks() -> None:
    first, *others = run_ranks(4, refused)
    assert all(other == first for other in others)
    for said, expected in zip(first, REFUSED.values(), strict=True):
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


def test_experts_of_one_number_are_clipped() -> None:
    model = Gained()
    (sum(gained_loss(model, rank) for rank in range(2)) / 2).backward()
    clip = nn.utils.clip_grad_norm_
    expected = [clip(model.parameters(), 1e9, p) for p in NORMS] + [clip(model.experts.gain, 0.01)]
    expected += [clip(model.parameters(), 0.5, p) for p in NORMS]
    for found in run_ranks(2, gained):
        assert found == pytest.approx([norm.item() for norm in expected], rel=1e-9)


def any_script(draw: Random, length: int) -> str:
    """Words in any order that a loop can have: another loss only of a forward with the weights as they are, steps of
    gradients that are there, moves between steps."""
    script, forward, gradients, between = "", False, False, False
    while len(script) < length or not script.endswith("S"):
        words = "BBBHNCRhLVZz" + "AA" * forward + "SSS" * gradients + "M" * between
        word = draw.choice(words)
        script += word
        forward = word in "BH" or (forward and word != "S")
        gradients = word in "BHA" or (gradients and word != "Z")
        between = word == "S" or (between and word in "ZzM")
    return script


ANY = {"EP 2 with copies": Layout(2, 1, slots=1), "EDP 2, no divisor": Layout(1, 2, divisor=1)}


def any_scripts(seed: int, count: int) -> list[str]:
    draw = Random(seed)
    return [any_script(draw, draw.randint(3, 14)) for _ in range(count)]


@pytest.mark.parametrize("layout", ANY)
def test_any_loop_trains_as_one_process(layout: str) -> None:
    assert far_off(ANY[layout], any_scripts(ANY[layout].ranks, count=6), move_gradients=True) == {}
