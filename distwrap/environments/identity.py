"""Identity of a process: its node, number and birth, by which others on the node see whether it lives."""

import os
import socket
import sys
from typing import Any

_UNKNOWN = "unknown"  # when a process started


def identity() -> dict[str, Any]:
    """Return the identity of this process, by which others on this node can see whether it lives."""
    return {
        "host": socket.gethostname(),
        "node": node(),
        "network": _network(),
        "pid": os.getpid(),
        "born": _born(os.getpid()),
    }


def node() -> str:
    """Return a name of the node, or of the container, in which process numbers mean the same."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _network() -> str:
    """Return a name of what shares its interfaces: the node, a container, a namespace."""
    try:
        return f"{node()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return node()


def pid_exists(pid: int) -> bool:
    """Return whether a process on this node has that number."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is another user's
        pass
    return True


def lives(process: dict[str, Any]) -> bool:
    """Return whether a process on this node lives, given its `identity`."""
    return pid_exists(process["pid"]) and _born(process["pid"]) in (process["born"], _UNKNOWN)


def has_ended(pid: int) -> bool:
    """Return whether no process on this node has that number, but for one that has ended and is not waited for yet."""
    return not pid_exists(pid) or not _born(pid)


def process_status(pid: int) -> tuple[str, list[str]]:
    """Return a process's name, and the fields that follow it in Linux's list of processes. See proc_pid_stat(5).

    Raises:
        OSError: there is no such process, or no such list.
    """
    with open(f"/proc/{pid}/stat") as stat:
        name, _, fields = stat.read().partition("(")[2].rpartition(")")
    return name, fields.split()


def _born(pid: int) -> str:
    """Return when a process started, since its number may be another's by now; empty for one that has ended."""
    try:
        fields = process_status(pid)[1]
    except OSError as error:  # at the limit of open files nobody knows
        is_gone = sys.platform == "linux" and isinstance(error, (FileNotFoundError, ProcessLookupError))
        return "" if is_gone else _UNKNOWN
    return fields[19] if fields[0] not in "ZX" else ""
