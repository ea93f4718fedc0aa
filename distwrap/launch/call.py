"""A call of the user's function, and the task that the ranks make of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from distwrap.options import Options


@dataclass(frozen=True)
class Call:
    """A function and its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """The function's name, for messages."""
        return f"{getattr(self.function, '__qualname__', type(self.function).__qualname__)}()"


class Task(NamedTuple):
    """A call, and the options under which the ranks run it."""

    call: Call
    options: Options
