"""A checkpoint is on disk before it takes its name, and takes it in one step: a power cut leaves the old or the new."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import distwrap as dw
from distwrap.checkpoint import SafetensorsIO
from distwrap.cli import main
from distwrap.testing import run_ranks
from tests.checkpoint.test_streaming import made, stepped


class Event(NamedTuple):
    """A file or folder that was synced to disk, with its size then, or that took another's name."""

    what: str
    path: str
    size: int = 0
    target: str = ""


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    return recorded(monkeypatch)


def recorded(patch: pytest.MonkeyPatch) -> list[Event]:
    """Record from now on what this process syncs and renames."""
    found: list[Event] = []
    sync, moves = os.fsync, {"replace": os.replace, "rename": os.rename}

    def note_sync(descriptor: int) -> None:
        sync(descriptor)
        found.append(Event("sync", os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size))

    def note_move(what: str, source: Any, target: Any) -> None:
        moves[what](source, target)
        found.append(Event(what, str(source), target=str(target)))

    patch.setattr(os, "fsync", note_sync)
    for what in moves:
        patch.setattr(os, what, lambda source, target, what=what: note_move(what, source, target))
    return found


def is_durable(events: list[Event], path: Path) -> bool:
    """Return whether all of a file or folder was synced before it took its name, by one move, and the name after."""
    [at] = [number for number, event in enumerate(events) if event.target == str(path)]
    synced = {event.path: event.size for event in events[:at] if event.what == "sync"}
    if path.is_file():
        whole = events[at].what == "replace" and synced.get(events[at].path) == path.stat().st_size
    else:
        parts = [part for part in path.rglob("*") if part.is_file()]
        source = Path(events[at].path)
        sizes = [synced.get(str(source / part.relative_to(path))) == part.stat().st_size for part in parts]
        whole = bool(parts) and all(sizes) and str(source) in synced
    return whole and str(path.parent) in {event.path for event in events[at:] if event.what == "sync"}


STATE = {"weight": torch.arange(6.0), "bias": torch.ones(3)}


def strip(path: Path) -> None:
    torch.save({f"module.{name}": value for name, value in STATE.items()}, path.with_name("in.pt"))
    assert main(["strip", str(path.with_name("in.pt")), str(path), "--force"]) == 0


WAYS: dict[str, Callable[[Path], object]] = {
    "a.pt": lambda path: dw.save(STATE, path),
    "b.pt": lambda path: dw.save(STATE, path, background=True),
    "c.safetensors": lambda path: dw.save(STATE, path),
    "d.safetensors": lambda path: dw.save(STATE, path, background=True),
    "folder": lambda path: dw.save(STATE, path, io=SafetensorsIO(max_shard_size=16)),
    "parts": lambda path: dw.save(STATE, path, io="sharded"),
    "in background": lambda path: dw.save(STATE, path, io="sharded", background=True),
    "e.pt": strip,
}


@pytest.mark.parametrize("name", WAYS)
def test_it_is_on_disk_before_it_has_its_name(name: str, tmp_path: Path, events: list[Event]) -> None:
    """By each way to write one, the first time and in the place of another."""
    for _ in range(2):
        events.clear()
        WAYS[name](tmp_path / name)
        dw.wait_for_saves()
        assert is_durable(events, tmp_path / name), events


@pytest.mark.parametrize("name", WAYS)
def test_the_old_one_is_replaced_and_never_written_to(name: str, tmp_path: Path) -> None:
    """Whoever has it open, or has linked it, goes on to read what it was."""
    path = tmp_path / name
    WAYS[name](path)
    dw.wait_for_saves()
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    for number, file in enumerate(files):
        os.link(file, tmp_path / f"old{number}")
    before = [file.read_bytes() for file in files]
    for value in STATE.values():
        value += 1
    WAYS[name](path)
    dw.wait_for_saves()
    assert [(tmp_path / f"old{number}").read_bytes() for number in range(len(files))] == before
    assert [file.read_bytes() for file in files if file.exists()] != before


def test_predecessors_and_the_link_to_the_latest_have_their_names_at_once(tmp_path: Path, events: list[Event]) -> None:
    """They are replaced too, so that each name always has a whole file."""
    for step in (1, 2):
        dw.save(STATE, tmp_path / "last.pt", keep=2)
        dw.save(STATE, tmp_path / f"step-{step}.pt", keep=1)
    moved = [Path(event.target).name for event in events if event.what == "replace"]
    assert moved.count("last.pt") == moved.count("step-latest.pt") == 2
    assert moved.count("last.pt.1") == 1


def save_pieces(folder: Path) -> list[bool]:
    """Save a divided model to a file, now and in the background; return on rank 0 whether that was durable."""
    events = recorded(patch := pytest.MonkeyPatch())
    model, optimizer = made()
    stepped(model, optimizer)
    names = ("now.pt", "later.pt", "now.safetensors")
    for name in names:
        dw.save(model, folder / name, background=name.startswith("later"))
        dw.wait_for_saves()
    patch.undo()
    return [is_durable(events, folder / name) for name in names if dw.rank() == 0]


@pytest.mark.slow("imports FSDP")
def test_a_file_of_pieces_is_on_disk_before_it_has_its_name(tmp_path: Path) -> None:
    """Also where the tensors come to rank 0 one at a time."""
    assert run_ranks(save_pieces, 2, tmp_path, timeout=60) == [[True] * 3, []]
