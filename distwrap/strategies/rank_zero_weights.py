"""Rank 0's weights on every rank, as DDP gives them when it is built."""

from torch import nn

from distwrap.group.collectives import broadcast


def take_rank_zero_weights(model: nn.Module) -> None:
    """Give every rank rank 0's weights and buffers, one tensor at a time; every rank calls it."""
    for tensor in {id(value): value for value in (*model.parameters(), *model.buffers())}.values():
        tensor.data.copy_(broadcast(tensor.data))
