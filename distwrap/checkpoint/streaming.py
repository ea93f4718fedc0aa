"""Write files whose tensors come one at a time: torch's own format, and safetensors in one or several files.

A file is written with space for the numbers, which are filled in as they come.

Source: https://docs.pytorch.org/docs/stable/notes/serialization.html#torch.serialization.skip_data
Source: https://huggingface.co/docs/safetensors#format (where the numbers begin)
"""

import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from struct import unpack
from typing import IO, Any

import torch

from distwrap.checkpoint.pieces import Later, leaves
from distwrap.checkpoint.untrusted import load_file
from distwrap.errors import CheckpointError
from distwrap.group.tensors_apart import as_bytes, is_dense
from distwrap.nesting import rebuilt

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_BUFFER = 2**22  # bytes


def write_torch(state: Any, path: Path, wholes: Iterator[torch.Tensor]) -> None:
    """Write a file for ``torch.load`` with tensors that come one at a time.

    Args:
        state: a plain state, with a `Later` for each tensor to come.
        path: the file.
        wholes: these tensors, in order.

    Raises:
        CheckpointError: another tensor is sparse, quantized, of a subclass, or in a set.
    """
    with torch.serialization.skip_data():
        torch.save(rebuilt(state, _with_room), path)
    begin = _begin_of_numbers(path)
    there = [leaf.untyped_storage() for leaf in leaves(load_file(path, "cpu", mapped=True), torch.Tensor)]
    base = min((storage.data_ptr() for storage in there if storage.nbytes()), default=0)
    with open(path, "r+b") as file:
        for leaf, storage in zip(leaves(state, (Later, torch.Tensor)), there, strict=True):
            if storage.nbytes():
                file.seek(begin + storage.data_ptr() - base)
            _write(file, next(wholes) if isinstance(leaf, Later) else _all_of(leaf))  # keeps no reference


def write_safetensors(
    state: Mapping[str, Any], path: Path, wholes: Iterator[torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a ``.safetensors`` file with tensors that come one at a time.

    Args:
        state: names with tensors, or `Later` for tensors to come.
        path: the file.
        wholes: the tensors to come, in order.
        metadata: strings to store beside the tensors.
    """
    safetensors().save_file({name: _with_room(leaf, (name,)) for name, leaf in state.items()}, path, dict(metadata))
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        for name, leaf in state.items():
            if isinstance(leaf, Later):
                file.seek(8 + length + header[name]["data_offsets"][0])
                _write(file, next(wholes))


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


def write_folder(
    state: Mapping[str, Any],
    folder: Path,
    wholes: Iterator[torch.Tensor],
    metadata: Mapping[str, str],
    max_shard_size: int,
) -> None:
    """Write ``.safetensors`` files of a maximal size, with an index if there are several, as Hugging Face does.

    Args:
        state: names with tensors, or `Later` for tensors to come.
        folder: an empty folder.
        wholes: the tensors to come, in order.
        metadata: strings to store beside the tensors.
        max_shard_size: the most bytes of tensors in a file; a larger tensor has a file of its own.

    Source: https://huggingface.co/docs/transformers/main/big_models
    """
    files: list[dict[str, Any]] = [{}]
    held = 0
    for name, leaf in state.items():
        if files[-1] and held + leaf.nbytes > max_shard_size:
            files.append({})
            held = 0
        files[-1][name] = leaf
        held += leaf.nbytes
    if len(files) == 1:
        write_safetensors(state, folder / SINGLE, wholes, metadata)
        return
    weight_map: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        write_safetensors(part, folder / file, wholes, metadata)
        weight_map.update(dict.fromkeys(part, file))
    total = sum(leaf.nbytes for leaf in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _with_room(leaf: Any, path: tuple[Any, ...]) -> Any:
    """Return a tensor with untouched memory, which takes no space, for a tensor to come."""
    if isinstance(leaf, (set, dict)) and leaves(list(leaf), torch.Tensor):  # tensors are not looked for there
        raise CheckpointError(
            f"a tensor in a set, or as a key of a dict, cannot be in one file with a divided model: put the tensors of "
            f"state{''.join(f'[{key!r}]' for key in path)} into a list"
        )
    if isinstance(leaf, Later):
        storage = torch.UntypedStorage(leaf.nbytes)  # type: ignore[no-untyped-call]
        strides = torch.empty(leaf.shape, device="meta").stride()
        return torch.empty(0, dtype=leaf.dtype, device="cpu").set_(storage, 0, leaf.shape, strides)
    if isinstance(leaf, torch.Tensor) and not (type(leaf) in (torch.Tensor, torch.nn.Parameter) and is_dense(leaf)):
        raise CheckpointError(
            f"a {type(leaf).__name__} that is sparse, quantized, or of a class of its own cannot be in one "
            "file with a divided model; save it to a file of its own"
        )
    return leaf


def _begin_of_numbers(path: Path) -> int:
    """Return where the first numbers begin in a file of ``torch.save``; 0 if it has none."""
    begins: list[int] = []
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for entry in archive.infolist():
            if "/data/" in entry.filename and entry.file_size:
                file.seek(entry.header_offset + 26)
                begins.append(entry.header_offset + 30 + sum(unpack("<HH", file.read(4))))
    return min(begins, default=0)


def _all_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's whole storage, which it may share with others, as in the file."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _write(file: IO[bytes], tensor: torch.Tensor) -> None:
    numbers = tensor.detach().cpu().contiguous()
    if not numbers.numel():
        return
    everything = as_bytes(numbers)
    buffer = bytearray(min(_BUFFER, everything.numel()))
    window = torch.frombuffer(buffer, dtype=torch.uint8)
    for part in everything.split(len(buffer)):  # type: ignore[no-untyped-call]
        window[: part.numel()].copy_(part)
        file.write(memoryview(buffer)[: part.numel()])
