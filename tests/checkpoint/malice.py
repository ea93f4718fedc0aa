"""Change files in every format at random, and load them; prints what came of it as JSON.

    python -m tests.checkpoint.malice FOLDER MUTATIONS [SEED]

The process has little memory to take, so that one that reads what a file claims to have dies, or is told. Before each
mutation its number is written to FOLDER/at, so that the one that ended the interpreter is known: run it alone with
``--only NUMBER``.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import distwrap as dw
from distwrap.cli import main as command_line
from distwrap.errors import DistwrapError
from distwrap.nesting import rebuilt

ROOM = 1 << 30  # bytes of address space that may be taken
GROWTH = 64 << 20  # and of memory, for files of a few thousand bytes
LENGTHS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 10**11, 2**60, 2**63 - 1, 2**63, 2**64 - 1]


class Canary:
    """Object whose pickle makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def state() -> dict[str, Any]:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "run": dw.run_state(),
        "epoch": 3,
        "name": "résumé",
        "nested": [(1, 2.5, None), {"half": torch.ones(5, dtype=torch.bfloat16), "empty": torch.ones(0)}],
        "view": torch.arange(12.0).view(3, 4).t(),
        "sparse": torch.eye(3).to_sparse(),
    }


def samples(folder: Path) -> dict[str, bytes]:
    """Return files in every format, by their names; of the sharded one the files of a folder ``parts``."""
    plain = state()
    dw.save(plain, folder / "a.pt")
    dw.save({"model": plain["model"]}, folder / "b.pt")
    torch.save(dw.load(folder / "a.pt"), folder / "c.pt", _use_new_zipfile_serialization=False)
    torch.save(dw.load(folder / "b.pt"), folder / "d.pt", _use_new_zipfile_serialization=False)
    dw.save(plain["model"], folder / "e.safetensors")
    torch.save({"w": torch.zeros(64, 64)}, folder / "f.pt")
    torch.save(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8), folder / "g.pt")
    plain.pop("sparse")
    dw.save(plain, folder / "parts", io="sharded")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def flip(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8, 64])):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def truncate(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    return data[: draw.randrange(len(data))]


def splice(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """Put a piece of this or another file over, or between, what is there."""
    other = draw.choice([data, *others])
    begin, length = draw.randrange(len(other)), draw.choice([1, 4, 16, 256, 4096])
    at = draw.randrange(len(data))
    return data[:at] + other[begin : begin + length] + data[at + draw.choice([0, length]) :]


def lengthen(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """Write an extreme number in 2, 4 or 8 bytes: anywhere, or where such a number is in a header."""
    form = draw.choice("HIQ")
    number = struct.pack(f"<{form}", draw.choice(LENGTHS) % (1 << 8 * struct.calcsize(form)))
    marks = [data.rfind(mark) for mark in (b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4", b"{")]
    marks = [mark for mark in marks if mark >= 0]
    at = draw.choice(marks) + draw.randrange(60) if marks and draw.random() < 0.5 else draw.randrange(len(data))
    return data[:at] + number + data[at + len(number) :]


def repickle(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """Replace a number in a pickle by an extreme one, and keep the archive around it whole, or compress it."""

    def changed(pickled: bytes) -> bytes:
        for _ in range(draw.choice([1, 1, 2, 4])):
            places = [at for at, code in enumerate(pickled) if code in b"KMJ"]
            at = draw.choice(places or [0])
            size = {"K": 1, "M": 2, "J": 4}.get(chr(pickled[at]), 0)
            long = pickle.encode_long(draw.choice([*LENGTHS, -1, -(2**63), 7, 3]))
            pickled = pickled[:at] + b"\x8a" + bytes([len(long)]) + long + pickled[at + 1 + size :]
        return pickled

    if data[:4] != b"PK\3\4":
        return changed(data)
    out = io.BytesIO()
    method = draw.choice([zipfile.ZIP_STORED] * 3 + [zipfile.ZIP_DEFLATED])
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", method) as new:
        for name in old.namelist():
            part = old.read(name)
            new.writestr(name, changed(part) if name.endswith("data.pkl") else part)
    return out.getvalue()


def poison(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """Put the canary's pickle where a pickle begins, or anywhere in it."""
    [canary] = others[-1:]
    starts = [at for at in range(len(data) - 1) if data[at] == 0x80 and data[at + 1] in (2, 3, 4)]
    at = draw.choice(starts) + draw.choice([0, 2]) if starts else draw.randrange(len(data))
    code = canary[2:-1] if at else canary
    return data[:at] + code + data[at + draw.choice([0, len(code)]) :]


MUTATIONS: list[Callable[[bytes, random.Random, list[bytes]], bytes]] = [
    flip, truncate, splice, lengthen, lengthen, repickle, repickle, poison,
]  # fmt: skip


def touch(value: Any) -> None:
    """Read every number that was loaded, as its user would."""

    def read(part: Any, _: tuple[Any, ...]) -> Any:
        if isinstance(part, torch.Tensor):
            if part.layout is torch.strided:
                assert part.untyped_storage().nbytes() < GROWTH, "numbers that no file of this length has"
                part.clone() if part.numel() < GROWTH else None  # else one number, many times
            elif part.numel() < GROWTH:
                part.to_dense()
        return part

    rebuilt(value, read)


def attempt(folder: Path, name: str, draw: random.Random) -> str:
    """Load what is there in one of the ways, and return what came of it."""
    path = folder / name
    if path.parent != folder:
        path = path.parent
    way = draw.choice(["load", "load", "resume_from", "strip"])
    printed = io.StringIO()
    try:
        if way == "strip" and path.is_file():
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                code = command_line(["strip", str(path), str(folder / f"out{path.suffix}"), "--force"])
            return f"strip {code}"
        touch(dw.resume_from(path) if way == "resume_from" else dw.load(path))
    except DistwrapError as error:
        return type(error).__name__
    except FileNotFoundError:
        return "FileNotFoundError"
    return "loaded"


def limit_memory() -> int:
    """Take no more than some memory from now on, and return how much was taken at most until now."""
    with open("/proc/self/statm") as statm:
        taken = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, taken + ROOM))
    return peak()


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("mutations", type=int)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--only", type=int)
    given = parser.parse_args()
    folder: Path = given.folder
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    whole = samples(folder)
    (folder / "canary.pt").write_bytes(pickle.dumps(Canary(folder / "sung"), 2))
    others = [*whole.values(), (folder / "canary.pt").read_bytes()]
    for name in whole:  # what is imported at first, is imported once
        assert attempt(folder, name, random.Random(1)) in ("loaded", "strip 0"), name
    before = limit_memory()
    counts: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    at = os.open(folder / "at", os.O_RDWR | os.O_CREAT)
    for number in range(given.mutations) if given.only is None else [given.only]:
        os.pwrite(at, f"{number:>8}".encode(), 0)
        draw = random.Random(given.seed * 1_000_003 + number)
        name = draw.choice(list(whole))
        mutate = draw.choice(MUTATIONS)
        (folder / name).write_bytes(mutate(whole[name], draw, others))
        try:
            counts[attempt(folder, name, draw)] += 1
        except BaseException as error:  # which is what is looked for
            wrong.append(f"{number} {mutate.__name__} {name}: {type(error).__name__}: {str(error)[:200]}")
            if given.only is not None:
                raise
        (folder / name).write_bytes(whole[name])
        if (folder / "sung").exists():
            wrong.append(f"{number} {mutate.__name__} {name}: code was run")
            shutil.rmtree(folder / "sung")
    print(json.dumps({"counts": counts, "wrong": wrong, "grown": peak() - before}))


if __name__ == "__main__":
    main()
