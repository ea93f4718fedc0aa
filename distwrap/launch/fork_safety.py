"""Whether this process may be forked into ranks, and why not."""

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

from distwrap._internals.python import can_forget_exit_handlers
from distwrap.devices.kinds import kind_that_prevents_fork


def refusal() -> str | None:
    """Return the reason why a fork would not be safe now; ``None`` if it is safe."""
    if not hasattr(os, "fork"):
        return "this system has no fork"
    if not can_forget_exit_handlers():
        return "this Python cannot forget the caller's exit handlers in a fork"
    if sys.platform == "darwin":
        return "Apple's system libraries do not survive a fork"
    kind = kind_that_prevents_fork()
    if kind is not None:
        first = kind.first_use()
        where = f", first used at:\n{first}" if first else ""
        return f"this process has initialised an accelerator, which a forked process cannot use{where}"
    if _autograd_has_threads():
        return (
            "this process has computed a backward on a node with accelerators, for which torch's autograd has started "
            "threads; a forked process could compute none"
        )
    others = [
        thread.name
        for thread in threading.enumerate()
        if thread is not threading.current_thread() and not type(thread).__module__.startswith("tqdm.")
    ]  # a progress bar's thread sleeps
    if others:
        return (
            f"other threads are at work ({', '.join(others)}), and a lock that one of them holds would stay "
            f"locked in the ranks forever"
        )
    return None


def _autograd_has_threads() -> bool:
    """Return whether autograd has threads for accelerators, which it starts at the first backward, also of the CPU.

    Python does not know them. They have this name in torch 2.6 to 2.15, on Linux. Where it is another, torch's own
    error ends the first backward of a forked rank.
    """
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread that has just ended
            if path.read_text().startswith("pt_autograd"):
                return True
    return False
