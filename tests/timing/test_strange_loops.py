"""Loops that are not as others are: what a report measures of them is right, and none fails by it."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap.errors import OptionError
from distwrap.stopwatch import HostClock, Part, Stopwatch
from distwrap.testing import run_ranks
from distwrap.timing.instruments import Instruments


def steps(count: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(count):
        model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def test_the_losses_of_a_generator() -> None:
    """All of them have a backward, with a report as without."""
    model = nn.Linear(4, 1)
    grads = []
    for _ in range(2):
        model.zero_grad()
        torch.autograd.backward(model(factor * torch.ones(4)) for factor in (1, 2))
        grads.append(model.weight.grad)
        with dw.report():
            model.zero_grad()
            torch.autograd.backward(model(factor * torch.ones(4)) for factor in (1, 2))
            grads.append(model.weight.grad)
    assert all(torch.equal(grad, torch.full((1, 4), 3.0)) for grad in grads if grad is not None)
    assert None not in grads


def test_a_fork_is_not_timed() -> None:
    """As a loader's worker, which could not touch the accelerator whose clock it is."""
    watch = Stopwatch(HostClock())
    child = multiprocessing.get_context("fork").Process(target=_hears_nothing, args=(watch,))
    child.start()
    child.join(60)
    assert watch.hears()
    assert child.exitcode == 0


def _hears_nothing(watch: Stopwatch) -> None:
    assert not watch.hears()


def test_optimizers_that_are_made_anew() -> None:
    """Each has a first step, also where it lies in memory where the one before did."""
    with dw.report() as found:
        model = dw.wrap_model(nn.Linear(4, 1))
        for _ in range(4):
            optimizer = sgd(model)
            steps(3, model, optimizer)
            del optimizer
    assert found.figures["steps"] == 2 * 4


def test_nested_inputs() -> None:
    class Net(nn.Linear):
        def forward(self, nested: torch.Tensor) -> torch.Tensor:
            return torch.cat([super(Net, self).forward(each) for each in nested.unbind()])

    model = dw.wrap_model(Net(4, 1))
    optimizer = sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    with dw.report() as found:
        for _ in range(3):
            model(nested).sum().backward()
            optimizer.step()
    assert found.figures["ranks"][0]["samples"] == 2


def test_a_wait_for_a_cpu_after_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of the time counts, so that it is none of more than a step."""
    waited = iter(range(100))
    monkeypatch.setattr("distwrap.timing.instruments.queued_seconds", lambda: float(next(waited)))
    model = dw.wrap_model(nn.Linear(4, 1))
    with dw.report() as found:
        steps(3, model, sgd(model))
    assert 0 < found.figures["ranks"][0]["queued"] <= found.figures["step"]
    assert all(piece.gain is None or piece.gain <= 1 for piece in found.advice)


def test_a_model_that_is_not_wrapped() -> None:
    """Its forward counts as the loop's own code, and that is said."""
    model = nn.Sequential(nn.Linear(4, 1), Sleep())
    with dw.report() as found:
        steps(3, model, sgd(model))
    assert any("not wrapped by wrap_model()" in piece.text for piece in found.advice)
    model = dw.wrap_model(model)
    with dw.report() as found:
        steps(3, model, sgd(model))
    assert not any("not wrapped by wrap_model()" in piece.text for piece in found.advice)


class Sleep(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return x


def test_a_hook_of_the_users_that_raises() -> None:
    """The hooks of the report that come after it leave it alone."""

    def raises(*_: object) -> None:
        raise ZeroDivisionError

    model = nn.Linear(4, 1)
    hook = model.register_forward_pre_hook(raises)
    model = dw.wrap_model(model)
    with dw.report() as found, warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ZeroDivisionError):
            steps(1, model, sgd(model))
        hook.remove()
        steps(3, model, sgd(model))
    assert found.figures["steps"] == 2


def test_a_program_that_never_steps() -> None:
    """What it measures takes no memory for each batch."""
    model = dw.wrap_model(nn.Linear(4, 1))
    marks: list[Any] = []

    def follow(plain: Callable[[Instruments], None]) -> Callable[[Instruments], None]:
        def placed(instruments: Instruments) -> None:
            marks.append(instruments.stopwatch)
            plain(instruments)

        return placed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Instruments, "place", follow(Instruments.place))
        with dw.report() as found, torch.no_grad():
            for _ in range(3000):
                model(torch.ones(1, 4))
    assert found.figures == {}
    assert "must call it at least twice" in found.text()
    assert len(marks[0]._marks) <= 4096
    assert not marks[0]._waiting


def test_a_long_step_is_whole() -> None:
    """Its parts are, though what it consists of is not kept."""

    class Ticks(HostClock):
        time = 0

        def now(self) -> float:
            Ticks.time += 1
            return Ticks.time

    rows: list[list[float]] = []
    watch = Stopwatch(Ticks())
    watch.on_row.append(rows.append)
    for _ in range(2):
        for _ in range(5000):
            with watch.part(watch_part := Part.CHECKPOINT):
                pass
        watch.step()
    assert [row[watch_part] for row in rows] == [5000, 5000]
    assert [sum(row) for row in rows] == [10001, 10001]


def test_a_trace_within_a_profile(tmp_path: Path) -> None:
    """Two of torch's profilers at a time crash: that is said, on every rank, and the loop's profile goes on."""
    run_ranks(_within_a_profile, 2, tmp_path)


def _within_a_profile(tmp_path: Path) -> None:
    with torch.profiler.profile() as profile:
        with pytest.raises(OptionError, match="running already"), dw.trace(path=tmp_path / "trace.json"):
            pytest.fail("it began")
        torch.ones(1) + 1
    assert profile.key_averages()
    model = dw.wrap_model(nn.Linear(4, 1), same_inputs=True)
    traced = dw.trace(steps=range(1, 3), path=tmp_path / "trace.json")
    with pytest.raises(OptionError, match="running already"), traced, torch.profiler.profile():
        steps(3, model, sgd(model))


def test_names_with_quotes_in_a_trace(tmp_path: Path) -> None:
    """They are a part of what is no JSON otherwise."""
    model = dw.wrap_model(nn.Linear(4, 1))
    optimizer = sgd(model)
    with dw.trace(steps=range(1, 3), path=tmp_path / "trace.json"):
        for _ in range(3):
            with torch.profiler.record_function('of "this" kind, "pid'):
                steps(1, model, optimizer)
    assert "of 'this' kind, 'pid" in (tmp_path / "trace.rank0.json").read_text()


def test_a_folder_that_is_gone(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """A trace that cannot be written is no failure of the run."""
    monkeypatch.delenv("DISTWRAP_QUIET", raising=False)
    folder = tmp_path / "folder"
    folder.mkdir()
    assert run_ranks(_loses_its_folder, 2, folder) == [True, True]
    said = capfd.readouterr().err
    assert [f"the file of rank {rank} cannot be written" in said for rank in (0, 1)] == [True, True]


def _loses_its_folder(folder: Path) -> bool:
    model = dw.wrap_model(nn.Linear(4, 1), same_inputs=True)
    with dw.trace(steps=range(1, 3), path=folder / "trace.json"):
        if dw.is_rank_zero():
            folder.rmdir()
        dw.barrier()
        steps(4, model, sgd(model))
    return True
