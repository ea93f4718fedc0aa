"""`prove`: right loops are equal, planted mistakes are named, and what cannot be told is not called equal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw
from distwrap.cli import main
from distwrap.errors import LaunchError, OptionError, ProofError
from distwrap.prove import proof, world
from distwrap.prove.catalogue import CATALOGUE
from distwrap.prove.proof import Proof, prove_program as proven
from distwrap.prove.world import Program
from distwrap.testing import prove
from tests.docs.pages import blocks_of
from tests.prove.planted import LOOPS, PLANTED, UNSEEN, Planted, loops
from tests.slow import nightly, slow

FEW = ("dw/plain", "loss times world size", "validation of rank 0's share")  # right loops and mistakes in make test
WHY = "a proof is four worlds"
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "mistakes.md"
# Loops in which each rank draws random numbers of its own.
DRAWING = tuple(
    f"public/{each}" for each in ("dcgan", "diffusion", "gradient_penalty", "mixup", "simclr", "vae", "word2vec")
)


def named(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def cases(values: list[Any], names: list[str]) -> list[Any]:
    """Return cases, of which some are in make test, some in make test-all, and the rest in the row `prove`."""
    return [
        value if name in FEW else slow(value, why=WHY) if number % 8 == 0 else nightly(value, row="prove", why=WHY)
        for number, (value, name) in enumerate(zip(values, names, strict=True))
    ]


@pytest.mark.parametrize("path", cases(loops(), list(map(named, loops()))), ids=named)
def test_a_right_loop_is_equal(path: Path) -> None:
    proof = proven(Program(str(path), steps=60))
    assert proof.verdict == ("not comparable" if named(path) in DRAWING else "equal"), str(proof)


def proven_with(planted: Planted, folder: Path) -> Proof:
    """Prove a loop with a mistake in it."""
    text = (LOOPS / planted.loop).read_text()
    path = folder / Path(planted.loop).name
    path.write_text(text.replace(planted.old, planted.new))
    return proven(Program(str(path), steps=60))


def test_each_mistake_is_planted_once() -> None:
    assert all((LOOPS / each.loop).read_text().count(each.old) == 1 for each in (*PLANTED, *UNSEEN))


@pytest.mark.parametrize("planted", cases(PLANTED, [each.name for each in PLANTED]), ids=lambda each: each.name)
def test_a_planted_mistake_is_named(planted: Planted, tmp_path: Path) -> None:
    proof = proven_with(planted, tmp_path)
    assert proof.mistake in planted.names, str(proof)


def train(scale: float, by_rank: bool = False) -> float:
    torch.manual_seed(0)
    x = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
    model = dw.wrap_model(nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loader = dw.shard_loader(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True))
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets) * (dw.world_size() if scale == 0 else scale)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item() if by_rank else dw.mean(loss.item(), len(inputs))


decorated = dw.distributed(nprocs=2)(train)


def test_a_function_decorated_or_not() -> None:
    """What hides behind a clip, and behind Adam, is seen before it."""
    assert prove(train, 1.0, ranks=[2]).comparisons[0].compared["returned numbers"] == 1
    assert decorated.prove(ranks=[3])(scale=1.0).verdict == "equal"
    with pytest.raises(ProofError, match="DW101 multiplied-by-ranks") as error:
        decorated.prove(ranks=[2, 3])(0.0)
    assert "step 1, the gradients of all parameters at test_prove.py:" in str(error.value)
    assert "on 2 ranks: 2.000 times" in str(error.value)
    assert "on 3 ranks: 3.000 times" in str(error.value)


def test_a_number_of_a_part() -> None:
    with pytest.raises(ProofError, match="DW204"):
        prove(train, 1.0, True, ranks=[2])


def draws() -> None:
    model = dw.wrap_model(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(12, 3, generator=dw.rank_generator(0))).square().mean().backward()
        optimizer.step()


def does_nothing() -> None: ...


def test_what_cannot_be_told_is_not_equal() -> None:
    """Data that each rank draws, and no training at all."""
    for function in (draws, does_nothing):
        with pytest.raises(ProofError, match="not comparable"):
            prove(function, ranks=[2])


def never_ends() -> None:
    while True:
        pass


def test_a_loop_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its world is ended after the limit, and nothing is left of it."""
    monkeypatch.setattr(world, "_SECONDS", 1.0)
    with pytest.raises(LaunchError, match="not done in"):
        prove(never_ends, ranks=[2])


WRITES = """
import torch
from pathlib import Path
import distwrap as dw

@dw.distributed()
def main(path):
    Path(path).write_text("written")

if __name__ == "__main__":
    import sys
    main(sys.argv[1])
"""


