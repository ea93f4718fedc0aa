"""Checkpoints in series, in the background, in parts, as safetensors, and back into objects."""

from __future__ import annotations

import copy
import io
import os
import pickle
import random
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint
from torch import nn

import distwrap as dw
from distwrap.checkpoint import files, saving
from distwrap.checkpoint.formats import FileIO
from distwrap.checkpoint.plain import Staging
from distwrap.errors import CheckpointError, OptionError
from distwrap.group.world import current_world
from distwrap.precision import LossScaling
from distwrap.testing import run_ranks


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# Series


def test_a_numbered_series_keeps_the_newest_and_points_to_the_latest(tmp_path: Path) -> None:
    """Of a name with a number the highest are kept; the link names the last that is complete; others are let be."""
    for other in ("step-note.pt", "best-1.pt", "step-1.txt"):
        (tmp_path / other).write_text("mine")
    for step in (5, 9, 10, 100):
        dw.save({"step": step}, tmp_path / f"step-{step}.pt", keep=3)
        assert dw.load(tmp_path / "step-latest.pt") == {"step": step}
    kept = ["step-10.pt", "step-100.pt", "step-9.pt", "step-latest.pt"]
    assert names(tmp_path) == sorted([*kept, "step-note.pt", "best-1.pt", "step-1.txt"])
    assert os.readlink(tmp_path / "step-latest.pt") == "step-100.pt"
    dw.save({"step": 7}, tmp_path / "step-7.pt", keep=3)  # gone back, and saved again
    assert dw.load(tmp_path / "step-latest.pt") == {"step": 7}
    assert (tmp_path / "step-7.pt").exists()
    assert dw.resume_from(tmp_path / "step-latest.pt") == {"step": 7}


def test_predecessors_of_one_name_are_kept(tmp_path: Path) -> None:
    """Of a name without a number the file before is ``.1``, and so on; without ``keep`` there is one file."""
    for step in range(5):
        dw.save({"step": step}, tmp_path / "last.pt", keep=3)
    assert names(tmp_path) == ["last.pt", "last.pt.1", "last.pt.2"]
    assert [dw.load(tmp_path / name)["step"] for name in names(tmp_path)] == [4, 3, 2]
    dw.save({"step": 5}, tmp_path / "last.pt")
    assert dw.load(tmp_path / "last.pt.1")["step"] == 3


@pytest.mark.parametrize("keep", [0, -1, True, 2.0, "3"])
def test_a_wrong_keep_is_refused(tmp_path: Path, keep: Any) -> None:
    """Nothing is written for a number that is none."""
    with pytest.raises(OptionError, match="whole number"):
        dw.save(1, tmp_path / "a.pt", keep=keep)
    assert not names(tmp_path)


# In the background


class Slow(FileIO):
    """A file that takes its time, or until it is let go, and may fail."""

    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.seconds, self.error = seconds, error
        self.go = threading.Event()
        self.go.set()
        self.began: list[float] = []
        self.ended: list[float] = []

    def save(self, state: Any, path: Path) -> None:
        self.began.append(time.monotonic())
        assert self.go.wait(20)
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        super().save(state, path)
        self.ended.append(time.monotonic())


def test_background_saves_what_was_there_at_the_call(tmp_path: Path) -> None:
    """The call returns before anything is written; training that goes on does not change what is."""

    def on_rank() -> None:
        weights = torch.zeros(1000)
        held = Slow()
        held.go.clear()
        dw.save({"weights": weights, "step": 0}, tmp_path / "s0.pt", background=True, io=held)
        weights.fill_(-1)
        assert not (tmp_path / "s0.pt").exists()
        dw.barrier()
        held.go.set()
        dw.wait_for_saves()
        assert len(held.ended) == (1 if dw.is_rank_zero() else 0)

    run_ranks(on_rank, 2)
    assert (dw.load(tmp_path / "s0.pt")["weights"] == 0).all()


def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    """One state at a time is in memory beside training's own; all of them are complete."""

    def on_rank() -> None:
        weights, slow = torch.zeros(1000), Slow(0.1)
        for step in range(3):
            weights.fill_(step)
            dw.save({"weights": weights, "step": step}, tmp_path / f"s{step}.pt", background=True, io=slow)
            weights.fill_(-1)
        dw.wait_for_saves()
        assert all(began >= ended for began, ended in zip(slow.began[1:], slow.ended, strict=False))
        assert len(slow.ended) == (3 if dw.is_rank_zero() else 0)

    run_ranks(on_rank, 2)
    for step in range(3):
        state = dw.load(tmp_path / f"s{step}.pt")
        assert state["step"] == step
        assert (state["weights"] == step).all()


