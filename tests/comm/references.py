"""The algorithms again, in NumPy and for all ranks at once, written from their formulas and not from our code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Coded = Callable[[Array], Array]  # what is left of numbers after they were encoded and decoded

BLOCK = 131072
SIGN_BLOCK = 4096


def as_float16(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(np.float16).astype(np.float64)


def as_bfloat16(x: Array) -> Array:
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def as_minmax8(x: Array) -> Array:
    out = np.empty_like(x)
    for start in range(0, len(x), BLOCK):
        block = x[start : start + BLOCK]
        low, step = block.min(), (block.max() - block.min()) / 254
        if step == 0:
            out[start : start + BLOCK] = low
            continue
        lowest = np.rint(low / step)
        if abs(lowest) <= 2**20:
            out[start : start + BLOCK] = np.rint(block / step) * step
        else:
            out[start : start + BLOCK] = low + np.rint((block - low) / step) * step
    return out


def as_sign(x: Array) -> Array:
    out = np.empty_like(x)
    for start in range(0, len(x), SIGN_BLOCK):
        block = x[start : start + SIGN_BLOCK]
        out[start : start + SIGN_BLOCK] = np.where(block >= 0, 1, -1) * np.abs(block).mean()
    return out


def _parts(count: int, ranks: int) -> list[slice]:
    part = -(-count // ranks)
    return [slice(min(count, rank * part), min(count, (rank + 1) * part)) for rank in range(ranks)]


class CompressedMean:
    """Each rank adds up one part; error feedback on what is sent, and on the part that is added up."""

    def __init__(self, coded: Coded, count: int, ranks: int, *, feedback: bool = False) -> None:
        self._coded, self._feedback, self._parts = coded, feedback, _parts(count, ranks)
        self._sent = [np.zeros(count) for _ in range(ranks)]
        self._summed = np.zeros(count)

    def __call__(self, everyone: Sequence[Array]) -> Array:
        if len(everyone) == 1:
            return everyone[0]
        mean = np.zeros_like(everyone[0])
        for rank, x in enumerate(everyone):
            x = x + self._sent[rank]
            for part in self._parts:
                if x[part].size:
                    coded = self._coded(x[part])
                    mean[part] += coded / len(everyone)
                    if self._feedback:
                        self._sent[rank][part] = x[part] - coded
        mean += self._summed
        for part in self._parts:
            if mean[part].size:
                coded = self._coded(mean[part])
                if self._feedback:
                    self._summed[part] = mean[part] - coded
                mean[part] = coded
        return mean


class PowerSGD:
    """Of one bucket of matrices and vectors, by their shapes; `rights` are the first right factors."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], ranks: int, rank: int, rights: Sequence[Array]) -> None:
        self._shapes, self._rank, self._rights = shapes, rank, list(rights)
        self._errors = [np.zeros(sum(int(np.prod(shape)) for shape in shapes)) for _ in range(ranks)]

    def small(self, shape: tuple[int, ...]) -> bool:
        if len(shape) < 2:
            return True
        rows, columns = shape[0], int(np.prod(shape[1:]))
        return 2 * min(self._rank, rows, columns) * (rows + columns) >= rows * columns

    def __call__(self, everyone: Sequence[Array]) -> Array:
        if len(everyone) == 1:
            return everyone[0]
        given = [x + error for x, error in zip(everyone, self._errors, strict=True)]
        out, at, matrix = np.zeros_like(everyone[0]), 0, 0
        for shape in self._shapes:
            size = int(np.prod(shape))
            here = slice(at, at + size)
            at += size
            if self.small(shape):
                out[here] = np.mean([x[here] for x in given], axis=0)
                for error in self._errors:
                    error[here] = 0
                continue
            own = [x[here].reshape(shape[0], -1) for x in given]
            left = np.linalg.qr(np.mean([m @ self._rights[matrix] for m in own], axis=0))[0]
            rights = [m.T @ left for m in own]
            self._rights[matrix] = np.mean(rights, axis=0)
            out[here] = (left @ self._rights[matrix].T).reshape(-1)
            for error, m, right in zip(self._errors, own, rights, strict=True):
                error[here] = (m - left @ right.T).reshape(-1)
            matrix += 1
        return out


class TopK:
    """The largest of each rank's, the rest added up."""

    def __init__(self, count: int, ranks: int, ratio: float) -> None:
        self._errors, self._count = [np.zeros(count) for _ in range(ranks)], int(np.ceil(ratio * count))

    def __call__(self, everyone: Sequence[Array]) -> Array:
        if len(everyone) == 1:
            return everyone[0]
        mean = np.zeros_like(everyone[0])
        for rank, x in enumerate(everyone):
            x = x + self._errors[rank]
            places = np.argsort(-np.abs(x), kind="stable")[: self._count]
            mean[places] += x[places] / len(everyone)
            self._errors[rank] = x.copy()
            self._errors[rank][places] = 0
        return mean


