"""What an algorithm is for one model on one rank: its links, its thread, and how it ends."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from distwrap.comm.base import Algorithm
from distwrap.comm.engine import Engine
from distwrap.comm.link import Link, Traffic
from distwrap.group.collectives import gather_object
from distwrap.group.world import RunPart, World, say

if TYPE_CHECKING:
    from distwrap.model.distributed import DistributedModel

# Ends a group with the interpreter's lock taken, for which one of gloo's threads may wait.
_BEFORE_2_8 = tuple(int(number) for number in torch.__version__.split(".")[:2]) < (2, 8)

_REPORTS = 3  # of gradients that are not finite, a model


A = TypeVar("A", bound=Algorithm)


class Exchanges(RunPart):
    """Exchanges of one run.

    Attributes:
        of_weights: those of models whose ranks hold different weights; they act around optimizer steps.
        dropped: those of models that nobody holds any more; ended when the next one is made.
    """

    def __init__(self, world: World) -> None:
        self._all: list[ref[Exchange[Any]]] = []
        self.of_weights: list[Any] = []
        self.dropped: list[Exchange[Any]] = []
        self.handles: list[Any] = []

    def add(self, exchange: Exchange[Any]) -> None:
        """Note an exchange that was made just now."""
        self._all = [held for held in self._all if held() is not None] + [ref(exchange)]

    def close_dropped(self) -> None:
        """End the exchanges of models that nobody holds any more."""
        for exchange in [each for each in self.dropped if not each.runs]:
            self.dropped.remove(exchange)
            exchange.close()

    def settle(self) -> None:
        """Bring what is under way to an end, with the other ranks."""
        for exchange in list(self.of_weights):
            exchange.settle()

    def close(self) -> None:
        """End all exchanges, the last one first, and listen to optimizers no more."""
        with ExitStack() as stack:
            for handle in self.handles:
                stack.callback(handle.remove)
            for held in self._all:
                if (exchange := held()) is not None:
                    stack.callback(exchange.close)


class Exchange(Generic[A]):
    """Holds what a model exchanges through. Made on every rank, in the same order.

    Attributes:
        algorithm: its options.
        traffic: what this rank has sent.
        node: between the ranks of this node, where the algorithm is hierarchical; else ``None``.
        link: between the ranks that run the algorithm: all of them, or the nodes' first ones where it is hierarchical;
            ``None`` on the others of a node.
        nnodes: how many ranks, or nodes, run the algorithm.
        reports: how often this rank's gradients were not finite.
    """

    def __init__(self, algorithm: A, model: DistributedModel, world: World) -> None:
        self._all = world.part(Exchanges)
        self._all.close_dropped()
        place = world.placement
        self.algorithm, self.device, self.rank, self.world_size = algorithm, world.device, place.rank, place.world_size
        self.traffic, self.reports = Traffic(), 0
        self._model = ref(model)
        self._groups: list[Any] = []
        everybody = list(range(place.world_size))
        nodes = _ranks_of_nodes(place.node_rank) if algorithm.hierarchical else [[rank] for rank in everybody]
        self.nnodes = len(nodes)
        algorithm.check(self.nnodes)
        self.node: Link | None = None
        if algorithm.hierarchical:
            links = [self.between(world, ranks, crosses_nodes=False) for ranks in nodes]
            self.node = next(link for link in links if link is not None)
        self.link = self.between(world, [ranks[0] for ranks in nodes])
        self.engine = Engine(world.device)
        self._all.add(self)
        finalize(model, self.drop).atexit = False

    def between(self, world: World, ranks: list[int], *, crosses_nodes: bool = True) -> Link | None:
        """Make a link between some ranks; every rank of the world calls it. ``None`` where this one is not in it."""
        group = back = None
        if len(ranks) > 1:
            timeout = timedelta(seconds=world.timeout)
            group = dist.new_group(ranks, timeout=timeout)
            if crosses_nodes and "gloo" in str(world.backend):
                back = dist.new_group(ranks, timeout=timeout)
        if self.rank not in ranks:
            return None
        self._groups += [group, back]
        return Link(group, ranks, self.rank, self.traffic, back=back, crosses_nodes=crosses_nodes)

    @property
    def runs(self) -> bool:
        """Whether something goes on in the background, which ends with the other ranks only."""
        return False

    @property
    def model(self) -> DistributedModel | None:
        """The wrapped model, while somebody holds it."""
        return self._model()

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer that the loop steps."""
        return optimizer

    def paused(self) -> AbstractContextManager[None]:
        """Do nothing in the background for the time of a ``with``."""
        return nullcontext()

    def report(self, names: list[str]) -> None:
        """Say that this rank's gradients are not finite."""
        self.reports += 1
        if self.reports <= _REPORTS:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            say(
                f"rank {self.rank}: not finite: the gradient of {', '.join(names[:3])}{more}. All ranks get NaN for "
                f"what it is averaged with.",
                every_rank=True,
            )

    def drop(self) -> None:
        """Take note that nobody holds the model any more.

        A garbage collection calls this, in any thread and anywhere, also in the middle of making a group: the end
        itself is for later.
        """
        self._all.dropped.append(self)

    def keep_groups(self) -> None:
        """Leave the groups to the end of the process: somebody is still inside."""
        self._groups = []

    def close(self) -> None:
        """End the thread, and let go of the groups where no other rank need take part."""
        if not self.engine.close() or _BEFORE_2_8:
            self.keep_groups()
        groups, self._groups = self._groups, []
        for group in groups:
            if group is not None and dist.is_initialized():
                with suppress(ValueError):  # of a group that went with the world's
                    if dist.get_backend(group) == "gloo":
                        dist.destroy_process_group(group)


def _ranks_of_nodes(node_rank: int) -> list[list[int]]:
    """Return the ranks of each node; a collective."""
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(gather_object(node_rank)):
        nodes.setdefault(node, []).append(rank)
    return [nodes[node] for node in sorted(nodes)]
