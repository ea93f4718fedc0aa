"""Replicas that train on their own and average their weights: every few steps, with peers, or in 8 bits on a ring."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from distwrap.checks import one_of, whole
from distwrap.comm.base import option
from distwrap.comm.codecs import MinMax8
from distwrap.comm.link import Link
from distwrap.comm.weights import WeightAlgorithm, WeightExchange
from distwrap.errors import OptionError


class _LocalSGD(WeightExchange["LocalSGD"]):
    def after_step(self, step: int) -> None:
        if step % self.algorithm.sync_every == 0:
            self.exchange_weights(Link.mean)
            self.alike = True


@dataclass(frozen=True, kw_only=True)
class LocalSGD(WeightAlgorithm):
    """Mean of the weights every `sync_every` steps of any optimizer. Each rank keeps its optimizer state.

    Source: https://arxiv.org/abs/1805.09767, algorithm 1. With a warm-up it is post-local SGD,
    https://arxiv.org/abs/1808.07217.
    """

    exchange_class = _LocalSGD
    sync_every: int = option(8, whole(1))


def peer_of(rank: int, size: int, turn: int) -> int:
    """Return the rank's peer in a turn; peers are one rank of the lower half and one of the upper.

    Example:
        >>> [peer_of(rank, 4, turn=0) for rank in range(4)], [peer_of(rank, 4, turn=1) for rank in range(4)]
        ([2, 3, 0, 1], [3, 2, 1, 0])
    """
    half = size // 2
    return half + (turn + rank) % half if rank < half else (rank - half - turn) % half


class _Decentralized(WeightExchange["Decentralized"]):
    _under_way: tuple[torch.futures.Future[torch.Tensor], torch.Tensor] | None = None

    def before_step(self) -> None:
        """Take over the mean, and keep changes of the weights since they were sent, as a clamp by hand."""
        if self._under_way is not None:
            (mean, sent), self._under_way = self._under_way, None
            self.weights.write(self.weights.read().sub_(sent).add_(self.engine.result(mean)))

    def after_step(self, step: int) -> None:
        turn, rest = divmod(step, self.algorithm.communication_interval)
        if rest == 0:
            shifts = self.algorithm.peer_selection == "shift_one"
            work = partial(_average_with_peer, turn=turn - 1) if shifts else Link.mean
            sent = self.weights.read()
            self._under_way = self.engine.submit(partial(self.among_replicas, work, sent.clone())), sent

    def settle(self) -> None:
        self.before_step()

    def loaded(self) -> None:
        self._under_way = None


def _average_with_peer(link: Link, weights: torch.Tensor, turn: int) -> None:
    if link.size > 1:
        peer, theirs = peer_of(link.rank, link.size, turn), torch.empty_like(weights)
        link.swap({peer: weights}, {peer: theirs})
        weights.add_(theirs).mul_(0.5)


@dataclass(frozen=True, kw_only=True)
class Decentralized(WeightAlgorithm):
    """Mean of the peers' weights, to which each rank adds a step along the gradient at its own weights.

    The weights are sent during the forward and backward.

    Source: https://arxiv.org/abs/2107.01499, section 3; Bagua's ``DecentralizedAlgorithm``.

    Args:
        peer_selection: ``"all"``, or ``"shift_one"`` for one other rank, a different one each time; needs an even
            number of ranks.
        communication_interval: optimizer steps between two exchanges.
    """

    exchange_class = _Decentralized
    peer_selection: str = option("all", one_of("peer_selection", ("all", "shift_one")))
    communication_interval: int = option(1, whole(1))

    def check(self, world_size: int) -> None:
        if self.peer_selection == "shift_one" and world_size % 2 and world_size > 1:
            raise OptionError(
                f"Decentralized(peer_selection='shift_one') pairs ranks (or nodes), and {world_size} is an odd "
                "number of them. Use an even number, or peer_selection='all'."
            )


class _Ring(WeightExchange["LowPrecisionDecentralized"]):
    """Exchange with copies of the weights that this rank and its neighbours know of each other."""

    _known: Sequence[torch.Tensor] = ()  # own, left, right

    def begin(self) -> None:
        self._known = [self.weights.read() for _ in range(3)]

    def brought_together(self) -> None:
        if self._known:
            self.begin()

    def after_step(self, step: int) -> None:
        if step % self.algorithm.communication_interval == 0:
            self.exchange_weights(self._exchange)

    def _exchange(self, link: Link, weights: torch.Tensor) -> None:
        if link.size == 1:
            return
        own, left, right = self._known
        codec = MinMax8()
        difference = (weights + (left + right) / 3 - own * (5 / 3)).float()
        codes = [torch.empty(codec.size(len(weights)), dtype=torch.uint8, device=weights.device) for _ in range(3)]
        if not codec.encode(difference, codes[0]):
            self.report(["a weight"])
        before, after = (link.rank - 1) % link.size, (link.rank + 1) % link.size
        if before == after:
            link.swap({after: codes[0]}, {before: codes[1]})
            codes[2] = codes[1]
        else:
            link.swap({before: codes[0], after: codes[0]}, {before: codes[1], after: codes[2]})
        for known, code in zip(self._known, codes, strict=True):
            codec.decode(code, difference)
            known.add_(difference)
        weights.copy_(own)


@dataclass(frozen=True, kw_only=True)
class LowPrecisionDecentralized(WeightAlgorithm):
    """Mean of the weights of a rank and its two neighbours after each step, plus the rank's progress.

    Each rank sends two bytes a weight, whatever the number of ranks, and keeps three copies of the weights.

    Source: https://arxiv.org/abs/1803.06443 (difference compression); Bagua's ``LowPrecisionDecentralizedAlgorithm``.

    Args:
        communication_interval: optimizer steps between two exchanges.
    """

    exchange_class = _Ring
    communication_interval: int = option(1, whole(1))
