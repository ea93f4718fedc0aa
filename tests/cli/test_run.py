"""``distwrap run``: scripts that call the helpers, without a decorator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distwrap.cli import main

SCRIPT = """
import pickle, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import distwrap as dw
from beside import width

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(width, 1).double()

    def forward(self, x):
        return self.layer(x)

batch, path, then = int(sys.argv[1]), sys.argv[2], sys.argv[3]
assert type(pickle.loads(pickle.dumps(Net()))) is Net and __file__ == sys.argv[0]
torch.manual_seed(0)
model = dw.wrap_model(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x, y = torch.randn(16, width).double(), torch.randn(16, 1).double()
for inputs, targets in dw.shard_loader(DataLoader(TensorDataset(x, y), batch_size=batch)):
    optimizer.zero_grad()
    ((model(inputs) - targets) ** 2).mean().backward()
    optimizer.step()
dw.save({"model": model, "ranks": dw.world_size()}, path)
if dw.rank() == dw.world_size() - 1 and then == "raise":
    raise LookupError("what the script raises")
if dw.rank() == dw.world_size() - 1 and then == "exit":
    sys.exit(3)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("width = 4\n")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run(script: Path, launcher: str, ranks: int, then: str = "") -> int:
    words = [script, 8 // ranks, script.with_suffix(f".{ranks}.pt"), then]
    return main(["run", "-n", str(ranks), "--launcher", launcher, *map(str, words)])


@pytest.mark.parametrize("launcher", ["forkserver", "simulate"])
def test_a_script_trains_as_in_one_process(launcher: str, script: Path) -> None:
    """A script with classes, arguments and a module beside it ends with the weights of one process."""
    assert run(script, "auto", 1) == run(script, launcher, 2) == 0
    one, two = (torch.load(script.with_suffix(f".{ranks}.pt")) for ranks in (1, 2))
    assert (one["ranks"], two["ranks"]) == (1, 2)
    for name, expected in one["model"].items():
        torch.testing.assert_close(two["model"][name], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("launcher", "ranks"), [("forkserver", 2), ("simulate", 2), ("auto", 1)])
def test_a_rank_that_fails(
    launcher: str, ranks: int, script: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is 1, and what is printed has the script's line and nothing of ours."""
    monkeypatch.setenv("DISTWRAP_TRACEBACK", "short")
    assert run(script, launcher, ranks, "raise") == 1
    told = capfd.readouterr().err
    assert f'File "{script}", line' in told
    assert "LookupError: what the script raises" in told
    assert ("rank 1 on " in told) == (ranks > 1)
    assert "cli/run.py" not in told


def test_options_may_follow_the_script(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """-n alone, or what stands before --; what may be the script's is refused, and nothing is started."""
    script.write_text("import sys, distwrap\nprint(distwrap.world_size(), sys.argv[1:], flush=True)\n")
    more = ["--launcher", "simulate"]
    for words, ranks, its in (
        ([str(script), "-n", "1"], 1, []),
        ([str(script), "-n1", "--", "-n", "3"], 1, ["-n", "3"]),
        ([*more, str(script), "--nprocs=2", "--", "--seed", "3"], 2, ["--seed", "3"]),
        (["-n", "1", str(script), "--epochs", "1"], 1, ["--epochs", "1"]),
    ):
        assert main(["run", *words]) == 0
        assert capsys.readouterr().out == f"{ranks} {its}\n" * ranks
    for words in (["--seed", "3"], ["--epochs", "1", "-n2"], ["--seed=3", "x"]):
        assert main(["run", str(script), *words]) == 2
        assert "may be the script's or this command's" in capsys.readouterr().err


@pytest.mark.parametrize(("launcher", "ranks"), [("forkserver", 2), ("auto", 1)])
def test_its_own_exit_code(launcher: str, ranks: int, script: Path) -> None:
    with pytest.raises(SystemExit, match="3"):
        run(script, launcher, ranks, "exit")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-n", "two"], "--nprocs='two': it must be 'auto' or a whole number"),
        (["--launcher", "frok"], "Did you mean 'fork'"),
        (["--strategy", "ddq"], "Did you mean"),
    ],
)
def test_wrong_options(words: list[str], told: str, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong option is one line, before anything starts."""
    assert main(["run", *words, str(script)]) == 2
    found = capsys.readouterr().err
    assert found.startswith("distwrap run: ")
    assert told in found
    assert found.count("\n") == 1
