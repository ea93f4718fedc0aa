"""Write and read checkpoints: whole or not at all, and safe to load.

Source of the safe loader: https://docs.pytorch.org/docs/stable/notes/serialization.html#weights-only
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import torch

from distwrap.errors import CheckpointError
from distwrap.group.world import current_world, is_rank_zero
from distwrap.model import unwrap_model
from distwrap.turns import share

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Tensor, torch.Size, torch.dtype, torch.device)


def save(state: Any, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint on rank 0: whole, or not at all.

    When every rank calls, all of them wait until the file is there, and learn of a failure; rank 0 may also call it
    alone. Models, optimizers and whatever else has a
    ``state_dict`` may stand anywhere in `state`; their state dicts are written, without a wrapper's prefix.

    Args:
        state: tensors, numbers, strings and objects with a ``state_dict``, in dicts, lists and tuples.
        path: the file. It is replaced in one step, after the new one is safely on disk.

    Raises:
        CheckpointError: it could not be written, or holds what the safe loader would refuse; names it.

    Example:
        >>> folder = Path(tempfile.mkdtemp())
        >>> save({"model": torch.nn.Linear(1, 1), "epoch": 3}, folder / "last.pt")
        >>> load(folder / "last.pt")["epoch"]
        3
    """
    name = f"save {os.path.abspath(path)}"
    if current_world().solo:  # a function of rank 0 alone; nobody else calls, or waits
        name = ""
    problem, cause = "", None
    if is_rank_zero():
        try:
            _write(_plain(state, ""), Path(path))
        except Exception as error:  # noqa: BLE001 - whatever is raised, the other ranks must hear of it
            problem = f"{error}" if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            cause = error
    if name:
        problem = share(name, 0, problem.encode() if is_rank_zero() else None).decode()
    if problem:
        raise CheckpointError(
            f"the checkpoint {os.fspath(path)} was not written by rank 0 on {socket.gethostname()}: {problem}. "
            f"What was there before is untouched."
        ) from cause


def load(path: str | os.PathLike[str], *, map_location: Any = "cpu") -> Any:
    """Read a checkpoint with torch's safe loader, onto the CPU, so that the ranks do not crowd one device.

    Args:
        path: the file.
        map_location: as for ``torch.load``.

    Raises:
        CheckpointError: the file is no checkpoint, or holds objects that only an unsafe load would take.
        FileNotFoundError: it is not there.

    Example:
        >>> path = Path(tempfile.mkdtemp()) / "last.pt"
        >>> save({"lr": 0.1}, path)
        >>> load(path)
        {'lr': 0.1}
    """
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        place = current_world().placement
        raise CheckpointError(
            f"rank {place.rank} cannot load {os.fspath(path)}: {str(error).splitlines()[0] if str(error) else error!r} "
            f"Save it again with distwrap.save(), or, if you trust where it comes from, read it with "
            f"torch.load(path, weights_only=False)."
        ) from error


def _write(state: Any, path: Path) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            os.chmod(temporary, path.stat().st_mode & 0o777)
        if not path.exists():
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name itself must survive a power cut
    finally:
        os.close(folder)


def _plain(value: Any, where: str) -> Any:
    """Replace objects by their state dicts, and refuse what the safe loader would refuse, by its path."""
    if type(value) in (dict, OrderedDict, Counter):
        items = {_plain(key, f"'s key {key!r}"): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
        if type(value) is not OrderedDict:
            return type(value)(items)
        result = OrderedDict(items)
        if hasattr(value, "_metadata"):
            result._metadata = value._metadata  # type: ignore[attr-defined]
        return result
    if type(value) in (list, tuple, set):
        return type(value)(_plain(item, f"{where}[{index}]") for index, item in enumerate(value))
    if isinstance(value, _PLAIN) and type(value).__module__.split(".")[0] in ("builtins", "torch"):
        return value
    if isinstance(value, torch.nn.Module):
        value = unwrap_model(value)
    if callable(getattr(value, "state_dict", None)):
        return _plain(value.state_dict(), f"{where}.state_dict()")
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    hint = " (use .item() or torch.as_tensor(…))" if kind.startswith("numpy.") else ""
    raise CheckpointError(
        f"state{where} is a {kind}, which the safe loader refuses; save plain values or tensors{hint}"
    )
