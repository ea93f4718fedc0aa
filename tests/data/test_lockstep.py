"""`lockstep`: all ranks take the same steps, and leave together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import distwrap as dw
from distwrap import Preemption, lockstep
from distwrap.errors import CollectiveError, LoaderError, OptionError
from distwrap.group import world
from distwrap.testing import run_ranks
from tests.limits import SOON
from tests.slow import INTERPRETERS, slow

LIMIT = 60.0


def _train(batches: Any, **options: Any) -> tuple[int, list[float]]:
    """Train with gradients that all ranks share; return the steps, and the weights."""
    torch.manual_seed(0)
    model = dw.wrap_model(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = lockstep(batches, **options)
    for batch in steps:
        optimizer.zero_grad()
        model(torch.full((2, 1), float(batch))).sum().backward()
        optimizer.step()
    return steps.step, [p.item() for p in model.parameters()]


def _uneven(lengths: list[int], how: str) -> tuple[int, list[float]]:
    return _train(range(lengths[dw.rank()]), uneven=how)


@pytest.mark.parametrize(
    ("lengths", "how", "expected"),
    [([3, 5], "shortest", 3), ([3, 5], "pad", 5), ([4, 2, 7], "pad", 7), ([0, 3], "shortest", 0), ([5] * 2, "pad", 5)],
)
def test_uneven_loaders(lengths: list[int], how: str, expected: int) -> None:
    """Ranks with loaders of different length take the same steps, and keep the same weights."""
    results = run_ranks(_uneven, len(lengths), lengths, how, timeout=LIMIT)
    assert [steps for steps, _ in results] == [expected] * len(lengths)
    assert all(weights == results[0][1] for _, weights in results)


def test_pad_repeats_from_the_start() -> None:
    """A rank that is out begins its own loader again."""
    assert run_ranks(_padded, 2, timeout=LIMIT) == [[0, 1, 0, 1, 0], [0, 1, 2, 3, 4]]


def _padded() -> list[int]:
    return list(lockstep(range(2 if dw.rank() == 0 else 5), uneven="pad"))


def test_nothing_to_repeat() -> None:
    """A rank without any batch cannot repeat one, and every rank hears so."""
    assert run_ranks(_empty, 2, timeout=LIMIT) == ["LoaderError"] * 2


def _empty() -> str:
    try:
        list(lockstep(range(3 * dw.rank()), uneven="pad"))
    except LoaderError as error:
        return type(error).__name__
    return "nothing"


def _branches() -> dict[str, Any]:
    """Everything by which ranks part, one after the other in one launch."""
    seen: dict[str, Any] = {}
    last = dw.rank() == dw.world_size() - 1

    steps = lockstep(range(10))
    seen["stop"] = []
    for batch in steps:
        seen["stop"].append(batch)
        if last and batch == 3:
            steps.stop()
        dw.barrier()

    seen["break"] = []
    for batch in lockstep(range(10)):
        seen["break"].append(batch)
        dw.barrier()
        if last and batch == 3:
            break

    seen["all break"] = []
    for batch in lockstep(range(10)):
        seen["all break"].append(batch)
        dw.barrier()
        if batch == 2:
            break

    seen["break in the last step"] = []
    for batch in lockstep(range(3)):
        seen["break in the last step"].append(batch)
        dw.barrier()
        if last and batch == 2:
            break

    steps = lockstep(range(6), skip=lambda batch: batch == 2 + dw.rank())
    seen["skip"] = []
    for batch in steps:
        seen["skip"].append(batch)
        dw.barrier()
    seen["skipped"] = steps.skipped

    seen["nested"] = []
    for outer in lockstep(range(3)):
        for inner in lockstep(range(4)):
            seen["nested"].append((outer, inner))
            if dw.rank() == 0 and inner == 1:
                break
            dw.barrier() if inner != 1 else None
        dw.barrier()

    steps = lockstep(range(3))
    seen["twice"] = [list(steps), steps.step, list(steps), len(steps)]
    seen["together"] = dw.reduce(1, "sum")
    return seen


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_branches(nprocs: int) -> None:
    """Stop, break, skip, nesting and repetition: every rank sees the same steps, and all go on together."""
    for seen in run_ranks(_branches, nprocs, timeout=LIMIT):
        assert seen["stop"] == [0, 1, 2, 3]
        assert seen["break"] == [0, 1, 2, 3]
        assert seen["all break"] == [0, 1, 2]
        assert seen["break in the last step"] == [0, 1, 2]
        assert seen["skip"] == [batch for batch in range(6) if not 2 <= batch < 2 + nprocs]
        assert seen["skipped"] == nprocs
        assert seen["nested"] == [(outer, inner) for outer in range(3) for inner in range(2)]
        assert seen["twice"] == [[0, 1, 2], 3, [0, 1, 2], 3]
        assert seen["together"] == nprocs


def _raises(where: str) -> None:
    def batches() -> Any:
        for batch in range(5):
            if where == "loader" and dw.rank() == 1 and batch == 2:
                raise ValueError("in the loader")
            yield batch

    def skip(batch: int) -> bool:
        if where == "skip" and dw.rank() == 1 and batch == 2:
            raise ValueError("in the skip")
        return False

    for batch in lockstep(batches(), skip=skip):
        if where == "loop" and dw.rank() == 1 and batch == 2:
            raise ValueError("in the loop")
        dw.barrier()


@pytest.mark.parametrize("where", ["loader", "skip", "loop"])
def test_an_exception_on_one_rank(where: str) -> None:
    """An exception goes its own way: it is raised in the caller, and nobody hangs."""
    start = time.monotonic()
    with pytest.raises(ValueError, match=f"in the {where}"):
        run_ranks(_raises, 2, where, timeout=2 * SOON)
    assert time.monotonic() - start < SOON


def _caught_outside() -> list[int]:
    """A rank that catches its own exception outside of the loop has left it; the others follow."""
    seen: list[int] = []
    try:
        for batch in lockstep(range(10)):
            seen.append(batch)
            dw.barrier()
            if dw.rank() == 0 and batch == 1:
                raise KeyError(batch)
    except KeyError:
        pass
    dw.barrier()
    return seen


def test_an_exception_that_is_caught() -> None:
    """Who leaves the loop by an exception and goes on takes the others along."""
    assert run_ranks(_caught_outside, 2, timeout=LIMIT) == [[0, 1], [0, 1]]


def _preempted(folder: str) -> tuple[Any, ...]:
    saved: list[Preemption] = []

    def on_preempt(preemption: Preemption) -> None:
        saved.append(preemption)
        dw.save({"step": preemption.step}, os.path.join(folder, "last.pt"))

    before = signal.getsignal(signal.SIGTERM)
    loader = DataLoader(list(range(400)), batch_size=2, num_workers=1)
    steps = lockstep(dw.shard_loader(loader), on_preempt=on_preempt, grace=600)
    for batch in steps:
        if dw.rank() == 1 and steps.step == 5:
            os.killpg(os.getpid(), signal.SIGTERM)  # the rank and its loader's worker, as Slurm does
        assert len(batch) == 2
        dw.barrier()
    assert steps.preempted is not None
    after = list(lockstep(range(5)))  # a later loop of the run ends at once
    restored = signal.getsignal(signal.SIGTERM) == before
    left = steps.preempted.seconds_left()
    return steps.step, len(saved), steps.preempted.rank, steps.preempted.signal, after, restored, 300 < left <= 600


@pytest.mark.processes("a rank is sent a signal")
def test_preemption(tmp_path: Path) -> None:
    """A signal to one rank makes all leave on the same step, after a checkpoint, with the time that is left."""
    first, second = run_ranks(_preempted, 2, str(tmp_path), timeout=LIMIT)
    assert first == second
    assert first[1:] == (1, 1, signal.SIGTERM, [], True, True)
    assert dw.load(tmp_path / "last.pt") == {"step": first[0]}
    assert 5 <= first[0] < 10


def test_preemption_in_a_single_process() -> None:
    """One process stops in the same way, and a handler of the user's own runs too."""
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:
        steps = lockstep(range(10))
        seen = []
        for batch in steps:
            seen.append(batch)
            if batch == 3:
                os.kill(os.getpid(), signal.SIGUSR2)
        assert seen == [0, 1, 2, 3]
        assert steps.preempted is not None
        assert (steps.preempted.signal, heard) == (signal.SIGUSR2, [signal.SIGUSR2])
        assert list(lockstep(range(3))) == []
    finally:
        signal.signal(signal.SIGUSR2, before)
        world.deactivate()


