"""Formats of checkpoints: one protocol, one class a format.

Formats of the user's own are objects with the same methods, given to ``save(io=...)`` and ``load(io=...)``.
"""

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from distwrap.checkpoint.files import SKELETON
from distwrap.checkpoint.untrusted import check_regular, load_file
from distwrap.errors import CheckpointError


@runtime_checkable
class CheckpointIO(Protocol):
    """Format of a checkpoint.

    Attributes:
        collective: whether every rank writes and reads its part, into a folder. Else rank 0 writes a file for all.
    """

    collective: bool

    def save(self, state: Any, path: Path) -> None:
        """Write a plain state to a path that nobody reads yet; it is brought to the disk and named by the caller."""

    def load(self, path: Path, map_location: Any) -> Any:
        """Read it back."""


class FileIO:
    """A file of torch's own, read by its safe loader."""

    collective = False

    def save(self, state: Any, path: Path) -> None:
        """Write with ``torch.save``."""
        torch.save(state, path)

    def load(self, path: Path, map_location: Any) -> Any:
        """Read with torch's safe loader."""
        return load_file(path, map_location)


class SafetensorsIO:
    """A flat dict of tensors as a ``.safetensors`` file; needs the ``safetensors`` extra.

    Args:
        metadata: words beside the tensors.

    Source: https://huggingface.co/docs/safetensors
    """

    collective = False

    def __init__(self, metadata: dict[str, str] | None = None) -> None:
        self._metadata = metadata or {"format": "pt"}

    def save(self, state: Any, path: Path) -> None:
        """Write with safetensors, which keeps tensors alone: names and numbers go into a file of torch's."""
        flat = isinstance(state, dict) and all(
            isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in state.items()
        )
        if not flat:
            raise CheckpointError(
                "a .safetensors file holds a dict of names and tensors, as a model or its state_dict(), and nothing "
                "else; save the whole state to a .pt file"
            )
        safetensors().save_file(_apart(state), path, metadata=self._metadata)

    def load(self, path: Path, map_location: Any) -> Any:
        """Read with safetensors, memory-mapped."""
        check_regular(path)
        device = "cpu" if map_location is None else str(torch.device(map_location))
        return dict(safetensors().load_file(path, device=device))


def choose(io: str | CheckpointIO, path: Path) -> CheckpointIO:
    """Return the format of a name; for ``"auto"`` by the path's suffix, or by what the folder holds."""
    if not isinstance(io, str):
        return io
    if io == "auto":
        io = "safetensors" if path.suffix == ".safetensors" else "sharded" if (path / SKELETON).exists() else "file"
    if io == "sharded":
        from distwrap.checkpoint.sharded import ShardedIO  # imports torch's distributed checkpoint

        return ShardedIO()
    if io in ("file", "safetensors"):
        return FileIO() if io == "file" else SafetensorsIO()
    raise CheckpointError(f"unknown format {io!r}. Known: auto, file, safetensors, sharded, or a CheckpointIO object.")


def _apart(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with memory of their own, without gaps: the format has no two names for one tensor."""
    apart = {name: value.detach().resolve_conj().resolve_neg().contiguous() for name, value in state.items()}
    owner: dict[int, str] = {}
    for name, value in apart.items():
        if value.numel() and owner.setdefault(value.untyped_storage().data_ptr(), name) != name:
            apart[name] = value.clone()
    return apart


def safetensors() -> Any:
    """Import and return ``safetensors.torch``.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise CheckpointError("a .safetensors file needs the safetensors package: pip install safetensors") from error
    return safetensors.torch
