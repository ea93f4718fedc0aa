"""Base classes of exchange algorithms: their options, their work on a rank for one model, and its collectives.

```
Algorithm                a frozen dataclass of options, which the user names
├── GradientAlgorithm    makes an Averager, which gets DDP's buckets of gradients
└── WeightAlgorithm      makes a WeightExchange, which acts around the optimizer's steps
```
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from distwrap.protocols import Algorithm as Algorithm

T = TypeVar("T")


def option(default: T, check: Callable[[str, Any], Any]) -> T:
    """Declare an option of an algorithm, and the check that its values pass.

    Args:
        default: the value if the user gives none.
        check: takes the name and a value, and returns the value or raises OptionError.
    """
    return field(default=default, metadata={"check": check})


@dataclass
class Bucket:
    """Flat tensor of numbers to average, parameter by parameter; usually gradients of one backward.

    Attributes:
        values: the numbers, which are averaged in place.
        parameters: the parameters of the numbers, in order.
        views: the numbers of each parameter, in its shape and memory format.
        scale: the factor by which fp16 has multiplied the numbers.
        name_of: the parameters' names by their ids.
        report: takes the names of parameters whose gradients are not finite.
    """

    values: torch.Tensor
    parameters: list[nn.Parameter]
    views: list[torch.Tensor] = field(default_factory=list)
    scale: float = 1.0
    name_of: dict[int, str] = field(default_factory=dict)
    report: Callable[[list[str]], None] | None = None

    @property
    def key(self) -> tuple[int, ...]:
        """The ids of the parameters, which identify the bucket; DDP rearranges buckets after the first step."""
        return tuple(map(id, self.parameters))

    def parts(self, flat: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Return the parts of a flat tensor by parameter, by default of the values; complex numbers count twice."""
        flat = self.values if flat is None else flat
        return list(torch.split(flat, [(1 + each.is_complex()) * each.numel() for each in self.parameters]))

    def complain(self) -> None:
        """Report the parameters with gradients that are not finite; call it before they are overwritten."""
        if self.report is not None:
            pairs = zip(self.parameters, self.parts(), strict=True)
            bad = [parameter for parameter, part in pairs if not torch.isfinite(part).all()]
            self.report([self.name_of.get(id(parameter), "a parameter") for parameter in bad])


class Averager(ABC):
    """Mean of gradients over the ranks of a link; holds the state of a gradient algorithm.

    Attributes:
        wants_scale: whether it keeps numbers from step to step, which must follow the scale of fp16.
    """

    wants_scale = False

    @abstractmethod
    def average(self, bucket: Bucket) -> None:
        """Replace the bucket's values by their mean over the ranks. Runs in the model's thread, in order.

        Numbers that are not finite stay so on all ranks, and `Bucket.complain` reports them.
        """


@dataclass
class Traffic:
    """Bytes and messages that one rank has sent for one model.

    Attributes:
        sent: bytes of tensors sent to other ranks, without the headers of network protocols.
        between_nodes: bytes that leave the node if the algorithm is hierarchical, else all bytes.
        exchanges: the number of collectives and messages.
    """

    sent: int = 0
    between_nodes: int = 0
    exchanges: int = 0


def real_numbers(x: torch.Tensor) -> torch.Tensor:
    """Return a view of a complex tensor as real numbers, and any other tensor as it is."""
    return torch.view_as_real(x) if x.is_complex() else x


