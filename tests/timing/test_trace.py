"""A trace of some steps: of all ranks, in one file, on one clock."""

from __future__ import annotations

import gzip
import json
import os
import time
import zlib
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
from distwrap.timing.trace import RankTrace, merged
from tests.slow import MORE_RANKS
from tests.timing import loops


def traced(path: Path, steps: range = range(3, 5)) -> None:
    with dw.trace(steps=steps, path=path):
        loops.slow_forward_on_one()


def read(path: Path) -> list[dict[str, Any]]:
    """Return the events of a file, which are such as Perfetto draws."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} in the file"))[
        "traceEvents"
    ]
    arrows = Counter((event["cat"], event["id"], event["ph"]) for event in events if event["ph"] in "stf")
    assert set(arrows.values()) <= {1}
    begins = {key[:2] for key in arrows if key[2] == "s"}
    assert begins == {key[:2] for key in arrows if key[2] == "f"}
    return events


def ranks_of(events: list[dict[str, Any]]) -> dict[int, str]:
    """Return the rank of each process in a file."""
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {event["pid"] for event in events} == set(names)
    return {track: name.split(" on ")[0] for track, name in names.items()}


def arrows_of(events: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the arrows between ranks, each of which leads forwards in time, into an exchange."""
    ends = [event for event in events if event["name"] == "waits for the last rank"]
    pairs = list(zip(ends[::2], ends[1::2], strict=True))
    for start, end in pairs:
        assert start["ph"] + end["ph"] == "sf"
        assert start["ts"] < end["ts"]
        place = [
            event
            for event in events
            if event["name"] == "distwrap: exchange"
            and (event["pid"], event["tid"]) == (end["pid"], end["tid"])
            and event["ts"] <= end["ts"] < event["ts"] + event["dur"]
        ]
        assert len(place) == 1
    return pairs


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_of_two_ranks(tmp_path: Path, name: str) -> None:
    """The parts of a step are on a track of their own, one after the other, and arrows lead from the slow rank."""
    path = tmp_path / "new" / name
    run_ranks(traced, 2, path, timeout=60)
    events = read(path)
    ranks = ranks_of(events)
    assert sorted(ranks.values()) == ["rank 0", "rank 1"]
    parts = [event for event in events if event["name"].startswith("distwrap: ")]
    counts = Counter((ranks[each["pid"]], each["name"]) for each in parts)
    for rank in ("rank 0", "rank 1"):
        for part in ("data", "forward", "backward", "exchange", "optimizer"):
            assert counts[rank, f"distwrap: {part}"] == 2
        mine = sorted((each["ts"], each["ts"] + each["dur"]) for each in parts if ranks[each["pid"]] == rank)
        assert all(ends <= begins + 0.01 for (_, ends), (begins, _) in pairwise(mine))
    operators = {(event["pid"], event["tid"]) for event in events if event["name"].startswith("aten::")}
    assert operators
    assert operators.isdisjoint((each["pid"], each["tid"]) for each in parts)
    assert [(ranks[start["pid"]], ranks[end["pid"]]) for start, end in arrows_of(events)] == [("rank 0", "rank 1")] * 2


