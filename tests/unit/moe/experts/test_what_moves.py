"""What belongs to an expert: parameters, optimizer state found through the optimizer, and their record on the wire."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from eplb_runtime.migration.exchange import formats_of
from eplb_runtime.moe.experts.optimizer_state import (
    OptimizerStateError,
    check_elementwise,
    expert_state,
    is_per_expert,
    replace_parameter,
)
from eplb_runtime.moe.experts.registry import ALIGNMENT, ExpertTensor, ExpertTensors, RecordFormat, why_not_written
from eplb_runtime.utils.checksums import as_bytes, checksum

ON_GPU = torch.cuda.is_available()
ELEMENT_WISE = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adagrad": {},
    "Adadelta": {},
    "Rprop": {},
    "ASGD": {},
}


def stepped(name: str, parameter: nn.Parameter) -> torch.optim.Optimizer:
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1, **ELEMENT_WISE.get(name, {}))
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_every_tensor_that_an_optimizer_keeps_per_element_is_found(name: str) -> None:
    parameter = nn.Parameter(torch.randn(4, 3, 5))
    optimizer = stepped(name, parameter)
    check_elementwise(optimizer)
    found = dict(expert_state(optimizer, parameter))
    kept = {k: v for k, v in optimizer.state[parameter].items() if isinstance(v, torch.Tensor) and v.numel() > 1}
    assert found.keys() == kept.keys()
    assert found
    assert all(found[key] is kept[key] for key in kept), "state must be written in place"


class Steps(torch.optim.Optimizer):
    """Gradient descent by ``change``."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.change(parameter, group), alpha=group["lr"])

    def change(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        return parameter.grad


class PerTensorTrust(Steps):
    """As LAMB does: the step is scaled by norms over the whole tensor."""

    def change(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        return parameter.norm() / parameter.grad.norm() * parameter.grad


class OneNorm(Steps):
    """The step is scaled by a norm over all tensors."""

    def change(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        norms = [one.grad.norm() for of in self.param_groups for one in of["params"]]
        return parameter.grad / torch.stack(norms).norm()


def test_an_optimizer_is_judged_by_what_it_does_and_not_by_its_name() -> None:
    import transformers

    parameters = [nn.Parameter(torch.randn(4, 3, 5))]
    for mixing in (PerTensorTrust(parameters, lr=0.1), transformers.Adafactor(parameters)):
        with pytest.raises(OptimizerStateError, match="mixes the experts"):
            check_elementwise(mixing)


def test_an_optimizer_that_cannot_be_tried_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    muon = torch.optim.Muon([nn.Parameter(torch.randn(4, 3))])
    muon.param_groups[0]["params"] = [nn.Parameter(torch.randn(4, 3, 5))]
    check_elementwise(muon)
    assert ["Muon cannot be tried" in record.getMessage() for record in caplog.records] == [True]


def test_experts_that_are_matrices_of_their_own_are_tried_so(caplog: pytest.LogCaptureFixture) -> None:
    parameters = [nn.Parameter(torch.randn(4, 3)) for _ in range(2)]
    for optimizer in (torch.optim.Muon(parameters), torch.optim.AdamW(parameters), PerTensorTrust(parameters, lr=0.1)):
        check_elementwise(optimizer, each=True)
    assert not caplog.records
    with pytest.raises(OptimizerStateError, match="mixes the experts of a rank"):
        check_elementwise(OneNorm(parameters, lr=0.1), each=True)


def test_state_of_another_shape_is_refused() -> None:
    parameter = nn.Parameter(torch.randn(4, 3, 5))
    with pytest.raises(OptimizerStateError, match="cannot be split by expert"):
        is_per_expert("odd", torch.zeros(7), parameter)
    assert not is_per_expert("step", torch.tensor(3.0), parameter)


class KeepsAList(Steps):
    """As optimizers with a history of gradients do, or with one preconditioner for each dimension."""

    def change(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        kept = self.state[parameter].setdefault("history", {"last": [torch.zeros_like(parameter)]})
        before, kept["last"][0] = kept["last"][0], parameter.grad.clone()
        return before + parameter.grad


def test_state_inside_of_containers_is_refused_because_it_would_stay_behind() -> None:
    parameter = nn.Parameter(torch.randn(4, 3))
    optimizer = KeepsAList([parameter], lr=0.1)
    with pytest.raises(OptimizerStateError, match="'history' is a dict that holds tensors"):
        check_elementwise(optimizer)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(OptimizerStateError, match="would stay behind"):
        expert_state(optimizer, parameter)
    assert not is_per_expert("betas", (0.9, 0.99), parameter)


def test_a_replaced_parameter_keeps_group_options_and_its_rows_of_state() -> None:
    one, other = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2))
    optimizer = torch.optim.AdamW([{"params": [other]}, {"params": [one], "lr": 0.7}], lr=0.1)
    one.grad, other.grad = torch.randn(4, 3), torch.randn(2)
    optimizer.step()
    momentum = optimizer.state[one]["exp_avg"].clone()
    local = nn.Parameter(one.detach()[[3, 1]])
    replace_parameter(optimizer, one, local, lambda tensor: tensor[[3, 1]])
    assert optimizer.param_groups[1]["params"] == [local]
    assert optimizer.param_groups[1]["lr"] == 0.7
    assert torch.equal(optimizer.state[local]["exp_avg"], momentum[[3, 1]])
    assert one not in optimizer.state
    with pytest.raises(OptimizerStateError, match="does not hold"):
        replace_parameter(optimizer, one, local, lambda tensor: tensor)


def test_tensors_that_no_expert_could_be_written_into_are_refused_before_ranks_agree() -> None:
    with torch.inference_mode():
        of_inference = torch.zeros(4, 3)
    for tensor, why in ((of_inference, "inference_mode"), (torch.zeros(4, 1).expand(4, 3), "share memory")):
        registry = ExpertTensors(1, 4)
        registry.add(0, "w", torch.zeros(4, 3))
        assert formats_of(registry, [0])[1] == ""
        registry.add(0, "average", tensor, "buffer")
        assert why in formats_of(registry, [0])[1] and why in why_not_written(tensor)
    assert not why_not_written(torch.zeros(1, 3).expand(1, 3)) and not why_not_written(torch.zeros(3, 4).T)


def test_memory_that_has_two_names_moves_once() -> None:
    parameter = nn.Parameter(torch.randn(4, 3, 5))
    optimizer = stepped("SGD", parameter)
    kept = {
        "master": parameter.detach().float(),
        "flat": parameter.detach().view(4, 15, 1),
        "own": torch.zeros(4, 3, 5),
    }
    kept |= {"column": kept["own"][:, :, :1], "same column": kept["own"][:, :, :1], "none": torch.zeros(4, 0, 1)}
    optimizer.state[parameter] = {**kept, "none either": torch.zeros(4, 0, 1)}
    registry = ExpertTensors(1, 4, [optimizer])
    registry.add(0, "w", parameter)
    assert [t.name for t in registry.of_home(0)] == ["w", "w/column", "w/none", "w/none either", "w/own"]


def left_behind() -> tuple[ExpertTensors, nn.Parameter]:
    """A parameter with a gradient, whose experts have moved."""
    parameter = nn.Parameter(torch.zeros(3, 2))
    parameter.grad = torch.ones(3, 2)
    registry = ExpertTensors(1, 3)
    registry.add(0, "w", parameter)
    registry.mark_gradients_stale(0)
    return registry, parameter


def test_gradients_left_behind_may_be_zeroed_but_not_used() -> None:
    registry, parameter = left_behind()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the gradient of w is still that of the experts that were"):
            registry.check_no_stale_gradients()
    parameter.grad.mul_(0.5)
    with pytest.raises(RuntimeError, match="is still that of"):
        registry.check_no_stale_gradients(parameter)
    parameter.grad.zero_()
    registry.check_no_stale_gradients(parameter)
    parameter.grad.add_(1)
    registry.check_no_stale_gradients(parameter)
    registry, parameter = left_behind()
    parameter.grad = torch.ones(3, 2)
    registry.check_no_stale_gradients()
    assert not registry.has_left_behind


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]


def layout_of(device: str) -> tuple[RecordFormat, list[torch.Tensor]]:
    tensors = [torch.randint(0, 100, (3, 5, 7)).to(device, dtype) for dtype in DTYPES]
    tensors += [torch.randn(3, device=device), torch.randn(3, 600, 1000, device=device)]
    named = [ExpertTensor(f"t{i}", tensor, "buffer") for i, tensor in enumerate(tensors)]
    return RecordFormat(tuple(named)), tensors


@pytest.mark.parametrize(("device", "by"), [("cpu", "cpu"), *[("cuda", "cpu"), ("cuda", "cuda")] * ON_GPU])
def test_a_record_carries_every_bit_of_every_dtype(device: str, by: str) -> None:
    """By a GPU's memory, and by pinned memory of the host's."""
    record_format, tensors = layout_of(device)
    before, addresses = [tensor.clone() for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
    record = torch.zeros(record_format.nbytes, dtype=torch.uint8, device=by, pin_memory=device != by)
    record_format.row(2).pack(record)
    record_format.row(0).unpack(record)
    for old, new in zip(before, tensors, strict=True):
        assert torch.equal(as_bytes(new[0]), as_bytes(old[2]))
        assert torch.equal(as_bytes(new[1:]), as_bytes(old[1:])), "another expert's row was touched"
    assert all(shard.offset % ALIGNMENT == 0 for shard in record_format.row(0).shards)
    assert [tensor.data_ptr() for tensor in tensors] == addresses


@pytest.mark.parametrize("device", ["cpu", *["cuda"] * ON_GPU])
def test_a_checksum_notices_every_single_bit(device: str) -> None:
    data = torch.randint(0, 256, (100,), dtype=torch.uint8, device=device)
    whole = checksum([data[:60], data[60:]])
    for position in range(100):
        for bit in range(8):
            changed = data.clone()
            changed[position] ^= 1 << bit
            assert checksum([changed[:60], changed[60:]]) != whole


def test_weights_that_are_emptied_between_phases_do_not_move_as_nothing() -> None:
    registry, weights = ExpertTensors(1, 4), nn.Parameter(torch.zeros(4, 3))
    rows = tuple(nn.Parameter(torch.zeros(3)) for _ in range(4))
    registry.add(0, "w", weights)
    registry.add(0, "of_slots", rows)
    assert formats_of(registry, [0])[1] == ""
    for freed in (weights, rows[2]):
        kept, freed.data = freed.data, torch.empty(0)
        found, problem = formats_of(registry, [0])
        assert not found and problem
        freed.data = kept
    rows[2].data = torch.empty(0)
    assert "of_slots: its memory is freed" in formats_of(registry, [0])[1]


# -- Optimizers as they are tried at attach: those of their own groups that hold experts, with their options


class MixesIn(Steps):
    """A group that says so."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, mixes: bool = False) -> None:
        super().__init__(params, lr, mixes=mixes)

    def change(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        return parameter.grad / parameter.grad.norm() if group["mixes"] else parameter.grad


class Inside(Steps):
    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.inner = torch.optim.Adam(self.param_groups)


class Rounds(Steps):
    def change(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        return parameter.grad + 1e-3 * torch.randn_like(parameter)


def experts() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0)))


def test_an_optimizer_is_tried_with_the_options_of_the_groups_that_hold_experts() -> None:
    dense, one = nn.Parameter(torch.randn(4, 3)), experts()
    apart = MixesIn([{"params": [dense], "mixes": True}, {"params": [one]}])
    check_elementwise(apart, {id(one)})
    for mixing in (MixesIn([{"params": [dense]}, {"params": [one], "mixes": True}]), MixesIn([one], mixes=True)):
        with pytest.raises(OptimizerStateError, match="MixesIn mixes the experts"):
            check_elementwise(mixing, {id(one)})
    check_elementwise(torch.optim.Adafactor([dense]), {id(one)})


def test_an_optimizer_that_draws_random_numbers_is_warned_of_and_leaves_them_as_they_were(
    caplog: pytest.LogCaptureFixture,
) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]  # noqa: NPY002
    check_elementwise(Rounds([experts()]))
    assert ["it draws random numbers" in record.getMessage() for record in caplog.records] == [True]
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.parametrize("lr", [1e-2, 1e-9])
def test_optimizers_of_torch_that_mix_experts_are_refused_however_small_their_steps(lr: float) -> None:
    check_elementwise(torch.optim.AdamW([experts()], lr=lr))
    biases = nn.Parameter(torch.randn(4, 3))  # of experts in one matrix
    for mixing in (torch.optim.Adafactor([experts()], lr=lr), torch.optim.Muon([biases], lr=lr)):
        with pytest.raises(OptimizerStateError, match="mixes the experts"):
            check_elementwise(mixing)


def test_an_optimizer_around_another_is_refused_unless_they_share_their_state() -> None:
    with pytest.raises(OptimizerStateError, match=r"Inside\.inner is a Adam with a state of its own"):
        check_elementwise(Inside([experts()]))
    shared = Inside([experts()])
    shared.inner.state = shared.state
    check_elementwise(shared)
