"""The state that a rank which comes back takes over is the same, in whatever order a rank's objects were made."""

from __future__ import annotations

import torch
from torch import nn

from distwrap.strategies.torchft.state import TrainingState


def state(first: int) -> TrainingState:
    """Return the state of a model of two layers with an optimizer each; that of the layer `first` was made first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    made = {number: torch.optim.SGD(model[number].parameters(), lr=0.1 * number + 0.1) for number in (first, 1 - first)}
    found = TrainingState()
    found.models.append(model)
    model.optimizers = [made[number] for number in range(2)]  # type: ignore[assignment]
    return found


def test_the_order_in_which_optimizers_were_made() -> None:
    """Two ranks with the same weights and learning rates have the same fingerprint and the same names."""
    one, other = state(0), state(1)
    assert one.fingerprint() == other.fingerprint()
    assert list(one.things()["optimizers"]) == list(other.things()["optimizers"]) != []
