"""Large pages for memory that many forks share: a fork takes as long as there are pages to note in the new process.

An interpreter with torch has 50,000 of 4 kB. Where they are some hundred of 2 MB, its fork and the end of the process
take a fourth of the time. The kernel divides such a page where a process writes to it, and copies 4 kB as before.
"""

import ctypes
from pathlib import Path

_MADV_COLLAPSE = 25  # since Linux 6.1; see madvise(2)
_SIZE = 1 << 21  # bytes, of a large page


def use_large_pages(maps: Path = Path("/proc/self/maps")) -> int:
    """Let the kernel put this process's own memory into large pages, where it can; return how many it has made.

    Example:
        >>> use_large_pages(Path("/nowhere"))
        0
    """
    if not maps.exists():
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    made = 0
    for line in maps.read_text().splitlines():
        place, rights, *_, name = [*line.split(None, 5), ""][:6]
        if rights == "rw-p" and name in ("", "[heap]"):
            begin, end = (int(word, 16) for word in place.split("-"))
            for address in range(-(-begin // _SIZE) * _SIZE, end - _SIZE + 1, _SIZE):
                made += madvise(address, _SIZE, _MADV_COLLAPSE) == 0
    return made