PROGRAM = """
import os, signal, sys, time
import distwrap as dw

def say(*words):  # in one piece
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

@dw.distributed(nprocs=2, launcher=os.environ.get("LAUNCHER", "auto"))
def main():
    steps = dw.lockstep(range(10**6), on_preempt=lambda preemption: dw.save({"step": preemption.step}, "last.pt"))
    for step in steps:
        if step == 3:
            say("ready", dw.rank(), os.getpid())
        time.sleep(0.01)
        dw.barrier()
    say("left", dw.rank(), steps.step, signal.Signals(steps.preempted.signal).name)
    return steps.step

if __name__ == "__main__":
    say("result", main())
"""


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("fork", signal.SIGTERM),
        slow("forkserver", signal.SIGUSR2, why=INTERPRETERS),
        slow("script", signal.SIGTERM, why=INTERPRETERS),
        slow("torchrun", signal.SIGUSR2, why=INTERPRETERS),
    ],
)
@pytest.mark.slow("starts interpreters, each of which imports torch")
def test_preemption_under(how: str, number: signal.Signals, tmp_path: Path) -> None:
    """A signal to the caller, or to one of torchrun's ranks, ends the run in step, with a checkpoint and exit code."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program)]
    if how == "torchrun":
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "LAUNCHER": "auto" if how == "torchrun" else how, "PYTHONUNBUFFERED": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert run.stdout is not None
        ready = [run.stdout.readline().split() for _ in range(2)]
        target = next(int(pid) for _, rank, pid in ready if rank == "1") if how == "torchrun" else run.pid
        os.kill(target, number)
        output, errors = run.communicate(timeout=LIMIT)
    finally:
        run.kill()
        run.communicate()
    assert run.returncode == 0, output + errors
    left = sorted(line.split()[1:] for line in output.splitlines() if line.startswith("left"))
    step = left[0][1]
    assert left == [["0", step, number.name], ["1", step, number.name]]
    assert f"result {step}" in output
    assert dw.load(tmp_path / "last.pt") == {"step": int(step)}


class _Indexed:
    """Iterable without __iter__, as Python allows it."""

    def __getitem__(self, index: int) -> int:
        return range(3)[index]


def test_a_loader_that_has_indices_alone() -> None:
    loader: Any = _Indexed()
    assert list(lockstep(loader)) == [0, 1, 2]


def test_wrong_input() -> None:
    """A misspelt way is refused with the right ones, and so is lockstep where only some ranks are."""
    with pytest.raises(OptionError, match="shortest"):
        lockstep([1], uneven="shortets")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="grace=0"):
        lockstep([1], grace=0)
    with pytest.raises(CollectiveError, match="rank-zero function"):
        run_ranks(_alone, 2, timeout=LIMIT)


def _alone() -> None:
    dw.rank_zero_only(lambda: list(lockstep([1])))()
    dw.barrier()


def _looked_at(make: Callable[[], Iterable[Any]], kept: list[FrameType | None]) -> int:
    """Leave a loop by itself while something keeps the frame, as another thread does that looks where this rank is."""
    taken, batches = 0, make()
    for _ in batches:
        kept.append(sys._getframe())
        taken += 1
        if taken == 4:
            break
    return taken


def _left_twice() -> list[int]:
    makes: list[Callable[[], Iterable[Any]]] = [
        lambda: lockstep(range(8)),
        lambda: dw.accumulate(lockstep(range(8)), 2, []),
        lambda: lockstep(dw.accumulate(range(8), 2, [])),
    ]
    kept: list[FrameType | None] = []
    taken = []
    for make in makes:
        for _ in range(2):
            taken.append(_looked_at(make, kept))
            if dw.rank() == 0:
                kept.clear()
    with dw.report():
        taken += [_looked_at(makes[0], kept), _looked_at(makes[1], kept)]
    return taken


def test_a_loop_is_left_where_it_is_left() -> None:
    """The others are told at the break, not once nobody looks at the frame any more, amid the next loop's turns."""
    assert run_ranks(_left_twice, 2, timeout=LIMIT) == [[4] * 8] * 2


def test_a_break_may_be_the_last_thing_that_a_rank_does() -> None:
    """Nobody waits for a rank that has left its loop and its function: the others end before their next step."""

    def on_rank() -> int:
        taken = 0
        for _ in lockstep(range(9)):
            taken += 1
            if dw.rank() == 1 and taken == 3:
                return taken
            dw.barrier() if taken < 3 else time.sleep(0.5)
        return taken

    assert run_ranks(on_rank, 2) == [3, 3]
