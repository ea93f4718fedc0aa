"""Write files and folders that take their name in one step, when they are safely on disk."""

import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from distwrap.environments.identity import pid_exists
from distwrap.errors import CheckpointError
from distwrap.wording import as_size, first_line

SKELETON = "skeleton.pt"  # in a sharded checkpoint: all but the tensors' numbers
_SWEEP_SECONDS = 60.0
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
    place = Path(os.path.realpath(path)) if path.is_symlink() else path
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


def write_atomically(path: Path, write: Callable[[Path], None], before: Callable[[], None] = lambda: None) -> None:
    """Write a file beside `path`, sync it to disk, and rename it to `path`.

    Whatever happens, the path holds either its old content or all of the new.

    Args:
        path: the file.
        write: takes the name of an empty file, and writes to it.
        before: called when the new file is complete, before it is renamed.
    """
    _sweep(path.parent)
    temporary = temporary_name(path)
    temporary.touch(0o600 if path.exists() else 0o666, exist_ok=False)
    try:
        with full_disk_told(path.parent):
            write(temporary)
            _sync(temporary)
        with suppress(FileNotFoundError):
            os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
        before()
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)  # the new name itself must survive a power cut


def write_folder(path: Path, write: Callable[[Path], None], check: Callable[[], None]) -> None:
    """Write a folder beside `path`, sync it to disk, and rename it to `path`, as `write_atomically` does.

    Args:
        path: the folder.
        write: takes the name of an empty folder, and writes into it.
        check: raises an error if the folder that has the name now must not be replaced.
    """
    check()
    temporary = new_folder(path)
    try:
        with full_disk_told(path.parent):
            write(temporary)
            put_folder(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def new_folder(path: Path) -> Path:
    """Make a folder beside `path` for this process alone, and return it."""
    _sweep(path.parent)
    temporary = temporary_name(path)
    temporary.mkdir()
    return temporary


def temporary_name(path: Path) -> Path:
    """Return an unused name beside `path`; files with such names are removed when their process is gone."""
    return path.parent / f".{path.name}{_owner(os.getpid())}{secrets.token_hex(4)}.tmp"


def put_folder(temporary: Path, path: Path) -> None:
    """Rename a complete folder to `path`; an older folder is kept as `_previous` until then."""
    for file in temporary.rglob("*"):
        _sync(file)
    _sync(temporary)
    previous = _previous(path)
    if path.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(path, previous)
    os.rename(temporary, path)
    _sync(path.parent)
    shutil.rmtree(previous, ignore_errors=True)


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


def _owner(pid: object) -> str:
    return f".{socket.gethostname()}.{pid}."


def _sweep(folder: Path) -> None:
    """Remove temporary files and folders of killed processes of this node."""
    for left in folder.glob(f".*{_owner('*')}*.tmp"):
        pid = left.name.split(".")[-3]
        with suppress(OSError):
            if pid.isdigit() and not pid_exists(int(pid)) and time.time() - left.stat().st_mtime > _SWEEP_SECONDS:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
