"""Filter for the output of torchft's native part, which writes several lines a step to standard error.

torchft has no switch for it. All other output stays: Python writes to a new descriptor from here on, and a small
process filters the lines of others. It lives until the last of them has ended, so that the output of a crash comes
through.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys

_FILTER = """
import os, re, sys
ours = re.compile(rb"^\\S+ \\[(INFO|WARN|ERROR|DEBUG)\\] \\[torchft")
rest = b""
while data := os.read(0, 65536):
    *lines, rest = (rest + data).split(b"\\n")
    os.write(1, b"".join(line + b"\\n" for line in lines if not ours.match(line)))
    if rest and not rest[:1].isdigit():  # the beginning of another's line, as of a progress bar
        os.write(1, rest)
        rest = b""
os.write(1, rest)
"""


def leave_out_torchft() -> None:
    """Remove the output of torchft's native part from this process's standard error from now on."""
    own = os.dup(2)
    command = [sys.executable, "-I", "-S", "-c", _FILTER]
    # Its own session receives no Ctrl-C.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=own, start_new_session=True) as process:
        assert process.stdin is not None
        os.dup2(process.stdin.fileno(), 2)
        process.stdin.close()
        process.returncode = 0  # it ends after this process, which must not wait for it
    if sys.stderr is not None and sys.stderr.fileno() == 2:
        sys.stderr = os.fdopen(own, "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace")
    faulthandler.enable(own)
