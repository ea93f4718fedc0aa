"""Scripts before and after: the text, and what both compute.

A case is a script under ``cases/``, with the text beside it that it is to become. Each is executed: the script as it
was in one process, with a batch of eight, and the converted one in one process and on two ranks with four each. Where
the libraries of a script are not installed, ``NAME.reference.py`` is the same training in plain torch, and is executed
in its place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distwrap.convert.conversion import ConversionOptions
from distwrap.convert.converting import Converted, convert
from distwrap.convert.script import Script, read
from tests.convert.runner import Runner, torchrun_variables

CASES = Path(__file__).parent / "cases"
BEFORE = sorted(path for path in CASES.glob("*/*.py") if path.name.count(".") == 1)
GLOBAL_BATCH = "data_parallel"  # the folder of scripts whose batch is that of all devices together
BATCH = 8

each_case = pytest.mark.parametrize("path", BEFORE, ids=lambda path: f"{path.parent.name}-{path.stem}")


def converted(path: Path) -> Converted:
    return convert(read(path)[0], ConversionOptions())


def after(path: Path) -> Path:
    return path.with_suffix(".after.py")


@each_case
def test_the_text(path: Path) -> None:
    """A script becomes the text beside it, to the byte."""
    result = converted(path)
    assert result.is_result, [each.text(path.name) for each in result.notes]
    assert result.text == after(path).read_bytes().decode()


def test_a_script_that_imports_distwrap_is_left() -> None:
    """A script that uses distwrap, as a converted one does, stays as it is, and the list says so."""
    text = after(BEFORE[0]).read_bytes().decode()
    result = convert(Script(text))
    assert result.text == text
    assert [each.rule for each in result.notes] == ["converted"]


@each_case
@pytest.mark.slow("runs each program before and after its conversion")
def test_it_trains_as_before(path: Path, runner: Runner, tmp_path: Path) -> None:
    """The original in one process, the converted script in one process and on two ranks end with the same weights."""
    reference = path.with_suffix(".reference.py")
    weights = [
        trained(runner, reference if reference.exists() else path, tmp_path / "original.pt", 1, as_torchrun=True),
        trained(runner, after(path), tmp_path / "alone.pt", 1),
        trained(runner, after(path), tmp_path / "ranks.pt", 2, as_torchrun=True),
    ]
    # One process shuffles as torch does, and ranks as DistributedSampler does.
    compared = weights[2:] if "shuffle=True" in after(path).read_text() else weights[1:]
    for found in compared:
        assert differences(weights[0], found) < 1e-6


def trained(runner: Runner, script: Path, out: Path, ranks: int, *, as_torchrun: bool = False) -> Any:
    """Run a script, and return the weights that it has saved, after a look at what its ranks have printed."""
    each = BATCH if GLOBAL_BATCH in script.parts else BATCH // ranks
    shared = {"BATCH": str(each), "OUT": str(out), "DISTWRAP_QUIET": "1"}
    places = torchrun_variables(ranks) if as_torchrun else [{}] * ranks
    for code, text in runner.run(script, [{**shared, **own} for own in places]):
        assert code == 0, text
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
