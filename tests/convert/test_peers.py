"""Whole programs of those who use DDP, Accelerate, Fabric or Horovod, and what they become.

Each was written without a thought of the conversion. The program, or the same training in plain torch where its package
is not installed, runs in one process; the converted one on two ranks, with the same samples in each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from distwrap import strip_module_prefix
from distwrap.convert.checking import check
from distwrap.convert.converting import convert
from distwrap.convert.script import Script
from tests.convert.runner import Runner, torchrun_variables
from tests.convert.test_cases import after, converted, differences
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
        reference: the words for the same training in plain torch.
        left: the rules of what was left as it is.
    """

    one: str
    two: str
    out: str
    key: str = ""
    reference: str = ""
    left: tuple[str, ...] = ()


RUNS = {
    "imagenet": Run(
        "--multiprocessing-distributed --world-size 1 --rank 0 --dist-url tcp://127.0.0.1:{port} --dist-backend gloo "
        "--seed 1 -b 16",
        "--world-size 1 --seed 1 -b 8", "checkpoint.pth.tar", "state_dict", left=("save",),
    ),
    "torchrun": Run("3 1 --batch_size 8", "3 1 --batch_size 4", "snapshot.pt", "MODEL_STATE"),
    "data_parallel": Run("--batch-size 16", "--batch-size 16", "digits_cnn.pt"),
    "accelerate_text": Run(
        "", "--cpu --batch_size 4 --gradient_accumulation_steps 3", "results/pytorch_model.bin", reference="8 3"
    ),
    "fabric_net": Run("", "--batch-size 8 --save-model", "digits.pt", "model", reference="16"),
    "horovod_net": Run(
        "", "--batch-size 8 --lr 0.01", "checkpoint-4.pth.tar", "model", reference="16 0.02", left=("comm",)
    ),
}  # fmt: skip

each_program = pytest.mark.parametrize("name", RUNS)


def program(name: str) -> Path:
    return PROGRAMS / f"{name}.py"


@each_program
@pytest.mark.slow("reads programs of hundreds of lines")
def test_the_text(name: str) -> None:
    """A program becomes the text beside it, and nothing that it computes is left for a person to write."""
    result = converted(program(name))
    assert result.is_result, [each.text(name) for each in result.notes]
    assert result.text == after(program(name)).read_text()
    assert tuple(each.rule for each in result.notes.of("left", "unsure")) == RUNS[name].left


@each_program
@pytest.mark.slow("runs each program before and after its conversion")
def test_nothing_is_done_or_found_twice(name: str) -> None:
    """A second conversion changes nothing, and lines of the list are those of the program."""
    text = after(program(name)).read_text()
    assert convert(Script(text)).text == text
    assert not [each for each in check(Script(text)) if each.rule not in ("save", "own-sum")]
    lines = program(name).read_text().splitlines()
    for each in converted(program(name)).notes:
        assert each.seen == lines[each.line - 1].strip()


@each_program
@pytest.mark.slow("runs each program before and after its conversion")
def test_it_trains_as_before(name: str, runner: Runner, tmp_path: Path) -> None:
    """The program in one process and the converted one on two ranks end with the same weights."""
    run, reference = RUNS[name], program(name).with_suffix(".reference.py")
    first = (reference, run.reference) if reference.exists() else (program(name), run.one)
    weights = [
        trained(runner, *first, tmp_path / "one", 1, run),
        trained(runner, after(program(name)), run.two, tmp_path / "two", 2, run),
    ]
    assert differences(*weights) < 1e-6


def trained(runner: Runner, script: Path, words: str, folder: Path, ranks: int, run: Run) -> Any:
    """Run a program in a folder of its own, and return the weights that it has saved."""
    folder.mkdir()
    port, shared = str(free_port()), {"DISTWRAP_QUIET": "1", "ACCELERATE_USE_CPU": "1"}
    told = ranks > 1 or TORCHRUN in script.name
    each = [{**shared, **own} for own in (torchrun_variables(ranks) if told else [{}])]
    for code, text in runner.run(script, each, arguments=words.format(port=port).split(), folder=folder):
        assert code == 0, text
    found = torch.load(folder / run.out, weights_only=False)
    return strip_module_prefix(found[run.key] if run.key else found)