def test_a_save_in_the_foreground_does_not_overtake(tmp_path: Path) -> None:
    """A plain save of the same name waits for the one in the background."""

    def on_rank() -> None:
        dw.save(1, tmp_path / "a.pt", background=True, io=Slow(0.3))
        dw.save(2, tmp_path / "a.pt")

    run_ranks(on_rank, 2)
    assert dw.load(tmp_path / "a.pt") == 2


@pytest.mark.parametrize("where", ["save", "wait", "end"])
def test_a_failure_in_the_background_reaches_every_rank(tmp_path: Path, where: str) -> None:
    """It is raised by the next save or wait on all ranks, or at the end of the function, and the old file is there."""
    dw.save("old", tmp_path / "a.pt")

    def on_rank() -> str:
        dw.save("new", tmp_path / "a.pt", background=True, io=Slow(0.1, OSError(28, "No space left on device")))
        if where == "end":
            return ""
        with pytest.raises(CheckpointError) as failure:
            dw.save("next", tmp_path / "b.pt") if where == "save" else dw.wait_for_saves()
        return str(failure.value)

    if where == "end":
        with pytest.raises(CheckpointError, match=r"background.*No space"):
            run_ranks(on_rank, 2)
    else:
        assert all("No space left on device" in text for text in run_ranks(on_rank, 2))
    assert dw.load(tmp_path / "a.pt") == "old"
    assert names(tmp_path) == ["a.pt"]


def test_the_end_of_the_function_waits(tmp_path: Path) -> None:
    """What is still being written when the function returns, in several processes or one, is complete afterwards."""
    for nprocs in (1, 2):
        path = tmp_path / f"{nprocs}.pt"
        run_ranks(lambda path=path: dw.save(1, path, background=True, io=Slow(0.1)), nprocs)
        assert dw.load(path) == 1
    assert not [thread for thread in threading.enumerate() if "checkpoint" in thread.name]


def test_staging_is_used_again_and_keeps_shared_memory(tmp_path: Path) -> None:
    """Copies go into the memory of the last ones; tied weights, views and parameters stay what they are."""
    base = torch.arange(6.0)
    state = {"a": base, "view": base[2:].view(2, 2), "again": [base], "p": nn.Parameter(torch.ones(2)), "n": 3}
    state["t"] = base.view(2, 3).t()
    staging = Staging()
    first = staging.copied(state)
    storages = {storage.data_ptr() for storage in staging._storages}
    base += 1
    assert first["a"].tolist() == list(range(6))
    assert first["a"].untyped_storage().data_ptr() == first["view"].untyped_storage().data_ptr()
    assert isinstance(first["p"], nn.Parameter)
    assert first["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    second = staging.copied(state)
    assert {storage.data_ptr() for storage in staging._storages} == storages
    assert second["a"].tolist() == list(range(1, 7))
    dw.save(second, tmp_path / "a.pt")
    loaded = dw.load(tmp_path / "a.pt")
    assert loaded["again"][0].data_ptr() == loaded["a"].data_ptr()
    odd = staging.copied({"e": torch.empty(0, 2), "s": torch.eye(2).to_sparse()})
    assert odd["e"].shape == (0, 2)
    assert odd["s"].to_dense().tolist() == [[1, 0], [0, 1]]


# In parts


def everything(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = dw.local_model(nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 40)).pow(3).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "epoch": seed, "half": torch.ones(3, dtype=torch.bfloat16) * seed}


def test_every_rank_writes_a_part_and_any_number_reads(tmp_path: Path) -> None:
    """A folder to which two ranks write is read by one process, by three ranks, and into fresh objects."""

    def write() -> None:
        state = everything(3)
        dw.save({**state, "model": dw.wrap_model(state["model"])}, tmp_path / "parts", io="sharded")

    def read() -> None:
        into = everything(4)
        loaded = dw.load(tmp_path / "parts", into={"model": into["model"], "optimizer": into["optimizer"]})
        expected = everything(3)
        assert loaded["epoch"] == 3
        assert loaded["half"].tolist() == [3, 3, 3]
        assert loaded["half"].dtype == torch.bfloat16
        for name, value in expected["model"].state_dict().items():
            torch.testing.assert_close(into["model"].state_dict()[name], value)
        ours, theirs = into["optimizer"].state_dict(), expected["optimizer"].state_dict()
        torch.testing.assert_close(ours["state"][0]["momentum_buffer"], theirs["state"][0]["momentum_buffer"])

    run_ranks(write, 2, timeout=60)
    parts = [name for name in names(tmp_path / "parts") if name.endswith(".distcp")]
    assert len(parts) == 2
    read()
    run_ranks(read, 3, timeout=60)
    assert names(tmp_path) == ["parts"]


