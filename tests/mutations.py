"""Break distwrap on purpose, one place at a time, and see whether `make test` notices.

    python -m tests.mutations                      # sixteen central places
    python -m tests.mutations --random 60 --seed 7  # operators, comparisons, constants and statements, drawn by a seed
    python -m tests.mutations --only fsync,stall

Each mutation is made in a copy of the project. For a central place the tests that should notice run first, then, if
they pass, all of `make test`; for a random one the tests of its room, and then all. A survivor is printed: some change
nothing that anybody could see, and the others want a test.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SECONDS = 1200  # for a run of tests


class Mutation(NamedTuple):
    """Change of one place.

    Attributes:
        name: the behaviour that it breaks.
        path: the file, in `distwrap/`.
        old: text that stands there once.
        new: what takes its place.
        tests: files of tests of which one should notice.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


CENTRAL = (
    Mutation(
        "the average of gradients",
        "strategies/ddp.py",
        "        return wrapped\n",
        "        wrapped.require_backward_grad_sync = False\n        return wrapped\n",
        ("tests/equality", "tests/model/test_wrap_model.py"),
    ),
    Mutation(
        "a loader's shard", "data/indices.py", "yield around[rank]", "yield around[0]", ("tests/data/test_indices.py",)
    ),
    Mutation(
        "a loader's seed",
        "data/samplers.py",
        'Shuffle("torch", self.seed + epoch)',
        'Shuffle("torch", self.seed)',
        ("tests/data/test_epochs.py", "tests/data/test_loader.py"),
    ),
    Mutation(
        "the last batch's weight",
        "group/collectives.py",
        "[tensor * count if count else torch.zeros_like(tensor) for tensor in exact]",
        "[tensor * float(count > 0) for tensor in exact]",
        ("tests/group/test_collectives.py",),
    ),
    Mutation(
        "atomic save",
        "checkpoint/files.py",
        "        os.replace(temporary, path)\n",
        "        shutil.copyfile(temporary, path)\n        temporary.unlink()\n",
        ("tests/checkpoint/test_durable.py",),
    ),
    Mutation(
        "fsync", "checkpoint/files.py", "            _sync(temporary)\n", "", ("tests/checkpoint/test_durable.py",)
    ),
    Mutation(
        "the first cause",
        "launch/outcome.py",
        "key=lambda failure: (failure.secondary, failure.time)",
        "key=lambda failure: failure.time",
        ("tests/launch/test_failure_told.py", "tests/launch/test_supervisor.py"),
    ),
    Mutation(
        "who is ended with the ranks",
        "launch/supervisor.py",
        "stop(processes, all_they_started=True, interrupt=by_hand)",
        "stop(processes, interrupt=by_hand)",
        ("tests/launch/test_local.py",),
    ),
    Mutation(
        "a dead neighbour",
        "supervision/failure_news.py",
        "        if lives(process):\n            return\n",
        "        return\n",
        ("tests/supervision", "tests/launch"),
    ),
    Mutation(
        "a stall",
        "supervision/observer.py",
        "return standing == self._place.world_size and",
        "return standing > self._place.world_size and",
        ("tests/supervision",),
    ),
    Mutation(
        "fp16's scale", "precision/loss_scaling.py", "            self.scaler.update()\n", "", ("tests/precision",)
    ),
    Mutation(
        "the window's rescale",
        "strategies/windows.py",
        "            self._rescale(self._divisor / everything)\n",
        "            pass\n",
        ("tests/model/test_accumulation.py",),
    ),
    Mutation(
        "rank 0's result",
        "launch/worker.py",
        'wanted = place.rank == 0 or assignment.returns == "all"',
        'wanted = place.rank == place.world_size - 1 or assignment.returns == "all"',
        ("tests/launch/test_local.py",),
    ),
    Mutation(
        "a secret's check",
        "network/signed_texts.py",
        "if hmac.compare_digest(found.encode(), self._signed(key, text).encode()):",
        "if True:",
        ("tests/network", "tests/supervision"),
    ),
    Mutation(
        "restored random state",
        "seeding.py",
        "        torch.set_rng_state(self.torch)\n",
        "",
        ("tests/checkpoint/test_resume.py", "tests/test_seeding.py"),
    ),
    Mutation(
        "the order of collectives",
        "supervision/order_check.py",
        "            return self._look()\n",
        "            return None\n",
        ("tests/supervision", "tests/forgotten/test_parted.py"),
    ),
)


