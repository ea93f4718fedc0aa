"""CPUs and memory of the host that this process may use, and the threads that a rank takes of them."""

import ctypes
import math
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_MOST_RANKS_PER_CPU = 4  # with more, their start alone takes a user by surprise


def allowed_cpus() -> list[int]:
    """Return the CPUs on which this process may run, fewer where its cgroup has a smaller quota."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    quota = _quota()
    return cpus if quota is None else cpus[: max(1, math.ceil(quota))]


def _quota(root: str = "/sys/fs/cgroup") -> float | None:
    """Return how many CPUs' worth of time the cgroup gives; ``None`` where it sets no limit.

    See https://docs.kernel.org/admin-guide/cgroup-v2.html, cpu.max, and cgroup-v1's cpu.cfs_quota_us.
    """
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = [word for name in names for word in Path(root, name).read_text().split()]
            quota, period = (-1.0 if word == "max" else float(word) for word in words)
        except (OSError, ValueError):
            continue
        return quota / period if quota > 0 else None
    return None


def allowed_memory(root: str = "/sys/fs/cgroup") -> int | None:
    """Return the bytes of the host's memory that this process's cgroup may use; ``None`` where nobody tells.

    See https://docs.kernel.org/admin-guide/cgroup-v2.html, memory.max, and cgroup-v1's memory.limit_in_bytes.
    """
    try:
        found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (AttributeError, ValueError, OSError):
        return None
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max"
            found.append(int(Path(root, name).read_text()))
    return min(found)


def return_freed_memory(device: torch.device) -> None:
    """Let the C library give large freed tensors of the CPU back to the system: glibc would keep each rank's buffers.

    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    if sys.platform == "linux" and device.type == "cpu":
        with suppress(AttributeError, OSError):
            mallopt = ctypes.CDLL(None).mallopt
            for setting in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
                mallopt(setting, 2**20)


def thread_times(thread: int | None = None) -> tuple[float, float] | None:
    """Return how long a thread has run, and has waited for a CPU while it could have, in seconds.

    ``None`` where nobody tells. See https://docs.kernel.org/scheduler/sched-stats.html, schedstat of a process.

    Args:
        thread: the system's number of one of this process; by default of the one that calls.
    """
    place = "thread-self" if thread is None else f"self/task/{thread}"
    try:
        ran, queued, _ = map(int, Path(f"/proc/{place}/schedstat").read_bytes().split())
    except (OSError, ValueError):
        return None
    return ran / 1e9, queued / 1e9


def too_many_ranks(count: int, cpus: int) -> str:
    """Return in words that ranks are too many for the CPUs of this node; empty where they are not.

    Example:
        >>> too_many_ranks(1000, 2)[:63]
        '1000 ranks on the 2 CPU cores of this node: starting them takes'
    """
    if count <= _MOST_RANKS_PER_CPU * cpus:
        return ""
    cores = f"the {cpus} CPU cores" if cpus > 1 else "the one CPU core"
    return (
        f"{count} ranks on {cores} of this node: starting them takes long, and they compute more slowly than one rank "
        f"for each core. To train faster use nprocs={max(2, cpus)}, or a single process."
    )


def choose_threads(local_world_size: int, cpus: int | None = None) -> int | None:
    """Return the number of threads of each rank here; ``None`` where the user has set it.

    Args:
        local_world_size: how many ranks share the CPUs.
        cpus: how many there are; by default those on which this process may run.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, (len(allowed_cpus()) if cpus is None else cpus) // local_world_size)


def share_threads(rank: int, registrations: dict[int, dict[str, Any]]) -> int | None:
    """Return this rank's number of threads: its CPUs over the ranks on this node that may use the same ones.

    A cluster may have given each rank CPUs of its own, which are not divided once more. ``None`` where the user has set
    the number.
    """
    own = set(registrations[rank]["cpus"])
    return choose_threads(sum(not own.isdisjoint(each["cpus"]) for each in registrations.values()), len(own))
