"""Tracebacks that show the user's frames: those of distwrap, and what it calls in between, are left out in one line."""

import contextlib
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from types import TracebackType
from typing import Any

import torch
import wrapt

from distwrap.errors import DistwrapError, WorkerTraceback
from distwrap.frames import VARIABLE, are_left_out, is_ours
from distwrap.places import cell_of

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_WRAPT = os.path.dirname(os.path.abspath(wrapt.__file__)) + os.sep
_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")
_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")  # which may be a folder of Python's own
_FILE = re.compile(r'  File ".*", line (?=\d)')


def as_text(error: BaseException) -> str:
    """Return an exception and its traceback as Python prints them, with our frames left out and cells named.

    What the exception was caused by, came after or consists of is shown in the same way. The launcher's frames above
    the user's function are left out without a line.
    """
    told = traceback.TracebackException.from_exception(error, compact=True)
    waiting: list[tuple[Any, Any]] = [(told, error)]
    while waiting:
        each, its_error = waiting.pop()
        if each is None or its_error is None:
            continue
        each.stack = _ShortStack(each.stack, keep_last=_keeps_last(its_error))
        waiting += [(each.__cause__, its_error.__cause__), (each.__context__, its_error.__context__)]
        waiting += zip(getattr(each, "exceptions", None) or (), getattr(its_error, "exceptions", ()), strict=False)
    return "".join(told.format())


def frames_as_text(frames: Iterable[traceback.FrameSummary]) -> str:
    """Return frames as Python prints them, with cells named."""
    return "".join(_as_lines(list(frames)))


def fold(error: BaseException) -> None:
    """Take our frames out of an exception that leaves a call of ours, and out of those that it is chained to.

    The frame that has caught it stays, since Python holds on to it.
    """
    if not are_left_out():
        return
    head, waiting, seen = error.__traceback__, [error], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        entries = list(_entries(each.__traceback__))
        start = 1 if each is error and head is not None else 0
        files = [entry.tb_frame.f_code.co_filename for entry in entries[start:]]
        out = left_out(files, keep_last=_keeps_last(each))
        kept = [*entries[:start], *(entry for entry, is_out in zip(entries[start:], out, strict=True) if not is_out)]
        for entry, following in zip(kept, [*kept[1:], None], strict=False):
            entry.tb_next = following
        with contextlib.suppress(AttributeError, TypeError):  # of an exception that lets nobody set it
            each.__traceback__ = kept[0] if kept else None
        chained = [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]
        waiting += [other for other in chained if isinstance(other, BaseException)]


def left_out(files: Sequence[str], *, keep_last: bool) -> list[bool]:
    """Return for each frame of a traceback, given by its file, whether it is left out.

    Frames of torch and of Python that stand with ours are left out with them.

    Args:
        files: of the frames, the outermost first.
        keep_last: whether the place at which the exception was raised stays: the last frame, and those of torch and of
            Python between it and the last one of ours.

    Example:
        >>> left_out(["me.py", _TORCH + "module.py", __file__, "me.py", _TORCH + "linear.py"], keep_last=True)
        [False, True, True, False, False]
    """
    out = [False] * len(files)
    for is_library, run in groupby(range(len(files)), lambda index: _is_library(files[index])):
        indices = list(run)
        ours = [index for index in indices if is_ours(files[index])]
        if not is_library or not ours:
            continue
        keeps_end = keep_last and indices[-1] == len(files) - 1
        last = min(ours[-1], len(files) - 2) if keeps_end else indices[-1]
        for index in range(indices[0], last + 1):
            out[index] = True
    return out


def _is_library(file: str) -> bool:
    if file.startswith((_TORCH, _WRAPT, "<frozen ")) or is_ours(file):
        return True
    return file.startswith(_PYTHON) and not _INSTALLED.search(file)


def _keeps_last(error: BaseException) -> bool:
    """Return whether the place at which an exception was raised is worth a look: our own errors say all in words."""
    return not (isinstance(error, DistwrapError) or isinstance(error.__cause__, WorkerTraceback))


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


class _ShortStack(traceback.StackSummary):
    """Stack whose text has the user's frames, and a line for those that are left out."""

    def __init__(self, frames: Sequence[traceback.FrameSummary], *, keep_last: bool) -> None:
        super().__init__(frames)
        self._keep_last = keep_last

    def format(self, **_: Any) -> list[str]:  # in colours from Python 3.13 on, which a text for elsewhere has not
        frames = list(self)
        out = left_out([frame.filename for frame in frames], keep_last=self._keep_last)
        if not are_left_out():
            out = [False] * len(frames)
        lines: list[str] = []
        for is_out, run in groupby(zip(out, frames, strict=True), lambda each: each[0]):
            members = [frame for _, frame in run]
            if not is_out:
                lines += _as_lines(members)
            elif lines or all(out):
                lines.append(_as_one_line(members))
        return lines


def _as_one_line(frames: Sequence[traceback.FrameSummary]) -> str:
    whose = "distwrap and torch" if any(frame.filename.startswith(_TORCH) for frame in frames) else "distwrap"
    how_many = "1 frame of {} is" if len(frames) == 1 else f"{len(frames)} frames of {{}} are"
    shows = "it" if len(frames) == 1 else "them"
    return f"  [{how_many.format(whose)} left out; {VARIABLE}=full shows {shows}]\n"


def _as_lines(frames: list[traceback.FrameSummary]) -> list[str]:
    """Return the lines that Python prints of frames, which are as many as the frames or fewer, with cells named."""
    lines: list[str] = []
    for cell, run in groupby(frames, lambda frame: cell_of(frame.filename)):
        texts = traceback.StackSummary.from_list(list(run)).format()
        lines += texts if cell is None else [_FILE.sub(f"  cell {cell}, line ", text, count=1) for text in texts]
    return lines
