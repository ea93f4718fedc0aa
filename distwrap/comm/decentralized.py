"""Average weights with all other ranks, or with one other rank, while the step is computed.

Source: https://arxiv.org/abs/2107.01499, section 3; Bagua's ``DecentralizedAlgorithm``.
"""

from dataclasses import dataclass
from functools import partial

import torch

from distwrap.checks import one_of, whole
from distwrap.comm.base import option
from distwrap.comm.link import Link
from distwrap.comm.weights import WeightAlgorithm, WeightExchange
from distwrap.errors import OptionError


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
