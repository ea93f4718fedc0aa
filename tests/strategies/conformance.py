"""The matrix of the conformance suite: which strategy runs it, on how many ranks, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from distwrap import FSDPStrategy, Strategy, broadcast
from distwrap.group.world import Layout, World
from distwrap.strategies.base import Wrapping
from distwrap.strategies.ddp2 import DDP2Strategy
from tests.strategies.by_hand import ByHand


@dataclass(frozen=True)
class Cell:
    """One run of the suite.

    Attributes:
        name: of the cell, for the test.
        strategy: a name, or an object.
        nprocs: number of ranks.
        refuses: the behaviours that it refuses by name.
        slow: why it is for `make test-all` alone, if it is.
    """

    name: str
    strategy: str | Strategy
    nprocs: int = 2
    refuses: tuple[str, ...] = ()
    slow: str = ""


class NodesOfOne(DDP2Strategy):
    """ddp2 with a node for each rank, as far as it can see."""

    def setup(self, world: World) -> Layout | None:
        rank, size = world.placement.rank, world.placement.world_size
        world.placement = replace(
            world.placement, local_rank=0, local_world_size=1, node_rank=rank, nnodes=size, source="distwrap"
        )
        return super().setup(world)


class Pair(ByHand):
    """ByHand with what its own tests do without: rank 0's weights, every step, and one process."""

    layout = Layout(0, 1)

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data.copy_(broadcast(tensor.data))
        if not wrapping.in_precision.is_plain:
            model.forward = wrapping.in_precision(model.forward)  # type: ignore[method-assign]
        return super().prepare_model(model, world, wrapping)

    def backward(self, loss: torch.Tensor) -> None:
        if self.layout.group is None:
            Strategy.backward(self, loss)
        else:
            super().backward(loss)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        return Strategy.step(self, optimizer) is not False


# LBFGS needs all parameters as one vector; hooks of divided parameters see no gradient, but after it is reduced.
DIVIDED = ("lbfgs", "gradient_hooks", "deepcopy")

CELLS = (
    Cell("ddp", "ddp"),
    Cell("ddp on one rank", "ddp", 1),
    Cell("ddp on three ranks", "ddp", 3, slow="the same again on more ranks"),
    Cell("ddp2", NodesOfOne()),
    Cell("fsdp", "fsdp", refuses=DIVIDED),
    Cell("fsdp on three ranks", "fsdp", 3, DIVIDED, slow="the same again on more ranks"),
    Cell("hsdp", FSDPStrategy(shard=2), 4, DIVIDED, slow="four ranks"),
    Cell("tp", "tp", refuses=DIVIDED),
    Cell("by hand", Pair(), refuses=("fp16", "fp16_overflow", "fp16_clip")),
)
