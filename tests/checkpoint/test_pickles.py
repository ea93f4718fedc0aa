"""Pickles are walked before torch loads them: what each call in them may make, and what people save."""

import io
import pickle
import struct
import zlib
from pathlib import Path

import pytest

import distwrap as dw
from distwrap.checkpoint.pickles import check_pickle
from distwrap.errors import CheckpointError

ENCODE, LATIN1 = b"c_codecs\nencode\n", b"X\6\0\0\0latin1"


def check(pickled: bytes) -> None:
    check_pickle(io.BytesIO(b"\x80\x02" + pickled + b"."), Path("a.pt"))


@pytest.mark.parametrize(
    "pickled",
    [
        ENCODE * 24 + b"X\1\0\0\0a" + LATIN1 + b"\x86R" + b"X\3\0\0\0hex\x86R" * 23,
        ENCODE + b"X\1\0\0\0a" + b"X\3\0\0\0hex\x86R",
        ENCODE + b"(X\1\0\0\0a" + LATIN1 + b"X\x0b\0\0\0namereplacetR",
        ENCODE + b"](X\1\0\0\0a" + LATIN1 + b"X\x0b\0\0\0namereplaceeR",
        ENCODE + b"K\1R",
    ],
    ids=["hex of hex", "hex", "a third argument", "a list", "a number"],
)
def test_no_text_is_made_longer(pickled: bytes) -> None:
    """Bytes as hexadecimal digits are twice as long, and those again: a file of 2 KB took half a gigabyte."""
    with pytest.raises(CheckpointError, match="encoded text"):
        check(pickled)


@pytest.mark.parametrize("data", [b"\0\xff", bytes(range(256)), [b"a", b"a"], {b"latin1": b"hex"}])
def test_bytes_are_read(data: object) -> None:
    """Python writes bytes as a text that is encoded."""
    check(pickle.dumps(data, 2)[2:-1])


class Mesh:
    """Stands for torch's ``DeviceMesh``, of which a flattened one knows its root, and the root it."""

    def __init__(self, root: "Mesh | None" = None) -> None:
        self.root, self.flattened = root or self, root and [self]


def test_objects_that_hold_each_other_are_read() -> None:
    """The meshes of torch's sharded tensors do; what an object holds is not copied where a call is given the object."""
    mesh = Mesh()
    mesh.flattened = [Mesh(mesh) for _ in range(3)]
    check(pickle.dumps([(mesh, Mesh(mesh)) for _ in range(3)], 2)[2:-1])


def test_a_pickle_behind_4_gib_is_the_one_that_torch_reads(tmp_path: Path) -> None:
    """Where a record begins is in another field there: what was walked was a pickle that torch never read."""
    records = {b"a/data.pkl": b"\x80\2" + ENCODE + b"X\1\0\0\0a" + b"X\3\0\0\0hex\x86R.", b"a/version": b"3\n"}
    file, table = b"", b""
    for name, data in records.items():
        sizes = struct.pack("<3L", zlib.crc32(data), len(data), len(data))
        wide = struct.pack("<2HQ", 1, 8, len(file))
        table += b"PK\1\2" + struct.pack("<6H", 45, 45, 0, 0, 0, 0) + sizes
        table += struct.pack("<5H2L", len(name), len(wide), 0, 0, 0, 0, 0xFFFFFFFF) + name + wide
        file += b"PK\3\4" + struct.pack("<5H", 45, 0, 0, 0, 0) + sizes + struct.pack("<2H", len(name), 0) + name + data
    end = b"PK\5\6" + struct.pack("<4H2LH", 0, 0, 2, 2, len(table), len(file), 0)
    (tmp_path / "a.pt").write_bytes(file + table + end)
    with pytest.raises(CheckpointError, match="encoded text"):
        dw.load(tmp_path / "a.pt")
