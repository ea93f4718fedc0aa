"""The table of behaviours: small functions, each of which proves one thing about a strategy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Body = TypeVar("Body", bound=Callable[..., None])


@dataclass(frozen=True)
class Behaviour:
    """One behaviour of a strategy.

    Attributes:
        body: raises where the strategy behaves otherwise, and a `ModelError`, `OptionError` or `PrecisionError` where
            it refuses.
        may_refuse: whether every strategy may refuse it by name, also by a `CollectiveError` that is no timeout.
        launches: whether the body runs in the caller, and gets a `Launch` to start ranks of its own.
    """

    body: Callable[..., None]
    may_refuse: bool = False
    launches: bool = False


BEHAVIOURS: dict[str, Behaviour] = {}


def behaviour(*, may_refuse: bool = False, launches: bool = False) -> Callable[[Body], Body]:
    """Register a behaviour under its function's name; see `Behaviour` for the arguments."""

    def register(body: Body) -> Body:
        BEHAVIOURS[body.__name__] = Behaviour(body, may_refuse, launches)
        return body

    return register
