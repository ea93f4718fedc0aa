"""Write files and folders that take their name in one step, when they are safely on disk."""

import fcntl
import glob
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from distwrap.errors import CheckpointError
from distwrap.wording import as_size, first_line

SKELETON = "skeleton.pt"  # in a sharded checkpoint: all but the tensors' numbers
_SWEEP_SECONDS = 60.0
_OF_HOST = f".{socket.gethostname()}."
_LITTLE = 2**20  # bytes, of a disk that is full


def place_of(path: Path, *, folder: bool = False) -> Path:
    """Return where a file or folder of this name must be written, following its symbolic links.

    Raises:
        CheckpointError: the name belongs to a device, FIFO or socket; or to a file instead of a folder, or vice versa;
            or it is in a folder that does not exist.
    """
    with suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            kind = "FIFO" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
            raise CheckpointError(
                f"{path} is a {kind}, and neither a file nor a folder, so it is not replaced: give another name"
            )
        if stat.S_ISDIR(mode) != folder:
            is_there, comes = ("file", "folder") if folder else ("folder", "file")
            raise CheckpointError(
                f"{path} exists and is a {is_there}, and this checkpoint would be a {comes}: give another name"
            )
    place = Path(os.path.realpath(path)) if path.is_symlink() else path.absolute()  # the program may change its folder
    if not place.parent.is_dir():
        raise CheckpointError(
            f"there is no folder {place.parent}. Make it before, by os.makedirs({str(place.parent)!r}, exist_ok=True)"
        )
    return place


@contextmanager
def full_disk_told(folder: Path) -> Iterator[None]:
    """Raise an error that names the folder of a full disk, where writing to it fails; torch's error says other things.

    What was written so far must still be there at the end of the ``with``, since it fills the disk.
    """
    try:
        yield
    except Exception as error:
        free = _LITTLE
        with suppress(OSError):
            free = shutil.disk_usage(folder).free
        if free >= _LITTLE:
            raise
        raise CheckpointError(
            f"the disk of {folder.absolute()} is full ({as_size(free)} free): {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error


class Unfinished:
    """File or folder beside `path` that is written under another name, and takes its name in one step.

    It is locked as long as it is written, so that no other process takes it for one that a killed process has left.

    Args:
        path: the name that it takes.
        folder: whether it is a folder.

    Attributes:
        path: the name that it takes.
        temporary: the empty file or folder to write to.
        has_name: whether it has taken its name.
    """

    def __init__(self, path: Path, *, folder: bool = False) -> None:
        self._lock: int | None = None
        _sweep(path.parent)
        self.path, self.temporary, self.has_name, self._is_folder = path, temporary_name(path), False, folder
        if folder:
            self.temporary.mkdir()
        else:
            self.temporary.touch(0o600 if path.exists() else 0o666, exist_ok=False)
        self._lock = _locked(self.temporary)

    def put(self, before: Callable[[], None] = lambda: None) -> None:
        """Sync what was written to disk, and give it its name.

        Args:
            before: called when the new file is safe, before it is renamed.
        """
        with full_disk_told(self.path.parent):
            for file in self.temporary.rglob("*") if self._is_folder else ():
                _sync(file)
            _sync(self.temporary)
        with suppress(FileNotFoundError):
            if not self._is_folder:
                os.chmod(self.temporary, stat.S_IMODE(self.path.stat().st_mode))
        before()
        if self._is_folder:
            self._replace_folder()
        else:
            os.replace(self.temporary, self.path)
        self.has_name = True
        self._unlock()
        _sync(self.path.parent)  # the new name itself must survive a power cut

    def discard(self) -> None:
        """Remove what was written, which may fill the disk, unless it has its name."""
        if not self.has_name:
            _remove(self.temporary)
        self._unlock()

    def _replace_folder(self) -> None:
        """Rename the folder; an older one is kept as `_previous` until then."""
        previous = _previous(self.path)
        if self.path.exists():
            shutil.rmtree(previous, ignore_errors=True)
            os.rename(self.path, previous)
        try:
            os.rename(self.temporary, self.path)
        except BaseException:
            with suppress(OSError):
                os.rename(previous, self.path)
            raise
        _sync(self.path.parent)
        shutil.rmtree(previous, ignore_errors=True)

    def __del__(self) -> None:
        self._unlock()  # of a simulated rank that was killed

    def _unlock(self) -> None:
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # for processes too that were forked meanwhile
            os.close(self._lock)
        self._lock = None


def write_atomically(
    path: Path, write: Callable[[Path], None], before: Callable[[], None] = lambda: None, *, folder: bool = False
) -> None:
    """Write a file or folder beside `path`, sync it to disk, and rename it to `path`.

    Whatever happens, the path holds either its old content or all of the new.

    Args:
        path: the file or folder.
        write: takes the name of an empty file or folder, and writes to it.
        before: called when the new file is complete, before it is renamed.
        folder: whether it is a folder.
    """
    unfinished = Unfinished(path, folder=folder)
    try:
        with full_disk_told(path.parent):
            write(unfinished.temporary)
        unfinished.put(before)
    finally:
        unfinished.discard()


def temporary_name(path: Path) -> Path:
    """Return an unused name beside `path`; files with such names are removed when nobody holds their lock."""
    return path.parent / f".{path.name}{_OF_HOST}{secrets.token_hex(4)}.tmp"


def _previous(path: Path) -> Path:
    """Return the name of a folder while its successor takes its place."""
    return path.parent / f".{path.name}.previous"


def found(path: Path) -> Path:
    """Return the path of the last complete checkpoint of a name: its folder may be about to be replaced."""
    previous = _previous(Path(os.path.realpath(path)))
    return previous if not path.exists() and previous.exists() else path


def point(link: Path, target: Path) -> None:
    """Point a symbolic link to a file beside it, in one step."""
    temporary = temporary_name(link)
    os.symlink(target.name, temporary)
    os.replace(temporary, link)
    _sync(link.parent)


def refuse_target(source: Path, target: Path, *, force: bool) -> None:
    """Refuse to write to the file that is read, or, without `force`, to any existing file.

    Raises:
        CheckpointError: the target is one of these.
    """
    if target.exists() and source.exists() and target.samefile(source):
        raise CheckpointError(
            f"{target} is the file that is read, which cannot be written to at the same time: give another name."
        )
    if target.exists() and not force:
        raise CheckpointError(f"{target} exists already: give another name, or --force to replace it.")


def _locked(path: Path) -> int | None:
    """Return an open file or folder whose lock this process holds; ``None`` if another one does, or none can be had.

    Processes are told apart by locks, and not by their numbers, which mean others in another container.
    """
    handle = -1
    try:
        handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # as a network's file system needs it
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if handle >= 0:
            os.close(handle)
        return None
    return handle


def _sweep(folder: Path) -> None:
    """Remove temporary files and folders of this host that are not written any more."""
    for left in folder.glob(f".*{glob.escape(_OF_HOST)}*.tmp"):
        with suppress(OSError):
            if time.time() - left.lstat().st_ctime > _SWEEP_SECONDS and (lock := _locked(left)) is not None:
                _remove(left)
                os.close(lock)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def copy_of(path: Path) -> Path:
    """Return another name of a file, or a copy of it on a file system that has no such names."""
    temporary = temporary_name(path)
    try:
        os.link(path, temporary)
    except OSError:
        shutil.copy2(path, temporary)
        _sync(temporary)
    return temporary


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
