"""The largest batch size that fits into the memory of every rank, found by trying."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from distwrap._internals.torch import collectives_begun
from distwrap.checks import SECONDS, whole
from distwrap.data.votes import Votes
from distwrap.errors import CollectiveError, OptionError
from distwrap.group.collective_guard import check_collectives_allowed
from distwrap.group.setup import require_group
from distwrap.group.world import RunPart, World, current_world, say
from distwrap.supervision.activity import Activity
from distwrap.wording import first_names, named_ranks

Value = TypeVar("Value")

# Of errors that are no OutOfMemoryError of torch's: its CPU, its other devices, and libraries of CUDA's.
_WORDS = ("out of memory", "DefaultCPUAllocator: can't allocate", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


class _Try(IntEnum):
    """Outcome of a try on a rank; 0 stands for a try that has not ended."""

    FITS = 1
    FULL = 2
    FAILED = 3


def fit_batch_size(
    fn: Callable[[int], Value], *, start: int, least: int = 1, patience: float = 60.0
) -> tuple[int, Value]:
    """Call a function with a batch size, which is halved on all ranks together until no rank runs out of memory.

    Every rank must call it; in a single process it works in the same way. Between two tries everything that the
    function has made is freed, so let the function make what it needs, also the model and the optimizer: changes to
    objects outside of it stay, and gradients of a failed try are useless. A rank that runs out of memory during an
    exchange with the others, as in the backward of a wrapped model, cannot try again if the others have gone further:
    that is an error on all ranks. If memory differs between ranks, try a step without exchanges: with the bare model,
    or in `no_sync`.

    Args:
        fn: a function of the batch size of one rank.
        start: the first batch size to try.
        least: the smallest batch size to try.
        patience: seconds for which a rank that is out of memory waits for the others to reach the end of `fn`.

    Returns:
        The batch size and the function's value, as ``size, value``.

    Raises:
        torch.OutOfMemoryError: a rank is out of memory with `least` too; raised on every rank.
        CollectiveError: a rank is out of memory while the others wait for it in an exchange, or have begun a different
            number of exchanges; or the ranks try different sizes; or `fn` raised another error on another rank, which
            that rank raises itself.
        OptionError: an argument is not a whole number, or `start` is below `least`.

    Example:
        >>> def train(batch_size: int) -> str:
        ...     if batch_size > 20:
        ...         raise torch.OutOfMemoryError("only 20 fit")
        ...     return "trained"
        >>> size, value = fit_batch_size(train, start=64)
        >>> size, value
        (16, 'trained')
    """
    size, least = whole(1)("start", start), whole(1)("least", least)
    seconds = SECONDS("patience", patience)
    if size < least:
        raise OptionError(
            f"fit_batch_size(start={start}, least={least}): the search begins at start and halves it, so start "
            "must be at least least."
        )
    check_collectives_allowed("fit_batch_size()")
    world = current_world()
    world.part(Activity).record("fit_batch_size")
    part = world.part(Fitting)
    while True:
        begun, value, why = collectives_begun(world.layout.group) or 0, None, ""
        try:
            value = fn(size)
        except Exception as error:
            if not is_out_of_memory(error):
                part.tell_failure()
                raise
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
        outcome = _Try.FULL if why else _Try.FITS
        full = part.full_ranks(outcome, size, (collectives_begun(world.layout.group) or 0) - begun, seconds)
        if not full:
            return size, cast("Value", value)
        value = None
        _free(world.device)
        if size // 2 < least:
            raise torch.OutOfMemoryError(
                f"fit_batch_size(): {named_ranks(full)} ran out of memory with batch size {size} too, and the least to "
                f"try is {least}. {why}".rstrip()
            )
        say(f"fit_batch_size(): {named_ranks(full)} ran out of memory with batch size {size}; trying {size // 2} now")
        size //= 2


class Fitting(RunPart):
    """Exchange of the outcomes of tries, apart from all exchanges of the function."""

    def __init__(self, world: World) -> None:
        self._place, self._votes = world.placement, Votes()
        self._group: Any = None
        if self._place.world_size > 1:
            require_group("fit_batch_size")
            self._group = world.new_group(backend="gloo")

    def tell_failure(self) -> None:
        """Tell the other ranks that another error ends the tries here, without waiting for them."""
        if self._group is not None and dist.is_initialized():
            self._votes.cast(self._vote(_Try.FAILED, 0, 0), self._group)

    def full_ranks(self, outcome: _Try, size: int, begun: int, seconds: float) -> list[int]:
        """Return which ranks are out of memory.

        Raises:
            CollectiveError: the ranks cannot try again, or one has failed in another way.
        """
        if self._group is None:
            return [0] if outcome is _Try.FULL else []
        vote = self._vote(outcome, begun, size)
        work = dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        try:
            work.wait(*([timedelta(seconds=seconds)] if outcome is _Try.FULL else []))
        except RuntimeError as error:
            if outcome is not _Try.FULL:
                raise
            raise CollectiveError(
                f"fit_batch_size(): rank {self._place.rank} ran out of memory with batch size {size}, and after "
                f"{seconds:g} s the other ranks have not come to the end of the function: they wait for this rank in "
                f"an exchange, or take longer, for which there is patience=. Start with less, or try a step that "
                f"exchanges nothing, of the bare model or in no_sync()."
            ) from error
        outcomes, counts, sizes = vote.view(3, -1).tolist()
        failed, full = ([rank for rank, how in enumerate(outcomes) if how == what] for what in (_Try.FAILED, _Try.FULL))
        if failed:
            raise CollectiveError(
                f"fit_batch_size(): with batch size {size} the function failed on {named_ranks(failed)} for "
                "another reason than memory; that rank raises the error."
            )
        if len(set(sizes)) > 1:
            raise CollectiveError(
                f"fit_batch_size(): the ranks have tried different batch sizes ({first_names(sizes, 8)}), so "
                "they could "
                f"not come to one. Give all ranks the same start=, as distwrap.reduce(start, 'max')."
            )
        if full and len(set(counts)) > 1:
            raise CollectiveError(
                f"fit_batch_size(): {named_ranks(full)} ran out of memory with batch size {size} in the middle "
                "of exchanges between the ranks, which had begun different numbers of them "
                f"({first_names(counts, 8)}): another try would mix them up. Start with less, or try a "
                "step that exchanges nothing, of the bare model or in no_sync()."
            )
        return full

    def wait(self) -> None:
        """Wait until the other ranks have got the message of this one."""
        self._votes.wait()

    def _vote(self, outcome: _Try, begun: int, size: int) -> torch.Tensor:
        vote = torch.zeros(3, self._place.world_size, dtype=torch.int64, device="cpu")
        vote[:, self._place.rank] = torch.tensor([outcome, begun, size], device="cpu")
        return vote.view(-1)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is short: of an accelerator, or of the CPU.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
        (True, False)
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def _free(device: torch.device) -> None:
    """Free the memory that a try has left: objects in reference cycles, and torch's cache."""
    gc.collect()
    if device.type != "cpu":
        getattr(torch.get_device_module(device), "empty_cache", lambda: None)()
