"""Words for how a process ended, with the usual reason and what the system knows of it."""

import contextlib
import os
import shutil
import signal

_HINTS = {
    signal.SIGKILL: "most likely for want of memory, if nobody killed it by hand",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "most often a full /dev/shm",
    signal.SIGTERM: "somebody asked it to stop",
    signal.SIGABRT: "native code gave up: gloo does when ranks call different collectives",
}


def describe_exit(exitcode: int | None, oom_kills: int | None = None) -> str:
    """Return an exit code in words.

    Args:
        exitcode: exit code of the process, or minus the number of the signal that ended it.
        oom_kills: number of processes that the kernel has killed for want of memory during the run; ``None`` where
            nobody counts.

    Example:
        >>> describe_exit(3)
        'exit code 3'
        >>> describe_exit(-9, oom_kills=1)
        'killed by SIGKILL (the kernel has killed 1 process of this control group for want of memory meanwhile)'
    """
    if exitcode is None:
        return "it still runs, but let go of its connection"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        number = signal.Signals(-exitcode)
    except ValueError:
        return f"killed by signal {-exitcode}"
    hint = _HINTS.get(number)
    if number == signal.SIGKILL and oom_kills is not None:
        hint = (
            f"the kernel has killed {oom_kills} process{'es' if oom_kills > 1 else ''} of this control group for want "
            f"of memory meanwhile"
            if oom_kills
            else "not for want of memory, by the count of the control group: somebody killed it"
        )
    if number == signal.SIGBUS:
        with contextlib.suppress(OSError):
            hint = f"most often a full /dev/shm: {shutil.disk_usage('/dev/shm').free >> 20} MiB are free now"
    return f"killed by {number.name}" + (f" ({hint})" if hint else "")


class OomCount:
    """Number of processes of this control group that the kernel has killed for want of memory since this was made.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files, ``memory.events``.
    """

    def __init__(self) -> None:
        self._before = _oom_kills()

    def __call__(self) -> int | None:
        """Return the count; ``None`` where nobody counts."""
        now = _oom_kills()
        return None if now is None or self._before is None else now - self._before


def _oom_kills() -> int | None:
    for path in _event_files():
        with contextlib.suppress(OSError, ValueError, KeyError), open(path) as events:
            return int(dict(line.split() for line in events)["oom_kill"])
    return None


def _event_files() -> list[str]:
    """Return the files in which the kernel counts: of control groups of version 2, then 1."""
    files = []
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as groups:
        for line in groups:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers:
                files.append(os.path.join("/sys/fs/cgroup", path.lstrip("/"), "memory.events"))
            elif "memory" in controllers.split(","):
                files.append(os.path.join("/sys/fs/cgroup/memory", path.lstrip("/"), "memory.oom_control"))
    # Inside a container the group's own files are at the top.
    return [*files, "/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"]
