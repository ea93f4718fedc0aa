"""Read files of torch's that may be a stranger's: no code in them is run.

torch's safe loader reads them. A file that claims to hold more than it does may take more memory than it has bytes.

Source: https://docs.pytorch.org/docs/stable/notes/serialization.html#weights-only
"""

import io
import re
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any
from zipfile import is_zipfile

import torch

from distwrap.errors import CheckpointError

DEEPEST = 250  # levels of a state that is saved or loaded
_PARTS = 1_000_000  # of a state that is loaded, in addition to one for each byte of its file


def load_file(path: Path, map_location: Any = None, *, mapped: bool = False) -> Any:
    """Return the content of a file of ``torch.save``, read by torch's safe loader.

    Args:
        path: the file.
        map_location: as for ``torch.load``.
        mapped: leave the numbers in the file, memory-mapped, if the format allows it.

    Raises:
        CheckpointError: the file is empty, or its content is nested too deep.
        Exception: torch's own, if it is not a file of ``torch.save``, or its safe loader refuses the content.
    """
    check_regular(path)
    if not path.stat().st_size:
        raise CheckpointError(f"cannot load {path}: it is empty.")
    return _checked(_load(path, map_location, mapped=mapped and is_zipfile(path)), path.stat().st_size, path)


def load_value(file: IO[bytes], start: int, length: int, path: Path) -> Any:
    """Return the value that ``torch.save`` wrote to a part of a file, on the CPU.

    Raises:
        CheckpointError: the part is not in the file, or its content is nested too deep.
    """
    file.seek(max(start, 0))
    part = file.read(max(length, 0))
    if start < 0 or len(part) != length:
        raise CheckpointError(f"cannot load {path}: it is shorter than the folder says. Was it cut off?")
    return _checked(_load(io.BytesIO(part), "cpu", mapped=False), length, path)


def load_tensor(file: IO[bytes], start: int, length: int, path: Path) -> torch.Tensor:
    """Return the tensor that ``torch.save`` wrote to a part of a file, as `load_value` does.

    Raises:
        CheckpointError: the part is not a tensor.
    """
    tensor = load_value(file, start, length, path)
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"cannot load {path}: it holds a {type(tensor).__name__} where a tensor should be.")
    return tensor


def check_regular(path: Path) -> None:
    """Refuse a FIFO, on which reading would block, a device, which has no end, and a folder.

    Raises:
        CheckpointError: the path is one of these.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode) and any(path.glob("*.distcp")):
        raise CheckpointError(
            f"cannot load {path}: it is a folder of torch's distributed checkpoint. Write it to one file by "
            f"`distwrap convert-checkpoint {path} model.pt`, and load that."
        )
    if not stat.S_ISREG(mode):
        raise CheckpointError(
            f"cannot load {path}: it is neither a file, nor a folder that distwrap.save() has written."
        )


def _load(file: Any, map_location: Any, *, mapped: bool) -> Any:
    with _without_advice(), torch.sparse.check_sparse_tensor_invariants(str(map_location) != "meta"):  # type: ignore[no-untyped-call]
        try:
            return torch.load(file, map_location=map_location, mmap=mapped or None, weights_only=True)
        except UnpicklingError as error:  # its text of a page has the name far below
            name = re.search(r"GLOBAL (\S+)", str(error))
            if name is None:
                raise
            raise UnpicklingError(f"it holds {name[1]}, which only an unsafe load would take") from error
        except (EOFError, LookupError, AttributeError, RuntimeError) as error:  # torch does not say what they are of
            if isinstance(error, RuntimeError) and "inline_container" not in str(error):
                raise
            raise UnpicklingError(f"it is damaged, or was not written by torch.save() ({error!r})") from error


@contextmanager
def _without_advice() -> Iterator[None]:
    """Silence newer torch's warning that the check of sparse tensors, which is wanted here, takes time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
        yield


def _checked(state: Any, length: int, path: Path) -> Any:
    """Return a state whose nesting ends, and whose parts can be counted.

    Raises:
        CheckpointError: a list contains itself, is nested too deep, or holds very many values.
    """
    level, parts, most = [state], 0, _PARTS + length
    for depth in range(DEEPEST + 2):
        parts += len(level)
        if depth > DEEPEST or parts > most:
            raise CheckpointError(
                f"cannot load {path}: a list or dict in it contains itself, is nested too deep, or holds more than "
                f"{most:,} values."
            )
        below: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                below += [*part, *part.values()]
            elif isinstance(part, (list, tuple, set)):
                below += part
            if len(below) > most:
                break
        if not below:
            break
        level = below
    return state