def test_sharded_checkpoints_are_replaced_and_kept_in_series(tmp_path: Path) -> None:
    """A folder is replaced whole; a numbered series of them is kept as files are."""

    def write() -> None:
        for step in (1, 2, 3):
            dw.save({"step": step, "w": torch.full((4,), step)}, tmp_path / "one", io="sharded")
            dw.save({"step": step}, tmp_path / f"s-{step}", io="sharded", keep=2)
        assert dw.load(tmp_path / "one")["w"].tolist() == [3.0] * 4

    run_ranks(write, 2, timeout=60)
    assert names(tmp_path) == ["one", "s-2", "s-3", "s-latest"]
    os.rename(tmp_path / "one", tmp_path / ".one.previous")  # as a power cut between two renames leaves it
    assert dw.load(tmp_path / "one")["step"] == 3


def test_a_sharded_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    """A table of contents that names anything else than its own classes is refused."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    dw.save({"w": torch.ones(2)}, tmp_path / "a", io="sharded")
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match="no place"):
        dw.load(tmp_path / "a")
    assert not (tmp_path / "exploded").exists()


def test_parts_of_a_users_own_format_are_not_written_in_the_background(tmp_path: Path) -> None:
    """It is the work of all ranks together."""
    with pytest.raises(OptionError, match="all ranks write"):
        dw.save({}, tmp_path / "a", io=OwnParts(), background=True)


def test_a_failing_part_is_everybodys_error(tmp_path: Path) -> None:
    """What one rank cannot write is raised on all of them, and nothing has the name."""

    def on_rank() -> str:
        state = {"x": object()} if dw.rank() == 1 else {"x": torch.ones(1)}
        with pytest.raises(CheckpointError) as failure:
            dw.save(state, tmp_path / "a", io=OwnParts())
        return str(failure.value)

    texts = run_ranks(on_rank, 2, timeout=30)
    assert all("was not written by rank 1 on" in text and "state['x'] is a builtins.object" in text for text in texts)
    assert not (tmp_path / "a").exists()


class OwnParts:
    """A format of a user's own, a file a rank."""

    collective = True

    def save(self, state: Any, path: Path) -> None:
        torch.save(state, path / f"{dw.rank()}.pt")

    def load(self, path: Path, map_location: Any) -> Any:
        return torch.load(path / f"{dw.rank()}.pt", map_location=map_location, weights_only=True)


def test_a_format_of_ones_own(tmp_path: Path) -> None:
    """An object with ``save``, ``load`` and ``collective`` is a format."""

    def on_rank() -> int:
        assert isinstance(OwnParts(), dw.CheckpointIO)
        dw.save({"rank": dw.rank()}, tmp_path / "own", io=OwnParts())
        found: int = dw.load(tmp_path / "own", io=OwnParts())["rank"]
        return found

    assert run_ranks(on_rank, 2) == [0, 1]
    with pytest.raises(CheckpointError, match="Known: auto"):
        dw.save(1, tmp_path / "a", io="tar")


# Safetensors


def test_a_model_as_safetensors(tmp_path: Path) -> None:
    """By its suffix a model is written as safetensors, tied weights and views too, and read back into any wrapper."""
    pytest.importorskip("safetensors")

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

    net = Tied().to(torch.bfloat16)
    run_ranks(lambda: dw.save(dw.wrap_model(net), tmp_path / "a.safetensors"), 2)
    loaded = dw.load(tmp_path / "a.safetensors")
    assert sorted(loaded) == ["a.weight", "b.weight"]
    assert loaded["a.weight"].dtype == torch.bfloat16
    twin = Tied().to(torch.bfloat16)
    dw.load(tmp_path / "a.safetensors", into=nn.DataParallel(twin))
    assert torch.equal(twin.a.weight, net.a.weight)
    with pytest.raises(CheckpointError, match="dict of names"):
        dw.save({"model": net, "epoch": 1}, tmp_path / "b.safetensors")
    assert names(tmp_path) == ["a.safetensors"]


