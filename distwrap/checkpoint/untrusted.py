"""Read untrusted files of torch's: no code in them is run, and they get no more memory than their size.

torch's safe loader runs no code, but trusts lengths: it allocates whatever a file claims, and takes the count of
numbers from the pickle even if their record is shorter.

Source of the archive's layout: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, section 4.3
"""

import io
import mmap
import os
import re
import stat
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from struct import unpack, unpack_from
from typing import IO, Any

import torch

from distwrap.checkpoint.bounded import Bounded
from distwrap.checkpoint.pickles import check_pickle
from distwrap.errors import CheckpointError

_on_device: Callable[[torch.UntypedStorage, str], Any] = torch.serialization.default_restore_location
DEEPEST = 250  # levels of a state that is saved or loaded
_PARTS = 1_000_000  # in addition to one for each byte of the file


def load_file(path: Path, map_location: Any = None, *, mapped: bool = False) -> Any:
    """Return the content of a file of ``torch.save``, read by torch's safe loader.

    Args:
        path: the file.
        map_location: as for ``torch.load``.
        mapped: leave the numbers in the file, memory-mapped, if the format allows it.

    Raises:
        CheckpointError: the file claims to hold more than it does, or is compressed.
        Exception: torch's own, if it is not a file of ``torch.save``, or its safe loader refuses the content.
    """
    check_regular(path)
    with open(path, "rb") as file:
        length = os.fstat(file.fileno()).st_size
        is_archive = file.read(4) == b"PK\3\4"  # torch before 1.6 wrote pickles followed by numbers
        if not length:
            raise CheckpointError(f"cannot load {path}: it is empty.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _check_pickles(content, _records(file, 0, length, path) if is_archive else None, path)

    def read(location: Any) -> Any:  # mapping does not read beyond the file's end
        has_numbers = str(map_location) != "meta"
        invariants = torch.sparse.check_sparse_tensor_invariants(has_numbers)  # type: ignore[no-untyped-call]
        with Bounded(length, path), invariants, _without_advice():
            try:
                return torch.load(path, map_location=location, mmap=is_archive, weights_only=True)
            except UnpicklingError as error:  # its text of a page has the name far below
                name = re.search(r"GLOBAL (\S+)", str(error))
                if name is None:
                    raise
                raise UnpicklingError(f"it holds {name[1]}, which only an unsafe load would take") from error

    own = (lambda new: new if mapped else new.clone()) if is_archive else (lambda new: new.fill_(0))
    try:
        state = read(_restorer(map_location, length, path, own))
    except RuntimeError as error:
        if "Callable map_location" not in str(error) or not is_archive:
            raise
        state = read(map_location)  # a DTensor: torch takes no function there, and the numbers stay mapped
    _check_state(state, length, path)
    return state


def load_tensor(file: IO[bytes], start: int, length: int, path: Path) -> torch.Tensor:
    """Return the tensor that ``torch.save`` wrote to a part of a file, on the CPU.

    Raises:
        CheckpointError: the part is not in the file, is not a tensor, or claims to hold more than it does.
    """
    tensor, lists = _load_part(file, start, length, path)
    if not isinstance(tensor, torch.Tensor) or lists != 1:
        raise CheckpointError(f"cannot load {path}: it holds a {type(tensor).__name__} where a tensor should be.")
    return tensor


def load_value(file: IO[bytes], start: int, length: int, path: Path) -> Any:
    """Return the value that ``torch.save`` wrote to a part of a file, with the checks of `load_tensor`."""
    value, _ = _load_part(file, start, length, path)
    _check_state(value, length, path)
    return value


def _load_part(file: IO[bytes], start: int, length: int, path: Path) -> tuple[Any, int]:
    """Return the content of a part of a file, and the number of its records of numbers."""
    records = _records(file, start, length, path)
    file.seek(start)
    part = io.BytesIO(file.read(length))
    for name, (at, size) in records.items():
        if name.endswith(b"byteorder"):  # torch would swap bytes before anything can be checked
            part.seek(_begin(part, at))
            if part.read(size) != sys.byteorder.encode():
                raise CheckpointError(
                    f"cannot load {path}: it was written by a processor with the other byte order. Save it "
                    "again on one like this."
                )
    _check_pickles(part, records, path)
    part.seek(0)
    numbers = [size for name, (_, size) in records.items() if b"/data/" in name]
    with Bounded(length, path), _without_advice():
        value = torch.load(part, map_location=_restorer("cpu", sum(numbers), path), weights_only=True)
    return value, len(numbers)


def begin_of_numbers(path: Path) -> int:
    """Return where the first numbers begin in a file of ``torch.save``; 0 if it has none.

    Raises:
        CheckpointError: the file is damaged.
    """
    with open(path, "rb") as file:
        records = _records(file, 0, os.fstat(file.fileno()).st_size, path)
        return min((_begin(file, at) for name, (at, size) in records.items() if b"/data/" in name and size), default=0)


def check_regular(path: Path) -> None:
    """Refuse a FIFO, on which reading would block, a device, which has no end, and a folder.

    Raises:
        CheckpointError: the path is one of these.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(
            f"cannot load {path}: it is neither a file, nor a folder that distwrap.save() has written."
        )


def _check_pickles(content: Any, records: dict[bytes, tuple[int, int]] | None, path: Path) -> None:
    """Check the pickles of a file before they are loaded.

    Args:
        content: the file, or a part of it.
        records: the positions of an archive's records. None: a file of torch before 1.6, with five pickles and numbers.
        path: the file, for the error.
    """
    if records is None:
        begins, pickles = [0], 5
    else:
        begins, pickles = [_begin(content, at) for name, (at, _) in records.items() if name.endswith(b"data.pkl")], 1
        if not begins:
            raise CheckpointError(f"cannot load {path}: it was not written by torch.save(). It has no data.pkl.")
    for begin in begins:
        content.seek(begin)
        for _ in range(pickles):
            check_pickle(content, path)


def _begin(file: Any, at: int) -> int:
    """Return where the bytes of a record begin, after its header."""
    file.seek(at + 26)
    name, extra = unpack("<HH", file.read(4))
    return at + 30 + int(name + extra)


def _records(file: IO[bytes], start: int, length: int, path: Path) -> dict[bytes, tuple[int, int]]:
    """Return the begin and length of each record in an archive, of which the total must fit into the archive.

    It must end as torch's archives do, so that no reader can find another table of contents in it.

    Raises:
        CheckpointError: the records are longer, or compressed.
    """
    problem = f"cannot load {path}: it is damaged, or was not written by torch.save(). Its archive"
    size = os.fstat(file.fileno()).st_size
    if not 0 <= start <= start + length <= size:
        raise CheckpointError(
            f"{problem} should be at bytes {start} to {start + length}, and the file has {size} bytes."
        )
    file.seek(start + max(0, length - 98))
    tail = file.read(min(length, 98)).rjust(98, b"\0")
    end, table_size, table_at = length - 22, *unpack("<LL", tail[88:96])
    if tail[56:60] == b"PK\6\7":
        end, table_size, table_at = length - 98, *unpack("<QQ", tail[40:56])
        if tail[:4] != b"PK\6\6" or unpack("<Q", tail[64:72])[0] != end:
            raise CheckpointError(f"{problem} has two ends.")
    if tail[76:80] != b"PK\5\6" or tail[96:] != b"\0\0" or table_at + table_size != end:
        raise CheckpointError(f"{problem} has no end. Was the file cut off?")
    file.seek(start + table_at)
    table, at, held = file.read(table_size), 0, 0
    records: dict[bytes, tuple[int, int]] = {}
    while at < table_size:
        method, packed, room, name_length, extra_length, comment_length, begin = unpack_from(
            "<10xH8x2L3H8xL", table, at
        )
        name = table[at + 46 : at + 46 + name_length].lower()
        if table[at : at + 4] != b"PK\1\2" or name in records:
            raise CheckpointError(f"{problem} has a broken table of contents.")
        if b"/code/" in name:
            raise CheckpointError(f"cannot load {path}: it is a TorchScript program, which torch.jit.load() reads.")
        if method:
            raise CheckpointError(f"cannot load {path}: it is compressed. Unpack it, and pack it again with 'zip -0'.")
        needs_field = [number == 0xFFFFFFFF for number in (room, packed, begin)]
        if any(needs_field):
            field = at + 46 + name_length
            while unpack_from("<H", table, field)[0] != 1:  # the field for numbers of 8 bytes
                field += 4 + unpack_from("<2xH", table, field)[0]
            numbers = unpack_from(f"<4x{sum(needs_field)}Q", table, field)
            room, begin = numbers[0] if needs_field[0] else room, numbers[-1] if needs_field[2] else begin
        records[name] = begin, room
        held += room
        at += 46 + name_length + extra_length + comment_length
    if held > length:
        raise CheckpointError(f"{problem} claims to hold {held} bytes, and has {length}.")
    return records


def _restorer(
    map_location: Any,
    limit: int,
    path: Path,
    own: Callable[[torch.UntypedStorage], torch.UntypedStorage] = lambda new: new,
) -> Any:
    """Return a `map_location` for ``torch.load`` that also limits the total size of storages.

    Args:
        map_location: as for ``torch.load``.
        limit: the most bytes of all storages together.
        path: the file, for the error.
        own: copies a storage, or returns it.
    """
    held = 0

    def restore(storage: torch.UntypedStorage, location: str) -> Any:
        nonlocal held
        if isinstance(map_location, Mapping):
            location = map_location.get(location, location)
        elif map_location is not None and not callable(map_location):
            location = str(torch.device(map_location))
        if location == "meta":  # torch asks again for each tensor of a storage
            return _on_device(storage, location)
        held += storage.nbytes()
        if held > limit:
            raise CheckpointError(
                f"cannot load {path}: it claims to hold {held} bytes of numbers, and has room for {limit}."
            )
        storage = own(storage)
        restored = map_location(storage, location) if callable(map_location) else None
        return _on_device(storage, location) if restored is None else restored

    return restore


@contextmanager
def _without_advice() -> Iterator[None]:
    """Silence newer torch's warning that the check of sparse tensors, which is wanted here, takes time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
        yield


def _check_state(state: Any, length: int, path: Path) -> None:
    """Check that a state takes no more memory than its file, and that its nesting ends.

    Raises:
        CheckpointError: a list contains itself, or tensors have numbers that are not in the file.
    """
    memory: dict[int, int] = {}
    parts = 0

    def check(part: Any, depth: int) -> None:
        nonlocal parts
        parts += 1
        if depth > DEEPEST or parts > _PARTS + length:
            raise CheckpointError(f"cannot load {path}: a list or dict in it contains itself, or is nested too deep.")
        if isinstance(part, (list, tuple, set, dict)):
            for item in part:
                check(item, depth + 1)
            for item in part.values() if isinstance(part, dict) else ():
                check(item, depth + 1)
        elif type(part) in (torch.Tensor, torch.nn.Parameter) and part.layout is torch.strided and not part.is_meta:
            if not _is_within_storage(part):  # torch 2.6 takes any strides of quantized numbers
                raise CheckpointError(
                    f"cannot load {path}: a tensor in it reads beyond the numbers that the file holds."
                )
            memory[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        elif isinstance(part, (torch.UntypedStorage, torch.TypedStorage)):
            memory[part.data_ptr()] = part.nbytes()

    check(state, 0)
    if sum(memory.values()) > length:
        raise CheckpointError(f"cannot load {path}: it claims to hold {sum(memory.values())} bytes, and has {length}.")


def _is_within_storage(tensor: torch.Tensor) -> bool:
    """Return whether all numbers of a tensor are in its storage."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((length - 1) * stride for length, stride in steps)
    return tensor.numel() == 0 or (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()
