"""A process group of one model's own, and a count of the bytes that go through it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

    Where `back` is given, messages to higher ranks go through `group` and those to lower ones through `back`: gloo has
    one connection between two ranks, and what goes over it in both directions at once takes up to twice the time.

    Args:
        group: its process group; ``None`` where this rank is alone in it, or not in it.
        back: a second one of the same ranks, or ``None``.
        ranks: the global ranks in it, in order.
        me: this process's global rank.
        traffic: where to count.
        crosses_nodes: whether its bytes go between nodes.

    Attributes:
        rank: this one's place in it.
        size: how many ranks it has.
    """

    def __init__(
        self,
        group: Any,
        ranks: list[int],
        me: int,
        traffic: Traffic,
        *,
        back: Any = None,
        crosses_nodes: bool = True,
    ) -> None:
        self._group, self._back, self._ranks = group, back, ranks
        self._traffic, self._crosses_nodes = traffic, crosses_nodes
        self.rank, self.size = ranks.index(me), len(ranks)
        self._messages = 0

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
        if self._back is None:
            self._count((self.size - 1) * _bytes(sent) // self.size)
            return dist.all_to_all_single(received, sent, group=self._group, async_op=True)
        received[self.rank].copy_(sent[self.rank])
        others = self._others()
        return self._post({to: sent[to] for to in others}, {source: received[source] for source in reversed(others)})

    def begin_all_gather(self, received: torch.Tensor, own: torch.Tensor) -> Any:
        """Receive every rank's tensor, in rank order, into one of as many numbers each.

        Returns what has a ``wait()``, or ``None`` where it is done.
        """
        rows = list(received.view(self.size, own.numel()))
        if self.size == 1:
            rows[0].copy_(own.view(-1))
            return None
        own = own.view(-1)
        if self._back is None:
            self._count((self.size - 1) * _bytes(own))
            return dist.all_gather(rows, own, group=self._group, async_op=True)
        rows[self.rank].copy_(own)
        others = self._others()
        return self._post(dict.fromkeys(others, own), {source: rows[source] for source in reversed(others)})

    def all_gather(self, received: torch.Tensor, own: torch.Tensor) -> None:
        """Receive every rank's tensor, and wait for it."""
        work = self.begin_all_gather(received, own)
        if work is not None:
            work.wait()

    def swap(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        """Send to some ranks and receive from some, by their places here."""
        self._post(outgoing, incoming).wait()

    def _others(self) -> list[int]:
        """List the other ranks, the next one first, so that not all send to the same one at once."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def _post(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> _Works:
        for x in outgoing.values():
            self._count(_bytes(x))
        if self._back is None:
            sends = [dist.P2POp(dist.isend, x, self._ranks[to], self._group) for to, x in outgoing.items()]
            receives = [dist.P2POp(dist.irecv, x, self._ranks[source], self._group) for source, x in incoming.items()]
            return _Works(dist.batch_isend_irecv(sends + receives))
        self._messages = tag = (self._messages + 1) % (1 << 30)  # which exchange it belongs to, alike on all ranks
        works = []
        for to, x in outgoing.items():
            way = self._group if to > self.rank else self._back
            works.append(dist.isend(x, self._ranks[to], group=way, tag=tag))
        for source, x in incoming.items():
            way = self._group if source < self.rank else self._back
            works.append(dist.irecv(x, self._ranks[source], group=way, tag=tag))
        return _Works(works)

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
        self._traffic.between_nodes += sent if self._crosses_nodes else 0
        self._traffic.exchanges += 1


class _Works:
    """Several messages under way."""

    def __init__(self, works: Iterable[Any]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()