# Back into objects


def test_into_tells_what_is_missing(tmp_path: Path) -> None:
    """An object for which nothing was saved is named with its place; what else was saved is returned."""
    model = nn.Linear(1, 1)
    dw.save({"nets": [model, {"deep": model}], "epoch": 4}, tmp_path / "a.pt")
    twin, deep = nn.Linear(1, 1), nn.Linear(1, 1)
    assert dw.load(tmp_path / "a.pt", into={"nets": [twin, {"deep": deep}]})["epoch"] == 4
    assert torch.equal(twin.weight, model.weight)
    assert torch.equal(deep.weight, model.weight)
    with pytest.raises(CheckpointError, match=r"\['nets'\]\[1\]\['deeper'\]. It has: 'deep'"):
        dw.load(tmp_path / "a.pt", into={"nets": [twin, {"deeper": deep}]})
    with pytest.raises(CheckpointError, match="list of 1"):
        dw.load(tmp_path / "a.pt", into={"nets": [twin]})
    with pytest.raises(RuntimeError, match="size mismatch"):
        dw.load(tmp_path / "a.pt", into={"nets": [nn.Linear(2, 2), {}]})


def test_run_state_gives_every_rank_its_random_numbers_back(tmp_path: Path) -> None:
    """torch, ``random`` and numpy go on on each rank as if nothing had been; also where there are more ranks now."""

    def draw() -> list[float]:
        return [torch.rand(1).item(), random.random(), float(numpy.random.rand())]

    def on_rank() -> None:
        torch.manual_seed(dw.rank())
        random.seed(dw.rank())
        numpy.random.seed(dw.rank())
        random.gauss(0, 1)
        numpy.random.randn()
        dw.save({"run": dw.run_state()}, tmp_path / "a.pt")
        expected = draw()
        draw()
        dw.load(tmp_path / "a.pt", into={"run": dw.run_state()})
        assert draw() == expected

    run_ranks(on_rank, 2)

    def more() -> list[float]:
        dw.load(tmp_path / "a.pt", into={"run": dw.run_state()})
        return draw()

    zero, one, two = run_ranks(more, 3)
    assert zero == two != one


