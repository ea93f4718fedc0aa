"""The secret of a run: where ranks take it from, and who cannot."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from distwrap.environments import Placement
from distwrap.errors import ArrivalError, OptionError
from distwrap.network import memory_file, secret
from distwrap.network.signed_texts import SignedTexts

ROOT = Path(__file__).parents[2]
OTHER_USER = 65534
needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.getuid() != 0, reason="needs Linux, and root to become another user"
)


class Replaced(dist.HashStore):
    """A store in which somebody puts something else in the place of rank 0's offer."""

    def __init__(self, offer: str = "") -> None:
        super().__init__()
        self._offer = offer

    def set(self, key: str, value: str) -> None:
        super().set(key, self._offer if self._offer and key == "secret/offer" else value)


def agreed(*, nnodes: int = 1, ranks: int = 2, store: dist.Store | None = None) -> list[bytes | BaseException]:
    """What each of some ranks, which are threads of this process, has agreed on."""
    store = dist.HashStore() if store is None else store
    store.set_timeout(timedelta(seconds=20))
    found: dict[int, bytes | BaseException] = {}

    def be_one(rank: int) -> None:
        try:
            found[rank] = secret.agree_on_secret(store, Placement(rank, ranks, 0, 1, rank % nnodes, nnodes))
        except BaseException as error:  # noqa: BLE001
            found[rank] = error

    threads = [threading.Thread(target=be_one, args=(rank,), name=str(rank)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    stored = [store.get(key).decode() for key in ("secret/offer", "secret/agreed")]
    for each in found.values():
        assert not isinstance(each, bytes) or not each or each.hex() not in " ".join(stored), "it is in the store"
    return [found[rank] for rank in range(ranks)]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of a secret, which the environment names."""
    path = tmp_path / "secret"
    path.write_text(16 * "ab" + "\n")
    path.chmod(0o600)
    monkeypatch.setenv("DISTWRAP_SECRET_FILE", str(path))
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_ranks_of_one_node_take_it_from_rank_0s_memory() -> None:
    """With nothing configured, ranks of one user on one node have a secret; nothing of it stays open."""
    before = os.listdir("/proc/self/fd")
    first, second = agreed()
    assert first == second
    assert len(first) == 32  # type: ignore[arg-type]
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    assert agreed() != [first, second]


def test_ranks_of_several_nodes_have_none() -> None:
    """Without a file or munge there is no safe way to one."""
    assert agreed(nnodes=2) == [b"", b""]


@pytest.mark.parametrize("nnodes", [1, 2])
def test_a_file(file: Path, nnodes: int) -> None:
    """The same file gives the same secret to all ranks, and another one to each run; its end of line is no part."""
    first, second = agreed(nnodes=nnodes)
    assert first == second != b""
    assert agreed(nnodes=nnodes)[0] not in (first, file.read_bytes().strip())
    assert secret.of_file() == 16 * b"ab"


def test_a_file_in_the_users_home(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell leaves ~ as it is in quotes, and a cluster's job description everywhere."""
    monkeypatch.setenv("HOME", str(file.parent))
    monkeypatch.setenv("DISTWRAP_SECRET_FILE", f"~/{file.name}")
    assert secret.of_file() == 16 * b"ab"


def test_an_offer_of_an_earlier_run(file: Path) -> None:
    """With a run's offer somebody could replay what its ranks have signed: rank 0 has to have the secret now."""
    before = dist.HashStore()
    assert all(isinstance(each, bytes) for each in agreed(store=before))
    for error in agreed(store=Replaced(before.get("secret/offer").decode())):
        assert isinstance(error, ArrivalError), error


def test_another_file_on_one_rank(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks have different files, or one has none, all are told which."""
    given = {0: 20 * b"a", 1: 20 * b"a"}
    monkeypatch.setattr(secret, "of_file", lambda: given[int(threading.current_thread().name)])
    for other, words in ((20 * b"b", "has another, and rank 0 has one"), (b"", "has none, and rank 0 has one")):
        given[2] = other
        for error in agreed(ranks=3):
            assert isinstance(error, ArrivalError)
            assert re.search(f"SECRET_FILE must name the same secret on all ranks: rank 2 on .* {words}", str(error))


@pytest.mark.parametrize("whose", [0, 2])
def test_a_file_that_one_rank_cannot_read(file: Path, whose: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks are told of it at once, and none waits for that rank."""

    def read() -> bytes:
        if threading.current_thread().name == str(whose):
            raise OptionError("DISTWRAP_SECRET_FILE='gone' cannot be read.")
        return 20 * b"a"

    monkeypatch.setattr(secret, "of_file", read)
    for error in agreed(ranks=3):
        assert isinstance(error, ArrivalError), error
        assert re.search(f"rank {whose} on .* has no secret .*'gone' cannot be read", str(error))


@pytest.mark.parametrize(
    ("mode", "content", "problem"),
    [
        (0o640, 20 * "a", "mode 640"),
        (0o602, 20 * "a", "mode 602"),
        (0o600, "short", "at least 16"),
        (0o600, None, "cannot be"),
    ],
)
def test_a_file_that_keeps_no_secret(file: Path, mode: int, content: str | None, problem: str) -> None:
    """A file that others may read, or that is too short, or missing, is refused by name."""
    file.unlink()
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    with pytest.raises(OptionError, match=f"DISTWRAP_SECRET_FILE=.*{problem}"):
        secret.of_file()


@pytest.mark.parametrize(("make", "problem"), [(os.mkfifo, "no file"), (os.mkdir, "Is a directory")])
def test_what_is_no_file_keeps_no_secret(file: Path, make: Callable[[Path, int], None], problem: str) -> None:
    """A FIFO would be waited for until somebody writes to it."""
    file.unlink()
    make(file, 0o600)
    with pytest.raises(OptionError, match=f"DISTWRAP_SECRET_FILE=.*{problem}"):
        secret.of_file()


@needs_root
def test_a_file_of_another_user(file: Path) -> None:
    """Who owns it could change it."""
    os.chown(file, OTHER_USER, -1)
    with pytest.raises(OptionError, match="another user"):
        secret.of_file()


STRANGER = f"""
import os, sys
import torch.distributed as dist
from datetime import timedelta
from distwrap.environments import Placement
from distwrap.network import secret
os.setgroups([]); os.setgid({OTHER_USER}); os.setuid({OTHER_USER})
fd = os.memfd_create(secret._PREFIX); os.write(fd, 32 * b"s")
print(f"/proc/{{os.getpid()}}/fd/{{fd}}", flush=True)
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=20))
try:
    print(open(store.get("secret/offer").decode().split()[1], "rb").read(), flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
print(secret.agree_on_secret(store, Placement(1, 2, 1, 2)), flush=True)
sys.stdin.read()
"""


@needs_root
@pytest.mark.slow("starts interpreters, each of which imports torch")
def test_another_user_gets_none(tmp_path: Path) -> None:
    """A stranger who joins as a rank reads no secret, and his own is not taken: the run has none then."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    stranger = subprocess.Popen(
        [sys.executable, "-c", STRANGER, str(store.port)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with stranger:
        try:
            assert stranger.stdout is not None
            place = stranger.stdout.readline().strip()
            with pytest.raises(PermissionError):
                memory_file.open_own(place, secret._PREFIX)
            with open(place, "rb") as memory:
                assert memory.read() == 32 * b"s"  # which root could read
            assert secret.agree_on_secret(store, Placement(0, 2, 0, 2)) == b""
            assert stranger.stdout.readline() == "PermissionError\n"
            assert stranger.stdout.readline() == "b''\n"
        finally:
            stranger.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_another_file_is_not_read_for_it(tmp_path: Path) -> None:
    """Whoever writes into the store cannot have a file read whose content he knows."""
    known = tmp_path / secret._PREFIX
    known.write_bytes(32 * b"k")
    with known.open("rb") as file, ExitStack() as stack:
        for place in (memory_file.path_of(file.fileno()), f"/proc/self/../../{known}", memory_file.path_of(99_999)):
            assert secret._taken(f"memory {place}", b"") == b""
        with pytest.raises(PermissionError, match="not a file in memory"):
            memory_file.open_own(str(known), secret._PREFIX)  # to open it alone could do harm, as of a device
        own, offer = secret._offer(Placement(0, 2, 0, 2), b"", stack)
        assert os.stat(offer.split()[1]).st_mode & 0o077 == 0
        assert secret._taken(offer, b"") == own


@pytest.mark.parametrize(("code", "user", "taken"), [(0, 0, True), (17, 0, True), (0, 1, False), (15, 0, False)])
def test_a_credential(code: int, user: int, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what this user has encoded is taken of munge, also where another rank of the node has decoded it before."""
    text = f"STATUS: ...\nUID:  somebody ({os.geteuid() + user})\n\n{secret._PREFIX} {32 * 'ab'}"
    monkeypatch.setattr(secret, "_run", lambda *_: subprocess.CompletedProcess([], code, text))
    assert secret._taken("munge CREDENTIAL", b"") == (bytes.fromhex(32 * "ab") if taken else b"")


def test_a_munge_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on without a secret, as where there is no munge."""
    (tmp_path / "munge").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "munge").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setattr(secret, "_MUNGE_SECONDS", 0.2)
    assert agreed(nnodes=2) == [b"", b""]


def test_signed_texts(capfd: pytest.CaptureFixture[str]) -> None:
    """A text that no rank of the run has written is ignored, with one notice; a rank's takes its place."""
    store = dist.HashStore()
    ours, theirs = SignedTexts(store, b"ours"), SignedTexts(store, b"theirs")
    theirs.set_first("failure", "made up")
    assert ours.read("failure") is ours.read("failure") is None
    assert capfd.readouterr().err.count("'failure' in the ranks' store has no valid signature of this run") == 1
    ours.set_first("failure", "the first")
    ours.set_first("failure", "the second")
    assert ours.read("failure") == "the first"
    store.set("left/1", store.get("failure"))
    assert ours.read("left/1") is None, "what a rank has said elsewhere"
    for junk in ("", "x", "é"):
        store.set("failure", junk)
        assert ours.read("failure") is None
