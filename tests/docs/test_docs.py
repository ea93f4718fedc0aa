"""What is written is true: docstrings, README and examples are run."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import distwrap
from tests.docs.pages import PYTHON, run_command
from tests.slow import INTERPRETERS, slow

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text()
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(*arguments: str | Path, folder: Path, seconds: float = 100, **env: str) -> str:
    """Run Python on something in a folder, and return what it printed; fail with its errors where it fails."""
    return run_command([*PYTHON, *map(str, arguments)], folder, seconds, **env)


def programs_of(page: str, folder: Path) -> Path:
    """Write the Python blocks of a page, one after the other, to a program in a folder, and return its path."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks, f"{page} has no program"
    program = folder / Path(page).with_suffix(".py").name
    program.write_text("\n\n".join(blocks))
    return program


def last_number(text: str, before: str) -> float:
    """Return the last number that follows some words."""
    return float(re.findall(rf"{before} (\d+\.\d+)", text)[-1])


@pytest.mark.slow("runs the example of each docstring on ranks")
def test_docstrings_hold(tmp_path: Path) -> None:
    """Each example in a docstring prints what it says, in a single process."""
    printed = run("-m", "tests.docs.doctests", folder=ROOT, TMPDIR=str(tmp_path))
    assert int(printed.split()[0]) > 50


# torchrun starts unbuffered interpreters, whose lines may come out mixed: one rank's are enough.
@pytest.mark.parametrize(
    "launcher", [[], slow([*TORCHRUN, "--local-ranks-filter=0"], why=INTERPRETERS)], ids=["alone", "torchrun"]
)
def test_readme_programs_run(launcher: list[str], tmp_path: Path) -> None:
    """The README's Python blocks, one after the other, are a program that ends well, also under torchrun."""
    losses = [float(word) for word in run(*launcher, programs_of("README.md", tmp_path), folder=tmp_path).split()]
    assert len(losses) == 2
    assert max(losses) < 0.5
    assert abs(losses[0] - losses[1]) < 2e-4  # as the README says, and rounded to four digits


@pytest.mark.slow("trains an example to the end")
def test_digits_learn_on_two_ranks(tmp_path: Path) -> None:
    """The digits example reaches 90 % in four epochs on two ranks, and saves the model without a wrapper's prefix."""
    out = tmp_path / "model.pt"
    printed = run(EXAMPLES / "digits.py", "--epochs", "4", "--nprocs", "2", "--out", out, folder=tmp_path)
    assert last_number(printed, "accuracy") > 0.9
    assert str(out) in printed
    assert "0.weight" in distwrap.load(out)


def test_the_claims_of_the_demo_hold(tmp_path: Path) -> None:
    """The demo's five claims hold by their numbers, and what it prints is plain and fits a terminal of 80 columns."""
    assert "/bin/python examples/demo.py" in (ROOT / "Makefile").read_text()
    path = tmp_path / "found.json"
    printed = run(EXAMPLES / "demo.py", "--fast", "--json", path, folder=tmp_path)
    assert [line for line in printed.splitlines() if len(line) > 80 or not line.isprintable()] == []
    without_numbers = re.sub(r"[\d.]+|^ +> ", "", printed, flags=re.MULTILINE)
    for quoted in re.findall(r"```text\n(.*?)```", README, re.DOTALL):
        for part in re.split(r"^….*\n|.*free cores.*\n", quoted, flags=re.MULTILINE):
            assert re.sub(r"[\d.]+", "", part) in without_numbers
    same, faster, proofs, deadlock, killed = json.loads(path.read_text()).values()
    one, two = same["losses"]
    assert two == pytest.approx(one, rel=1e-12)
    assert one[-1] < one[0]
    assert 0 <= faster["waiting"] < 1
    assert min(faster["seconds"]) > 0
    assert ("times" in faster) is (faster["cores"] >= 1.8)  # no ratio where the second core is not free
    assert proofs["verdict"] == "equal"
    assert re.findall(r"on 2 ranks: (\S+) times", proofs["mistake"]) == ["0.500"]
    assert re.findall(r"step (\d+)", proofs["mistake"])[0] == "1"
    assert "LoaderError" in proofs["refused"]
    assert {int(rank) for rank in re.findall(r"rank (\d) waits", deadlock["told"])} == {0, 1, 2, 3, 4, 6, 7}
    assert deadlock["milliseconds"] > 0
    assert (killed["rank"], killed["signal"], killed["left"], killed["differ"]) == (1, signal.SIGKILL, 0, 0)


@pytest.mark.slow("trains an example to the end, twice")
def test_training_survives_an_accident(tmp_path: Path) -> None:
    """The elastic example loses a rank in epoch 3, goes on there, and learns as well as without."""
    printed = run(EXAMPLES / "elastic.py", folder=tmp_path)
    assert "goes on with epoch 3" in printed
    survived = last_number(printed, "accuracy")
    undisturbed = last_number(run(EXAMPLES / "elastic.py", "--no-accident", folder=tmp_path), "accuracy")
    assert survived == undisturbed > 0.9


