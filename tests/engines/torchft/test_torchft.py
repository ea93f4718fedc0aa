"""Trainings that go on while ranks die and come back, against the same training undisturbed."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import distributed
from distwrap.errors import ModelError, OptionError, WorkerDiedError
from tests.engines.torchft import program

ROOT = Path(__file__).parents[3]
TIMEOUT = 60.0


def run(folder: Path, kills: list[tuple[int, int, int, str]], nprocs: int = 3, **options: Any) -> list[dict[str, Any]]:
    """Run the training with these kills, and return what the ranks that were there at its end return."""
    names = ("launcher", "timeout", "max_lost", "comm")
    given = {name: options.pop(name) for name in names if name in options}
    launched = distributed(nprocs=nprocs, returns="all", **{"max_lost": 1, "timeout": TIMEOUT, **given})
    ended: list[dict[str, Any]] = launched(program.train)(folder, kills, **options)
    assert len(list(folder.glob("killed-*"))) == len(kills)
    return ended


@cache
def undisturbed(comm: str | None = None) -> dict[str, Any]:
    """Return what a run of three ranks without deaths ends with, under plain DDP."""
    with TemporaryDirectory() as folder:
        ended: dict[str, Any] = distributed(nprocs=3, timeout=TIMEOUT, comm=comm)(program.train)(Path(folder), [])
    return ended


def assert_alike(ended: list[dict[str, Any]]) -> None:
    """All ranks that were there at the end have the same weights to the bit, rates and means."""
    for each in ended[1:]:
        assert torch.equal(each["weights"], ended[0]["weights"])
        assert each["lr"] == ended[0]["lr"]
    assert len({each["means"][-1] for each in ended if each["means"]}) == 1  # one may be back after the last epoch


def samples(folder: Path) -> tuple[dict[int, Counter[int]], dict[int, Counter[int]]]:
    """Return how often each epoch has seen each sample, in steps that were taken and in others."""
    taken: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(program.EPOCHS)}
    lost: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(program.EPOCHS)}
    for _, step in program.steps_of(folder):
        (taken if step["taken"] else lost)[step["epoch"]].update(step["numbers"])
    return taken, lost


def assert_each_sample_once(folder: Path, kills: int) -> None:
    """No sample is lost but those of lost steps, and none is twice in an epoch but what fills its last step."""
    taken, lost = samples(folder)
    unseen = 0
    for epoch in range(program.EPOCHS):
        missing = set(range(program.SAMPLES)) - set(taken[epoch])
        unseen += len(missing - set(lost[epoch]))
        twice = sum(taken[epoch].values()) - len(taken[epoch])
        assert twice <= (2 if kills else 0)  # which fill up the last step where the ranks have changed
    assert unseen <= kills * program.BATCH  # what a rank had in hands when it died, and did not write down


def test_undisturbed_it_is_ddp(tmp_path: Path) -> None:
    """With no death the numbers are those of plain DDP."""
    ended = run(tmp_path, [])
    assert len(ended) == 3
    assert_alike(ended)
    torch.testing.assert_close(ended[0]["weights"], undisturbed()["weights"], rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.tensor(ended[0]["means"]), torch.tensor(undisturbed()["means"]))
    assert ended[0]["lr"] == undisturbed()["lr"]
    assert_each_sample_once(tmp_path, 0)


PLACES = [
    (1, 0, 0, "forward"),  # before the first step
    (0, 0, 3, "stepped"),  # who is rank 0
    (2, 0, 7, "averaged"),  # in the last step of an epoch
    (1, 1, 0, "forward"),
    (0, 1, 2, "forward"),
    (2, 1, 5, "stepped"),
    (1, 1, 0, "between"),  # before the evaluation
    (1, 1, 2, "evaluation"),
    (0, 1, 0, "evaluated"),  # before the ranks exchange its result
    (2, 2, 4, "averaged"),
]


@pytest.mark.parametrize("kill", PLACES, ids=lambda kill: "-".join(map(str, kill)))
def test_a_lost_rank_comes_back(kill: tuple[int, int, int, str], tmp_path: Path) -> None:
    """Killed at any place, it comes back with the others' weights, and no sample is lost but those of its step."""
    ended = run(tmp_path, [kill], pause=0.02)
    assert len(ended) == 3
    assert_alike(ended)
    assert_each_sample_once(tmp_path, 1)
    if kill[3] in ("stepped", "averaged", "between"):  # whose step all others took
        torch.testing.assert_close(ended[0]["weights"], undisturbed()["weights"], rtol=0, atol=1e-5)


