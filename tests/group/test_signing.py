"""Nothing is unpickled that does not come from a rank of this run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from distwrap.errors import CollectiveError
from distwrap.group.signing import sign, verify
from distwrap.supervision.failure_news import NEWS_SECONDS
from tests.forked_commands import PYTHON, forked_commands
from tests.interpreters import interpreter
from tests.slow import nightly

ROOT = Path(__file__).parents[2]

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
    with pytest.raises(CollectiveError, match="as rank 3's object has no valid signature of this run"):
        verify(message, b"the run's own", 3)
    assert not harmful.exists()
    with pytest.raises(CollectiveError):
        verify(b"", b"the run's own", 3)


RUN = """
import os, sys, time
import distwrap as dw

@dw.distributed(nprocs=2, launcher="{launcher}", timeout=30)
def main(folder):
    open(os.path.join(folder, f"pid{{dw.rank()}}"), "w").write(str(os.getpid()))
    while not os.path.exists(os.path.join(folder, "go")):
        time.sleep(0.05)
    with dw.rank_zero_first():
        pass
    done = [late() for _ in range(4)]
    return [dw.gather_object(("from", dw.rank())) for _ in range(20)][-1], done

@dw.rank_zero_only(broadcast=True)
def late():
    time.sleep(0.1)
    return 0

if __name__ == "__main__":
    sys.stdout.write("result {{}} {{}}\\n".format(*main(os.getcwd())))  # in one piece, beside the other rank's
"""

STRANGER = """
import glob, json, os, socket, struct, sys, time
"".encode("idna")  # is read from disk, where a stranger may not look
os.setgroups([]); os.setgid(65534); os.setuid(65534)
ports, pids = eval(sys.argv[1]), eval(sys.argv[2])
sockets = []
for port in ports:
    for junk in (b"", b"GET / HTTP/1.0\\r\\n\\r\\n", os.urandom(64), bytes(64)):
        s = socket.create_connection(("127.0.0.1", port), timeout=5)
        s.sendall(junk)
        sockets.append(s)

def text(data):
    return struct.pack("<Q", len(data)) + data

stores, secrets = [], []  # of torch's, which let anybody in: those that answer a ping
for port in ports:
    s = socket.create_connection(("127.0.0.1", port), timeout=1)
    s.sendall(struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 4711))
    try:
        if s.recv(4) != struct.pack("<I", 4711):
            continue
    except OSError:
        continue
    stores.append(s)
    for key in (b"/distwrap/1/secret", b"/distwrap/1/secret/offer"):
        s.sendall(b"\\x05" + struct.pack("<Q", 1) + text(key))
        if s.recv(1) == b"\\0":  # it is there
            s.sendall(b"\\x03" + text(key))
            value = s.recv(struct.unpack("<Q", s.recv(8, socket.MSG_WAITALL))[0], socket.MSG_WAITALL).decode()
            if key.endswith(b"secret"):
                secrets.append(value)
            elif value.startswith("memory"):
                try:
                    secrets.append(open("/proc/" + value.split()[1], "rb").read())
                except OSError:
                    pass
    for key, value in (
        (b"failure", json.dumps([1, "evil", 1, 64 * "0" + "made up", "", 0.0]).encode()),
        (b"left/1", 64 * b"0" + b"failed"),
        (b"left/0", b"failed"),
        (b"work/late()/0/1", b"00"),
        (b"stalled", b"0"),
    ):
        s.sendall(b"\\x01" + text(b"/distwrap/1/" + key) + text(value))
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
print("opened", opened, "secrets", secrets, "stores", len(stores), flush=True)
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


def _forks() -> set[int]:
    """The programs of this test: the caller, or torchrun."""
    folder = Path(f"/proc/{interpreter().pid}/task/{interpreter().pid}")
    return set(map(int, (folder / "children").read_text().split()))


def _documented(launcher: str) -> Counter[str]:
    """How many ports docs/explanation/security.md says that a run of two ranks opens, by address."""
    rows = [
        row.split(" | ")
        for row in (ROOT / "docs" / "explanation" / "security.md").read_text().splitlines()
        if " | " in row
    ]
    [ports] = [row[-1] for row in rows if f"`{launcher}`" in row[0]]
    opened: Counter[str] = Counter()
    for each in ports.removesuffix(" |").split("; "):
        who, _, where = each.partition(": ")
        opened[where.removeprefix("one a rank, ")] += 2 if "one a rank" in where else 1
        assert who in ("gloo", "rank 0's store", "torchrun's stores")
    return opened


ADDRESSES = {"0100007F": "127.0.0.1", "00000000": "all addresses", 32 * "0": "all addresses"}
STARTED_BY = {
    "torchrun": [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "mpirun": ["mpirun.mpich", "-np", "2", PYTHON],
}


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="needs Linux, and root to become a stranger")
@pytest.mark.parametrize(
    "launcher",
    [
        "elastic",
        "forkserver",
        "script",
        "torchrun",
        nightly("fork", row="products", why="[elastic] and [forkserver]"),
        nightly("spawn", row="products", why="[forkserver]"),
        nightly("mpirun", row="mpi", why="[torchrun], which starts ranks as it does"),
    ],
)
@pytest.mark.slow("a program, and a stranger beside it")
def test_a_stranger_on_this_machine(launcher: str, tmp_path: Path) -> None:
    """Another user can open no file or memory of a run, and finds no secret; what it says and sends changes nothing.

    It can only connect to the ports that docs/explanation/security.md lists.
    """
    command = STARTED_BY.get(launcher, [PYTHON])
    if shutil.which(command[0]) is None:
        pytest.skip(f"not installed: {command[0]}")
    program = tmp_path / "program.py"
    program.write_text(RUN.format(launcher="auto" if launcher in STARTED_BY else launcher))
    temporary = tmp_path / "temporary"
    temporary.mkdir(mode=0o777)
    run = subprocess.Popen(
        [*command, program],
        cwd=tmp_path,
        env={**os.environ, **forked_commands(), "TMPDIR": str(temporary)},
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
        pids = {run.pid, *_forks(), *(int(note.read_text()) for note in notes)}
        mpiruns = _listening({run.pid}) if launcher == "mpirun" else {}  # which its children hold too
        ports = {port: address for port, address in _listening(pids).items() if port not in mpiruns}
        seen = Counter(ADDRESSES.get(address, address) for address in ports.values())
        documented = _documented(launcher)
        assert seen["127.0.0.1"] == documented["127.0.0.1"], ports
        assert set(seen) == set(documented), ports  # torchrun has one store or two
        for path in temporary.iterdir():
            assert path.stat().st_mode & 0o077 == 0, f"others can look into {path}"
        stranger = subprocess.Popen(
            [sys.executable, "-S", "-c", STRANGER, repr(sorted(ports)), repr(sorted(pids))],
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert stranger.stdout is not None
        line = stranger.stdout.readline()
        stores = len(ports) - 2
        assert line == f"opened [] secrets [] stores {stores}\n", line
        time.sleep(2 * NEWS_SECONDS if stores else 0)  # for what it has told of to end a run that believes it
        (tmp_path / "go").touch()
        output = run.communicate(timeout=LIMIT)[0]
        assert "result [('from', 0), ('from', 1)] [0, 0, 0, 0]" in output
        assert run.returncode == 0, output
        assert ("'failure' in the ranks' store has no valid signature of this run" in output) == bool(stores)
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
