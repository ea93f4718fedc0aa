"""Files that a stranger has made run no code, and are loaded or refused."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import resource
import struct
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import distwrap as dw
from distwrap._internals.torch import LAYOUT_FUNCTION
from distwrap.cli import main
from distwrap.errors import CheckpointError
from distwrap.testing import run_ranks
from tests.interpreters import run_python
from tests.slow import nightly, slow

ROOT = Path(__file__).parents[2]
HUGE = 4 << 30  # bytes that a file of some hundred claims to hold
MUTATIONS = int(os.environ.get("MUTATIONS", "500"))  # `make kills` sets it
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.mark.parametrize(
    "mutations",
    [
        slow(100, why="loads many changed files"),
        nightly(MUTATIONS, row="faults", why="the first hundred of the same seed"),
    ],
)
def test_files_changed_at_random(mutations: int) -> None:
    """Each is loaded, or refused with an error of distwrap's own; in a process that has little memory to take."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        done = run_python("-m", "tests.checkpoint.malice", folder, mutations, 500, cwd=ROOT, timeout=200)
        assert done.returncode == 0, f"mutation {Path(folder, 'at').read_text()} ended it: {done.stderr[-3000:]}"
    found = json.loads(done.stdout)
    assert not found["wrong"], found["wrong"]
    assert sum(found["counts"].values()) == mutations
    assert found["counts"]["CheckpointError"] > mutations // 5 < found["counts"]["loaded"] * 5


# Archives


def archive(path: Path, data: bytes, records: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> None:
    """Write a file as ``torch.save`` does, with any pickle and any records of numbers."""
    with zipfile.ZipFile(path, "w", method) as file:
        whole = {"data.pkl": data, "byteorder": b"little", **records, "version": b"3\n"}
        for name, content in whole.items():
            file.writestr(f"archive/{name}", content)


def both_refuse(path: Path, words: str) -> None:
    """Load and strip a file, which both refuse with the same words."""
    with pytest.raises(CheckpointError, match=words):
        dw.load(path)
    assert main(["strip", str(path), str(path.with_suffix(".out"))]) == 2
    assert not path.with_suffix(".out").exists()


def doubled() -> bytes:
    """Pickle a list of one list, many times, and so on down: few bytes, and without end to who walks through it."""
    pickled = b"\x80\x02]q\0"
    for level in range(60):
        pickled += b"](" + 2 * bytes([ord("h"), level]) + b"eq" + bytes([level + 1])
    return pickled + b"."


@pytest.mark.parametrize("pickled", [doubled(), b"\x80\x02" + b"]" * 2000 + b"a" * 1999 + b".", b"\x80\x02]q\0h\0a."])
def test_lists_in_lists(tmp_path: Path, pickled: bytes) -> None:
    """A list that doubles sixty times, one in more lists than Python goes down, and one in itself."""
    path = tmp_path / "a.pt"
    archive(path, pickled, {})
    both_refuse(path, "nested")


def test_an_object_in_many_places_is_no_bomb(tmp_path: Path) -> None:
    """Tied weights, one list in many dicts, bytes and sets are what people save."""
    weight, words = torch.nn.Parameter(torch.ones(3)), ["a" * 10_000] * 100
    state = {str(key): {"w": weight, "words": words, "bytes": b"x" * 1000, "set": set(range(99))} for key in range(100)}
    dw.save(state, tmp_path / "a.pt")
    loaded = dw.load(tmp_path / "a.pt")
    assert loaded["99"]["set"] == set(range(99))
    assert loaded["0"]["w"].data_ptr() == loaded["99"]["w"].data_ptr()


def test_a_sparse_tensor_with_numbers_outside_of_it(tmp_path: Path) -> None:
    """torch does not check it by default, and writes beyond its memory when it is made dense."""
    path = tmp_path / "a.pt"
    sparse = torch.sparse_coo_tensor(torch.tensor([[10**9]]), torch.ones(1), (10**9 + 1,), check_invariants=True)
    torch.save({"w": sparse}, path)
    assert dw.load(path)["w"]._values().tolist() == [1.0]
    data = path.read_bytes()
    path.write_bytes(data.replace(struct.pack("<q", 10**9), struct.pack("<q", 10**12)))
    both_refuse(path, "cannot load")


@pytest.mark.parametrize("length", [2**60, 100 << 30, 2**63, 99])
def test_a_safetensors_header_of_any_length(tmp_path: Path, length: int) -> None:
    """It is no longer than the file."""
    path = tmp_path / "a.safetensors"
    dw.save({"w": torch.zeros(3)}, path)
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    both_refuse(path, "cannot (load|read)")


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    """A FIFO would be waited for, and a device such as /dev/zero read without end."""
    for name in ("a.pt", "a.safetensors"):
        os.mkfifo(tmp_path / name)
        both_refuse(tmp_path / name, "neither a file")
    both_refuse(Path("/dev/zero"), "neither a file") if os.access("/dev/zero", os.R_OK) else None


# Sharded checkpoints


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    dw.save({"w": torch.arange(6.0), "v": torch.ones(3), "n": 1}, tmp_path / "parts", io="sharded")
    return tmp_path / "parts"


def contents(parts: Path, change: Callable[[Any], object]) -> None:
    """Change the table of contents of a sharded checkpoint."""
    table = pickle.loads((parts / ".metadata").read_bytes())
    change(table)
    (parts / ".metadata").write_bytes(pickle.dumps(table))


MODULE = "torch.distributed.checkpoint.filesystem"


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("io.FileIO", ("{folder}/sung", "w")),
        ("torch._strobelight.cli_function_profiler.subprocess.Popen", (["touch", "{folder}/sung"],)),
        ("os.mkdir", ("{folder}/sung",)),
        ("FileSystemWriter", ("{folder}/sung",)),
    ],
)
def test_a_table_of_contents_runs_nothing(parts: Path, name: str, args: Any) -> None:
    """Nor through the names within the modules whose classes it needs: a class there may start a program."""
    words = json.loads(json.dumps(args).replace("{folder}", str(parts)))
    code = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(word)]) + word for word in (MODULE.encode(), name.encode()))
    code += b"\x93" + pickle.dumps(tuple(words), 4)[2:-1].replace(b"\x95", b"\x95", 1)
    frame = code.index(b"\x95", len(MODULE))
    code = code[:frame] + code[frame + 9 :] + b"R."
    (parts / ".metadata").write_bytes(code)
    with pytest.raises(CheckpointError, match="table of contents"):
        dw.load(parts)
    assert not (parts / "sung").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [(type(Path()).__module__, "PosixPath"), ("torch.distributed.checkpoint.metadata", "Metadata"), LAYOUT_FUNCTION],
)
def test_a_table_of_contents_changes_no_class(parts: Path, module: str, name: str) -> None:
    """A pickle can set what a class has, for the whole process: how paths are compared, for one."""
    words = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    change = words + b"\x93N}\x8c\x06poisonK\x07s\x86b0"
    (parts / ".metadata").write_bytes(b"\x80\x04" + change + (parts / ".metadata").read_bytes()[2:])
    with pytest.raises(CheckpointError, match="table of contents"):
        dw.load(parts)
    assert not hasattr(getattr(importlib.import_module(module), name), "poison")


