"""Whole programs of those who use DDP, `mp.spawn` or DataParallel, and what they become.

Each was written without a thought of the conversion. The program runs in one process, and the converted one on two
ranks, with the same samples in each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from distwrap import strip_module_prefix
from distwrap.convert.checking import check
from distwrap.convert.script import Script
from tests.convert.runner import run, torchrun_variables
from tests.convert.test_cases import NIGHTLY, after, converted, differences
from tests.ports import free_port

PROGRAMS = Path(__file__).parent / "peers"
TORCHRUN = "torchrun"  # programs that only run where a launcher tells them their rank


@dataclass(frozen=True)
class Run:
    """How a program is run, and where it leaves its weights.

    Attributes:
        one: the words of the command line of the program in one process.
        two: of the converted one, on each of two ranks.
        out: the file that is written.
        key: of the weights in it; empty where they are all that is there.
        left: the rules of what was left as it is.
    """

    one: str
    two: str
    out: str
    key: str = ""
    left: tuple[str, ...] = ()


RUNS = {
    "torchrun": Run("3 1 --batch_size 8", "3 1 --batch_size 4", "snapshot.pt", "MODEL_STATE"),
    "data_parallel": Run("--batch-size 16", "--batch-size 16", "digits_cnn.pt", left=("shard_loader",)),
}  # fmt: skip

each_program = pytest.mark.parametrize("name", RUNS)


def program(name: str) -> Path:
    return PROGRAMS / f"{name}.py"


@each_program
@pytest.mark.slow("reads programs of hundreds of lines")
def test_the_text(name: str) -> None:
    """A program becomes the text beside it, with nothing that it computes left to write; check finds no fault there."""
    result = converted(program(name))
    assert result.is_result, [each.text(name) for each in result.notes]
    assert result.text == after(program(name)).read_text()
    assert tuple(each.rule for each in result.notes.of("left", "unsure")) == RUNS[name].left
    assert [each.text(name) for each in check(Script(result.text))] == []


@each_program
@pytest.mark.nightly(row="convert", why=NIGHTLY)
def test_it_trains_as_before(name: str, tmp_path: Path) -> None:
    """The program in one process and the converted one on two ranks end with the same weights."""
    how = RUNS[name]
    one = trained(program(name), how.one, tmp_path / "one", 1, how)
    two = trained(after(program(name)), how.two, tmp_path / "two", 2, how)
    assert differences(one, two) < 1e-6


def trained(script: Path, words: str, folder: Path, ranks: int, how: Run) -> Any:
    """Run a program in a folder of its own, and return the weights that it has saved."""
    folder.mkdir()
    told = ranks > 1 or TORCHRUN in script.name
    places = torchrun_variables(ranks) if told else [{}]
    run(script, places, arguments=words.format(port=free_port()).split(), folder=folder)
    found = torch.load(folder / how.out, weights_only=False)
    return strip_module_prefix(found[how.key] if how.key else found)
