"""A trace of some steps: a file a rank."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap.errors import OptionError
from distwrap.testing import run_ranks
from tests.timing import loops


def traced(path: Path, steps: range = range(3, 5)) -> None:
    with dw.trace(steps=steps, path=path):
        loops.train()


def read(path: Path) -> list[dict[str, Any]]:
    """Return the events of a file, which are such as Perfetto draws."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} in the file"))[
        "traceEvents"
    ]
    assert all(isinstance(event["pid"], int) for event in events)
    return events


def test_a_trace_of_two_ranks(tmp_path: Path) -> None:
    """Each rank's file has its name, and the parts of a step, on a track of their own, one after the other."""
    run_ranks(traced, 2, tmp_path / "new" / "trace.json.gz", timeout=60)
    assert {each.name for each in (tmp_path / "new").iterdir()} == {f"trace.rank{rank}.json.gz" for rank in (0, 1)}
    processes = []
    for rank in (0, 1):
        events = read(tmp_path / "new" / f"trace.rank{rank}.json.gz")
        named = [event for event in events if event["name"] == "process_name"]
        processes += [each["pid"] for each in named if each["args"]["name"].startswith(f"rank {rank} on ")]
        parts = [event for event in events if event["name"].startswith("distwrap: ")]
        counts = Counter(each["name"] for each in parts)
        for part in ("data", "forward", "backward", "exchange", "optimizer"):
            assert counts[f"distwrap: {part}"] == 2
        mine = sorted((each["ts"], each["ts"] + each["dur"]) for each in parts)
        assert all(ends <= begins + 0.01 for (_, ends), (begins, _) in pairwise(mine))
        operators = {(event["pid"], event["tid"]) for event in events if event["name"].startswith("aten::")}
        assert operators
        assert operators.isdisjoint((each["pid"], each["tid"]) for each in parts)
    assert len(set(processes)) == 2, "files that are opened together must not take two ranks for one process"


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (range(2), ""),
        (range(10, 30), "trace(): not all of the steps 10 to 29 are there: the loop took 24 step(s) on rank 0"),
        (range(24, 25), "trace(): not all of the steps 24 to 24 are there: the loop took 24 step(s) on rank 0"),
    ],
)
def test_ranges_of_one_rank(
    steps: range, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first step, or beyond the loop's end, or nothing at all."""
    monkeypatch.delenv("DISTWRAP_QUIET", raising=False)
    with dw.trace(steps=steps, path=str(tmp_path / "trace.json")):
        loops.train()
    written = f"trace(): written to {tmp_path / 'trace.rank0.json'}; open it in https://ui.perfetto.dev"
    said = [*filter(None, [words]), *([written] if steps.start < 24 else [])]
    lines = [line for line in capfd.readouterr().err.splitlines() if "trace()" in line]
    assert lines == [f"distwrap: {line}" for line in said]
    assert (tmp_path / "trace.rank0.json").exists() == (steps.start < 24)
    if steps.start < 24:
        steppings = [event for event in read(tmp_path / "trace.rank0.json") if event["name"] == "distwrap: optimizer"]
        assert len(steppings) == min(24, steps.stop) - steps.start


def leave_early(path: Path) -> None:
    """Leave the loop on one rank while the others have nothing to exchange."""
    os.environ.pop("DISTWRAP_QUIET", None)
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with dw.trace(steps=range(1, 3), path=path):
        for _ in range(1 if dw.rank() == 0 else 5):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()


def test_a_rank_that_leaves_early(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The others have their files."""
    run_ranks(leave_early, 2, tmp_path / "trace.json", timeout=60)
    assert [each.name for each in tmp_path.iterdir()] == ["trace.rank1.json"]
    said = capfd.readouterr().err
    assert "not all of the steps 1 to 2 are there: the loop took 1 step(s) on rank 0" in said
    assert "written to" in said


def accumulate_and_evaluate(path: Path) -> None:
    model = dw.wrap_model(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dw.trace(steps=range(1, 3), path=path):
        for step, (x, window) in enumerate(dw.accumulate([torch.ones(1, 2)] * 8, 2, model)):
            model(x).sum().backward()
            if window.last:
                optimizer.step()
            if step % 4 == 3:
                with torch.no_grad():
                    model(x)


def test_windows_and_evaluation(tmp_path: Path) -> None:
    """A step is a window."""
    accumulate_and_evaluate(tmp_path / "trace.json")
    names = Counter(event["name"] for event in read(tmp_path / "trace.rank0.json"))
    assert names["distwrap: evaluation"] == 1
    assert names["distwrap: forward"] == 4
    assert names["distwrap: optimizer"] == 2


def refused(folder: Path) -> list[str]:
    """Return the words of all ranks for paths that cannot be written, each before its loop runs."""
    words = []
    for path in (folder / "folder.json", folder / "file" / "trace.json"):
        with pytest.raises(OptionError) as error, dw.trace(path=path):
            raise AssertionError("the loop runs")
        words.append(str(error.value))
    with dw.trace(path=folder / "own.json"), pytest.raises(OptionError) as error, dw.trace(path=folder / "inner.json"):
        raise AssertionError("the loop runs")
    return [*words, str(error.value)]


def test_what_is_refused(tmp_path: Path) -> None:
    """On every rank, before the loop runs: what cannot be written, and a trace within another."""
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.rank1.json").mkdir()
    for folder, in_file, inner in run_ranks(refused, 2, tmp_path, timeout=60):
        assert "folder.rank1.json" in folder
        assert "cannot be written" in in_file
        assert "outer" in inner
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder.rank1.json"]


def test_a_path_is_that_of_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with dw.trace(steps=range(1, 2), path="trace.json"):
        os.chdir("elsewhere")
        loops.train()
    assert read(tmp_path / "trace.rank0.json")


def test_nothing_stays(tmp_path: Path) -> None:
    """Neither after a trace, nor after an exception within it, nor is there a file then."""
    before = (torch.save, torch.autograd.backward)
    with pytest.raises(ZeroDivisionError), dw.trace(steps=range(1, 100), path=tmp_path / "trace.json"):
        loops.train(each=lambda step, model: step // (step - 5))
    assert not (tmp_path / "trace.rank0.json").exists()
    assert not torch.autograd.profiler._is_profiler_enabled
    assert (torch.save, torch.autograd.backward) == before
    with dw.report() as found, dw.trace(steps=range(1, 2), path=tmp_path / "trace.json"), torch.enable_grad():
        loops.train()
    assert found.figures["steps"] == 23
    with dw.trace(steps=range(1, 2), path=tmp_path / "trace.json"), dw.report() as found:
        loops.train()
    assert found.figures["steps"] in (23, 24)
    assert read(tmp_path / "trace.rank0.json")
    assert (torch.save, torch.autograd.backward) == before


@pytest.mark.parametrize("steps", [range(0), range(3, 1), range(0, 9, 2), range(-1, 3), 3, [1, 2]])
def test_no_range_of_steps(steps: Any) -> None:
    with pytest.raises(OptionError, match="follow each other"), dw.trace(steps=steps):
        pass


@pytest.mark.parametrize("path", [None, 3])
def test_no_path(path: Any) -> None:
    with pytest.raises(OptionError, match="path of a file"), dw.trace(path=path):
        pass
