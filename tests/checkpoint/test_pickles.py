"""Pickles are walked before torch loads them: what each call in them may make, and what people save."""

import io
import pickle
from pathlib import Path

from distwrap.checkpoint.pickles import check_pickle


def check(pickled: bytes) -> None:
    check_pickle(io.BytesIO(b"\x80\x02" + pickled + b"."), Path("a.pt"))


class Mesh:
    """Stands for torch's ``DeviceMesh``, of which a flattened one knows its root, and the root it."""

    def __init__(self, root: "Mesh | None" = None) -> None:
        self.root, self.flattened = root or self, root and [self]


def test_objects_that_hold_each_other_are_read() -> None:
    """The meshes of torch's sharded tensors do; what an object holds is not copied where a call is given the object."""
    mesh = Mesh()
    mesh.flattened = [Mesh(mesh) for _ in range(3)]
    check(pickle.dumps([(mesh, Mesh(mesh)) for _ in range(3)], 2)[2:-1])