def test_twice_in_a_run(tmp_path: Path) -> None:
    """The same rank, and then another one."""
    kills = [(1, 0, 2, "forward"), (1, 1, 3, "stepped"), (0, 2, 1, "forward")]
    ended = run(tmp_path, kills, pause=0.05)
    assert len(ended) == 3
    assert_alike(ended)
    assert_each_sample_once(tmp_path, 3)


def test_the_loss_at_the_end(tmp_path: Path) -> None:
    """Two deaths later a training ends within two hundredths of where it ends undisturbed."""
    (tmp_path / "plain").mkdir()
    undisturbed_loss = distributed(nprocs=3, timeout=TIMEOUT)(program.learn)(tmp_path / "plain", [])
    kills = [(1, 3, 2, "forward"), (0, 6, 1, "forward")]
    ended = distributed(nprocs=3, max_lost=1, timeout=TIMEOUT, returns="all")(program.learn)(tmp_path, kills)
    assert len(list(tmp_path.glob("killed-*"))) == 2
    assert ended == [ended[0]] * 3
    assert ended[0] == pytest.approx(undisturbed_loss, rel=0.02)


def test_two_at_once(tmp_path: Path) -> None:
    """With more away than may be lost the rest wait for one that comes back."""
    ended = run(tmp_path, [(1, 1, 2, "forward"), (2, 1, 2, "forward")], pause=0.02)
    assert_alike(ended)
    assert_each_sample_once(tmp_path, 2)