def test_the_scale_of_fp16_is_part_of_the_run(tmp_path: Path) -> None:
    """The scaler's state, with an update that is due, goes on; another precision is refused."""

    def train(steps: int, *, load: bool) -> list[float]:
        torch.manual_seed(0)
        model = dw.wrap_model(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        current_world().part(LossScaling).scaler = torch.amp.GradScaler(
            "cpu", init_scale=64.0
        )  # at which nothing here overflows
        if load:
            dw.load(tmp_path / "a.pt", into={"model": model, "run": dw.run_state()})
        scales = []
        for step in range(steps):
            optimizer.zero_grad()
            factor = float("inf") if step == steps - 1 and not load else 1.0
            dw.backward(model(torch.ones(1, 2)).sum() * factor)
            scales.append(current_world().part(LossScaling).scaler.get_scale())  # type: ignore[union-attr]
            dw.optimizer_step(optimizer)
        dw.save({"model": model, "run": dw.run_state()}, tmp_path / "a.pt")
        return scales

    fp16 = dw.distributed(nprocs=2, precision="fp16", launcher="forkserver", timeout=30)(train)
    assert fp16(3, load=False) == [64.0] * 3
    assert fp16(1, load=True) == [32.0]

    def other() -> None:
        with pytest.raises(CheckpointError, match="with a gradient"):
            dw.load(tmp_path / "a.pt", into={"run": dw.run_state()})

    run_ranks(other, 2)


def test_run_state_on_rank_zero_alone_is_refused(tmp_path: Path) -> None:
    """Every rank's random numbers are wanted, so a save in a rank-zero function is an error, not a hang."""

    def on_rank() -> None:
        saved = dw.rank_zero_only(lambda: dw.save({"run": dw.run_state()}, tmp_path / "a.pt"))
        if dw.is_rank_zero():
            with pytest.raises(dw.DistwrapError, match="rank"):
                saved()
        else:
            saved()

    run_ranks(on_rank, 2, timeout=30)


def test_restore_ignores_what_is_no_object() -> None:
    """Counters in the nesting are the loop's to take from what is returned."""
    state = {"epoch": 3, "model": nn.Linear(1, 1).state_dict()}
    saving.load_into({"epoch": 0, "model": nn.Linear(1, 1)}, copy.deepcopy(state))


def test_a_sharded_checkpoint_has_the_names_of_its_tensors(tmp_path: Path) -> None:
    """Other tools read it with torch's distributed checkpoint alone; names that would be alike are told apart."""
    saved, loaded = nn.Linear(3, 2), nn.Linear(3, 2)
    odd = {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}
    dw.save({"model": saved, "odd": odd, "step": 3, "": {"root": torch.ones(1)}}, tmp_path / "parts", io="sharded")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = {"model": loaded.state_dict(), "root": torch.zeros(1)}
        torch.distributed.checkpoint.load(names, checkpoint_id=tmp_path / "parts")
    assert torch.equal(saved.weight, loaded.weight)
    assert dw.load(tmp_path / "parts")["odd"]["a"]["b"].tolist() == [0, 0]


class _AsAttribute:
    """A member of a class as its attribute, as the first releases of Python 3.11 pickle those of enumerations."""

    def __init__(self, kind: type, name: str) -> None:
        self._parts = kind, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self._parts


def test_a_table_of_contents_of_any_python() -> None:
    """A table of contents whose enumerations are attributes is read; an attribute of anything else is refused."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

    from distwrap.checkpoint.safe_reader import _Contents

    wanted = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    assert _Contents(io.BytesIO(pickle.dumps(_AsAttribute(_MEM_FORMAT_ENCODING, wanted.name)))).load() is wanted
    for kind, name in ((_MEM_FORMAT_ENCODING, "__init__"), (Metadata, "__init__")):
        with pytest.raises(pickle.UnpicklingError, match="has no place"):
            _Contents(io.BytesIO(pickle.dumps(_AsAttribute(kind, name)))).load()


class Tied(torch.nn.Module):
    """Words go in and out by one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
        self.out.weight = self.words.weight


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow("imports FSDP"))])
def test_a_tied_model_loads_a_folder_with_one_of_its_names(tmp_path: Path, strategy: str) -> None:
    """Hugging Face's files leave the others out; what is tied to nothing is still missed."""
    weight = torch.arange(15.0).reshape(5, 3)
    dw.save({"words.weight": weight}, tmp_path / "net", io="safetensors")
    plain = Tied()
    dw.load(tmp_path / "net", into=plain)
    assert torch.equal(plain.out.weight, weight)
    assert plain.out.weight is plain.words.weight

    def on_rank() -> None:
        model = dw.wrap_model(Tied(), strategy=strategy)
        dw.load(tmp_path / "net", into=model)
        dw.save(model, tmp_path / "whole.pt")

    run_ranks(on_rank, 2)
    assert torch.equal(dw.load(tmp_path / "whole.pt")["out.weight"], weight)
    with pytest.raises(RuntimeError, match="Missing key"):
        dw.load(tmp_path / "net", into=torch.nn.ModuleDict({"words": plain.words, "more": torch.nn.Linear(1, 1)}))


def test_a_folder_of_torchs_names_the_command_that_converts_it(tmp_path: Path) -> None:
    """It is no checkpoint that load() reads."""
    (tmp_path / "of_fsdp").mkdir()
    (tmp_path / "of_fsdp" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"distwrap convert-checkpoint .*of_fsdp model\.pt"):
        dw.load(tmp_path / "of_fsdp")


def test_predecessors_are_kept_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that has none, where they are copied."""

    def refuse(*args: Any, **options: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    for step in range(4):
        dw.save({"step": step}, tmp_path / "last.pt", keep=3)
    assert [dw.load(tmp_path / f"last.pt{end}")["step"] for end in ("", ".1", ".2")] == [3, 2, 1]
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.parametrize("background", [False, True])
def test_an_error_after_the_new_name_does_not_say_that_nothing_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """The folder cannot be synced, where the file is there already."""
    sync = files._sync

    def failing(path: Path) -> None:
        if path == tmp_path:
            raise OSError(5, "Input/output error")
        sync(path)

    dw.save(1, tmp_path / "a.pt")
    monkeypatch.setattr(files, "_sync", failing)

    def save() -> None:
        dw.save(2, tmp_path / "a.pt", background=background)
        dw.wait_for_saves()

    with pytest.raises(CheckpointError, match=r"is written, but then rank 0 .*Input/output error") as raised:
        save()
    assert "untouched" not in str(raised.value)
    assert dw.load(tmp_path / "a.pt") == 2
