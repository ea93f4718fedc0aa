"""A process group of one model's own, and a count of the bytes that go through it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Traffic:
    """What one rank has sent for one model.

    Attributes:
        sent: bytes of tensors to other ranks, without the headers of the network's protocols.
        between_nodes: those of them that leave the node, where the algorithm is hierarchical; else all of them.
        exchanges: how many collectives or messages.
    """

    sent: int = 0
    between_nodes: int = 0
    exchanges: int = 0


class Link:
    """Collectives over some ranks; each waits for its end. With one rank, none does anything.

    A ring all-reduce sends 2(n-1)/n of a tensor's bytes, an all-gather (n-1) times its input's, and so the others are
    counted too. Source: https://docs.pytorch.org/docs/stable/distributed.html.

    Args:
        group: its process group; ``None`` where this rank is alone in it, or not in it.
        ranks: the global ranks in it, in order.
        me: this process's global rank.
        traffic: where to count.
        leaves_node: whether its bytes go between nodes.

    Attributes:
        rank: this one's place in it.
        size: how many ranks it has.
    """

    def __init__(self, group: Any, ranks: list[int], me: int, traffic: Traffic, *, leaves_node: bool = True) -> None:
        self._group, self._ranks, self._traffic, self._leaves_node = group, ranks, traffic, leaves_node
        self.rank, self.size = ranks.index(me), len(ranks)

    def sum(self, x: torch.Tensor) -> None:
        """Replace `x` by the sum over the ranks."""
        if self.size > 1:
            self._count(2 * (self.size - 1) * _bytes(x) // self.size)
            dist.all_reduce(x, group=self._group)

    def mean(self, x: torch.Tensor) -> None:
        """Replace `x` by the mean over the ranks; divided first, as DDP does, so that a sum cannot overflow."""
        x.mul_(1.0 / self.size)
        self.sum(x)

    def least(self, value: int, device: torch.device) -> int:
        """Return the least of the ranks' numbers."""
        tensor = torch.tensor([value], dtype=torch.int32, device=device)
        if self.size > 1:
            self._count(2 * (self.size - 1) * _bytes(tensor) // self.size)
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        return int(tensor.item())

    def begin_all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Any:
        """Send the n-th row to the n-th rank, and receive one from each; both of shape (ranks, …).

        Returns what has a ``wait()``, or ``None`` where it is done.
        """
        if self.size == 1:
            received.copy_(sent)
            return None
        self._count((self.size - 1) * _bytes(sent) // self.size)
        return dist.all_to_all_single(received, sent, group=self._group, async_op=True)

    def begin_all_gather(self, received: torch.Tensor, own: torch.Tensor) -> Any:
        """Receive every rank's tensor, in rank order, into one of as many numbers each.

        Returns what has a ``wait()``, or ``None`` where it is done.
        """
        rows = list(received.view(self.size, own.numel()))
        if self.size == 1:
            rows[0].copy_(own.view(-1))
            return None
        self._count((self.size - 1) * _bytes(own))
        return dist.all_gather(rows, own.view(-1), group=self._group, async_op=True)

    def all_gather(self, received: torch.Tensor, own: torch.Tensor) -> None:
        """Receive every rank's tensor, and wait for it."""
        work = self.begin_all_gather(received, own)
        if work is not None:
            work.wait()

    def swap(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        """Send to some ranks and receive from some, by their places here."""
        sends = [dist.P2POp(dist.isend, x, self._ranks[to], self._group) for to, x in outgoing.items()]
        receives = [dist.P2POp(dist.irecv, x, self._ranks[source], self._group) for source, x in incoming.items()]
        for x in outgoing.values():
            self._count(_bytes(x))
        for work in dist.batch_isend_irecv(sends + receives):
            work.wait()

    def to_first(self, x: torch.Tensor) -> None:
        """Replace `x` on the first rank by the sum; what it is then on the others is undefined."""
        if self.size > 1:
            self._count(_bytes(x) if self.rank else 0)
            dist.reduce(x, self._ranks[0], group=self._group)

    def from_first(self, x: torch.Tensor) -> None:
        """Replace `x` by the first rank's."""
        if self.size > 1:
            self._count(0 if self.rank else (self.size - 1) * _bytes(x))
            dist.broadcast(x, self._ranks[0], group=self._group)

    def _count(self, sent: int) -> None:
        self._traffic.sent += sent
        self._traffic.between_nodes += sent if self._leaves_node else 0
        self._traffic.exchanges += 1


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()
