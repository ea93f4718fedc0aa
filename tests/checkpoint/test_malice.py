"""Files that a stranger has made run no code, take no more memory than they have, and do not end the process."""

from __future__ import annotations

import importlib
import io
import json
import os
import pickle
import resource
import struct
import sys
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import distwrap as dw
from distwrap._internals.torch import LAYOUT_FUNCTION
from distwrap.checkpoint.untrusted import load_tensor
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
    assert found["grown"] < 64 << 20


# Archives


def archive(path: Path, data: bytes, records: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> None:
    """Write a file as ``torch.save`` does, with any pickle and any records of numbers."""
    with zipfile.ZipFile(path, "w", method) as file:
        whole = {"data.pkl": data, "byteorder": b"little", **records, "version": b"3\n"}
        for name, content in whole.items():
            file.writestr(f"archive/{name}", content)


class Call:
    """Object whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.reduced = function, args

    def __reduce__(self) -> Any:
        return self.reduced


def tensor_pickle(numel: int, size: int, key: str = "0") -> bytes:
    """Pickle a tensor of some numbers, in a record that should have as many as is said."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", torch.FloatStorage, key, "cpu", numel) if obj == "the storage" else None

    rebuild = torch._utils._rebuild_tensor_v2
    file = io.BytesIO()
    Pickler(file, 2).dump({"w": Call(rebuild, "the storage", 0, (size,), (1,), False, OrderedDict())})
    return file.getvalue()


def both_refuse(path: Path, words: str) -> None:
    """Load and strip a file, which both refuse with the same words, and with little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=words):
        dw.load(path)
    assert main(["strip", str(path), str(path.with_suffix(".out"))]) == 2
    assert not path.with_suffix(".out").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_a_storage_is_no_longer_than_its_file(tmp_path: Path) -> None:
    """torch takes a storage to be as long as the pickle says; reading it would read other memory, or crash."""
    path = tmp_path / "a.pt"
    archive(path, tensor_pickle(3, 3), {"data/0": b"\0" * 12})
    assert dw.load(path)["w"].tolist() == [0.0] * 3
    archive(path, tensor_pickle(100_000_000, 100_000_000), {"data/0": b"\0" * 12})
    both_refuse(path, "cannot load")


def test_an_archive_that_is_compressed(tmp_path: Path) -> None:
    """A bomb of zeros is refused before anything is unpacked; strip took compressed bytes for numbers."""
    path = tmp_path / "a.pt"
    archive(path, tensor_pickle(100, 100), {"data/0": b"\0" * 400}, zipfile.ZIP_DEFLATED)
    both_refuse(path, "is compressed")
    archive(path, b" " * (120 << 20), {}, zipfile.ZIP_DEFLATED)
    both_refuse(path, "is compressed")


@pytest.mark.parametrize("room", [100 << 30, HUGE, 10_000])
def test_an_archive_whose_records_claim_more_than_it_has(tmp_path: Path, room: int) -> None:
    """A record of 100 GB in a file of a thousand bytes is refused before there is room made for it."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.zeros(3)}, path)
    data = path.read_bytes()
    entry = data.rfind(b"archive/data/0" if b"archive/data/0" in data else b"a/data/0") - 46
    assert data[entry : entry + 4] == b"PK\1\2"
    changed = bytearray(data)
    changed[entry + 20 : entry + 28] = struct.pack("<2L", *([min(room, 2**32 - 1)] * 2))
    path.write_bytes(changed)
    both_refuse(path, "cannot load" + ".* claims" * (room == 10_000))


def test_an_archive_with_two_tables_of_contents(tmp_path: Path) -> None:
    """What is checked must be what torch reads: an archive in which another reader could find another is refused."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.zeros(3)}, path)
    data = path.read_bytes()
    path.write_bytes(b"PK\3\4 in front" + data)
    both_refuse(path, "cannot load")
    path.write_bytes(data + b"behind")
    both_refuse(path, "no end")


def test_an_archive_with_two_records_of_one_name(tmp_path: Path) -> None:
    """The one that is checked must be the one that torch reads."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.zeros(3)}, path)
    with zipfile.ZipFile(path, "a") as file:
        (name,) = (name for name in file.namelist() if name.endswith("data.pkl"))
        file.writestr(name.replace("data.pkl", "data.PKL"), b"another")
    both_refuse(path, "table of contents")


