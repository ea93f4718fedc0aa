"""Let one rank do what must be done once: print, download, log."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, overload

from distwrap.decorated import DecoratedFunction
from distwrap.errors import OptionError, WorkerError
from distwrap.group.collective_guard import check_collectives_allowed, guard_collectives
from distwrap.group.collectives import broadcast, gather_object
from distwrap.group.signing import run_secret, sign, verify
from distwrap.group.wait_for_rank import share_result
from distwrap.group.world import current_world

P = ParamSpec("P")
R = TypeVar("R")


@overload
def rank_zero_only(fn: Callable[P, R], /) -> Callable[P, R | None]: ...
@overload
def rank_zero_only(
    fn: None = None, /, *, default: Any = None, broadcast: bool = False, local: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def rank_zero_only(
    fn: Callable[..., Any] | None = None, /, *, default: Any = None, broadcast: bool = False, local: bool = False
) -> Any:
    """Run a function or method on rank 0 only; on the other ranks it returns `default`.

    A collective inside of it, of distwrap or of torch, is an error at once, because the other ranks would never call
    it.

    Args:
        fn: the function.
        default: the value that the other ranks return.
        broadcast: give every rank the value that rank 0 returned, or raise the exception that it raised. All ranks must
            then call the function. They wait as long as rank 0 works, and stop waiting when it dies.
        local: run it on the first rank of every node instead.

    Raises:
        CollectiveInRankZeroError: the function calls a collective.

    Example:
        >>> @rank_zero_only
        ... def report(loss):
        ...     print(f"loss {loss:.2f}")
        >>> report(0.5)
        loss 0.50
    """
    if fn is None:
        return lambda fn: _decorated(fn, default, broadcast, local)
    return _decorated(fn, default, broadcast, local)


def _decorated(fn: Callable[..., Any], default: Any, everywhere: bool, local: bool) -> Any:
    if not callable(fn) and not isinstance(fn, (staticmethod, classmethod)):
        raise OptionError(f"@rank_zero_only decorates a function, not a {type(fn).__qualname__}.")
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
        raise OptionError(f"@rank_zero_only takes plain functions; {fn.__qualname__} is async or a generator.")

    return RankZeroFunction(fn, default, everywhere, local)


class RankZeroFunction(DecoratedFunction):
    """A function under ``@rank_zero_only``. It goes to the ranks along with the function that calls it."""

    @staticmethod
    def _self_call(
        default: Any, everywhere: bool, local: bool, wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any
    ) -> Any:
        chosen = _is_chosen(local)
        name = f"the rank-zero function {getattr(wrapped, '__qualname__', type(wrapped).__qualname__)}()"
        if everywhere:
            return _everywhere(name, lambda: wrapped(*args, **kwargs), chosen, local)
        if not chosen:
            return default
        with guard_collectives(name):
            return wrapped(*args, **kwargs)


@contextmanager
def rank_zero_first(local: bool = False) -> Iterator[None]:
    """Let rank 0 run the block first, and the others when it has finished, as to download or preprocess data once.

    The others wait as long as rank 0 works, whatever the timeout of collectives, and stop waiting when it dies.

    Args:
        local: let the first rank of every node go first, instead of rank 0 alone.

    Raises:
        CollectiveInRankZeroError: the block calls a collective.
        WorkerError: the first rank failed in the block; raised on the other ranks, so that none of them waits.

    Example:
        >>> with rank_zero_first():
        ...     files = ["train.csv"]
    """
    name, worker = "rank_zero_first()", _worker(local)
    check_collectives_allowed(name)
    if _is_chosen(local):
        try:
            with guard_collectives(name):
                yield
        except BaseException as error:
            share_result(name, worker, f"{type(error).__name__}: {error}".encode())
            raise
        share_result(name, worker, b"")
        return
    problem = share_result(name, worker, None)
    if problem:
        raise WorkerError(
            f"rank {worker}, which goes first, failed inside {name}, so rank {current_world().placement.rank} does not "
            f"enter: {problem.decode()}",
            rank=worker,
            secondary=True,
        )
    with guard_collectives(name):
        yield


def on_rank_zero(factory: Callable[[], R]) -> R:
    """Make an object on rank 0, and on the other ranks a stand-in that accepts any call or attribute and does nothing.

    Use it for loggers, which should record one run and not one for each rank.

    Args:
        factory: a function that returns the object; it is called on rank 0 only.

    Example:
        >>> log = on_rank_zero(list)
        >>> log.append(1)
        >>> log
        [1]
    """
    if _is_chosen(local=False):
        return factory()
    return _Nothing()  # type: ignore[return-value]


class _Nothing:
    """Object that takes any call or attribute, and does nothing."""

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self

    def _answer(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self

    def _ignore(self, *args: Any) -> None: ...

    __call__ = __enter__ = __getitem__ = _answer
    __exit__ = __setattr__ = __setitem__ = _ignore

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _is_chosen(local: bool) -> bool:
    return current_world().placement.rank == _worker(local)


def _worker(local: bool) -> int:
    """Return the rank that is chosen, as seen from this one."""
    place = current_world().placement
    return place.rank - place.local_rank if local else 0


def _everywhere(name: str, run: Callable[[], Any], chosen: bool, local: bool) -> Any:
    """Run on the chosen rank, and share its value, or its exception."""
    if current_world().placement.world_size == 1:
        return run()
    check_collectives_allowed(name)
    worker = _worker(local)
    result: tuple[Any, BaseException | None] = (None, None)
    if chosen:
        try:
            with guard_collectives(name):
                result = (run(), None)
        except Exception as error:  # noqa: BLE001 - it is raised again, on every rank
            result = (None, error)
        except BaseException as error:
            share_result(name, worker, f"{type(error).__name__} {error}".encode())
            raise
    problem = share_result(name, worker, b"" if chosen else None)
    if problem:
        raise WorkerError(f"rank {worker} ended inside {name}: {problem.decode()}", rank=worker, secondary=True)
    own_value, own_error = result
    value, their_error = _shared(result, local)
    if their_error is not None:
        raise their_error if own_error is None else own_error
    return own_value if chosen else value


def _shared(result: tuple[Any, BaseException | None], local: bool) -> tuple[Any, BaseException | None]:
    place, secret = current_world().placement, run_secret()
    try:
        data = sign(("", *result), secret)
        verify(data, secret, place.rank)
    except Exception as error:  # noqa: BLE001 - whatever is raised, the others must hear of it
        kind = type(result[1] if result[1] is not None else result[0]).__qualname__
        text = f"rank {place.rank}'s {kind} cannot be sent to the other ranks: {_cause(error)}"
        data = sign((text if result[1] is None else f"{text}\n{result[1]!r}", None, None), secret)
    if not local:
        data = broadcast(data)
    else:
        everyone = gather_object((place.node_rank, place.local_rank, data))
        data = next(sent for node, index, sent in everyone if (node, index) == (place.node_rank, 0))
    problem, value, their_error = verify(data, secret, _worker(local))
    return value, TypeError(problem) if problem else their_error


def _cause(error: Exception) -> str:
    """Return in words why an object could not be pickled, or not be unpickled here."""
    error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    return f"{type(error).__name__}: {error}"
