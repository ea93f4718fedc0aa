"""Copy rank 0's weights to every rank, as DDP does when it is built."""

from torch import nn

from distwrap.group.collectives import broadcast


def take_rank_zero_weights(model: nn.Module) -> None:
    """Copy rank 0's weights and buffers to every rank, one tensor at a time; every rank calls it."""
    for tensor in {id(value): value for value in (*model.parameters(), *model.buffers())}.values():
        tensor.data.copy_(broadcast(tensor.data))
