"""Replicas that train on their own, and average their weights now and then, or their progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from distwrap._internals.torch import foreach
from distwrap.checks import fraction, one_of, whole
from distwrap.comm.base import Bucket, Link, option
from distwrap.comm.compressed import Cast, Codec, CompressedMean, MinMax8, Sign
from distwrap.comm.weights import FlatWeights, WeightAlgorithm, WeightExchange
from distwrap.errors import OptionError
from distwrap.model.checks.in_sync import ComparedTensor


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


_CODECS: dict[str, Callable[[], Codec]] = {"16bit": lambda: Cast(torch.bfloat16), "8bit": MinMax8, "1bit": Sign}


class _Fragment:
    """Part of the weights: their values after the last outer step, outer momentum, and pending mean.

    Args:
        weights: the weights of the fragment.
        options: the options of the algorithm.
        link: the ranks that run the algorithm; ``None`` if this rank does not.
        offset: the step within each `sync_every` steps at which the fragment is sent, once `sync_every` steps are done.
    """

    def __init__(self, weights: FlatWeights, options: DiLoCo, link: Link | None, offset: int) -> None:
        self._weights, self._options = weights, options
        self.offset = offset
        self.anchor = weights.read()
        self.momentum = torch.zeros_like(self.anchor)
        self.due = 0  # the step after which the mean is applied
        self.future: torch.futures.Future[torch.Tensor] | None = None
        self._mean: CompressedMean | None = None
        if options.compression is not None and link is not None:
            self._mean = CompressedMean(link, _CODECS[options.compression](), feedback=True)

    def progress(self) -> torch.Tensor:
        """Return this replica's change since the last outer step, with the sign of a gradient."""
        return self.anchor - self._weights.read()

    def average(self, link: Link, progress: torch.Tensor) -> None:
        """Average the progress over the replicas, in place. Runs in the model's exchange thread."""
        if self._mean is None:
            link.mean(progress)
        else:
            self._mean.average(Bucket(progress, self._weights.parameters))

    def outer_step(self, mean: torch.Tensor) -> None:
        """Take a step as torch.optim.SGD(nesterov=True) does, and set the weights."""
        options = self._options
        self.momentum.mul_(options.outer_momentum).add_(mean)
        self.anchor.add_(mean + options.outer_momentum * self.momentum, alpha=-options.outer_lr)
        if options.mixing:
            self._weights.write(torch.lerp(self.anchor, self._weights.read(), options.mixing))
        else:
            self._weights.write(self.anchor)