class QAdam:
    """Adam, whose variance and its bias correction are frozen after the warm-up, with a compressed mean of momenta.

    No step is longer than lr · max(1, (1 - β₁) / √(1 - β₂)), the bound of Adam's own paper.
    """

    def __init__(
        self,
        weights: Array,
        mean: Callable[[Sequence[Array]], Array],
        *,
        warmup: int,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        decay: float = 0.0,
        decoupled: bool = False,
    ) -> None:
        self.weights, self._mean, self._warmup, self._lr = weights, mean, warmup, lr
        self._betas, self._eps, self._decay, self._decoupled = betas, eps, decay, decoupled
        self._m, self._v, self._t = np.zeros_like(weights), np.zeros_like(weights), 0

    def step(self, everyone: Sequence[Array]) -> None:
        b1, b2 = self._betas
        if not self._decoupled:
            everyone = [g + self._decay * self.weights for g in everyone]
        if self._t < self._warmup:
            g = np.mean(everyone, axis=0)
            self._m = b1 * self._m + (1 - b1) * g
            self._v = b2 * self._v + (1 - b2) * g**2
        else:
            frozen = np.sqrt(self._v / (1 - b2**self._warmup)) + self._eps
            most = max(1, (1 - b1) / np.sqrt(1 - b2)) * (1 - b1 ** (self._t + 1))
            moves = [np.clip((b1 * self._m + (1 - b1) * g) / frozen, -most, most) for g in everyone]
            self._m = frozen * self._mean(moves)
        self._t += 1
        unbiased = np.sqrt(self._v / (1 - b2 ** min(self._t, self._warmup))) + self._eps
        if self._decoupled:
            self.weights = self.weights * (1 - self._lr * self._decay)
        self.weights = self.weights - self._lr / (1 - b1**self._t) * self._m / unbiased


class Replicas:
    """Weights of all ranks, each of which descends 0.5·|w - target|²; subclasses say how they meet."""

    def __init__(self, start: Array, targets: Sequence[Array], lr: float) -> None:
        self.w = [start.copy() for _ in targets]
        self._targets, self.lr, self.steps = targets, lr, 0

    def progress(self, rank: int, at: Array | None = None) -> Array:
        return -self.lr * ((self.w[rank] if at is None else at) - self._targets[rank])

    def step(self) -> None:
        self.steps += 1
        self.w = [w + self.progress(rank) for rank, w in enumerate(self.w)]
        self.meet()

    def meet(self) -> None:
        """Do nothing."""


class LocalSGD(Replicas):
    every = 3

    def meet(self) -> None:
        if self.steps % self.every == 0:
            self.w = [np.mean(self.w, axis=0) for _ in self.w]


class DiLoCo(Replicas):
    """The outer step of torch.optim.SGD with Nesterov momentum."""

    every, lr_outer, momentum = 3, 0.7, 0.9

    def __init__(self, start: Array, targets: Sequence[Array], lr: float) -> None:
        super().__init__(start, targets, lr)
        self._anchor, self._velocity = start.copy(), np.zeros_like(start)

    def meet(self) -> None:
        if self.steps % self.every == 0:
            g = np.mean([self._anchor - w for w in self.w], axis=0)
            self._velocity = self.momentum * self._velocity + g
            self._anchor = self._anchor - self.lr_outer * (g + self.momentum * self._velocity)
            self.w = [self._anchor.copy() for _ in self.w]


class StreamingDiLoCo(Replicas):
    """Fragments that leave at different steps, come back `delay` later, and are mixed with what has gone on."""

    every, lr_outer, momentum, delay, mixing = 4, 0.7, 0.9, 1, 0.25

    def __init__(self, start: Array, targets: Sequence[Array], lr: float, parts: Sequence[slice]) -> None:
        super().__init__(start, targets, lr)
        self._anchor, self._velocity, self._fragments = start.copy(), np.zeros_like(start), parts
        self._away: dict[int, Array] = {}

    def meet(self) -> None:
        for number, part in enumerate(self._fragments):
            offset = self.every * number // len(self._fragments)
            if self.steps >= self.every and (self.steps - offset) % self.every == 0:
                self._away[number] = np.mean([self._anchor[part] - w[part] for w in self.w], axis=0)
            elif number in self._away and (self.steps - offset - self.delay) % self.every == 0:
                g = self._away.pop(number)
                self._velocity[part] = self.momentum * self._velocity[part] + g
                self._anchor[part] -= self.lr_outer * (g + self.momentum * self._velocity[part])
                for w in self.w:
                    w[part] = self.mixing * w[part] + (1 - self.mixing) * self._anchor[part]


class DecentralizedAll(Replicas):
    """From the mean of all, along the gradient at one's own weights."""

    def step(self) -> None:
        start = [np.mean(self.w, axis=0) if self.steps else w for w in self.w]
        self.w = [start[rank] + self.progress(rank) for rank in range(len(self.w))]
        self.steps += 1


class ShiftOne(Replicas):
    """The same with one peer, another in each turn."""

    def step(self) -> None:
        n, turn = len(self.w), self.steps - 1
        start = list(self.w)
        if self.steps and n > 1:
            for rank in range(n // 2):
                peer = (turn + rank) % ((n + 1) // 2) + n // 2
                start[rank] = start[peer] = (self.w[rank] + self.w[peer]) / 2
        self.w = [start[rank] + self.progress(rank) for rank in range(n)]
        self.steps += 1


class Ring(Replicas):
    """x = w + deQ(Q(x + L/3 + R/3 - 5/3 w)) on a ring."""

    def __init__(self, start: Array, targets: Sequence[Array], lr: float) -> None:
        super().__init__(start, targets, lr)
        self._known = [start.copy() for _ in targets]

    def meet(self) -> None:
        n = len(self.w)
        if n == 1:
            return
        known = self._known
        sent = [
            as_minmax8(x + known[rank - 1] / 3 + known[(rank + 1) % n] / 3 - 5 / 3 * known[rank])
            for rank, x in enumerate(self.w)
        ]
        self._known = [w + d for w, d in zip(known, sent, strict=True)]
        self.w = [w.copy() for w in self._known]
