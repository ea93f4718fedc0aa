"""Arithmetic of the indices that a rank takes, and of its batches, without torch or processes."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal, TypeVar

Mode = Literal["pad", "exact", "drop"]
Item = TypeVar("Item")


def share_size(n: int, rank: int, world_size: int, mode: Mode) -> int:
    """Return how many of `n` items a rank takes.

    Example:
        >>> [share_size(5, rank, 2, "exact") for rank in (0, 1)]
        [3, 2]
    """
    return len(range(rank, end_of_shares(0, n, world_size, mode), world_size))


def end_of_shares(start: int, n: int, world_size: int, mode: Mode) -> int:
    """Return the place at which the ranks' shares of an order of `n` items end; past `n` the order begins again.

    Example:
        >>> [end_of_shares(0, 5, 2, mode) for mode in ("pad", "drop", "exact")]
        [6, 4, 5]
    """
    left = max(0, n - start)
    if mode == "pad":
        return start + -(-left // world_size) * world_size
    if mode == "drop":
        return start + left // world_size * world_size
    return n


def repeated(n: int, world_size: int) -> int:
    """Return how many of `n` items some rank gets a second time in mode pad, so that all get equally many.

    Example:
        >>> repeated(5, 2), repeated(6, 2)
        (1, 0)
    """
    return end_of_shares(0, n, world_size, "pad") - n


def share(items: Iterable[Item], rank: int, world_size: int, mode: Mode, start: int = 0) -> Iterator[Item]:
    """Yield a rank's share of a stream: every `world_size`-th item, after the first `start` ones.

    ``"pad"`` fills the last round from the start, so that all ranks take equally many; ``"drop"`` leaves the last
    round out where it is not full; ``"exact"`` yields each item once over all ranks.

    Example:
        >>> [list(share("abcde", rank, 2, "pad")) for rank in (0, 1)]
        [['a', 'c', 'e'], ['b', 'd', 'a']]
    """
    stream = iter(items)
    first = list(islice(stream, min(start, world_size)))
    next(islice(stream, start - len(first), start - len(first)), None)
    while around := list(islice(stream, world_size)):
        if len(first) < world_size:
            first += around[: world_size - len(first)]
        if mode == "pad" and len(around) < world_size:
            around += (first * world_size)[: world_size - len(around)]
        if len(around) == world_size or (mode == "exact" and rank < len(around)):
            yield around[rank]


def batch_count(n: int, world_size: int, batch_size: int, drop_last: bool) -> int:
    """Return how many batches every rank takes in exact mode: as many as the rank with the fewest samples has.

    Where there are fewer samples than ranks, the ranks that have one take one batch (zero with `drop_last`).
    """
    fewest = n // world_size
    if drop_last:
        return fewest // batch_size
    return max(-(-fewest // batch_size), 1 if n else 0)


def stream_batches(n: int, rank: int, world_size: int, workers: int, batch_size: int, drop_last: bool) -> int:
    """Return how many batches a rank's workers make of every n-th item of a stream; the first rank's are the most.

    Example:
        >>> [stream_batches(11, rank, 2, workers=1, batch_size=2, drop_last=False) for rank in (0, 1)]
        [3, 3]
    """
    first, count = rank * workers, world_size * workers
    shares = [share_size(n, worker, count, "exact") for worker in range(first, first + workers)]
    return sum(share // batch_size if drop_last else -(-share // batch_size) for share in shares)


def exact_batches(indices: Iterable[int], count: int, batch_size: int, drop_last: bool) -> Iterator[list[int]]:
    """Yield a rank's indices in `count` batches; what is left over joins the last one, or is dropped.

    Example:
        >>> list(exact_batches([0, 2, 4, 6, 8], count=2, batch_size=2, drop_last=False))
        [[0, 2], [4, 6, 8]]
    """
    stream = iter(indices)
    if not count:
        next(stream, None)  # an epoch of nothing is one too, and begins when it is asked for
    for number in range(count):
        batch = list(islice(stream, batch_size if number < count - 1 or drop_last else None))
        if batch:
            yield batch


def merged_batches(batches: Iterable[list[int]], count: int) -> Iterator[list[int]]:
    """Yield `count` batches of a rank's share of ready-made ones; a left-over batch joins the last.

    Example:
        >>> list(merged_batches([[0], [1], [2]], count=2))
        [[0], [1, 2]]
    """
    stream = iter(batches)
    yield from islice(stream, max(0, count - 1))
    last = [index for batch in stream for index in batch]
    if last:
        yield last
