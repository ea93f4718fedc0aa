"""Failures of this rank: find the cause, and report it to the other ranks."""

import os
import socket
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from distwrap import tracebacks
from distwrap.errors import (
    CheckpointError,
    CollectiveError,
    CollectiveTimeoutError,
    DistwrapError,
    WorkerDiedError,
    WorkerError,
)
from distwrap.group.world import active_world
from distwrap.supervision import stacks
from distwrap.supervision.failure import Failure

FIRST_FAILURE_SECONDS = 1.5  # for the word of a rank that failed first
LAUNCHER_SECONDS = 0.5  # for whoever started the ranks to notice it before this rank's end

# What torch.distributed says on a rank whose peer is gone: an effect, not the cause.
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Socket Timeout",
    "connectFullMesh",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "remote process exited",
    "Failed to recv",
    "Horovod has been shut down",
)

# What torch says when not all ranks came to a collective in time.
_TIMEOUTS = (
    "Timed out waiting",
    "wait timeout after",
    "monitoredBarrier",
    "Timeout waiting for key",
    "timeout caused pair closure",  # of an exchange beside the one that has timed out
)

# What gloo says where a rank gets more than it waits for: another one makes a different exchange.
_UNLIKE = "op.preamble.length <= op.nbytes"

# Where Python reads what a loader's worker sends.
_PIPES = tuple(os.path.join("multiprocessing", file) for file in ("connection.py", "reduction.py"))


def is_secondary(error: BaseException) -> bool:
    """Return whether an error only follows from a lost peer, or from another rank's failure.

    Our errors say so themselves; of others only torch's own words count. What is raised while such an error is handled
    follows too.
    """
    earlier: BaseException | None = error
    seen: set[int] = set()  # a chain may lead back, as where a cause is raised in place of what it has caused
    while earlier is not None and id(earlier) not in seen:
        seen.add(id(earlier))
        if (isinstance(earlier, DistwrapError) and earlier.secondary) or _lost_a_peer(earlier):
            return True
        if isinstance(earlier, DistwrapError) and not isinstance(earlier, CheckpointError):
            return False  # which tells of any error of a save or a load
        earlier = earlier.__cause__ or (None if earlier.__suppress_context__ else earlier.__context__)
    return False


def _lost_a_peer(error: BaseException) -> bool:
    return _is_of_exchange(error) and any(lost in str(error) for lost in _LOST_PEER)


def explained(error: BaseException) -> BaseException:
    """Return the error that the user should read in place of this one: the cause, where torch reports an effect.

    A collective that timed out, or met another one, comes with the places of all ranks. Where no launcher of ours finds
    the first cause, a secondary failure is replaced by the word of the rank that failed first.
    """
    world = active_world()
    if isinstance(error, (OSError, EOFError)) and world is not None and _fetches_a_batch(error):
        return WorkerDiedError(
            f"a DataLoader worker of rank {world.placement.rank} on {socket.gethostname()} ended while a batch was "
            f"fetched from it ({type(error).__name__}: {error}). Look at what it printed last.",
            rank=world.placement.rank,
            host=socket.gethostname(),
        ).with_traceback(error.__traceback__)
    if world is None or world.channel is None or not _is_of_exchange(error):
        return error
    channel, place, text = world.channel, world.placement, str(error)
    here = f"rank {place.rank} on {socket.gethostname()}"
    if any(words in text for words in _TIMEOUTS):
        channel.reporter.failed_at = stacks.of_traceback(error.__traceback__)
        better: BaseException = CollectiveTimeoutError(
            f"{here} waited {world.options.timeout:g} s in a collective, which not all ranks "
            f"called:\n{channel.reporter.ask_all()}\nEvery rank must call the same collectives in the same "
            "order. For work of one rank that takes longer use rank_zero_first() or "
            "rank_zero_only(broadcast=True), or raise timeout=."
        )
    elif _UNLIKE in text:
        channel.reporter.failed_at = stacks.of_traceback(error.__traceback__)
        better = CollectiveError(
            f"{here} got more numbers in a collective than it expected, so another rank was in a different "
            f"one:\n{channel.reporter.ask_all()}\nEvery rank must call the same collectives in the same order: "
            "look for a branch that differs between ranks."
        )
    elif _lost_a_peer(error) and not channel.supervised:
        first = channel.failures.wait_for_cause(FIRST_FAILURE_SECONDS)
        if first is None:
            return error
        time.sleep(LAUNCHER_SECONDS)
        better = WorkerError(
            f"{here} lost the connection to a rank that failed first: {first}",
            rank=first.rank,
            host=first.host,
            secondary=True,
        )
    else:
        return error
    better.__suppress_context__ = True
    return better.with_traceback(error.__traceback__)


def _is_of_exchange(error: BaseException) -> bool:
    ours = isinstance(error, DistwrapError)
    of_horovod = type(error).__module__.startswith("horovod.")
    of_engine = of_horovod or not stacks.raised_outside_torch(error.__traceback__)
    return isinstance(error, RuntimeError) and not ours and of_engine


def _fetches_a_batch(error: BaseException) -> bool:
    """Return whether an error comes from the pipe to a loader's worker, and not from the dataset's own code."""
    lines = stacks.of_traceback(error.__traceback__)
    from_pipe = (bool(lines) and lines[-1][0].endswith(_PIPES)) or "in pin memory thread" in str(error)
    return from_pipe and stacks.locate(lines)[0] == "DataLoader"


def of_rank(rank: int, error: BaseException) -> Failure:
    """Return the failure of this process as a rank that has raised an exception."""
    return Failure.of(error, rank, traceback=tracebacks.as_text(error), secondary=is_secondary(error))


def tell(error: BaseException) -> None:
    """Report a failure to the other ranks, and to torchrun, where no launcher of ours does."""
    world = active_world()
    if world is None or world.channel is None or world.channel.supervised or not is_failure(error):
        return
    failure = of_rank(world.placement.rank, error)
    world.channel.failures.tell(failure)
    if "TORCHELASTIC_ERROR_FILE" in os.environ and not failure.secondary:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        trace = error.__traceback__
        try:
            raise error from None  # it writes down the exception that is being handled
        except BaseException:  # noqa: BLE001
            get_error_handler().record_exception(error)
            error.__traceback__ = trace


def is_failure(error: BaseException) -> bool:
    """Return whether an exception that leaves a rank's function is a failure: ``sys.exit(0)`` is not."""
    return not (isinstance(error, SystemExit) and error.code in (None, 0))


def tell_uncaught() -> Callable[[], None]:
    """Report exceptions that end the interpreter, until the function that this returns is called."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        tell(error)
        return before(kind, error, trace)

    sys.excepthook = hook

    def undo() -> None:
        if sys.excepthook is hook:
            sys.excepthook = before

    return undo
