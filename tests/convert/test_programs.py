"""Whole programs, as people start from them: what the conversion makes of them, and what they then compute.

Nobody has adapted the programs to the tool. Each becomes the text beside it. What is whole runs as it was in one
process, and converted on two ranks: by its own decorator where it has one, and as torchrun starts it. Where a step can
see the same samples in both, the weights are compared; elsewhere, what does not depend on numbers that ranks draw.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from distwrap.convert.checking import check
from distwrap.convert.conversion import ConversionOptions
from distwrap.convert.converting import convert
from distwrap.convert.script import Script, read
from tests.convert import runner
from tests.convert.runner import torchrun_variables
from tests.convert.test_cases import NIGHTLY, after, differences
from tests.slow import nightly, slow

PROGRAMS = Path(__file__).parent / "programs"
ALL = sorted(path for path in PROGRAMS.glob("*.py") if path.name.count(".") == 1)

HEART = "classifier"  # the one whose text is for `make test`, and which `make test-all` runs
LONG = "reads a program of hundreds of lines"

at_night = pytest.mark.nightly(row="convert", why=NIGHTLY)

# For each program whose weights can be compared: its file of weights, the arguments, and those for the batch size. All
# samples are in one batch where the loader shuffles, since one process shuffles in another order than several ranks.
COMPARED = {
    "mnist": ("digits_cnn.pt", ["--save-model", "--dropout", "0"], "--batch-size", 64),
    "classifier": ("checkpoints/last.pt", [], "--batch-size", 60),
}


@pytest.mark.parametrize(
    "path", [path if path.stem == HEART else slow(path, why=LONG) for path in ALL], ids=lambda path: path.stem
)
def test_the_text(path: Path) -> None:
    """A program becomes the text beside it, with nothing unsure; check finds no other fault than the list has."""
    script = read(path)[0]
    result = convert(script, ConversionOptions())
    assert result.text == after(path).read_text()
    assert [each.text(path.name) for each in result.notes.of("unsure")] == []
    assert [each.text(path.name) for each in check(script)] == []
    own = {"own-sum"} if any(each.rule == "metric" for each in result.notes.of("left")) else set()
    assert {each.rule for each in check(Script(result.text))} <= own


@pytest.mark.parametrize(
    "name",
    [
        slow(name, why="runs a program before and after its conversion")
        if name == HEART
        else nightly(name, row="convert", why=NIGHTLY)
        for name in COMPARED
    ],
)
def test_the_weights_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    """Two ranks with half the batch each end with the weights of one process, and so does the program on one rank."""
    path = PROGRAMS / f"{name}.py"
    file, arguments, word, size = COMPARED[name]
    whole, half = [*arguments, word, str(size)], [*arguments, word, str(size // 2)]
    runs = [
        run(path, tmp_path / "original", whole),
        run(after(path), tmp_path / "alone", whole),
        run(after(path), tmp_path / "decorator", half, ranks=2),
        run(after(path), tmp_path / "torchrun", half, ranks=2, as_torchrun=True),
    ]
    weights = [torch.load(tmp_path / each / file) for each in ("original", "alone", "decorator", "torchrun")]
    weights = [found.get("model", found) for found in weights]
    assert differences(weights[0], weights[1]) == 0
    for found, said in zip(weights[2:], runs[2:], strict=True):
        assert differences(weights[0], found) < 1e-4
        assert evaluations(said) == pytest.approx(evaluations(runs[0]), abs=2e-4)


@at_night
def test_without_learning_the_numbers_stay(tmp_path: Path) -> None:
    """Models are made alike on all ranks, and an evaluation of what no rank draws is that of one process."""
    path, arguments = PROGRAMS / "vae.py", ["--lr", "0"]
    first = run(path, tmp_path / "original", arguments)
    second = run(after(path), tmp_path / "ranks", arguments, ranks=2, as_torchrun=True)
    one, other = (torch.load(tmp_path / each / "results/vae.pt") for each in ("original", "ranks"))
    assert differences(one, other) == 0
    assert evaluations(first) == pytest.approx(evaluations(second), abs=2e-4)
    assert len(list((tmp_path / "ranks").rglob("*.pt*"))) == len(list((tmp_path / "original").rglob("*.pt*")))


def evaluations(said: str) -> list[float]:
    """Return the numbers that a program has printed of its evaluations."""
    found = re.findall(r"(?:Test set: Average loss:|Test set loss:|val loss|valid loss|test loss) +([\d.]+)", said)
    assert found
    return [float(each.rstrip(".")) for each in found]


def run(
    script: Path, folder: Path, arguments: Sequence[str], *, ranks: int = 1, as_torchrun: bool = False, **env: str
) -> str:
    """Run a program in a folder, and return what rank 0 has printed."""
    folder.mkdir(exist_ok=True)
    own = torchrun_variables(ranks) if as_torchrun else [{"DISTWRAP_NPROCS": str(ranks)}]
    return runner.run(script, [{**env, **each} for each in own], arguments=arguments, folder=folder)
