"""Weights averaged with the others', or with one other, while the step is computed.

Source: https://arxiv.org/abs/2107.01499, section 3; Bagua's ``DecentralizedAlgorithm``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from distwrap.checks import whole
from distwrap.comm.link import Link
from distwrap.comm.weights import WeightAlgorithm, WeightExchange
from distwrap.errors import OptionError
from distwrap.group.world import World
from distwrap.wording import unknown_name

if TYPE_CHECKING:
    from distwrap.model.distributed import DistributedModel

_SELECTIONS = ("all", "shift_one")


@dataclass(frozen=True, kw_only=True)
class Decentralized(WeightAlgorithm):
    """Each step goes from the mean of the peers' weights along this rank's own gradient at its own weights.

    The weights travel during the forward and backward.

    Args:
        peer_selection: ``"all"``, or ``"shift_one"``: one other rank, another each time; for an even number of ranks.
        communication_interval: optimizer steps between two exchanges.
    """

    peer_selection: str = "all"
    communication_interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(1)("communication_interval", self.communication_interval)
        if self.peer_selection not in _SELECTIONS:
            raise OptionError(unknown_name("peer_selection", self.peer_selection, _SELECTIONS))

    def check(self, world_size: int) -> None:
        if self.peer_selection == "shift_one" and world_size % 2 and world_size > 1:
            raise OptionError(
                f"Decentralized(peer_selection='shift_one') pairs ranks (or nodes), and {world_size} cannot be paired. "
                f"Use an even number, or peer_selection='all'."
            )

    def attach(self, model: DistributedModel, world: World) -> _Decentralized:
        return _Decentralized(self, model, world)


def peer_of(rank: int, size: int, turn: int) -> int:
    """Say with which rank one of the lower half, or of the upper, is paired in a turn.

    Example:
        >>> [peer_of(rank, 4, turn=0) for rank in range(4)], [peer_of(rank, 4, turn=1) for rank in range(4)]
        ([2, 3, 0, 1], [3, 2, 1, 0])
    """
    half = size // 2
    return half + (turn + rank) % half if rank < half else (rank - half - turn) % half


class _Decentralized(WeightExchange[Decentralized]):
    def __init__(self, algorithm: Decentralized, model: DistributedModel, world: World) -> None:
        super().__init__(algorithm, model, world)
        self._under_way: torch.futures.Future[torch.Tensor] | None = None

    def before_step(self) -> None:
        if self._under_way is not None:
            mean, self._under_way = self._under_way.wait(), None
            self.engine.raise_failure()
            self.weights.write(mean)

    def after_step(self, step: int) -> None:
        turn, rest = divmod(step, self.algorithm.communication_interval)
        if rest == 0:
            self._under_way = self.engine.submit(partial(self._exchange, self.weights.read(), turn - 1))

    def _exchange(self, weights: torch.Tensor, turn: int) -> torch.Tensor:
        if self.algorithm.peer_selection == "all":
            self.among_replicas(Link.mean, weights)
        else:
            self.among_replicas(partial(_with_peer, turn=turn), weights)
        return weights

    def settle(self) -> None:
        self.before_step()


def _with_peer(link: Link, weights: torch.Tensor, turn: int) -> None:
    if link.size > 1:
        peer, theirs = peer_of(link.rank, link.size, turn), torch.empty_like(weights)
        link.swap({peer: weights}, {peer: theirs})
        weights.add_(theirs).mul_(0.5)
