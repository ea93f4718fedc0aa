"""Loops that are slow on purpose: what the report finds, on real ranks."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distwrap as dw
from distwrap.cli import main
from distwrap.errors import OptionError
from distwrap.group.world import current_world
from distwrap.model.wrapped_models import handle_of
from distwrap.testing import run_ranks
from distwrap.timing.recorder import Measuring
from tests.convert.runner import torchrun_variables
from tests.forked_commands import PYTHON, forked_commands
from tests.slow import nightly
from tests.timing import loops


def figures(loop: Callable[..., object], *args: object) -> dict[str, Any]:
    with dw.report() as found:
        loop(*args)
    return found.figures


def measured(loop: Callable[..., object], *args: object) -> dict[str, Any]:
    first, second = run_ranks(figures, 2, loop, *args, timeout=60)
    assert first == second
    return dict(first)


def test_a_rank_that_holds_the_other_up() -> None:
    """It is named with the part in which it is slow, in the figures and in the advice."""
    found = measured(loops.slow_forward_on_one)
    lag = found["lags"][0]
    assert (lag["ranks"], lag["part"], lag["takes_turns"]) == ([0], "forward", False)
    assert 0.3 < lag["share"] < 1
    assert "for rank 0: forward takes" in found["advice"][0]["text"]


def test_counts() -> None:
    """They are those of the loop; `test_parts` compares its time."""
    found = measured(loops.train)
    assert found["steps"] == loops.STEPS - 1
    assert [rank["samples"] for rank in found["ranks"]] == [4, 4]


def test_one_process() -> None:
    """There the forward is one too, and afterwards all is as it was."""
    found = figures(loops.train, loops.LONG)
    assert max(found["parts"], key=found["parts"].get) == "forward"
    assert (found["speedup"], found["lags"], found["waiting"]) == (1.0, [], 0.0)
    _and_after()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_was_wrapped_before(ranks: int) -> None:
    """It is measured; it can be copied and saved meanwhile, and after the report it is as it was, as its copy is."""
    run_ranks(_wrapped_before, ranks)


def _wrapped_before() -> None:
    model = dw.wrap_model(loops.Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with dw.report() as report:
        for x in torch.randn(3, 4, 8, generator=dw.rank_generator(0)):
            model(x).mean().backward()
            optimizer.step()
        copied = copy.deepcopy(model)
        torch.save(model, io.BytesIO())
    assert report.figures["parts"]["forward"] > 0
    for each in (model, copied):
        handle = handle_of(each)
        assert (handle is None) == (each is copied)
        assert handle is None or handle.routing._around is None


def test_nothing_stays() -> None:
    """After the report torch's functions are what they were, and a wrapped model runs what it ran."""
    run_ranks(_and_after, 2)


def _and_after() -> None:
    functions = torch.autograd.backward, torch.distributed.all_reduce
    with dw.report():
        model = loops.train()
        assert torch.autograd.backward is not functions[0]
    assert (torch.autograd.backward, torch.distributed.all_reduce) == functions
    handle = handle_of(model)
    assert handle is not None
    assert handle.routing.dressed is None


def test_the_numbers_are_the_same() -> None:
    plain = run_ranks(_weights, 2, False)
    reported = run_ranks(_weights, 2, True)
    assert torch.equal(plain[0], reported[0])
    assert torch.equal(reported[0], reported[1])


def _weights(reports: bool) -> torch.Tensor:
    torch.manual_seed(0)
    if not reports:
        return torch.nn.utils.parameters_to_vector(loops.train().parameters()).detach()
    with dw.report():
        return torch.nn.utils.parameters_to_vector(loops.train().parameters()).detach()


def test_a_loop_that_fails() -> None:
    """Its own error comes out, and nothing stays."""
    run_ranks(_fails, 2)


