"""Words of one rank, not of all: `print`, and a logger that says the rank."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

from distwrap.group.world import current_world, is_first_time
from distwrap.versions import FRAMES_OF_ADAPTER

if TYPE_CHECKING:
    Adapter = logging.LoggerAdapter[logging.Logger]
else:
    Adapter = logging.LoggerAdapter


def print(
    *values: object,
    sep: str | None = " ",
    end: str | None = "\n",
    file: IO[str] | None = None,
    flush: bool = False,
    all_ranks: bool = False,
) -> None:
    """Print on rank 0 only, as the builtin ``print`` does; in a single process it is the builtin.

    Args:
        *values: the values to print.
        sep: the text between two values.
        end: the text after the last value.
        file: where to print; by default standard output.
        flush: whether to write at once.
        all_ranks: print on every rank, with the rank in front. Each rank's text is written at once, so that lines do
            not mix, but the ranks print in no fixed order.

    Example:
        >>> import distwrap
        >>> distwrap.print("loss", 0.5)
        loss 0.5
    """
    place = current_world().placement
    if place.world_size == 1 or (place.rank == 0 and not all_ranks):
        builtins.print(*values, sep=sep, end=end, file=file, flush=flush)
    elif all_ranks:
        words = (" " if sep is None else sep).join(map(str, values))
        last = "\n" if end is None else end
        builtins.print(f"[rank {place.rank}] {words}{last}", end="", file=file, flush=flush)


class RankLogger(Adapter):
    """Logger that writes the rank in front of each message, where there are several ranks.

    Its methods take two more arguments: ``rank_zero=True`` logs on rank 0 only, and ``once=True`` logs a message only
    the first time that this rank logs it in a run.
    """

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return a message with the rank in front."""
        place = current_world().placement
        return super().process(f"[rank {place.rank}] {msg}" if place.world_size > 1 else msg, kwargs)

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message, as a ``logging.LoggerAdapter`` does."""
        rank_zero, once = kwargs.pop("rank_zero", False), kwargs.pop("once", False)
        if not self.isEnabledFor(level) or (rank_zero and current_world().placement.rank != 0):
            return
        if once and not is_first_time(f"in a log {self.logger.name} {msg}"):
            return
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + FRAMES_OF_ADAPTER  # who called this
        super().log(level, msg, *args, **kwargs)


def get_logger(name: str | None = None, extra: Mapping[str, object] | None = None) -> RankLogger:
    """Return a logger that writes the rank in front of each message; in a single process messages stay as they are.

    Args:
        name: the name of the logger; by default the root logger.
        extra: the same as for ``logging.LoggerAdapter``.

    Example:
        >>> log = get_logger("train")
        >>> log.info("epoch %d", 1, rank_zero=True)
        >>> log.warning("this card is slow", once=True)
    """
    return RankLogger(logging.getLogger(name), {} if extra is None else extra)
