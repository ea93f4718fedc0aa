"""Check what a pickle would do without running it: the names it uses, and the size of its calls' arguments.

A few bytes can pass one object to a function many times, and the function may copy it each time.

Source of the opcodes and their effects on the stack: https://docs.python.org/3/library/pickletools.html
"""

import pickletools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from distwrap.errors import CheckpointError

_GETS = ("GET", "BINGET", "LONG_BINGET")
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_FILLS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
_CALLS = ("REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST")
_EMPTY = ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET")
_SIMPLE = {op.name for op in pickletools.opcodes if not op.stack_before and op.stack_after} - {*_GETS, *_EMPTY, "MARK"}
_MADE_OF_A_LENGTH = re.compile(r"torch(\.storage|\.cuda)? \w*(Storage|Tensor)$")
_ENOUGH = 1_000_000
_PER_BYTE = 8  # a part counts in each nested call: a tensor's in a parameter three times

_Part = int | str | bytes | bytearray | list[Any]  # 1 for an object without parts, else its parts


def check_pickle(file: Any, path: Path) -> None:
    """Check that the calls in a pickle make no more than it holds.

    Args:
        file: a file at the beginning of the pickle; afterwards it is at the end.
        path: the path of the file, for the error.

    Raises:
        CheckpointError: objects are passed to functions again and again, a function makes bytes of any length, or the
            pickle is not complete.
    """
    try:
        _walk(file, path)
    except (ValueError, IndexError, KeyError, AttributeError) as error:
        why = error if isinstance(error, ValueError) else "it is not a pickle, or was cut off"
        raise CheckpointError(
            f"cannot load {path}: it is damaged, or was not written by torch.save(): {why}"
        ) from error


def _walk(file: Any, path: Path) -> None:
    stack: list[_Part] = []
    below: list[list[_Part]] = []  # the stacks at each mark
    memo: dict[int, _Part] = {}
    given, start = 0, file.tell()
    operations: Iterator[tuple[Any, Any, Any]] = pickletools.genops(file)
    for opcode, argument, at in operations:
        name = opcode.name
        if name in ("GLOBAL", "INST") and argument.endswith(" bytearray"):
            raise CheckpointError(
                f"cannot load {path}: it holds a bytearray, whose length the file does not limit: it could "
                "fill the memory."
            )
        if name in _SIMPLE:
            stack.append(argument if isinstance(argument, (str, bytes, bytearray)) else 1)
        elif name in _EMPTY:
            stack.append([])
        elif name in _PUTS:
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in _GETS:
            stack.append(memo[argument])
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "MARK":
            below.append(stack)
            stack = []
        elif name == "POP" and not stack:
            stack = below.pop()
        else:
            taken, before = [], opcode.stack_before
            if pickletools.markobject in before:
                taken, stack = stack, below.pop()
                before = before[: before.index(pickletools.markobject)]
            taken += [stack.pop() for _ in before]
            filled: Any = taken.pop() if name in _FILLS else None
            if name == "REDUCE" and taken[1] == "_codecs encode" and not _is_of_bytes(taken[0]):
                raise CheckpointError(
                    f"cannot load {path}: it holds an encoded text, whose length the file does not limit: it "
                    "could fill the memory."
                )
            called = taken[1] if name in _CALLS else ""
            if isinstance(called, str) and _MADE_OF_A_LENGTH.match(called):
                raise CheckpointError(
                    f"cannot load {path}: it makes an empty {called}, whose length the file does not limit: it "
                    "could fill the memory."
                )
            if name in _CALLS or name == "BUILD":
                limit = _ENOUGH + _PER_BYTE * (at - start)
                given += _size(taken, limit - given)
                if given > limit:
                    raise CheckpointError(
                        f"cannot load {path}: it copies what it holds again and again, which could fill the memory."
                    )
            if filled is not None:
                if name != "BUILD":  # attributes are not copied with an object, and may contain it
                    filled.extend(taken)
                stack.append(filled)
            else:
                stack += [[1, *taken] for _ in opcode.stack_after]


def _is_of_bytes(given: _Part) -> bool:
    """Return whether a text is encoded as Python writes bytes; other encodings may make it longer each time.

    Args:
        given: the tuple of text and encoding; taken from the stack, two items have the other order.
    """
    return isinstance(given, list) and len(given) == 3 and [1, "latin1"] in (given[:2], given[::2])


def _size(parts: Sequence[_Part], limit: int) -> int:
    """Return the total size of parts, or more than the limit, as parts may contain themselves."""
    size, left = 0, list(parts)
    while left and size <= limit:
        part = left.pop()
        size += 1
        if isinstance(part, list):
            left += part
        elif not isinstance(part, int):
            size += len(part)
    return size