class Link:
    """Collectives over some ranks. Methods wait for the end, and do nothing with one rank.

    Bytes are counted as a ring algorithm sends them: 2(n-1)/n of the tensor in an all-reduce, (n-1) times the input in
    an all-gather. Source: https://docs.pytorch.org/docs/stable/distributed.html.

    With a second group, messages to higher ranks use the first group, and those to lower ranks the second: gloo has one
    connection between two ranks, and messages in both directions take up to twice the time.

    Args:
        group: the process group of the ranks; ``None`` with one rank.
        back: a second group of the same ranks, or ``None``.
        ranks: the global ranks, in order.
        me: this process's global rank.
        traffic: the count to add to.
        crosses_nodes: whether the ranks are on several nodes.

    Attributes:
        rank: this process's index among the ranks.
        size: the number of ranks.
    """

    def __init__(
        self, group: Any, ranks: list[int], me: int, traffic: Traffic, *, back: Any = None, crosses_nodes: bool = True
    ) -> None:
        self._group, self._back, self._ranks = group, back, ranks
        self._traffic, self._crosses_nodes = traffic, crosses_nodes
        self.rank, self.size = ranks.index(me), len(ranks)
        self._messages = 0

    def sum(self, x: torch.Tensor) -> None:
        """Replace `x` by the sum over the ranks."""
        self._all_reduce(x, dist.ReduceOp.SUM)

    def mean(self, x: torch.Tensor) -> None:
        """Replace `x` by the mean over the ranks. It is divided first, as in DDP, so the sum cannot overflow."""
        x.mul_(1.0 / self.size)
        self.sum(x)

    def least(self, value: int, device: torch.device) -> int:
        """Return the minimum of a number over the ranks."""
        tensor = torch.tensor([value], dtype=torch.int32, device=device)
        self._all_reduce(tensor, dist.ReduceOp.MIN)
        return int(tensor.item())

    def begin_all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Any:
        """Start to send row n to rank n, and to receive a row from each rank; both have shape (ranks, …).

        Returns an object with a ``wait()``.
        """
        return self._begin(
            list(received), list(sent), lambda: dist.all_to_all_single(received, sent, group=self._group, async_op=True)
        )

    def begin_all_gather(self, received: torch.Tensor, own: torch.Tensor) -> Any:
        """Start to receive every rank's tensor, in rank order, into one flat tensor.

        Returns an object with a ``wait()``.
        """
        rows, own = list(received.view(self.size, own.numel())), own.view(-1)
        return self._begin(
            rows, [own] * self.size, lambda: dist.all_gather(rows, own, group=self._group, async_op=True)
        )

    def all_gather(self, received: torch.Tensor, own: torch.Tensor) -> None:
        """Receive every rank's tensor, and wait for the end."""
        self.begin_all_gather(received, own).wait()

    def swap(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        """Send and receive tensors; both dicts have them by the other rank's index in the link."""
        self._send_and_receive(outgoing, incoming).wait()

    def to_first(self, x: torch.Tensor) -> None:
        """Replace `x` on the first rank by the sum. On the other ranks it is undefined afterwards."""
        if self.size > 1:
            self._count(x.nbytes if self.rank else 0)
            dist.reduce(real_numbers(x), self._ranks[0], group=self._group)

    def from_first(self, x: torch.Tensor) -> None:
        """Replace `x` by the first rank's `x`."""
        if self.size > 1:
            self._count(0 if self.rank else (self.size - 1) * x.nbytes)
            dist.broadcast(real_numbers(x), self._ranks[0], group=self._group)

    def _all_reduce(self, x: torch.Tensor, operation: Any) -> None:
        if self.size > 1:
            self._count(2 * (self.size - 1) * x.nbytes // self.size)
            dist.all_reduce(real_numbers(x), op=operation, group=self._group)

    def _begin(self, received: list[torch.Tensor], sent: list[torch.Tensor], collective: Callable[[], Any]) -> Any:
        """Start to exchange rows with all ranks: by a collective, or by messages over two groups."""
        if self.size > 1 and self._back is None:
            self._count((self.size - 1) * sent[0].nbytes)
            return collective()
        received[self.rank].copy_(sent[self.rank])
        # Each rank starts with the next rank, so that they do not all send to the same one at once.
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        return self._send_and_receive({to: sent[to] for to in others}, {by: received[by] for by in reversed(others)})

    def _send_and_receive(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> _Works:
        for x in outgoing.values():
            self._count(x.nbytes)
        if self._back is None:
            sends = [dist.P2POp(dist.isend, x, self._ranks[to], self._group) for to, x in outgoing.items()]
            receives = [dist.P2POp(dist.irecv, x, self._ranks[by], self._group) for by, x in incoming.items()]
            return _Works(dist.batch_isend_irecv(sends + receives) if sends or receives else [])
        self._messages = tag = (self._messages + 1) % (1 << 30)  # identifies the exchange, and is the same on all ranks
        works = _Works()
        for to, x in outgoing.items():
            works.append(dist.isend(x, self._ranks[to], self._group if to > self.rank else self._back, tag))
        for by, x in incoming.items():
            works.append(dist.irecv(x, self._ranks[by], self._group if by < self.rank else self._back, tag))
        return works

    def _count(self, sent: int) -> None:
        self._traffic.sent += sent
        self._traffic.between_nodes += sent if self._crosses_nodes else 0
        self._traffic.exchanges += 1


class _Works(list[Any]):
    """Handles of several messages."""

    def wait(self) -> None:
        """Wait for all messages."""
        for work in self:
            work.wait()
