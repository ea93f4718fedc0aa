"""Checks of what a user gives: each takes the name and the value, and returns the value or raises OptionError."""

import ast
import numbers
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from distwrap.errors import OptionError
from distwrap.wording import unknown_name

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def is_whole(value: object, least: int = 0) -> bool:
    """Check for a whole number from `least`; booleans, which Python takes for numbers, are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def is_number(value: object) -> bool:
    """Check for a number; booleans, which Python takes for numbers, are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Check:
    """Values that are accepted, and the words for them.

    Attributes:
        words: what the value must be, for the error.
        accepts: whether a value is accepted.
        convert: makes the value plain, as an ``int`` of a number of numpy's.
    """

    words: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value

    def __call__(self, name: str, value: Any) -> Any:
        """Return the value, made plain.

        Raises:
            OptionError: it is not accepted.
        """
        if not self.accepts(value):
            is_text = isinstance(value, str) and value.isdigit() and self.accepts(int(value))
            hint = f" This is a string: give int({value!r})." if is_text else ""
            raise OptionError(f"{name}={value!r}: it must be {self.words}.{hint}")
        return self.convert(value)


def whole(least: int, words: str = "") -> Check:
    """Return the check for a whole number from `least`.

    Example:
        >>> whole(1)("steps", 3)
        3
    """
    return Check(words or f"a whole number from {least}", lambda value: is_whole(value, least), int)


def either(constant: str | None, check: Check) -> Check:
    """Return the check for what another one accepts, and one constant besides.

    Example:
        >>> either("auto", whole(1))("nprocs", "auto")
        'auto'
    """

    def is_constant(value: object) -> bool:
        return value is None if constant is None else isinstance(value, str) and value == constant

    return Check(
        f"{constant!r} or {check.words}",
        lambda value: is_constant(value) or check.accepts(value),
        lambda value: constant if is_constant(value) else check.convert(value),
    )


def one_of(what: str, known: Iterable[str], hints: Mapping[str, str] | None = None) -> Callable[[str, Any], str]:
    """Return the check for one of some names, which are listed for a wrong one, with a hint where there is one."""
    names = tuple(known)

    def check(name: str, value: Any) -> str:
        if value not in names:
            raise OptionError(unknown_name(what, value, names, hints))
        return str(value)

    return check


def parsed(kind: str, text: str) -> tuple[str, dict[str, Any]]:
    """Split a name and its options, which are plain values.

    Example:
        >>> parsed("algorithm", "diloco(sync_every=64, compression='8bit')")
        ('diloco', {'sync_every': 64, 'compression': '8bit'})
    """
    name, opened, arguments = text.strip().partition("(")
    if not opened:
        return name, {}
    try:
        call = ast.parse(f"options({arguments}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError(arguments)
        return name.strip(), {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
    except (SyntaxError, ValueError):
        raise OptionError(
            f"{kind} {text!r}: write it as a name, or as name(option=value, …) with plain values."
        ) from None


def as_bytes(name: str, value: object) -> int:
    """Return a number of bytes out of a number, or out of a number with its unit.

    Raises:
        OptionError: it is none.

    Example:
        >>> as_bytes("memory", "80GB"), as_bytes("memory", "1.5 GiB")
        (80000000000, 1610612736)
    """
    text = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b?", str(value).strip().lower())
    if text is None or isinstance(value, bool) or (text[3] and not text[2]) or float(text[1]) == 0:
        raise OptionError(f"{name}={value!r}: it must be a number of bytes, as '80GB', '512MiB' or 2_000_000.")
    return int(float(text[1]) * (1024 if text[3] else 1000) ** (" kmgt".index(text[2] or " ")))


def fraction(low: float = 0.0, high: float = 1.0, *, with_low: bool = False) -> Check:
    """Return the check for a number above `low`, or from it, to `high`.

    Example:
        >>> fraction()("ratio", 0.5)
        0.5
    """
    return Check(
        f"a number {'from' if with_low else 'above'} {low} to {high}",
        lambda value: is_number(value) and low <= value <= high and (with_low or value > low),
    )


AT_LEAST_ONE = whole(1, "a whole number of at least 1")
SEED = Check("a whole number from 0 to 2**63 - 1", lambda value: is_whole(value) and value < 2**63, int)
SECONDS = Check("a positive number of seconds", lambda value: is_number(value) and 0 < value < float("inf"), float)
