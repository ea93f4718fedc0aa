"""A trace of some steps: of all ranks, in one file, on one clock."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import distwrap as dw
from distwrap.errors import OptionError
from distwrap.testing import run_ranks
from distwrap.timing.trace import merged
from tests.timing import loops


def traced(path: Path) -> None:
    with dw.trace(steps=range(3, 5), path=path):
        loops.slow_forward_on_one()


def test_a_trace_of_two_ranks(tmp_path: Path) -> None:
    run_ranks(traced, 2, tmp_path / "trace.json", timeout=60)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    tracks = {track: name.split(" on ")[0] for track, name in names.items()}
    parts = Counter((tracks[each["pid"]], each["name"]) for each in events if each["name"].startswith("distwrap: "))
    for rank in ("rank 0", "rank 1"):
        for part in ("data", "forward", "backward", "exchange", "optimizer"):
            assert parts[rank, f"distwrap: {part}"] == 2
    arrows = [each for each in events if each["name"] == "waits for the last rank"]
    assert [(tracks[each["pid"]], each["ph"]) for each in arrows] == [("rank 0", "s"), ("rank 1", "f")] * 2
    assert any("aten::" in event["name"] for event in events)


def test_a_loop_that_ends_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with dw.trace(steps=range(100, 101), path=tmp_path / "trace.json"):
        loops.train()
    assert not (tmp_path / "trace.json").exists()


@pytest.mark.parametrize("steps", [range(0), range(3, 1), range(0, 9, 2), range(-1, 3), 3, [1, 2]])
def test_no_range_of_steps(steps: Any) -> None:
    with pytest.raises(OptionError, match="it is a range of steps"), dw.trace(steps=steps):
        pass


def trace_of(base: int, ts: float, begins: float) -> dict[str, Any]:
    return {
        "baseTimeNanoseconds": base,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 7, "tid": 7, "ts": ts, "args": {"name": "python"}},
            {"ph": "X", "name": "distwrap: exchange", "pid": 7, "tid": 7, "ts": begins, "dur": 10.0},
            {"ph": "s", "name": "fwdbwd", "id": 1, "pid": 7, "tid": 7, "ts": ts},
        ],
    }


def test_clocks_of_two_hosts() -> None:
    """What one clock is ahead is taken off, and arrows of one rank never end on another by their number alone."""
    whole = merged([("a", 0.0, trace_of(2000, 100.0, 100.0)), ("b", 1.5, trace_of(1000, 1_500_101.0, 1_500_106.0))])
    exchanges = [event["ts"] for event in whole["traceEvents"] if event["name"] == "distwrap: exchange"]
    assert exchanges == pytest.approx([101.0, 106.0])
    arrows = {(each["ph"], each["id"]): each["ts"] for each in whole["traceEvents"] if each["ph"] in "sf"}
    assert len(arrows) == 4
    last = [(each["pid"], each["ph"], each["ts"]) for each in whole["traceEvents"][-2:]]
    assert last == [(1000, "s", pytest.approx(106.0)), (0, "f", pytest.approx(111.0))]