def test_a_part_with_its_bytes_in_another_order(tmp_path: Path) -> None:
    """Its numbers would be turned around before their room could be checked."""
    path = tmp_path / "a.pt"
    torch.save(torch.ones(2), path)
    path.write_bytes(path.read_bytes().replace(sys.byteorder.encode(), b"other "))
    with open(path, "rb") as file, pytest.raises(CheckpointError, match="byte order"):
        load_tensor(file, 0, path.stat().st_size, path)


@pytest.mark.parametrize("call", [(torch.Tensor, HUGE // 4), (torch.UntypedStorage, HUGE), (bytearray, HUGE)])
def test_memory_that_a_pickle_asks_for(tmp_path: Path, call: tuple[Any, int]) -> None:
    """torch's safe loader calls these for any file, and what they give is in no file."""
    path = tmp_path / "a.pt"
    archive(path, pickle.dumps({"w": Call(*call)}, 2), {})
    both_refuse(path, "empty torch|bytearray")
    torch.save({"w": Call(*call)}, path, _use_new_zipfile_serialization=False)
    both_refuse(path, "empty torch|bytearray")


def test_a_file_of_torch_before_archives_that_claims_more_than_it_has(tmp_path: Path) -> None:
    """Its numbers come after the pickle; memory is taken for no more than the file has."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.zeros(300)}, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    assert data.count(b"M\x2c\x01") == 2
    path.write_bytes(data.replace(b"M\x2c\x01", b"J" + struct.pack("<i", HUGE // 4)))
    both_refuse(path, "cannot load")


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


MANY = b"]q\0(" + b"K\1" * 20_000 + b"e"  # a list of 20,000 ones
LATER = b"]q\0\x85q\20(" + b"h\0(" + b"K\1" * 20_000 + b"e0"  # the same, filled only after it has a place in a tuple
SIZES, SETS, ENCODE = (b"c" + name + b"\nq\1" for name in (b"torch\nSize", b"builtins\nset", b"_codecs\nencode"))


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02](" + MANY + SIZES + b"h\1h\0\x85R" * 1000 + b"e.",
        b"\x80\x02](" + MANY + SETS + b"h\1h\0\x85R" * 1000 + b"e.",
        b"\x80\x02(" + LATER + SIZES + b"h\1h\20R" * 1000 + b"l.",
        b"\x80\x02](X\x40\x0d\x03\0" + b"a" * 200_000 + b"q\0" + ENCODE + b"h\1h\0X\6\0\0\0latin1\x86R" * 300 + b"e.",
    ],
    ids=["sizes", "sets", "filled later", "encoded"],
)
def test_one_object_that_functions_are_given_again_and_again(tmp_path: Path, pickled: bytes) -> None:
    """Each may make a copy, for the few bytes of the call: of 0.2 MB that took 400 MB, of this it would take 160."""
    path = tmp_path / "a.pt"
    archive(path, pickled, {})
    both_refuse(path, "copies")
    dw.save({"w": torch.arange(6.0)}, tmp_path / "parts", io="sharded")
    (tmp_path / "parts" / ".metadata").write_bytes(pickled)
    with pytest.raises(CheckpointError, match="copies"):
        dw.load(tmp_path / "parts")


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


@pytest.mark.slow("many changed files, each loaded")
def test_twice_the_files_memory_is_enough(tmp_path: Path) -> None:
    """A file of 200 MB is loaded by a process that may take some 400 MB more."""
    path = tmp_path / "a.pt"
    torch.save({str(number): torch.ones(5_000_000) for number in range(10)}, path)
    program = """if 1:
        import sys, resource, torch, distwrap as dw
        from tests.checkpoint import malice
        dw.save({"w": torch.ones(3)}, sys.argv[1] + ".small")
        dw.load(sys.argv[1] + ".small")
        before = malice.peak()
        state = dw.load(sys.argv[1])
        assert all(bool((value == 1).all()) for value in state.values())
        print(malice.peak() - before)
    """
    done = run_python("-c", program, path, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2 * path.stat().st_size + (32 << 20)


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
