"""What a program gave, in a form that can be compared: no times, paths, addresses or wording of messages."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Iterator, Sequence
from typing import TypedDict


class Given(TypedDict, total=False):
    """What a program gave.

    Attributes:
        exit: its exit code, which is left out where it differs from run to run; ``None`` if it did not end in time.
        error: the class of the error that ended it, and ``""`` without one.
        lines: what it printed, as `lines_of` returns it.
        unstable: whether it printed other lines too, which differ from run to run.
        wrong: why this is not right; ``""`` where it is.
    """

    exit: int | None
    error: str
    lines: list[str]
    unstable: bool
    wrong: str


MOST_LINES = 400
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE][-+]?\d))(?:[eE][-+]?\d+)?(?![\w.])")
_ERROR = re.compile(r"\b(?:[a-z_]\w*\.)*(_*[A-Z]\w*(?:Error|Exception|Interrupt|Warning|Timeout|Exit))\b")
_VARIES = [
    (re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]"), ""),
    (re.compile(r"0x[0-9a-f]{6,}"), "<address>"),
    (re.compile(r"(?<![\w./])/[\w./@+-]{3,}"), "<path>"),
    (re.compile(r"\b(?:127\.0\.0\.1|localhost|\[::1\]):\d+"), "<port>"),
    (re.compile(r"\b(pid|process|port) \d+"), r"\1 <number>"),
    (re.compile(r"[\d.]+ ?(?:[nuµm]?s|min|h|seconds?|minutes?|[KMG]i?B|[KMG]?B/s|x)\b(?! *=)"), "<amount>"),
    (re.compile(rf"\b{re.escape(socket.gethostname())}\b"), "<host>"),
    (re.compile(r"\b[a-z']+(?:,? [a-z']+){5,}"), "<words>"),
]


def lines_of(printed: str) -> list[str]:
    """Return what was printed, line by line, without what differs from run to run and from machine to machine.

    A line that tells of an error ends with the error's class, and sentences are left out: messages may be improved.

    >>> lines_of("loss 0.25 after 3.1 s in /tmp/a1b2\\n\\nCheckpointError: the file …\\n")
    ['loss 0.25 after <amount> in <path>', 'CheckpointError']
    """
    lines = []
    for line in printed.splitlines():
        for pattern, instead in _VARIES:
            line = pattern.sub(instead, line)
        if error := _ERROR.search(line):
            line = line[: error.start()] + error[1]
        if line.strip() and not line.startswith("[distwrap") and not line.endswith("."):
            lines.append(" ".join(line.split()))
    return lines[:MOST_LINES]


def error_of(printed: str) -> str:
    """Return the class of the error that a traceback ends with, as it was printed; ``""`` without one.

    >>> error_of("Traceback …\\n  x\\ndistwrap.errors.OptionError: an option\\n\\nand more\\n")
    'OptionError'
    """
    found = [error[1] for line in printed.splitlines() if (error := _ERROR.match(re.sub(r"^\[rank\d+\]: ", "", line)))]
    return found[-1] if found else ""


def without_unstable(recorded: Given, given: Given) -> Given:
    """Return what a program gives again, of what was recorded before."""
    lines = [line for line, found in _pairs(recorded["lines"], given["lines"]) if found is not None]
    kept: Given = {**recorded, "lines": lines}
    if len(lines) < max(len(recorded["lines"]), len(given["lines"])):
        kept["unstable"] = True
    if _end(recorded) != _end(given):
        kept["unstable"] = True
        kept.pop("exit", None)
        kept.pop("error", None)
    return kept


def differences(recorded: Given, given: Given) -> Iterator[str]:
    """Yield what a program gives otherwise than it was recorded, in words."""
    if "exit" in recorded and _end(given) != _end(recorded):
        yield f"It ends with {_end(given)}, and ended with {_end(recorded)}."
    pairs = list(_pairs(recorded["lines"], given["lines"]))
    yield from (f"- {line}" for line, found in pairs if found is None)
    if not recorded.get("unstable"):
        taken = {found for _, found in pairs}
        yield from (f"+ {line}" for number, line in enumerate(given["lines"]) if number not in taken)


def _end(given: Given) -> str:
    code = given.get("exit")
    return f"exit code {code}, {given.get('error') or 'no error'}" if code is not None else "none in time"


def _pairs(lines: Sequence[str], others: Sequence[str]) -> Iterator[tuple[str, int | None]]:
    """Yield each line with the number of one like it among the others; ranks may have printed in another order."""
    left = list(range(len(others)))
    for line in lines:
        found = next((number for number in left if alike(line, others[number])), None)
        if found is not None:
            left.remove(found)
        yield line, found


def alike(line: str, other: str) -> bool:
    """Return whether two lines have the same words and whole numbers, and nearly the same numbers.

    A number may differ in its last printed digit by one.

    >>> alike("epoch 3: loss 0.1234", "epoch 3: loss 0.1235"), alike("epoch 3: loss 0.12", "epoch 4: loss 0.12")
    (True, False)
    """
    if line == other:
        return True
    ours, theirs = _NUMBER.findall(line), _NUMBER.findall(other)
    return (
        len(ours) == len(theirs)
        and _NUMBER.sub("#", line) == _NUMBER.sub("#", other)
        and all(
            math.isclose(float(a), float(b), rel_tol=1e-4, abs_tol=max(1e-7, 1.01 * min(_digit(a), _digit(b))))
            for a, b in zip(ours, theirs, strict=True)
        )
    )


def _digit(number: str) -> float:
    """Return the worth of the last digit of a number as it is printed."""
    digits, _, exponent = number.lower().partition("e")
    return float(10.0 ** (int(exponent or 0) - len(digits.partition(".")[2])))
