"""A loop as a script of letters, run by the ranks of a layout and by one process that has all their batches: what one
process computes is right, to the rounding of float64."""

from __future__ import annotations

import os
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from support.moe_models import batch_of, make_model
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import eplb_runtime as eplb

from . import training
from .shuffle import plan_by, plan_shuffle

EXPERTS = 8
TOLERANCE = 1e-9
"""Of weights and norms near 1; what is reduced twice is off by more than 1e-5."""


@dataclass(frozen=True)
class Layout:
    """How experts lie, and what model they are of.

    Args:
        ep: ranks among which they are spread.
        edp: ranks that hold the same.
        slots: replica slots of each rank, which hold from the beginning the first experts that are not at home there.
        sliced: each EDP rank has a slice of every expert, by `fully_shard`.
        frozen: parameters whose names contain one of these are not trained.
        policy: of mixed precision, where experts are sliced.
        ranks_per_node: of the tree by which replicas travel.
    """

    ep: int
    edp: int = 1
    divisor: int | None = None
    slots: int = 0
    family: str = "olmoe"
    sliced: bool = False
    frozen: tuple[str, ...] = ()
    policy: MixedPrecisionPolicy | None = None
    ranks_per_node: int = 0

    @property
    def ranks(self) -> int:
        return self.ep * self.edp

    def ranks_of(self, rank: int) -> eplb.hosts.Ranks:
        first = rank // self.ep * self.ep
        return eplb.hosts.Ranks(ep=tuple(range(first, first + self.ep)), gradient_divisor=self.divisor)

    def placement(self) -> eplb.Placement:
        plain = eplb.Placement.initial(2, EXPERTS, self.ep, self.slots)
        slots = plain.physical_to_logical.reshape(2, self.ep, -1).copy()
        homes = EXPERTS // self.ep
        for rank in range(self.ep):
            away = [expert for expert in range(EXPERTS) if expert // homes != rank]
            slots[:, rank, homes:] = away[: self.slots]
        return eplb.Placement(slots.reshape(2, -1), EXPERTS, self.ep, plain.home)


class Whole:
    """The model in one process, on all ranks' batches; its steps are words of one letter."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.of = list(range(layout.ranks))
        self.scale = 1 / (layout.divisor or layout.ranks)
        self.model = make_model(layout.family, experts=EXPERTS, width=16).double().train()
        self.model.set_experts_implementation("eager")
        self.model.temperature = nn.Parameter(torch.ones(1, dtype=torch.float64))
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in layout.frozen))
        self.extra = nn.Parameter(torch.full((16,), 0.1, dtype=torch.float64))
        self.batch = 0
        self.sums: dict[Tensor, Tensor] = {}
        self.losses: list[tuple[Tensor, Tensor]] = []
        self.norms: list[float] = []

    def begin(self) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.5)

    def run(self, script: str) -> list[float]:
        """A script, from gradients of nothing on."""
        self.optimizer.zero_grad()
        self.norms = []
        for letter in script.replace(" ", ""):
            getattr(self, WORDS[letter])()
        return self.norms

    def loss(self, rank: int, batch: int) -> tuple[Tensor, Tensor]:
        ids = batch_of(rank, batch)[:2, :6]
        out = self.model(input_ids=ids, labels=ids, output_hidden_states=True)
        second = out.logits.square().mean() + (out.hidden_states[-1] * self.extra).mean()
        return out.loss * self.model.temperature.sigmoid().sum(), second

    def forward(self) -> None:
        """Of the next batch."""
        self.losses = [self.loss(rank, self.batch) for rank in self.of]
        self.batch += 1

    def backward_of_it(self, **options: Any) -> None:
        for first, _ in self.losses:
            (first * self.scale).backward(retain_graph=True, **options)

    def backward(self, **options: Any) -> None:
        """A forward of the next batch, and the backward of its loss."""
        self.forward()
        self.backward_of_it(**options)

    def backward_of_two(self) -> None:
        """Two forwards, and one backward of their sum."""
        for rank in self.of:
            losses = [self.loss(rank, self.batch + number)[0] for number in range(2)]
            (sum(losses) * self.scale).backward()
        self.batch += 2

    def backwards_in_turn(self) -> None:
        """Two forwards, and then a backward of each."""
        for rank in self.of:
            for loss, _ in [self.loss(rank, self.batch + number) for number in range(2)]:
                (loss * self.scale).backward()
        self.batch += 2

    def with_inputs_named(self) -> None:
        self.backward(inputs=[p for p in self.model.parameters() if p.requires_grad])

    def of_one_expert_tensor(self) -> None:
        self.backward(inputs=[self.model.model.layers[0].mlp.experts.down_proj])

    def without_experts(self) -> None:
        """A backward pass that is told to leave experts out."""
        self.backward(inputs=[p for n, p in self.model.named_parameters() if ".experts." not in n])

    def gradient_of_embeddings(self) -> None:
        """Which leaves nothing in the parameters."""
        for rank in self.of:
            ids = batch_of(rank, self.batch)[:2, :6]
            embedded = self.model.get_input_embeddings()(ids).detach().requires_grad_()
            loss = self.model(inputs_embeds=embedded, labels=ids).loss
            assert torch.autograd.grad(loss, [embedded])[0].any()

    def penalty(self) -> Tensor:
        return 0.1 * sum(p.square().sum() for p in self.model.parameters())  # type: ignore[return-value]

    def penalised(self) -> None:
        """A penalty on all parameters, in the loss."""
        self.forward()
        for first, _ in self.losses:
            ((first + self.penalty()) * self.scale).backward()

    def penalised_apart(self) -> None:
        """The same in a backward pass of its own."""
        self.backward()
        for _ in self.of:
            (self.penalty() * self.scale).backward()

    def head(self) -> None:
        """Something else that is computed with experts, whose gradient the loop adds."""
        parameter = self.model.model.layers[0].mlp.experts.down_proj
        for _ in self.of:
            (gradient,) = torch.autograd.grad(parameter.sin().sum() * self.scale, [parameter])
            parameter.grad += gradient

    def again(self) -> None:
        """The backward of another loss of the same forward."""
        for _, second in self.losses:
            (second * self.scale).backward(retain_graph=True)

    def held_back(self) -> None:
        with self.no_sync():
            self.backward()

    def held_back_by_fsdp(self) -> None:
        self.backward()

    def held_back_by_both(self) -> None:
        self.held_back()

    def no_sync(self):
        return nullcontext()

    def evaluate(self) -> None:
        pass

    def evaluate_in_inference_mode(self) -> None:
        pass

    def recompute(self) -> None:
        """From now on."""
        self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def take_state_anew(self) -> None:
        pass

    def move_by_a_state(self) -> None:
        pass

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

    def clipped_by_hand(self) -> None:
        nn.utils.clip_grad_norm_([p for n, p in self.model.named_parameters() if ".experts." in n], 1e-3)

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
            self.loss(rank, 1000 + self.batch)

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
    "2": "backward_of_two",
    "T": "backwards_in_turn",
    "w": "forward",
    "b": "backward_of_it",
    "u": "of_one_expert_tensor",
    "x": "clipped_by_hand",
    "W": "move_by_a_state",
    "i": "with_inputs_named",
    "I": "without_experts",
    "y": "gradient_of_embeddings",
    "J": "penalised",
    "j": "penalised_apart",
    "g": "head",
    "q": "held_back_by_fsdp",
    "Q": "held_back_by_both",
    "E": "evaluate",
    "e": "evaluate_in_inference_mode",
    "c": "recompute",
    "O": "take_state_anew",
    "B": "backward",
    "A": "again",
    "D": "interrupted",
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
        settings = {"interval": 1000, "gate": "always", "replica_slots": layout.slots, **settings}
        if layout.slots:
            settings["initial_placement"] = layout.placement()
        where: dict[str, Any] = {"ranks": layout.ranks_of(rank)}
        if layout.sliced:
            where = {"ep_group": training.meshes(layout.ep, layout.edp)[0]["ep"].get_group()}
            settings["dense_gradients"] = "host"
            options = {"mp_policy": layout.policy} if layout.policy else {}
            training.shard(self.model, layout.ep, layout.edp, options, **settings)
        if layout.ranks_per_node:
            os.environ["LOCAL_WORLD_SIZE"] = str(layout.ranks_per_node)
        self.begin()
        self.balancer = training.attach(self.model, self.optimizer, **where, **settings)
        plan_by(self.balancer, plan_shuffle)

    def interrupted(self) -> None:
        """The last layer's gradients of replicas are on their way, and the backward pass goes no further."""

        def interrupt(module: nn.Module, gradients: Any) -> None:
            raise KeyError("interrupted")

        with self.model.model.layers[0].register_full_backward_pre_hook(interrupt), suppress(KeyError):
            self.backward()
        self.zero()

    def no_sync(self):
        return self.balancer.no_sync()

    def held_back_by_fsdp(self) -> None:
        self.model.set_requires_gradient_sync(False)
        self.backward()
        self.model.set_requires_gradient_sync(True)

    def held_back_by_both(self) -> None:
        with self.no_sync():
            self.held_back_by_fsdp()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.loss(self.of[0], 2000 + self.batch)
        self.model.train()

    def evaluate_in_inference_mode(self) -> None:
        with torch.inference_mode():
            self.evaluate()

    def take_state_anew(self) -> None:
        """Weights and state go out and come back."""
        state = eplb.logical_state_dict(self.model, self.optimizer)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        eplb.load_logical_state_dict(self.model, self.optimizer, state)

    def move_by_a_state(self) -> None:
        plain = eplb.Placement.initial(2, EXPERTS, self.layout.ep, self.layout.slots)
        self.balancer.load_state_dict({"step": 0, "placement": plain.to_json()})

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
        if self.layout.sliced:
            state = eplb.logical_state_dict(self.model)
            return {name.removeprefix("model."): tensor for name, tensor in state.items()} | {"extra": self.extra}
        layers, gather = self.balancer.layer_of_parameter, self.balancer.gather_experts
        found = {n: gather(layers[n], p) if n in layers else p for n, p in self.model.named_parameters()}
        return {n: p.detach().clone() for n, p in {**found, "extra": self.extra}.items()}


def spread(rank: int, layout: Layout, scripts: list[str], settings: dict) -> list:
    job = Spread(rank, layout, **settings)
    found = []
    for script in scripts:
        assert not layout.slots or job.balancer.placement.copy_count.max() > 1
        found.append((job.run(script), job.weights()))
    job.balancer.close()
    return found


def far_off(layout: Layout, scripts: list[str], **settings: bool | str) -> dict[str, float]:
    """Scripts that run one after the other: after which of them weights or norms differ from one process's by more than
    rounding, and by how much."""
    results = run_ranks(layout.ranks, spread, layout, scripts, settings)
    whole, found = Whole(layout), {}
    whole.begin()
    for position, script in enumerate(scripts):
        norms, weights = whole.run(script), whole.weights()
        off = 0.0
        for norms_here, weights_here in (results[rank][position] for rank in range(layout.ranks)):
            off = max([off, *(abs(a - b) / max(1, b) for a, b in zip(norms_here, norms, strict=True))])
            off = max([off, *((weights_here[name] - weights[name]).abs().max().item() for name in weights)])
        if not off <= TOLERANCE:
            found[script] = off
    return found


def any_script(draw: Random, length: int) -> str:
    """Words in any order that a loop can have: another loss only of a forward with the weights as they are, steps of
    gradients that are there, moves between steps, of experts whose gradients are zeroed."""
    script, forward, gradients = "", False, False
    while len(script) < length or script[-1] not in "SM":
        words = "BBBHNCRhLVZz" + "AA" * forward + "SSS" * gradients
        word = draw.choice(words)
        word += "ZM" * (word == "S" and draw.random() < 0.5)
        script += word
        forward = word in "BH" or (forward and word[0] != "S")
        gradients = word in "BHA" or (gradients and word[-1] not in "ZM")
    return script


def any_scripts(seed: int, count: int) -> list[str]:
    draw = Random(seed)
    return [any_script(draw, draw.randint(3, 14)) for _ in range(count)]