class _DiLoCo(WeightExchange["DiLoCo"]):
    _fragments: Sequence[_Fragment] = ()
    _saved: dict[str, torch.Tensor] | None = None

    def begin(self) -> None:
        options = self.algorithm
        parts = fragments(self.weights.parameters, options.fragments)
        self._fragments = [
            _Fragment(part, options, self.link, options.sync_every * index // len(parts))
            for index, part in enumerate(parts)
        ]
        if self._saved is not None:
            for name, pieces in self._outer_state().items():
                foreach("copy_", pieces, torch.split(self._saved[name], [len(piece) for piece in pieces]))
            self._saved = None

    def _outer_state(self) -> dict[str, list[torch.Tensor]]:
        return {
            "anchor": [fragment.anchor for fragment in self._fragments],
            "momentum": [fragment.momentum for fragment in self._fragments],
        }

    def state_dict(self) -> dict[str, Any]:
        outer = {name: torch.cat(pieces) for name, pieces in self._outer_state().items() if pieces}
        return {**super().state_dict(), **(self._saved or outer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._fragments = ()  # pending means are dropped
        goes_on = "anchor" in state and self.steps > self.algorithm.warmup_steps
        self._saved = {name: state[name] for name in ("anchor", "momentum")} if goes_on else None

    def loaded(self) -> None:
        self._fragments, self._begun = (), False

    def after_step(self, step: int) -> None:
        for fragment in self._fragments:
            if step >= self.algorithm.sync_every and (step - fragment.offset) % self.algorithm.sync_every == 0:
                work = partial(self.among_replicas, fragment.average, fragment.progress())
                fragment.future, fragment.due = self.engine.submit(work), step + self.algorithm.delay
            if fragment.future is not None and fragment.due == step:
                self._receive(fragment)
        self.alike = self.algorithm.delay == 0 == self.algorithm.mixing and all(
            fragment.offset == 0 and step % self.algorithm.sync_every == 0 for fragment in self._fragments
        )

    def _receive(self, fragment: _Fragment) -> None:
        assert fragment.future is not None
        fragment.outer_step(self.engine.result(fragment.future))
        fragment.future = None
        turn = self.steps // self.algorithm.sync_every
        if turn & (turn - 1) == 0:
            held = ComparedTensor("the weights of the last outer step", "", fragment.anchor)
            self.compare(f"after step {self.steps}, part {self._fragments.index(fragment)},", [held])

    def settle(self) -> None:
        for fragment in self._fragments:
            if fragment.future is not None:
                self._receive(fragment)


def fragments(parameters: Sequence[nn.Parameter], count: int) -> list[FlatWeights]:
    """Cut a model into at most `count` runs of parameters of about the same size.

    Example:
        >>> parts = fragments([nn.Parameter(torch.zeros(n)) for n in (4, 1, 2, 1)], 2)
        >>> [[len(parameter) for parameter in part.parameters] for part in parts]
        [[4], [1, 2, 1]]
    """
    total = sum(parameter.numel() for parameter in parameters)
    runs: list[list[nn.Parameter]] = [[] for _ in range(count)]
    before = 0
    for parameter in parameters:
        middle = before + parameter.numel() / 2
        runs[min(count - 1, int(middle * count / max(1, total)))].append(parameter)
        before += parameter.numel()
    return [FlatWeights(run) for run in runs if run]


def _codec(name: str, value: str | None) -> str | None:
    return None if value is None else one_of(name, _CODECS)(name, value)


@dataclass(frozen=True, kw_only=True)
class DiLoCo(WeightAlgorithm):
    """Outer SGD steps with Nesterov momentum, every `sync_every` steps, from the weights of the last one.

    Any inner optimizer works, usually AdamW. Each rank keeps its own optimizer state.

    Source: https://arxiv.org/abs/2311.08105, algorithm 1. Fragments, delay and compression are those of Streaming
    DiLoCo, https://arxiv.org/abs/2501.18512, algorithm 2.

    Args:
        sync_every: inner steps between two outer steps of the same weights.
        outer_lr: the outer learning rate.
        outer_momentum: the outer momentum; 0 for none.
        fragments: the number of parts in which the model is exchanged, spread evenly over `sync_every` steps. The total
            of bytes stays, and the peak is a fraction.
        delay: inner steps that go on while a fragment is sent; 0 waits for it.
        mixing: the part of its progress in that time that a replica keeps, from 0 to 1.
        compression: ``"16bit"``, ``"8bit"`` or ``"1bit"`` for the exchange, with error feedback; ``None`` for float32.
    """

    exchange_class = _DiLoCo
    sync_every: int = option(32, whole(1))
    outer_lr: float = option(0.7, fraction(0.0, 10.0))
    outer_momentum: float = option(0.9, fraction(with_low=True))
    fragments: int = option(1, whole(1))
    delay: int = option(0, whole(0))
    mixing: float = option(0.0, fraction(with_low=True))
    compression: str | None = option(None, _codec)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delay >= self.sync_every or self.fragments > self.sync_every:
            raise OptionError(
                f"DiLoCo(sync_every={self.sync_every}, delay={self.delay}, fragments={self.fragments}): the "
                "delay must be less than sync_every, and fragments must be at most sync_every."
            )