def test_an_interrupted_proof(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends it with a line in the place of our frames."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(proof, "prove_program", interrupted)
    assert main(["prove", __file__]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_proof_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file outside of its folder is not written, unless that is allowed; a relative path leads into its folder."""
    script, target = tmp_path / "script.py", tmp_path / "target"
    script.write_text(WRITES)
    assert main(["prove", "--ranks", "2", str(script), str(target)]) == 2
    assert "would open" in capsys.readouterr().out
    assert not target.exists()
    assert main(["prove", "--ranks", "2", str(script), "target"]) == 2
    assert "not comparable" in capsys.readouterr().out
    assert not Path("target").exists()
    main(["prove", "--ranks", "2", "--allow-writes", str(script), str(target)])
    assert target.read_text() == "written"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(LOOPS / "dw" / "plain.py")
    assert main(["prove", "--ranks", "2", "--steps", "3", "--json", path]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["id"]) == ("equal", "")
    assert found["comparisons"][0]["steps"] == 3
    assert main(["prove", str(tmp_path / "missing.py")]) == 2
    assert "there is no script" in capsys.readouterr().err
    with pytest.raises(OptionError, match="divide the batch"):
        prove(train, 1.0, ranks=[5], batch=12)
    with pytest.raises(OptionError, match="2 ranks or more"):
        prove(train, 1.0, ranks=[1])


def test_the_catalogue() -> None:
    """Each mistake has an id and a name of its own, and a section of the page, and no message names another id."""
    assert len({each.id for each in CATALOGUE}) == len({each.name for each in CATALOGUE}) == len(CATALOGUE)
    sections = dict(re.findall(r"^## (\S+ \S+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S))
    assert list(sections) == [f"{each.id} {each.name}" for each in CATALOGUE]
    for each, text in zip(CATALOGUE, sections.values(), strict=True):
        words = " ".join(text.split())
        assert all(f"{said[0].upper()}{said[1:]}." in words for said in (each.what, each.rule)), each.id
    named = {id for path in (ROOT / "distwrap").rglob("*.py") for id in re.findall(r"\bDW\d{3}\b", path.read_text())}
    assert named == {each.id for each in CATALOGUE}
    assert Proof("equal", [], []).exit_code == 0


# Programs of pages and examples that train, and are not equal: each rank has its own data, model, rate, or output.
OWN = {
    **dict.fromkeys(("guides/communication", "guides/extending", "howto/gan"), "not comparable"),
    **dict.fromkeys(
        (
            "examples/custom_strategy",
            "howto/testing",
            "howto/large_model",
            "howto/several_machines",
            "howto/slow_links",
        ),
        "not comparable",
    ),
    "explanation/same_result": "not comparable",  # it divides the batch itself
    "examples/elastic": "failed",  # it restarts, which is not simulated
    "guides/model": "failed",  # it asks for two ranks
    "howto/notebooks": "failed",  # cells import for each other
    "guides/prove": "multiplied-by-ranks",
    "howto/ema": "batch-statistics",
    "howto/ensembles": "weights-apart",
    "howto/sweep": "learning-rate",
}


def programs_that_train() -> dict[str, dict[str, str]]:
    """Return, by pages and examples, the files of a decorated program that trains; it is the last one of them."""
    examples = {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    found = {f"examples/{name.removesuffix('.py')}": {**examples, "": name} for name in examples}
    for page in (ROOT / "docs").rglob("*.md"):
        files: dict[str, str] = {}
        for block in blocks_of(page.read_text()):
            if block.mark == "file":
                files[block.value] = block.text
            elif block.language == "python" and block.mark != "not run":
                before = "" if block.mark == "new program" else files.get("page.py", "")
                files["page.py"] = f"{before}\n\n{block.text}"
        last = [name for name, text in files.items() if "backward(" in text][-1:]
        found |= {str(page.relative_to(ROOT / "docs").with_suffix("")): {**files, "": name} for name in last}
    trains = {name: files[files[""]] for name, files in found.items()}
    return {
        name: found[name] for name, text in sorted(trains.items()) if "backward(" in text and "@distributed" in text
    }


@pytest.mark.parametrize("name", programs_that_train())
@pytest.mark.nightly(row="prove", why=WHY)
def test_a_program_of_the_documentation(name: str, tmp_path: Path) -> None:
    files = programs_that_train()[name]
    for file, text in files.items():
        path = tmp_path / (file or "which")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    proof = proven(Program(str(tmp_path / files[""]), steps=4), ranks=(2, 3))
    assert (proof.mistake or proof.verdict) == OWN.get(name, "equal"), str(proof)


@pytest.mark.parametrize("planted", UNSEEN, ids=lambda each: each.name)
@pytest.mark.nightly(row="prove", why=WHY)
def test_what_is_not_seen(planted: Planted, tmp_path: Path) -> None:
    """Each has a reason; once it is seen, it belongs to the others."""
    assert proven_with(planted, tmp_path).mistake not in planted.names
