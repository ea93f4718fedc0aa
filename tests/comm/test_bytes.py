"""What is sent in a step, by our count; tests/clusters/test_bytes.py holds it against the kernel's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distwrap import wrap_model, wrap_optimizer
from distwrap.comm import traffic
from distwrap.testing import run_ranks

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


def _bytes_of_the_last_steps(comm: str, steps: int) -> float:
    model = wrap_model(net(), comm=comm)
    optimizer = wrap_optimizer(torch.optim.Adam(model.parameters()), model)
    before = 0
    for step in range(1 + steps):
        optimizer.zero_grad()
        model(torch.ones(1, 500)).sum().backward()
        optimizer.step()
        before = before if step else traffic(model).sent
    return (traffic(model).sent - before) / steps


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("comm", GRADIENTS)
def test_gradients(comm: str, ranks: int) -> None:
    """Of each rank, in each step."""
    full = 2 * (ranks - 1) / ranks * 4 * sum(parameter.numel() for parameter in net().parameters())
    low, high = GRADIENTS[comm]
    for sent in run_ranks(_bytes_of_the_last_steps, ranks, comm, 2):
        assert low * full - 64 <= sent <= high * full + 64, sent / full


def test_topk_sends_its_part_to_every_other_rank() -> None:
    count = sum(parameter.numel() for parameter in net().parameters())
    for sent in run_ranks(_bytes_of_the_last_steps, 3, "topk(ratio=0.01)", 2):
        assert sent == pytest.approx(2 * 8 * 0.01 * count, rel=0.01)


@pytest.mark.parametrize(
    ("comm", "bytes_a_weight"),
    [
        ("local_sgd(sync_every=4)", 2 * 3 / 4 * 4 / 4),
        ("diloco(sync_every=4)", 2 * 3 / 4 * 4 / 4),
        ("diloco(sync_every=4, compression='8bit')", 2 * 3 / 4 / 4),
        ("decentralized(peer_selection='shift_one')", 4),
        ("low_precision_decentralized", 2),
    ],
)
def test_weights(comm: str, bytes_a_weight: float) -> None:
    """A step's share, of four ranks; of what travels during the next step the last may be missing."""
    count = sum(parameter.numel() for parameter in net().parameters())
    for sent in run_ranks(_bytes_of_the_last_steps, 4, comm, 12):
        assert sent == pytest.approx(bytes_a_weight * count, rel=0.1)