def test_a_table_of_contents_takes_no_memory_for_its_numbers(parts: Path) -> None:
    """Python's unpickler in C makes room for as many remembered objects as the highest number of one."""
    (parts / ".metadata").write_bytes(b"\x80\x04]r" + struct.pack("<L", 10**8) + b".")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        dw.load(parts)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize("outside", ["../other.distcp", "{folder}/other.distcp", "link", "fifo"])
def test_numbers_outside_of_the_folder_are_not_read(parts: Path, outside: str) -> None:
    """By a path in the table of contents, or a symbolic link; nor is a FIFO waited for."""
    [part] = parts.glob("*.distcp")
    part.rename(parts.parent / "other.distcp")
    (parts / "link").symlink_to("../other.distcp")
    os.mkfifo(parts / "fifo")
    name = outside.format(folder=parts.parent)
    contents(parts, lambda table: [setattr(info, "relative_path", name) for info in table.storage_data.values()])
    with pytest.raises(CheckpointError, match=r"outside of|neither a file"):
        dw.load(parts)


@pytest.mark.parametrize("what", ["chunks", "offset", "length", "transform_descriptors", "size"])
def test_a_table_of_contents_that_does_not_fit_its_numbers(parts: Path, what: str) -> None:
    """Numbers that are nowhere would be what was in memory before, without a word."""

    def change(table: Any) -> None:
        if what in ("chunks", "size"):
            tensor = table.state_dict_metadata["w"]
            setattr(tensor, what, [] if what == "chunks" else torch.Size([7]))
        else:
            value = {"offset": 2**60, "length": 2**60, "transform_descriptors": ["zstd"]}[what]
            for info in table.storage_data.values():
                setattr(info, what, value)

    contents(parts, change)
    with pytest.raises(CheckpointError):
        dw.load(parts)


def test_a_sharded_checkpoint_that_claims_more_than_it_has(parts: Path) -> None:
    """It is refused before there is room made for it."""
    torch.save({"w": torch.empty(HUGE, device="meta")}, parts / "skeleton.pt")
    with pytest.raises(CheckpointError, match=f"{4 * HUGE} bytes"):
        dw.load(parts)


def test_a_folder_that_is_broken_for_all_is_told_on_all(parts: Path) -> None:
    """No rank waits for another that has refused it."""
    contents(parts, lambda table: setattr(table.state_dict_metadata["w"], "chunks", []))

    def on_rank() -> str:
        with pytest.raises(CheckpointError, match="lacks 6") as failure:
            dw.load(parts)
        return str(failure.value)

    one, other = run_ranks(on_rank, 2)
    assert one == other


# The state of a run


def broken_states() -> list[Any]:
    """Return states of a run with something else in each of their places."""
    whole = dw.run_state().state_dict()
    random = whole["random"][0]
    name, keys, position, *rest = random["numpy"]
    of_rank = [
        {**random, "torch": torch.zeros(3)},
        {**random, "torch": torch.full_like(random["torch"], 255)},
        {**random, "python": [3, torch.zeros(625, dtype=torch.int64) - 1, None]},
        {**random, "python": [3, torch.full((625,), 10**6), None]},
        {**random, "python": 3},
        {**random, "numpy": [name, keys, 10**6, *rest]},
        {**random, "numpy": [name, keys, -5, *rest]},
        {**random, "numpy": [name, keys[:5], position, *rest]},
        {**random, "numpy": ["PCG64", keys, position, *rest]},
        {},
        None,
    ]
    return [
        *({**whole, "random": [each]} for each in of_rank),
        *({**whole, "random": each} for each in ([], 3, None)),
        *({key: value for key, value in whole.items() if key != name} for name in ("random", "seed", "scaler")),
        {**whole, "comm": 3},
        [],
        7,
        None,
    ]


def test_a_broken_state_of_a_run_is_refused(tmp_path: Path) -> None:
    """With one error, whatever is wrong in it: numpy would read beyond its memory by a position that it was given."""

    def on_rank() -> None:
        for state in broken_states():
            with pytest.raises(CheckpointError, match="not a state"):
                dw.run_state().load_state_dict(state)
        numpy.random.rand(1000)

    run_ranks(on_rank, 1)
