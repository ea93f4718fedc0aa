"""Waits of this rank's main thread for other ranks, seen in its stack from outside, at no cost for that thread."""

import linecache
import os
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from distwrap._internals.torch_groups import collectives_begun
from distwrap.devices.cpus import thread_times
from distwrap.frames import OURS
from distwrap.network.waiting import Clock
from distwrap.supervision import stacks

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_DATA = os.path.join(_TORCH, "utils", "data", "")
_COLLECTIVES = os.path.join(_TORCH, "distributed", "distributed_c10d.py")
_TORCHS = (os.path.join(_TORCH, "distributed", ""), os.path.join(_TORCH, "nn", "parallel", "distributed.py"))
_OPERATORS = os.path.join("torch", "_ops.py")  # in which a functional collective of torch's waits
_HOROVOD = os.sep + os.path.join("horovod", "")
_BACKWARD = os.path.join("torch", "autograd", "graph.py")
_OUR_ROOMS = ("comm", "data", "group", "model", "strategies", "_internals")
_OUR_NATIVE = (*(os.path.join(OURS, room, "") for room in _OUR_ROOMS), os.path.join(OURS, "timing", "instruments.py"))
# Functions of ours that look for the other ranks again and again, so that their innermost line changes.
_LOOPS = {
    (os.path.join(OURS, *path), name)
    for path, name in (
        (("supervision", "shared_work.py"), "_wait"),
        (("checkpoint", "meeting.py"), "_wait"),
        *((("strategies", name), "_wait_for") for name in ("rendezvous.py", "horovod.py")),
    )
}
_DEBUGGERS = (os.sep + "bdb.py", os.sep + "pdb.py")
_IDLE = 0.05  # of a core, below which a thread in a native call does not compute
_LONGEST_GAP = 1.0  # of seconds between two looks that counts: a process that was stopped has not waited

Kind = Literal["exchange", "work", "perhaps", "debugger"]


class Wait(NamedTuple):
    """Wait of a rank for others.

    Attributes:
        seconds: the seconds for which it has waited, at least.
        kind: ``"exchange"``; ``"work"`` of one rank; ``"perhaps"``, as in a call on an accelerator, which is a wait if
            other ranks are behind; or ``"debugger"``, in which a person takes their time.
        worker: the rank whose work it waits for, or -1.
        ranks: the only ranks that it may wait for, as those of a process group; empty if it may be any.
    """

    seconds: float
    kind: Kind
    worker: int = -1
    ranks: tuple[int, ...] = ()


def read_wait(value: Any) -> Wait | None:
    """Return the wait that another rank has written as JSON.

    Raises:
        TypeError: the value is not a wait.
        ValueError: the value is not a wait.
    """
    if value is None:
        return None
    seconds, kind, worker, ranks = value
    return Wait(float(seconds), kind, int(worker), tuple(map(int, ranks)))


class StackFrame(NamedTuple):
    """Frame of the main thread, outside of the user's code."""

    file: str
    name: str
    number: int  # of the frame's object
    at: int  # instruction


class MainThread:
    """Main thread of this rank, which is looked at in the channel's thread.

    Args:
        begun: a function that returns how many exchanges this rank has begun.
        worker: a function that returns the rank for whose work this one waits, or -1.
        clock: the clock by which it is looked at.

    Attributes:
        stood: the seconds for which it has been in one call, or in one wait of distwrap's.
        moves: the number of looks at which it had moved.
        on_accelerator: whether this rank computes on an accelerator, for which a thread may wait in any call.
    """

    def __init__(self, begun: Callable[[], object], worker: Callable[[], int], clock: Clock = time) -> None:
        self._begun, self._worker, self._clock = begun, worker, clock
        self._mark: object = None
        self._ran: float | None = None
        self._frames: list[StackFrame] = []
        self._looked = self._clock.monotonic()
        self.stood, self.moves = 0.0, 0
        self.on_accelerator = False

    def look(self) -> bool:
        """Look where the thread is; return whether it has moved since the last look."""
        now = self._clock.monotonic()
        gap, self._looked = min(now - self._looked, _LONGEST_GAP), now
        self._frames = frames_from(stacks.frame_of())
        loop = waiting_loop_in(self._frames)  # in which the instruction changes
        here = [(each.number, 0 if loop else each.at) for each in loop or self._frames[:1]]
        mark = (here, self._begun(), collectives_begun())
        computed = self._computed(gap) and _may_compute(self._frames)
        moved, self._mark = mark != self._mark or computed, mark
        self.moves += moved
        self.stood = 0.0 if moved else self.stood + gap
        return moved

    def wait(self) -> Wait | None:
        """Return the wait for other ranks in which the thread stands; ``None`` where it is in none."""
        lines = stacks.of_thread()
        if any(file.endswith(_DEBUGGERS) or "pydevd" in file for file, _, _ in lines):
            return Wait(self.stood, "debugger")
        kind = kind_of_wait(self._frames, lines[-1] if lines else None)
        if kind == "perhaps" and not self.on_accelerator and self._ran is not None:
            kind = "exchange" if _may_compute(self._frames) else None  # it would have been seen to compute
        if kind is None:
            return None
        return Wait(self.stood, kind, self._worker() if kind == "work" else -1, peers_of(stacks.frame_of()))

    def _computed(self, seconds: float) -> bool:
        """Return whether the thread has computed since the last look; never on an accelerator, where it may spin."""
        times, before = thread_times(os.getpid()), self._ran  # the main thread's number is the process's
        self._ran = None if times is None else times[0]
        if self.on_accelerator or self._ran is None or before is None:
            return False
        return self._ran - before > _IDLE * seconds


