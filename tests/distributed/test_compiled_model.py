"""A model that is compiled as a whole trains to the same bits: what runs around its forward is not traced."""

from __future__ import annotations

import torch
from moe_models import batch_of, make_model
from ranks import run_ranks

import eplb_runtime as eplb


def losses(rank: int, compiled: bool) -> list[float]:
    model = make_model("olmoe", layers=1)
    optimizer = torch.optim.AdamW(model.parameters())
    balancer = eplb.attach(model, optimizer, config=eplb.BalancerConfig(dense_gradients="allreduce"))
    model.train()
    if compiled:
        model.compile(backend="eager")
    found = []
    for step in range(2):
        ids = batch_of(rank, step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    balancer.close()
    return found


def test_a_compiled_model_trains_as_the_plain_one() -> None:
    assert run_ranks(2, losses, True) == run_ranks(2, losses, False)