@pytest.mark.parametrize(
    ("nprocs", "options"), [(2, {}), (3, {"workers": 2}), (3, {"launcher": "spawn"}), (4, {"max_lost": 2})]
)
def test_under_other_options(nprocs: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Two ranks, loaders with workers, fresh interpreters, two that may be lost."""
    ended = run(tmp_path, [(0, 1, 1, "forward")], nprocs, pause=0.05, **options)
    assert_alike(ended)
    assert_each_sample_once(tmp_path, 1)


def test_a_frozen_rank_is_left_behind(tmp_path: Path) -> None:
    """One that stands still holds the others up for the time limit of a collective, and is ended and started again."""
    ended = run(tmp_path, [(1, 1, 1, "forward")], timeout=5.0, how=signal.SIGSTOP)
    assert len(ended) == 3
    assert_alike(ended)


@pytest.mark.parametrize("kill", [(1, 1, 2, "forward"), (0, 1, 2, "stepped"), (2, 1, 3, "logged")])
def test_collectives_in_each_step(kill: tuple[int, int, int, str], tmp_path: Path) -> None:
    """Whatever is exchanged between two steps, it is exchanged among those that are left."""
    ended = run(tmp_path, [kill], logged=True, pause=0.02)
    assert len(ended) == 3
    assert_alike(ended)
    assert_each_sample_once(tmp_path, 1)


def start(function: Any, *args: Any, **options: Any) -> Any:
    """Run a function on three ranks, of which one may be lost."""
    return distributed(**{"nprocs": 3, "max_lost": 1, "timeout": TIMEOUT, "returns": "all", **options})(function)(*args)


def test_what_is_before_the_loop(tmp_path: Path) -> None:
    """A rank that comes back gets what the others got, though they are long in the loop."""
    ended = start(program.meet_before_the_loop, tmp_path)
    assert [got for got, _, _ in ended] == [["of rank 0", 1.0, [0, 1, 2], "made by 0", [0, 1, 2]]] * 3
    assert [first for _, first, _ in ended] == [False, True, True]
    assert len({weight for _, _, weight in ended}) == 1


@pytest.mark.parametrize("lost", [0, 1])
def test_checkpoints_in_the_loop(lost: int, tmp_path: Path) -> None:
    """Whoever is rank 0 writes them."""
    assert start(program.save_each_epoch, tmp_path, lost) == [[3, True, True]] * 3


@pytest.mark.parametrize("comm", [None, "local_sgd(sync_every=4)"])
def test_loops_that_are_left(comm: str | None, tmp_path: Path) -> None:
    """After a break the weights are those of plain DDP, and another loop follows."""
    ended = start(program.leave_a_loop, tmp_path, comm=comm)
    assert ended[1:] == ended[:-1]
    if comm is None:
        plain = distributed(nprocs=3, timeout=TIMEOUT)(program.leave_a_loop)(tmp_path)
        assert ended[0] == pytest.approx(plain, abs=1e-5)


def test_failures_after_the_loop_are_told() -> None:
    """Where the others are done already, and nobody would do again what rank 0 did alone."""
    with pytest.raises(OSError, match="the disk is full"):
        start(program.raise_after_the_loop)


def test_rank_zero_may_work_on(tmp_path: Path) -> None:
    """Longer than the time limit of a collective."""
    assert start(program.work_long_after_the_loop, tmp_path, 7.0, timeout=3.0, returns="rank0") == "of rank 0"
    assert (tmp_path / "exported").exists()


def test_what_is_unfrozen_is_an_error() -> None:
    """Its gradient would stay each rank's own."""
    with pytest.raises(ModelError, match=r"bias was made trainable after wrap_model\(\)"):
        start(program.unfreeze)


def test_other_elements_are_an_error(tmp_path: Path) -> None:
    """A rank that comes back and would count from another number says so, and does not train other epochs."""
    with pytest.raises(ModelError, match=r"resumable\(\) is \d+, where the others have \d+"):
        start(program.other_elements, tmp_path)


@pytest.mark.parametrize("dies", [False, True])
def test_passes_that_are_left(dies: bool, tmp_path: Path) -> None:
    """A break out of a pass ends it: the next one is a new one."""
    for seen in start(program.left_passes, tmp_path, dies):
        batches, evaluated = [each[0] for each in seen], [each[1:] for each in seen]
        assert batches[-2:] == [3, 3]  # who has come back has not seen the first ones
        assert evaluated[-1] == list(range(24))


def test_what_comes_before_the_batches(tmp_path: Path) -> None:
    """On its way back a rank changes nothing twice, prints nothing twice, and divides by no zero."""
    ended = start(program.before_the_batches, tmp_path)
    assert len(ended) == 3
    assert ended[1:] == ended[:-1]
    assert ended[0][:2] == [2, [0.025]]
    assert (tmp_path / "printed").read_text().split() == ["0", "1", "2"]


@pytest.mark.parametrize(
    "function",
    [program.count_in_passes, program.several_steps_an_element, program.two_loops],
    ids=lambda each: each.__name__,
)
def test_loops_that_count(function: Any, tmp_path: Path) -> None:
    """Who comes back comes in where it is at the same count as the others."""
    ended = start(function, tmp_path)
    assert len(ended) == 3
    assert ended[1:] == ended[:-1]


def test_what_is_not_taken_over_is_an_error(tmp_path: Path) -> None:
    """A learning rate of a counter differs on a rank that has come back: a later comparison finds it."""
    with pytest.raises(ModelError, match=r"weights or learning rates of rank \d are not those of rank \d"):
        start(program.rate_of_a_counter, tmp_path)


def test_a_batch_before_the_loop() -> None:
    """It is of no step."""
    assert len(set(start(program.sample_batch))) == 1


def test_under_an_outer_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody there would start a lost rank again."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(OptionError, match="max_lost=1 needs ranks that distwrap itself has started"):
        distributed(max_lost=1)(without_resumable)()


def test_one_rank(capfd: pytest.CaptureFixture[str]) -> None:
    """The same script runs in one process, which is told that it has no effect there."""
    distributed(nprocs=1, max_lost=1)(program.raise_nothing)()
    assert "max_lost=1 has no effect with one rank" in capfd.readouterr().err


ROUNDS = ["local_sgd(sync_every=4)", "diloco(sync_every=4, outer_lr=0.8, outer_momentum=0.5)"]


@pytest.mark.parametrize("comm", ROUNDS)
def test_rounds_are_those_of_ddp(comm: str, tmp_path: Path) -> None:
    """Ranks that exchange weights now and then: with no death the numbers are those of the same algorithm under DDP."""
    ended = run(tmp_path, [], comm=comm)
    assert_alike(ended)
    torch.testing.assert_close(ended[0]["weights"], undisturbed(comm)["weights"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("comm", ROUNDS)
def test_a_rank_is_lost_in_a_round(comm: str, tmp_path: Path) -> None:
    """The others keep what they have learnt in it, and the lost one comes in with the next round."""
    ended = run(tmp_path, [(1, 1, 2, "forward")], comm=comm, pause=0.1)
    assert len(ended) == 3
    assert_alike(ended)
    assert_each_sample_once(tmp_path, 4)  # of each of its steps in the round


def test_all_are_lost(tmp_path: Path) -> None:
    """Where nobody is left who has the weights, the first death is the error."""
    with pytest.raises(WorkerDiedError, match=r"rank \d on .* killed by SIGKILL"):
        run(tmp_path, [(rank, 1, 1, "stepped") for rank in range(3)])


def raise_at_once() -> None:
    raise ValueError("a mistake in the program")


def test_a_mistake_is_not_tried_for_ever() -> None:
    """A rank that fails again before it has taken a step ends the run with its error."""
    with pytest.raises(ValueError, match="a mistake in the program"):
        distributed(nprocs=2, max_lost=1, timeout=TIMEOUT)(raise_at_once)()


def without_resumable() -> None:
    model = dw.wrap_model(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_a_plain_loop_is_an_error() -> None:
    """At the first step, and not when a rank comes back."""
    with pytest.raises(ModelError, match=r"for epoch in distwrap\.resumable\(range\(epochs\)\)"):
        distributed(nprocs=2, max_lost=1, timeout=TIMEOUT)(without_resumable)()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_lost": 2}, "max_lost=2, but there are 2 ranks"),
        ({"max_lost": 1, "comm": "fp16"}, "does not go with max_lost="),
        ({"max_lost": 1, "comm": "diloco(delay=1)"}, "does not go with max_lost="),
        ({"max_lost": 1, "precision": "fp16"}, "precision='fp16' does not go with max_lost="),
        ({"max_lost": 1, "max_restarts": 1}, "max_restarts= starts all ranks again"),
        ({"max_lost": 1, "strategy": "fsdp"}, "max_lost=1 does not go with strategy="),
        ({"max_lost": 1, "launcher": "script"}, "max_lost= starts the ranks by its own launcher"),
        ({"max_lost": 1, "nnodes": 2, "rdzv_endpoint": "localhost"}, "max_lost= works on one node only"),
    ],
)
def test_refused_before_a_start(options: dict[str, Any], words: str) -> None:
    """What does not go with ranks that come and go."""
    with pytest.raises(OptionError, match=words):
        distributed(nprocs=2, **options)(without_resumable)()


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process, no port, no thread, and no variable."""
    monkeypatch.setenv("MARK_OF_THIS_TEST", str(tmp_path))
    before = dict(os.environ)
    run(tmp_path, [(1, 1, 1, "forward")], workers=1)
    assert dict(os.environ) == before
    deadline = time.monotonic() + 10
    while (left := started_here(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def test_all_listen_on_loopback() -> None:
    """Ranks with torchft's manager, as docs/explanation/security.md says; its own would listen at all addresses."""
    for addresses in start(program.addresses_at_work):
        assert set(addresses) == {"0100007F"}  # 127.0.0.1
        assert len(addresses) >= 3


def started_here(mark: str) -> list[str]:
    """Return the command lines of processes with this mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found