def drawn(count: int, seed: int) -> Iterator[Mutation]:
    """Yield mutations of places that a seed draws: each statement, operator, comparison and constant is as likely."""
    places = [
        (path, old, new)
        for path in sorted((ROOT / "distwrap").rglob("*.py"))
        for old, new in _changes(path.read_text())
    ]
    random.Random(seed).shuffle(places)
    for path, old, new in islice((each for each in places if _is_python(each)), count):
        name = path.relative_to(ROOT / "distwrap").as_posix()
        room = ROOT / "tests" / name.split("/")[0]
        tests = (f"tests/{room.name}",) if room.is_dir() else ()
        yield Mutation(f"{name}: {old.strip()!r} -> {new.strip()!r}", name, old, new, tests)


def _is_python(change: tuple[Path, str, str]) -> bool:
    """Return whether a changed file can still be read: quotes within an f-string may come apart."""
    path, old, new = change
    try:
        ast.parse(path.read_text().replace(old, new))
    except SyntaxError:
        return False
    return True


_OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "+"}
_COMPARISONS = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: ">=",
    ast.LtE: ">",
    ast.Gt: "<=",
    ast.GtE: "<",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}


def _changes(text: str) -> Iterator[tuple[str, str]]:
    """Yield the changes of a file: a line of it that stands there once, and what it becomes."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        line = lines[node.lineno - 1] if hasattr(node, "lineno") else ""
        if not line or getattr(node, "end_lineno", 0) != node.lineno or text.count(line) > 1:
            continue
        encoded = line.encode()
        start, end = node.col_offset, node.end_col_offset

        def within(at: tuple[int, int], new: str) -> tuple[str, str]:
            return line, (encoded[: at[0]] + new.encode() + encoded[at[1] :]).decode()  # noqa: B023

        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS and not isinstance(node.left, ast.JoinedStr):
            left, right = ast.unparse(node.left), ast.unparse(node.right)
            yield within((start, end), f"({left} {_OPERATORS[type(node.op)]} {right})")
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            yield within((start, end), f"({left} {_COMPARISONS[type(node.ops[0])]} {right})")
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            new = repr(not node.value) if isinstance(node.value, bool) else repr(node.value + 1)
            yield within((start, end), new)
        elif isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.Return)) and not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            yield within((start, end), "pass")


def tried(mutation: Mutation) -> str:
    """Return what noticed a mutation, by the names of tests that failed; empty if nothing did."""
    with tempfile.TemporaryDirectory(prefix="distwrap-mutation-") as folder:
        copy = Path(folder) / "project"
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        path = copy / "distwrap" / mutation.path
        text = path.read_text()
        if text.count(mutation.old) != 1:
            raise ValueError(f"{mutation.name}: {mutation.old!r} stands {text.count(mutation.old)} times in {path}")
        path.write_text(text.replace(mutation.old, mutation.new))
        there = [each for each in mutation.tests if (copy / each).exists()]
        return (_failures(copy, there) if there else "") or _failures(copy, [])


def refuse_failures_without_a_mutation() -> None:
    """Raise where `make test` fails as things are: every mutation would look as if it was noticed."""
    failed = _failures(ROOT, [])
    if failed:
        raise SystemExit(f"make test fails without a mutation: {failed}")


def _failures(copy: Path, tests: Sequence[str]) -> str:
    """Return the tests of `make test` that fail in a copy, up to the first; all of them, or of these files."""
    jobs = ["-n", "3"] if not tests else ["-n", "0"]
    command = [sys.executable, "-m", "pytest", *jobs, "-q", "-x", "-p", "no:cacheprovider", "--tier", "test", *tests]
    try:
        # Programs by their path have no folder of ours first, and would find the installed package.
        env = {**os.environ, "PYTHONPATH": str(copy)}
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"not done within {SECONDS} s"
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if "Error while loading conftest" in done.stderr or "ImportError" in done.stderr:
        return done.stderr.strip().splitlines()[-1]
    return ", ".join(failed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try mutations, print what noticed each, and return 1 if one of the central ones has survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("--only", default="", help="words of the names of central places, with commas between")
    parser.add_argument("--random", type=int, default=0, help="draw so many places instead")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    words = [word for word in given.only.split(",") if word]
    central = [each for each in CENTRAL if not words or any(word in each.name for word in words)]
    if not central:
        parser.error(f"no central place has {given.only!r} in its name")
    refuse_failures_without_a_mutation()
    survivors = []
    for mutation in drawn(given.random, given.seed) if given.random else central:
        noticed = tried(mutation)
        print(f"{'red' if noticed else 'SURVIVED'}: {mutation.name}: {noticed}", flush=True)
        survivors += [] if noticed else [mutation.name]
    print(f"{len(survivors)} survived")
    return int(bool(survivors) and not given.random)


if __name__ == "__main__":
    sys.exit(main())
