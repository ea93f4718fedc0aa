"""Parameters that a strategy has exchanged are put back as they were."""

import torch
from torch import nn

from distwrap.strategies.parameter_swap import ParameterSwap


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight


def test_weights_that_came_without_numbers_stay_tied() -> None:
    """A model out of init_empty() that is given back has one parameter where it had one."""
    with torch.device("meta"):
        net = Tied()
    before = dict(net.named_parameters(remove_duplicate=False))
    net.first.weight = net.last.weight = nn.Parameter(torch.ones(3, 3))
    swap = ParameterSwap(before, net)
    swap.undo(net.state_dict())
    assert net.first.weight is net.last.weight
    assert not net.first.weight.is_meta
