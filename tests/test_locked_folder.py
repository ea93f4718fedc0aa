"""Temporary folders with a lock: whose they are, and what becomes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from distwrap import locked_folder
from distwrap.network.waiting import wait_until
from tests.forked_commands import PYTHON
from tests.limits import SOON
from tests.orphans import lives

HOLDER = """
import os, signal
from distwrap import locked_folder
folder = locked_folder.make("x")
fork = os.fork()  # it lives on, and is not the owner
if fork:
    print(folder, os.getpid(), fork, flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_ours_until_we_remove_it(temporary: Path) -> None:
    """Nobody else reads it, and not even this process takes it for an abandoned one."""
    folder = locked_folder.make("x")
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "file").touch()
    locked_folder.remove_abandoned("x")
    assert (folder / "file").exists()
    locked_folder.remove(folder)
    assert not list(temporary.iterdir())


def test_a_killed_owners_is_removed(temporary: Path) -> None:
    """As soon as its owner is gone, though a fork of it lives, and only where its kind is asked for."""
    command = [PYTHON, "-c", HOLDER]
    env = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        name, owner, fork = holder.stdout.readline().split()
        folder = Path(name)
        locked_folder.remove_abandoned("x")
        assert folder.exists()
        holder.kill()
        holder.wait(20)
        assert wait_until(lambda: not lives(int(owner)), SOON)
        seen: list[Path] = []
        locked_folder.remove_abandoned("other")
        assert folder.exists()
        locked_folder.remove_abandoned("x", first=seen.append)
        os.kill(int(fork), signal.SIGKILL)
    assert seen == [folder]
    assert not folder.exists()


def test_a_fork_removes_nothing() -> None:
    """What a process has made is not its forks' to remove."""
    folder = locked_folder.make("x")
    pid = os.fork()
    if pid == 0:
        locked_folder.remove(folder)
        locked_folder.remove_abandoned("x")
        os._exit(0)
    os.waitpid(pid, 0)
    assert folder.exists()
    locked_folder.remove(folder)


def test_a_link_is_left_alone(temporary: Path) -> None:
    """Somebody may lay a link where a folder is expected: what it leads to is not removed."""
    target = temporary / "precious"
    target.mkdir()
    (target / "file").touch()
    (temporary / "distwrap-x-1").symlink_to(target)
    seen: list[Path] = []
    locked_folder.remove_abandoned("x", first=seen.append)
    assert (target / "file").exists()
    assert not seen


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_users_is_left_alone(temporary: Path) -> None:
    """Root could remove it, and it is not root's."""
    folder = temporary / "distwrap-x-1"
    folder.mkdir()
    os.chown(folder, 65534, -1)
    locked_folder.remove_abandoned("x")
    assert folder.exists()


def test_taken_before_it_was_locked(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its making and its lock another process may take it for an abandoned one: there is a second then."""
    lock, calls = locked_folder._lock, []

    def late(fd: int) -> bool | None:
        calls.append(fd)
        if len(calls) == 1:
            locked_folder.remove_abandoned("x")
        return lock(fd)

    monkeypatch.setattr(locked_folder, "_lock", late)
    folder = locked_folder.make("x")
    assert list(temporary.iterdir()) == [folder]
    locked_folder.remove(folder)


def test_without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks has folders, of which none is taken for an abandoned one."""

    def none(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(locked_folder.fcntl, "flock", none)
    folder = locked_folder.make("x")
    locked_folder.remove_abandoned("x")
    assert folder.exists()
    locked_folder.remove(folder)
    assert not folder.exists()
