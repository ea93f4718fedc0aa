"""Waits of this rank's main thread for other ranks, seen from outside, at no cost for that thread.

What waits says so, by `Activity.waiting`. Of torch's own calls the stack tells. On an accelerator a thread that stands
in any other call may wait too: it does if it has begun more collectives than another rank.
"""

import linecache
import os
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distwrap._internals.torch import collectives_begun
from distwrap.frames import is_ours
from distwrap.network.waiting import Clock
from distwrap.supervision import stacks
from distwrap.supervision.activity import Activity, Kind

_TORCH = os.path.dirname(torch.__file__)
_DISTRIBUTED = (os.path.join(_TORCH, "distributed", ""), os.path.join(_TORCH, "nn", "parallel", "distributed.py"))
_BACKWARD = os.path.join("torch", "autograd", "graph.py")
_LONGEST_GAP = 1.0  # of seconds between two looks that counts: a process that was stopped has not waited
_SHORTEST_GAP = 0.1  # of seconds between two measurements of the process's CPU time
_IDLE = 0.05  # of a core, below which a process does not compute


class Wait(NamedTuple):
    """Wait of a rank for others.

    Attributes:
        seconds: the seconds for which it has waited, at least.
        kind: how it waits.
        peers: the only ranks that it may wait for, as those of a process group; empty if it may be any.
    """

    seconds: float
    kind: Kind
    peers: tuple[int, ...] = ()


def read_wait(value: Any) -> Wait | None:
    """Return the wait that another rank has written as JSON.

    Raises:
        TypeError: the value is not a wait.
        ValueError: the value is not a wait.
    """
    if value is None:
        return None
    seconds, kind, peers = value
    return Wait(float(seconds), kind, tuple(map(int, peers)))


class MainThread:
    """Main thread of this rank, which is looked at in the channel's thread.

    Args:
        activity: what this rank has begun, and the waits in which it says that it is.
        clock: the clock by which it is looked at.

    Attributes:
        stood: the seconds for which it has been in one wait, or in one call in which the process does not compute.
        still: likewise, but in no wait that may take as long as it likes, and where the process computes in no wait.
        moves: the number of looks at which it had moved.
        on_accelerator: whether this rank computes on an accelerator, for which a thread may spin as it waits.
    """

    def __init__(self, activity: Activity, clock: Clock = time) -> None:
        self._activity, self._clock = activity, clock
        self._mark: object = None
        self._looked = self._measured = clock.monotonic()
        self._cpu = clock.process_time()
        self.stood, self.still, self.moves = 0.0, 0.0, 0
        self.on_accelerator = False

    def look(self) -> bool:
        """Look where the thread is; return whether it has moved since the last look."""
        now, token, frame = self._clock.monotonic(), self._activity.wait_begun, stacks.frame_of()
        gap, self._looked = min(now - self._looked, _LONGEST_GAP), now
        computed = self._has_computed(now)
        # Within a wait the instruction may change, where it looks for other ranks again and again.
        at = token or (frame is not None and (id(frame), frame.f_lasti))
        mark = (at, self._activity.begun(), self._activity.step, collectives_begun())
        same, self._mark = mark == self._mark, mark
        excused = token is not None and token.kind in ("work", "debugger")
        self.still = self.still + gap if same and not computed and not excused else 0.0
        moved = not same or (computed and not (self.on_accelerator or token or _peers_in_torch(frame) is not None))
        self.stood = 0.0 if moved else self.stood + gap
        self.moves += moved
        return moved

    def _has_computed(self, now: float) -> bool:
        """Return whether the process has computed since this was measured last; not of the time for a single look."""
        seconds, before = now - self._measured, self._cpu
        if seconds < _SHORTEST_GAP:
            return False
        self._measured, self._cpu = now, self._clock.process_time()
        return self._cpu - before > _IDLE * seconds

    def wait(self) -> Wait | None:
        """Return the wait for other ranks in which the thread stands, or may stand; ``None`` where it is in none."""
        if (token := self._activity.wait_begun) is not None:
            return Wait(self.stood, token.kind, token.peers)
        lines, peers = stacks.of_thread(), _peers_in_torch(stacks.frame_of())
        if stacks.in_debugger(lines):
            return Wait(self.stood, "debugger")
        if peers is not None or (lines and _waits_in(lines[-1])):
            return Wait(self.stood, "exchange", peers or ())
        return Wait(self.stood, "perhaps") if self.on_accelerator else None


def _waits_in(line: stacks.Line) -> bool:
    """Return whether a thread that stands in a line is in a backward of torch's, or in the ``wait`` of its work."""
    file, number, _ = line
    calls = stacks.is_users(file) or is_ours(file)
    return file.endswith(_BACKWARD) or (calls and ".wait(" in linecache.getline(file, number))


def _peers_in_torch(frame: FrameType | None) -> tuple[int, ...] | None:
    """Return the ranks with which a thread exchanges in torch's Python code, if that tells; ``None`` elsewhere."""
    with stacks.no_collection():
        calls = [frame, frame and frame.f_back]  # an operator's own file may be the inner one
        if not any(each is not None and each.f_code.co_filename.startswith(_DISTRIBUTED) for each in calls):
            return None
        found: tuple[int, ...] = ()
        while frame is not None and not found and not stacks.is_users(frame.f_code.co_filename):
            found = _peers_in(frame.f_code.co_name, frame.f_locals)
            frame = frame.f_back
    return found


def _peers_in(name: str, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the peers of a call with these local variables, in which torch keeps them by these names."""
    end, group = {"recv": "src", "send": "dst"}.get(name, ""), given.get("group")
    if isinstance(peer := given.get(end), int):
        return (peer,)
    if not isinstance(group, dist.ProcessGroup):
        return ()
    peer = given.get(f"group_{end}")
    return tuple(dist.get_process_group_ranks(group)) if peer is None else (dist.get_global_rank(group, peer),)
