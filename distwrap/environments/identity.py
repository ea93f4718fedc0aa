"""Which process this is, and whether a process of this machine lives."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any


def identity() -> dict[str, Any]:
    """Say which process this is, so that others on this machine can see whether it lives."""
    return {
        "host": socket.gethostname(),
        "machine": machine(),
        "network": _network(),
        "pid": os.getpid(),
        "born": _born(os.getpid()),
    }


def machine() -> str:
    """Name the machine, or the container, in which process numbers mean the same."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _network() -> str:
    """Name what shares its interfaces: the machine, a container, a namespace."""
    try:
        return f"{machine()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return machine()


def lives(home: dict[str, Any]) -> bool:
    """Say whether a process of this machine lives, by its `identity`."""
    try:
        os.kill(home["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return bool(_born(home["pid"]) == home["born"])


def _born(pid: int) -> str:
    """When a process started, where the system says so: its number may be another's by now. Empty for a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return "unknown" if sys.platform != "linux" else ""
    return fields[19] if fields[0] not in "ZX" else ""
