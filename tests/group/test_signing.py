"""Nothing is unpickled that does not come from a rank of this run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distwrap.errors import CollectiveError
from distwrap.group.signing import sign, verify
from tests.limits import INTERPRETERS, slow

LIMIT = 60.0


class Harmful:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


def test_what_is_signed_is_verified() -> None:
    """What a rank of the run signed comes out as it went in."""
    assert verify(sign({"a": [1, 2]}, b"secret"), b"secret", 0) == {"a": [1, 2]}


@pytest.mark.parametrize("secret", [b"none", b"guessed"])
def test_what_a_stranger_made_is_not_read(secret: bytes, tmp_path: Path) -> None:
    """An object with a signature of another secret is refused before anything of it is unpickled."""
    harmful = tmp_path / "was here"
    message = sign(Harmful(str(harmful)), secret)
    with pytest.raises(CollectiveError, match="in place of rank 3's object was not made by a rank of this run"):
        verify(message, b"the run's own", 3)
    assert not harmful.exists()
    with pytest.raises(CollectiveError):
        verify(b"", b"the run's own", 3)


RUN = """
import os, time
import distwrap as dw

@dw.distributed(nprocs=2, launcher="{launcher}", timeout=30)
def main(folder):
    open(os.path.join(folder, f"pid{{dw.rank()}}"), "w").write(str(os.getpid()))
    while not os.path.exists(os.path.join(folder, "go")):
        time.sleep(0.05)
    return [dw.gather_object(("from", dw.rank())) for _ in range(20)][-1]

if __name__ == "__main__":
    print("result", main(os.getcwd()))
"""

STRANGER = """
import glob, os, socket, sys, time
"".encode("idna")  # is read from disk, where a stranger may not look
os.setgroups([]); os.setgid(65534); os.setuid(65534)
ports, pids = eval(sys.argv[1]), eval(sys.argv[2])
sockets = []
for port in ports:
    for junk in (b"", b"GET / HTTP/1.0\\r\\n\\r\\n", os.urandom(64), bytes(64)):
        s = socket.create_connection(("127.0.0.1", port), timeout=5)
        s.sendall(junk)
        sockets.append(s)
opened = []
for pid in pids:
    for path in (f"/proc/{pid}/environ", f"/proc/{pid}/mem", *glob.glob(f"/proc/{pid}/fd/*")):
        try:
            open(path, "rb").close()
            opened.append(path)
        except OSError:
            pass
    try:
        if os.listdir(f"/proc/{pid}/fd"):
            opened.append(f"/proc/{pid}/fd")
    except OSError:
        pass
print("opened", opened, flush=True)
time.sleep(60)
"""


def _listening(pids: set[int]) -> dict[int, str]:
    """The ports on which processes listen, each with the address."""
    inodes = set()
    for pid in pids:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    ports = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                ports[int(port, 16)] = address
    return ports


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="needs Linux, and root to become a stranger")
@pytest.mark.parametrize("launcher", ["fork", slow("script", why=INTERPRETERS)])
def test_a_stranger_on_this_machine(launcher: str, tmp_path: Path) -> None:
    """Another user can open no file or memory of a run, only connect to loopback, and what it sends changes nothing."""
    program = tmp_path / "program.py"
    program.write_text(RUN.format(launcher=launcher))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    run = subprocess.Popen(
        [sys.executable, program],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    stranger = None
    try:
        deadline = time.monotonic() + LIMIT
        notes = [tmp_path / f"pid{rank}" for rank in range(2)]
        while not all(note.exists() and note.read_text() for note in notes):
            assert time.monotonic() < deadline
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.05)
        pids = {run.pid, *(int(note.read_text()) for note in notes)}
        ports = _listening(pids)
        assert set(ports.values()) <= {"0100007F"}, "something listens beyond loopback"
        assert not list(temporary.iterdir())
        stranger = subprocess.Popen(
            [sys.executable, "-S", "-c", STRANGER, repr(sorted(ports)), repr(sorted(pids))],
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert stranger.stdout is not None
        assert (line := stranger.stdout.readline()) == "opened []\n", line + stranger.communicate(timeout=LIMIT)[0]
        (tmp_path / "go").touch()
        assert "result [('from', 0), ('from', 1)]" in run.communicate(timeout=LIMIT)[0]
        assert run.returncode == 0
    finally:
        for process in (run, stranger):
            if process is not None:
                process.kill()
                process.communicate()


def test_no_port_is_predictable() -> None:
    """Two runs listen on different ports, and the place where the ranks meet is none."""
    from distwrap.testing import run_ranks

    first, second = (run_ranks(_own_ports, 2, timeout=LIMIT) for _ in range(2))
    assert not set(first[0]) & set(second[0])


def _own_ports() -> list[int]:
    return sorted(_listening({os.getpid()}))