def frames_from(frame: FrameType | None) -> list[StackFrame]:
    """Return the frames from this one outwards, up to and including the first one of the user's code."""
    frames = []
    with stacks.no_collection():
        while frame is not None:
            code = frame.f_code
            frames.append(StackFrame(code.co_filename, code.co_name, id(frame), frame.f_lasti))
            if stacks.is_users(code.co_filename):
                break
            frame = frame.f_back
    return frames


def peers_of(frame: FrameType | None) -> tuple[int, ...]:
    """Return the ranks with which a thread exchanges in a call of torch.distributed; empty if that is not known."""
    with stacks.no_collection():
        while frame is not None and not stacks.is_users(frame.f_code.co_filename):
            if frame.f_code.co_filename == _COLLECTIVES and (found := _peers_in(frame.f_code.co_name, frame.f_locals)):
                return found
            frame = frame.f_back
    return ()


def _peers_in(name: str, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the peers of a call with these local variables, in which torch keeps them by these names."""
    end, group = {"recv": "src", "send": "dst"}.get(name, ""), given.get("group")
    if isinstance(peer := given.get(end), int):
        return (peer,)
    if not isinstance(group, dist.ProcessGroup):
        return ()
    peer = given.get(f"group_{end}")
    return tuple(dist.get_process_group_ranks(group)) if peer is None else (dist.get_global_rank(group, peer),)


def waiting_loop_in(frames: list[StackFrame]) -> list[StackFrame]:
    """Return the frame, if any, in which a function of distwrap looks for other ranks again and again."""
    return [frame for frame in frames if (frame.file, frame.name) in _LOOPS][-1:]


def _may_compute(frames: list[StackFrame]) -> bool:
    """Return whether a thread is in a call that first computes and then waits for other ranks, as a backward does."""
    return bool(frames) and (frames[0].file.startswith(_OUR_NATIVE) or frames[0].file.endswith(_BACKWARD))


def kind_of_wait(frames: list[StackFrame], line: stacks.Line | None) -> Kind | None:
    """Return how a thread that does not move may be waiting for other ranks; ``None`` if it is not.

    Args:
        frames: the frames of its stack, from the innermost to the user's.
        line: the innermost line of its stack.

    Example:
        >>> kind_of_wait([StackFrame(_TORCHS[0] + "distributed_c10d.py", "barrier", 1, 2)], None)
        'exchange'
    """
    if not frames:
        return None
    if loop := waiting_loop_in(frames):
        return "work" if loop[0].name == "_wait" else "exchange"
    inner = frames[0].file
    beneath = frames[1].file if len(frames) > 1 and inner.endswith(_OPERATORS) else inner
    if beneath.startswith(_TORCHS) or _HOROVOD in inner:
        return "exchange"
    if line is not None and stacks.is_users(inner) and ".wait(" in linecache.getline(line[0], line[1]):
        return "exchange"
    is_call = stacks.is_users(inner) or inner.startswith((_TORCH, *_OUR_NATIVE))
    return "perhaps" if is_call and not inner.startswith(_DATA) else None