@pytest.mark.slow(MORE_RANKS)
def test_a_trace_of_eight_ranks(tmp_path: Path) -> None:
    run_ranks(traced, 8, tmp_path / "trace.json", range(1, 3), timeout=100)
    events = read(tmp_path / "trace.json")
    assert sorted(ranks_of(events).values()) == [f"rank {rank}" for rank in range(8)]
    assert len(arrows_of(events)) == 14


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (range(2), ""),
        (range(10, 30), "trace(): not all of 10 to 29 are in trace.json: the loop took 24 step(s) on rank 0"),
        (range(24, 25), "trace(): no file is written: the loop took 24 step(s), counted from 0, and none of 24 to 24"),
        (
            range(100, 101),
            "trace(): no file is written: the loop took 24 step(s), counted from 0, and none of 100 to 100",
        ),
    ],
)
def test_ranges_of_one_rank(
    steps: range, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first step, or beyond the loop's end, or nothing at all."""
    monkeypatch.delenv("DISTWRAP_QUIET", raising=False)
    with dw.trace(steps=steps, path=str(tmp_path / "trace.json")):
        loops.train()
    written = f"trace(): {tmp_path / 'trace.json'} was written; open it in https://ui.perfetto.dev"
    said = [*filter(None, [words]), *([written] if steps.start < 24 else [])]
    lines = [line for line in capfd.readouterr().err.splitlines() if "trace()" in line]
    assert lines == [f"distwrap: {line}" for line in said]
    assert (tmp_path / "trace.json").exists() == (steps.start < 24)
    if steps.start < 24:
        steppings = [event for event in read(tmp_path / "trace.json") if event["name"] == "distwrap: optimizer"]
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
    """The others are in the file."""
    run_ranks(leave_early, 2, tmp_path / "trace.json", timeout=60)
    assert set(ranks_of(read(tmp_path / "trace.json")).values()) == {"rank 1"}
    assert "not all of 1 to 2 are in trace.json: the loop took 1 step(s) on rank 0" in capfd.readouterr().err


def accumulate_and_evaluate(path: Path) -> None:
    model = dw.wrap_model(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dw.trace(steps=range(1, 3), path=path):
        for step, (x, window) in enumerate(dw.accumulate([torch.ones(1, 2)] * 8, 2, model)):
            time.sleep(0.05 * dw.rank())  # or each may have what it needs before the other looks for it
            model(x).sum().backward()
            if window.last:
                optimizer.step()
            if step % 4 == 3:
                with torch.no_grad():
                    model(x)


def test_windows_and_evaluation(tmp_path: Path) -> None:
    """A step is a window, and what exchanges nothing has no arrow that leads back in time."""
    run_ranks(accumulate_and_evaluate, 2, tmp_path / "trace.json", timeout=60)
    events = read(tmp_path / "trace.json")
    assert arrows_of(events)
    names = Counter(event["name"] for event in events)
    assert names["distwrap: evaluation"] == 2
    assert names["distwrap: optimizer"] == 4


def refused(folder: Path) -> list[str]:
    """Return the words of all ranks for paths that cannot be written, each before its loop runs."""
    words = []
    for path in (folder, folder / "file" / "trace.json"):
        with pytest.raises(OptionError) as error, dw.trace(path=path):
            raise AssertionError("the loop runs")
        words.append(str(error.value))
    with dw.trace(path=folder / "own.json"), pytest.raises(OptionError) as error, dw.trace(path=folder / "inner.json"):
        raise AssertionError("the loop runs")
    return [*words, str(error.value)]


def test_what_is_refused(tmp_path: Path) -> None:
    """On every rank, before the loop runs: what cannot be written, and a trace within another."""
    (tmp_path / "file").write_text("")
    for folder, in_file, inner in run_ranks(refused, 2, tmp_path, timeout=60):
        assert folder.startswith(f"trace(path={str(tmp_path)!r}) cannot be written: [Errno 21] Is a directory")
        assert in_file.startswith(f"trace(path={str(tmp_path / 'file' / 'trace.json')!r}) cannot be written: [Errno ")
        assert inner == "trace(): a trace is being made already, by an outer trace()."
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_path_is_that_of_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with dw.trace(steps=range(1, 2), path="trace.json"):
        os.chdir("elsewhere")
        loops.train()
    assert read(tmp_path / "trace.json")


def test_nothing_stays(tmp_path: Path) -> None:
    """Neither after a trace, nor after an exception within it, nor is there a file then."""
    before = (torch.save, torch.autograd.backward)
    with pytest.raises(ZeroDivisionError), dw.trace(steps=range(1, 100), path=tmp_path / "trace.json"):
        loops.train(each=lambda step, model: step // (step - 5))
    assert not (tmp_path / "trace.json").exists()
    assert not torch.autograd.profiler._is_profiler_enabled
    assert (torch.save, torch.autograd.backward) == before
    with dw.report() as found, dw.trace(steps=range(1, 2), path=tmp_path / "trace.json"), torch.enable_grad():
        loops.train()
    assert found.figures["steps"] == 23
    with dw.trace(steps=range(1, 2), path=tmp_path / "trace.json"), dw.report() as found:
        loops.train()
    assert found.figures["steps"] in (23, 24)
    assert read(tmp_path / "trace.json")
    assert (torch.save, torch.autograd.backward) == before


@pytest.mark.parametrize("steps", [range(0), range(3, 1), range(0, 9, 2), range(-1, 3), 3, [1, 2]])
def test_no_range_of_steps(steps: Any) -> None:
    with pytest.raises(OptionError, match="it must be a range of steps"), dw.trace(steps=steps):
        pass


@pytest.mark.parametrize("path", [None, 3])
def test_no_path(path: Any) -> None:
    with pytest.raises(OptionError, match="it must be the path of a file"), dw.trace(path=path):
        pass


def trace_of(base: int, ts: float, *begins: float) -> bytes:
    name = "distwrap: exchange"
    own = {
        "baseTimeNanoseconds": base,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": ts, "args": {"name": "python"}},
            {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 1, "pid": 7, "tid": 7, "ts": ts},
            {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": ts},
            *(
                {"ph": "X", "cat": "user_annotation", "name": name, "pid": 7, "tid": 7, "ts": each, "dur": 10.0}
                for each in begins
            ),
        ],
    }
    return zlib.compress(json.dumps(own).encode())


def events_of(ranks: list[RankTrace], *traces: bytes) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads("".join(merged(ranks, traces)))["traceEvents"]
    return events


def test_clocks_of_two_hosts() -> None:
    """What one clock is ahead is taken off, also where both hosts have one name; arrows of ranks are told apart."""
    ranks = [RankTrace(0, 5, True, "localhost", "a", 0.0), RankTrace(1, 5, True, "localhost", "b", 1.5)]
    events = events_of(ranks, trace_of(2000, 100.0, 100.0), trace_of(1000, 1_500_101.0, 1_500_106.0))
    exchanges = [event["ts"] for event in events if event["name"] == "distwrap: exchange"]
    assert exchanges == pytest.approx([100.0, 105.0])
    assert len({each["id"] for each in events if each["ph"] in "sf"}) == 3
    last = [(each["pid"], each["ph"], each["ts"]) for each in events[-2:]]
    assert last == [(1000, "s", pytest.approx(105.0)), (0, "f", pytest.approx(110.0, abs=0.02))]
    assert not [event for event in events if event["name"] == "Record Window End"]


def test_ranks_with_other_numbers_of_exchanges() -> None:
    """None knows then which belong together."""
    ranks = [RankTrace(rank, 5, True, "localhost", "a", 0.0) for rank in (0, 1)]
    events = events_of(ranks, trace_of(0, 0.0, 0.0, 50.0), trace_of(0, 0.0, 50.0))
    assert "waits for the last rank" not in {event["name"] for event in events}


@pytest.mark.parametrize(("begins", "arrows"), [(105.0, 1), (110.5, 1), (500.0, 0)])
def test_who_has_waited(begins: float, arrows: int) -> None:
    """Also where the last rank's share was there shortly before its part began; not where all went on by themselves."""
    ranks = [RankTrace(rank, 5, True, "localhost", "a", 0.0) for rank in (0, 1)]
    assert len(arrows_of(events_of(ranks, trace_of(0, 0.0, 100.0), trace_of(0, 0.0, begins)))) == arrows
