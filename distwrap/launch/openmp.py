"""Let go of OpenMP's idle threads before a fork.

A process that was forked after a multi-threaded kernel believes that OpenMP's worker threads are still there, and
waits for them forever in its first large kernel. `omp_pause_resource_all` ends the idle threads; they come back at the
next kernel, in the caller and in the forked process alike.

Source: OpenMP 5.2, section 18.6.2 (omp_pause_resource_all); libgomp since GCC 9.
"""

import ctypes
import os

_SOFT = 1


def pause() -> bool:
    """End the idle threads of every OpenMP runtime in this process; ``False`` where one could not be reached."""
    paused = True
    for path in _loaded_runtimes():
        try:
            paused &= ctypes.CDLL(path).omp_pause_resource_all(_SOFT) == 0
        except (OSError, AttributeError):
            paused = False
    return paused


def _loaded_runtimes() -> set[str]:
    """List the files of the OpenMP runtimes that are mapped into this process (Linux)."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if line.count("/")}
    except OSError:
        return set()
    names = ("libgomp", "libomp.", "libiomp5")
    return {path for path in paths if os.path.basename(path).startswith(names)}
