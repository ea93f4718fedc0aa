"""What is sent in a step, by our count; tests/clusters/test_bytes.py holds it against the kernel's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distwrap import wrap_model, wrap_optimizer
from distwrap.comm import traffic
from distwrap.testing import run_ranks
from tests.slow import nightly

# Of the bytes of an all-reduce of all gradients in float32: at least, and at most.
GRADIENTS = {
    "allreduce": (1.0, 1.0),
    "fp16": (0.4999, 0.5001),
    "bf16": (0.4999, 0.5001),
    "bytegrad": (0.2475, 0.2525),
    "bytegrad(error_feedback=True)": (0.2475, 0.2525),
    "qadam(warmup_steps=1)": (0.2475, 0.2525),
    "qadam(warmup_steps=1, bits=1)": (0.03, 0.04),
    "powersgd": (0.005, 0.05),
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(500, 1000), nn.ReLU(), nn.Linear(1000, 501))


def _bytes_of_the_last_steps(comms: list[str], steps: int) -> dict[str, float]:
    return {comm: _bytes_of_a_step(comm, steps) for comm in comms}


def _bytes_of_a_step(comm: str, steps: int) -> float:
    model = wrap_model(net(), comm=comm)
    optimizer = wrap_optimizer(torch.optim.Adam(model.parameters()), model)
    before = 0
    for step in range(1 + steps):
        optimizer.zero_grad()
        model(torch.ones(1, 500)).sum().backward()
        optimizer.step()
        before = before if step else traffic(model).sent
    return (traffic(model).sent - before) / steps


# Of a step and weight, for four ranks.
WEIGHTS = {
    "local_sgd(sync_every=4)": 2 * 3 / 4 * 4 / 4,
    "diloco(sync_every=4)": 2 * 3 / 4 * 4 / 4,
    "diloco(sync_every=4, compression='8bit')": 2 * 3 / 4 / 4,
    "decentralized(peer_selection='shift_one')": 4,
    "low_precision_decentralized": 2,
}


@pytest.mark.parametrize("ranks", [2, nightly(4, row="products", why="two ranks show it")])
@pytest.mark.slow("runs all algorithms in turns")
def test_gradients(ranks: int) -> None:
    """Each rank sends its share in each step, under every algorithm."""
    full = 2 * (ranks - 1) / ranks * 4 * sum(parameter.numel() for parameter in net().parameters())
    for sent in run_ranks(_bytes_of_the_last_steps, ranks, list(GRADIENTS), 2):
        for comm, (low, high) in GRADIENTS.items():
            assert low * full - 64 <= sent[comm] <= high * full + 64, (comm, sent[comm] / full)


def test_topk_sends_its_part_to_every_other_rank() -> None:
    """Positions and values of its largest gradients."""
    count, comm = sum(parameter.numel() for parameter in net().parameters()), "topk(ratio=0.01)"
    for sent in run_ranks(_bytes_of_the_last_steps, 3, [comm], 2):
        assert sent[comm] == pytest.approx(2 * 8 * 0.01 * count, rel=0.01)


@pytest.mark.slow("runs all algorithms in turns")
def test_weights() -> None:
    """A step's share is as predicted; the last exchange may still be on its way, and is not counted then."""
    count = sum(parameter.numel() for parameter in net().parameters())
    for sent in run_ranks(_bytes_of_the_last_steps, 4, list(WEIGHTS), 12):
        for comm, bytes_a_weight in WEIGHTS.items():
            assert sent[comm] == pytest.approx(bytes_a_weight * count, rel=0.1), comm
