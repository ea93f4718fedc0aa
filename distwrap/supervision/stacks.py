"""Python stacks, and the one line of each that its owner would look for."""

import dis
import inspect
import os
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, TracebackType

import torch

from distwrap._internals.python import frames_of_threads
from distwrap.frames import OURS
from distwrap.garbage import collection_paused
from distwrap.places import place
from distwrap.versions import LOOKS_COLLECT_GARBAGE

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})
_DEBUGGER = os.sep + "bdb.py"  # beyond it are Python's debugger, and what is typed there
_DATA_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")
# By file, the name of what its functions do for the user's loop; a file of ours adds itself.
LOOPS: dict[str, str] = {}
# Functions, by file and name, in which a rank is at the end of its function; a file of ours adds its own.
END_OF_RUN: set[tuple[str, str]] = set()
_OPTIMIZER = os.path.join("torch", "optim", "optimizer.py")

# Functions of torch, of the standard library and of ours that say less than the ones below or above them.
_SILENT = {"wrapper", "inner", "decorate_context", "fn", "wrapped", "run"}

Line = tuple[str, int, str]  # file, line number, function


def frame_of(ident: int | None = None) -> FrameType | None:
    """Return the frame in which a thread is, by default the main thread."""
    with no_collection():
        return frames_of_threads().get(ident or threading.main_thread().ident or 0)


def no_collection() -> AbstractContextManager[None]:
    """Look at another thread's frames without a collection of garbage, which the look begins in older Pythons.

    In ``sys._current_frames`` that may lock the interpreter for good. In ``f_back`` it may let the other thread return
    from the very frame meanwhile, and crash. Source: https://github.com/python/cpython/issues/106883
    """
    return collection_paused() if LOOKS_COLLECT_GARBAGE else nullcontext()


def of_thread(ident: int | None = None) -> list[Line]:
    """Return a thread's stack, by default the main thread's, the outermost frame first."""
    return of_frame(frame_of(ident))


def of_frame(frame: FrameType | None) -> list[Line]:
    """Return a frame's stack, the outermost frame first."""
    with no_collection():
        return _lines(traceback.walk_stack(frame))[::-1]


def of_traceback(trace: TracebackType | None) -> list[Line]:
    """Return the stack on which an exception was raised, the outermost frame first."""
    return _lines(traceback.walk_tb(trace))


def _lines(frames: Iterator[tuple[FrameType, int]]) -> list[Line]:
    return [(frame.f_code.co_filename, number or 0, frame.f_code.co_name) for frame, number in frames]


def raised_outside_torch(trace: TracebackType | None) -> bool:
    """Return whether a ``raise`` of the user's or of a library's has made an exception, and not torch."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    by_statement = code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]  # native code raises at a call
    of_a_worker = code.co_name == "reraise"  # what a loader's worker has raised, which torch raises again
    return by_statement and (of_a_worker or not code.co_filename.startswith(_TORCH))


def users_frame() -> FrameType | None:
    """Return the innermost frame outside of torch and distwrap; the main thread's where this thread has none.

    With an accelerator a backward runs in a thread of its own.
    """
    for look in (inspect.currentframe, frame_of):
        frame = look()
        with no_collection():
            while frame is not None and frame.f_code.co_filename.startswith((OURS, _TORCH)):
                frame = frame.f_back
        if frame is not None and not frame.f_code.co_filename.startswith(_LIBRARIES):
            return frame
    return None


def locate(lines: Iterable[Line]) -> tuple[str, str]:
    """Return the function that the user's code has called, and the innermost line of that code.

    Args:
        lines: a stack, the outermost frame first.

    Example:
        >>> locate([("/home/me/train.py", 88, "main"), (_TORCH + "distributed/distributed_c10d.py", 3, "all_reduce")])
        ('all_reduce', 'train.py:88')
    """
    stack = list(lines)
    theirs = [index for index, (file, _, _) in enumerate(stack) if is_users(file)]
    if theirs:
        inner = range(theirs[0], len(stack))
        stack = stack[: next((index for index in inner if stack[index][0].endswith(_DEBUGGER)), len(stack))]
        theirs = [index for index in theirs if index < len(stack)]
    else:  # user code that is installed as a library, or none
        theirs = [index for index, (file, _, _) in enumerate(stack) if not file.startswith((OURS, _TORCH, "<"))]
    called = stack[theirs[-1] + 1 :] if theirs else stack
    if any((file, name) in END_OF_RUN for file, _, name in called):
        return "", "the end of its function"
    if not theirs:
        return "", "an unknown place"
    file, number, name = stack[theirs[-1]]
    return _what(called) or (name if name != "<module>" else ""), place(file, number)


def in_debugger(lines: Iterable[Line]) -> bool:
    """Return whether a stack is in Python's debugger, or in the one of an editor."""
    return any(file.endswith(_DEBUGGER) or "pydevd" in file for file, _, _ in lines)


def is_users(file: str) -> bool:
    """Return whether a file is the user's own, and no library's."""
    return not file.startswith((OURS, _TORCH, *_LIBRARIES, "<frozen", "<string>"))


def _what(called: list[Line]) -> str:
    if any(file.endswith(_DATA_LOADER) for file, _, _ in called):
        return "DataLoader"
    if loops := [LOOPS[file] for file, _, _ in called if file in LOOPS]:
        return loops[0]
    # Around an optimizer's step torch has a wrapper, which also runs the hooks.
    names = ("step" if name == "wrapper" and file.endswith(_OPTIMIZER) else name for file, _, name in called)
    return next((name for name in names if not name.startswith(("_", "<")) and name not in _SILENT), "")
