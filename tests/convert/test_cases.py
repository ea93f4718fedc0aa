"""Scripts before and after: the text, and what both compute.

A case is a script under ``cases/``, with the text beside it that it is to become. Where one is executed, the script as
it was runs in one process, with a batch of eight, and the converted one in one process and on two ranks with four each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distwrap.convert.checking import check
from distwrap.convert.conversion import ConversionOptions
from distwrap.convert.converting import Converted, convert
from distwrap.convert.script import Script, read
from tests.convert.runner import run, torchrun_variables
from tests.slow import few, nightly, slow

CASES = Path(__file__).parent / "cases"
BEFORE = sorted(path for path in CASES.glob("*/*.py") if path.name.count(".") == 1)
GLOBAL_BATCH = "data_parallel"  # the folder of scripts whose batch is that of all devices together
BATCH = 8

# One of each kind; the first is for `make test` too.
TRAINED = ("plain-module_level", "ddp-resume", "spawn-classic", "data_parallel-trainer")
NIGHTLY = f"test_the_text has its text, and {', '.join(TRAINED)} are executed"


def named(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


def executed(path: Path) -> Any:
    """Return a case for the tests that execute it."""
    if named(path) == TRAINED[0]:
        return path
    why = "runs a program before and after its conversion"
    return slow(path, why=why) if named(path) in TRAINED else nightly(path, row="convert", why=NIGHTLY)


def is_whole(path: Path) -> bool:
    """Return whether a converted script has no TODO line, until whose code is written its ranks go apart."""
    return "TODO(distwrap)" not in after(path).read_text()


def converted(path: Path) -> Converted:
    return convert(read(path)[0], ConversionOptions())


def after(path: Path) -> Path:
    return path.with_suffix(".after.py")


@pytest.mark.parametrize("path", few(BEFORE, 20), ids=named)
def test_the_text(path: Path) -> None:
    """A script becomes the text beside it, to the byte; check finds nothing in a plain one that is whole."""
    script, expected = read(path)[0], after(path).read_bytes().decode()
    result = convert(script, ConversionOptions())
    assert result.is_result, [each.text(path.name) for each in result.notes]
    assert result.text == expected
    if path.parent.name == "plain" and is_whole(path):
        assert not [*check(script), *check(Script(expected))]


def test_a_script_that_imports_distwrap_is_left() -> None:
    """A script that uses distwrap, as a converted one does, stays as it is, and the list says so."""
    text = after(BEFORE[0]).read_bytes().decode()
    result = convert(Script(text))
    assert result.text == text
    assert [each.rule for each in result.notes] == ["converted"]


@pytest.mark.parametrize("path", [executed(path) for path in BEFORE if is_whole(path)], ids=named)
@pytest.mark.slow("others of its kind are in make test")
def test_it_trains_as_before(path: Path, tmp_path: Path) -> None:
    """The original in one process, the converted script in one process and on two ranks end with the same weights."""
    weights = [
        trained(path, tmp_path / "original.pt", 1, as_torchrun=True),
        trained(after(path), tmp_path / "alone.pt", 1),
        trained(after(path), tmp_path / "ranks.pt", 2, as_torchrun=True),
    ]
    # One process shuffles as torch does, and ranks as DistributedSampler does.
    compared = weights[2:] if "shuffle=True" in after(path).read_text() else weights[1:]
    for found in compared:
        assert differences(weights[0], found) < 1e-6


def trained(script: Path, out: Path, ranks: int, *, as_torchrun: bool = False) -> Any:
    """Run a script, and return the weights that it has saved."""
    each = BATCH if GLOBAL_BATCH in script.parts else BATCH // ranks
    shared = {"BATCH": str(each), "OUT": str(out)}
    places = torchrun_variables(ranks) if as_torchrun else [{}] * ranks
    run(script, [{**shared, **own} for own in places])
    return torch.load(out, weights_only=True)


def differences(first: Any, second: Any) -> float:
    """Return by how much the numbers of two states differ at most."""
    assert first.keys() == second.keys()
    return max(
        differences(first[key], second[key])
        if isinstance(first[key], dict)
        else float((first[key] - second[key]).abs().max())
        for key in first
    )