@pytest.mark.slow("trains an example to the end")
def test_digits_learn_without_distwrap(tmp_path: Path) -> None:
    """The plain digits example, which the other is compared with, learns as well."""
    assert last_number(run(EXAMPLES / "digits_plain.py", "--epochs", "4", folder=tmp_path), "accuracy") > 0.9


@pytest.mark.slow("trains an example to the end")
def test_digits_learn_in_an_untouched_loop(tmp_path: Path) -> None:
    """The retrofitted loop trains the caller's own model, on two ranks."""
    printed = run(EXAMPLES / "digits_retrofit.py", "--epochs", "4", folder=tmp_path)
    assert float(re.search(r"(\S+) after", printed)[1]) > 0.9


@pytest.mark.slow("trains an example to the end")
def test_helpers_alone_fit_a_line(tmp_path: Path) -> None:
    """The script without the decorator finds the ranks of torchrun, prints once, and fits its line."""
    printed = run(*TORCHRUN, EXAMPLES / "helpers_only.py", "--epochs", "4", folder=tmp_path)
    assert printed.count("epoch 3") == 1
    assert "on 2 rank(s)" in printed
    assert last_number(printed, "loss") < 0.01


@pytest.mark.slow("trains an example to the end")
def test_language_model_learns(tmp_path: Path) -> None:
    """A tiny language model lowers its loss on two ranks in bf16, and writes something."""
    tiny = "--steps 20 --width 32 --depth 1 --length 32 --megabytes 0.1 --test 16 --write 20 --batch-size 16 --lr 1e-2"
    printed = run(EXAMPLES / "language_model.py", *tiny.split(), folder=tmp_path)
    assert last_number(printed, "test loss") < last_number(printed, "before training") - 0.5
    assert len(printed.split("it writes:")[1].strip()) > 10


@pytest.mark.slow("trains an example to the end")
def test_the_slow_loop_learns_and_is_advised(tmp_path: Path) -> None:
    """The slow example reaches 90 % on two ranks, and its report has advice."""
    path = tmp_path / "report.json"
    printed = run(EXAMPLES / "why_slow.py", folder=tmp_path, DISTWRAP_REPORT=str(path))
    assert last_number(printed, "accuracy") > 0.9
    assert json.loads(path.read_text())["advice"]


@pytest.mark.nightly(row="benchmarks", why="timing/test_analysis.py shows the advice from recorded times of steps")
@pytest.mark.timeout(600)
def test_two_faults_are_found(tmp_path: Path) -> None:
    """The slow example's report names both its faults, until each is mended; the accuracy is the same."""
    slow_storage = "Storage(seconds=0.001)"
    program = (EXAMPLES / "why_slow.py").read_text()
    assert slow_storage in program
    # As slow as a far one, so that busy cores hide neither the reading nor the evaluation.
    (tmp_path / "slower.py").write_text(program.replace(slow_storage, "Storage(seconds=0.004)"))
    told, accuracies = [], []
    for mended in ([], ["--workers", "2"], ["--workers", "2", "--share-evaluation"]):
        path = tmp_path / f"{len(told)}.json"
        words = ["--test-samples", "900", *mended]
        printed = run("slower.py", *words, folder=tmp_path, DISTWRAP_REPORT=str(path))
        told.append(" ".join(piece["text"] for piece in json.loads(path.read_text())["advice"]))
        accuracies.append(last_number(printed, "accuracy"))
    assert accuracies == [accuracies[0]] * 3
    assert accuracies[0] > 0.9
    reads, evaluates = "which reads in the loop itself", "Let every rank evaluate its share"
    assert [reads in text for text in told] == [True, False, False]
    assert [evaluates in text for text in told] == [True, True, False]


@pytest.mark.slow("trains an example to the end")
def test_a_strategy_of_ones_own(tmp_path: Path) -> None:
    """The strategy example meets, wraps, clips and saves in its own way, and fits its line."""
    printed = run(EXAMPLES / "custom_strategy.py", folder=tmp_path)
    assert "2 ranks meet over gloo" in printed
    assert last_number(printed, "loss") < 1e-6
    assert (tmp_path / "in_double.pt.gz").read_bytes()[:2] == b"\x1f\x8b"


@pytest.mark.slow(INTERPRETERS)
def test_fix_checkpoint_repairs_what_it_breaks(tmp_path: Path) -> None:
    """The checkpoint example shows the wrappers' keys, and loads them after the repair."""
    printed = run(EXAMPLES / "fix_checkpoint.py", folder=tmp_path)
    assert "_orig_mod.module.0.weight" in printed
    assert "All keys matched" in printed


@pytest.mark.slow(INTERPRETERS)
def test_fix_checkpoint_repairs_a_file(tmp_path: Path) -> None:
    """Given two paths it repairs the weights in the first into the second, and leaves an optimizer's state alone."""
    model = nn.Linear(2, 1)
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    state = {"model": nn.DataParallel(model).state_dict(), "optimizer": optimizer, "epoch": 3}
    torch.save(state, tmp_path / "in.pt")
    run(EXAMPLES / "fix_checkpoint.py", "in.pt", "out.pt", folder=tmp_path)
    repaired = distwrap.load(tmp_path / "out.pt")
    assert list(repaired["model"]) == ["weight", "bias"]
    assert (repaired["optimizer"], repaired["epoch"]) == (optimizer, 3)