def _fails() -> None:
    backward = torch.autograd.backward
    with pytest.raises(ZeroDivisionError), dw.report() as found:
        loops.train(each=lambda step, model: 1 // 0)
    assert torch.autograd.backward is backward
    assert found.figures == {}
    assert not current_world().part(Measuring).has_report


def test_one_in_another_is_refused() -> None:
    with dw.report(), pytest.raises(OptionError, match="measured already"), dw.report():
        pass


def _asked_for(how: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.delenv("DISTWRAP_QUIET")
    if how == "option":
        return {"report": str(path)}
    monkeypatch.setenv("DISTWRAP_REPORT", str(path))
    return {}


def _check_report(path: Path, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"distwrap report: {loops.STEPS - 1} steps of " in said
    assert said.count("What to change") == 1
    assert json.loads(path.read_text())["lags"][0]["ranks"] == [0]
    assert main(["report", str(path)]) == 0
    assert capsys.readouterr().out.strip() in said


@pytest.mark.parametrize("how", ["option", "variable"])
def test_the_report_of_a_run(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A table and advice on rank 0's standard error, and all figures in a file, which the command prints again."""
    path = tmp_path / "times.json"
    options = _asked_for(how, path, monkeypatch)
    dw.distributed(nprocs=2, launcher="forkserver", timeout=60, **options)(loops.slow_forward_on_one)()
    _check_report(path, capfd.readouterr().err, capfd)


OTHERS, WARM = ("script", "spawn", "elastic"), "test_the_report_of_a_run, by the launcher of warm ranks"
SCRIPT = """
import distwrap as dw
from tests.timing import loops

if __name__ == "__main__":
    dw.distributed(nprocs=2, launcher={launcher!r})(loops.slow_forward_on_one)()
"""


@pytest.mark.parametrize("launcher", ["torchrun", *(nightly(each, row="products", why=WARM) for each in OTHERS)])
@pytest.mark.slow("a program")
def test_the_report_of_a_run_under_other_launchers(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It comes the same way."""
    script, path = tmp_path / "train.py", tmp_path / "times.json"
    places = torchrun_variables(2) if launcher == "torchrun" else [{}]
    script.write_text(SCRIPT.format(launcher="auto" if launcher == "torchrun" else launcher))
    _asked_for("variable", path, monkeypatch)
    for name, value in {**forked_commands(), "PYTHONPATH": str(Path(__file__).parents[2])}.items():
        monkeypatch.setenv(name, value)
    ranks = [
        subprocess.Popen([PYTHON, script], env={**os.environ, **place}, stderr=subprocess.PIPE, text=True)
        for place in places
    ]
    said = "".join([rank.communicate(timeout=100)[1] for rank in ranks])
    assert [rank.returncode for rank in ranks] == [0] * len(places)
    _check_report(path, said, capsys)


def test_a_quiet_run_prints_the_report_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """DISTWRAP_QUIET silences what nobody has asked for: not the report of DISTWRAP_REPORT, nor that of a ``with``."""
    monkeypatch.setenv("DISTWRAP_QUIET", "1")
    monkeypatch.setenv("DISTWRAP_REPORT", "1")
    dw.distributed(nprocs=1)(loops.train)()
    assert "distwrap report: " in capsys.readouterr().err
    with dw.report():
        loops.train()
    assert "distwrap report: " in capsys.readouterr().err


def test_where_a_report_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is made, and it is where the call was made, also where the function goes elsewhere."""
    monkeypatch.chdir(tmp_path)

    @dw.distributed(nprocs=1, report="new/times.json")
    def train() -> None:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        loops.train()

    train()
    assert json.loads((tmp_path / "new" / "times.json").read_text())["steps"]


@pytest.mark.parametrize("wrong", ["file/times.json", "folder.json"])
def test_a_report_that_cannot_be_written(wrong: str, tmp_path: Path) -> None:
    """That is said before anything runs."""
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(OptionError, match=r"(times|folder)\.json.* cannot be written"):
        dw.distributed(nprocs=2, report=tmp_path / wrong)(pytest.fail)("ran")


def test_a_report_that_cannot_be_written_at_last(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What the function has returned is returned all the same; a run that fails leaves no file."""
    path = tmp_path / "new" / "times.json"

    def run(fails: bool) -> int:
        path.parent.rmdir()
        assert not fails, "it fails"
        return 3

    reported = dw.distributed(nprocs=1, report=path)(run)
    with pytest.raises(AssertionError, match="it fails"):
        reported(True)
    assert reported(False) == 3
    assert "distwrap: the report cannot be written: " in capfd.readouterr().err


@pytest.mark.parametrize("wrong", ["", 1, 0, None, "times.txt", b"times.json", ["times.json"]])
def test_a_report_that_is_no_path(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="path of a file"):
        dw.distributed(report=wrong)
    if isinstance(wrong, str) and wrong:
        monkeypatch.setenv("DISTWRAP_REPORT", wrong)
        with pytest.raises(OptionError, match=r"DISTWRAP_REPORT=.* ends in"):
            dw.distributed(nprocs=2)(pytest.fail)("ran")


ONE = {
    "gradient_bytes": 1,
    "parts": {},
    "device_memory": None,
    "process_memory": 1,
    "rank": 0,
    "host": "",
    "device": "",
}
WHOLE = {"ranks": [ONE, ONE], "step": 0, "steps": 1, "samples_per_second": 1, "advice": [], "link": 0, "waiting": 0}
WHOLE |= {"speedup": 1, "efficiency": 1, "alone": 1}


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "[1]", '{"ranks": 1, "step": 2}', "\0", json.dumps(WHOLE)),
        json.dumps({**WHOLE, "step": 1, "ranks": [{**ONE, "parts": []}]}),
    ],
)
def test_a_file_that_holds_no_report(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "times.json").write_text(text)
    assert main(["report", str(tmp_path / "times.json")]) == 2
    assert main(["report", str(tmp_path / "none.json")]) == 2
    said = capsys.readouterr().err
    assert "times.json is not a report. A run with" in said
    assert "none.json cannot be read: No such file or directory. A run with" in said


def test_a_run_in_which_no_optimizer_stepped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its file says so."""
    dw.distributed(nprocs=1, report=tmp_path / "times.json")(lambda: None)()
    assert main(["report", str(tmp_path / "times.json")]) == 1
    assert "no step was measured. A step goes from one optimizer.step() to the next" in capsys.readouterr().out


def test_a_report_that_is_read_too_early() -> None:
    with dw.report() as found:
        loops.train()
        assert "empty until its `with` block has ended" in str(found)
    assert str(found).startswith("distwrap report: ")
    assert "as fast as one rank alone" not in str(found), "one rank is compared with none"


def test_models_that_are_gone() -> None:
    """What is known of a model that was the loop's own is known when the loop has ended."""
    found = measured(lambda: loops.train() and None)
    assert found["ranks"][0]["gradient_bytes"] == 4 * (8 * 16 + 16 + 16 + 1)
    assert found["ranks"][0]["is_ddp"]
