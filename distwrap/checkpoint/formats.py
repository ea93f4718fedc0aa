"""Formats of checkpoints: a protocol, and one class for each format.

Users may pass objects of their own with the same methods to ``save(io=...)`` and ``load(io=...)``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from distwrap.checkpoint.files import SKELETON
from distwrap.checkpoint.safetensors_format import SUFFIX, SafetensorsIO, is_folder_of_safetensors
from distwrap.checkpoint.streaming import write_torch
from distwrap.checkpoint.untrusted import load_file
from distwrap.errors import CheckpointError
from distwrap.protocols import CheckpointIO as CheckpointIO


@runtime_checkable
class Streamed(Protocol):
    """Format of one file that is written tensor by tensor, and read in parts."""

    def stream(self, state: Any, path: Path, wholes: Iterator[torch.Tensor]) -> None:
        """Write a plain state; `wholes` yields the tensors for each `Later` in it, in order."""

    def mapped(self, path: Path) -> Any:
        """Return the saved state with memory-mapped numbers."""


class FileIO:
    """Format of ``torch.save``, one file, which torch's safe loader reads."""

    collective = False

    def save(self, state: Any, path: Path) -> None:
        """Write with ``torch.save``."""
        torch.save(state, path)

    def stream(self, state: Any, path: Path, wholes: Iterator[torch.Tensor]) -> None:
        """Write a file with space for tensors that come one at a time, and are `Later` in the state."""
        write_torch(state, path, wholes)

    def load(self, path: Path, map_location: Any) -> Any:
        """Read with torch's safe loader."""
        return load_file(path, map_location)

    def mapped(self, path: Path) -> Any:
        """Return the saved state, whose numbers are read from the file when they are used."""
        return load_file(path, "cpu", mapped=True)


def choose(io: str | CheckpointIO, path: Path) -> CheckpointIO:
    """Return the format of a name; ``"auto"`` chooses by the path's suffix, or by the content of the folder."""
    if isinstance(io, CheckpointIO):
        return io
    if io == "auto":
        safe = path.suffix == SUFFIX or (is_folder_of_safetensors(path) and not (path / SKELETON).exists())
        io = "safetensors" if safe else "sharded" if (path / SKELETON).exists() else "file"
    if io == "sharded":
        from distwrap.checkpoint.sharded import ShardedIO  # imports torch's distributed checkpoint

        return ShardedIO()
    if io in ("file", "safetensors"):
        return FileIO() if io == "file" else SafetensorsIO()
    raise CheckpointError(f"unknown format {io!r}. Known: auto, file, safetensors, sharded, or a CheckpointIO object.")
