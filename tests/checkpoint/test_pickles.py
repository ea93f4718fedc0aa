"""Pickles are walked before torch loads them: what each call in them may make, and what people save."""

import io
import pickle
from pathlib import Path

import pytest

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
    with pytest.raises(CheckpointError, match=r"a\.pt: it holds an encoded text, which can be of any length"):
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
