"""The side channel: who is where, who has failed, who waits for whom."""

from __future__ import annotations

import errno
import os
import queue
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import distwrap as dw
from distwrap import distributed
from distwrap.environments import identity as identities
from distwrap.errors import CollectiveError, CollectiveTimeoutError, WorkerDiedError, WorkerError, WorkerTimeoutError
from distwrap.group.world import current_world
from distwrap.supervision.channel import Channel
from distwrap.testing import run_ranks
from tests.by_hand import by_hand
from tests.limits import SOON
from tests.orphans import lives
from tests.slow import INTERPRETERS

LIMIT = 60.0


@pytest.mark.slow("others of its kind are in make test")
def test_a_collective_that_times_out_says_where_all_are() -> None:
    """The error of a collective to which not all ranks came has the place of each rank."""

    @distributed(nprocs=3, launcher="forkserver", timeout=2)
    def hangs() -> None:
        if dw.rank() == 1:
            while True:
                pass
        dw.barrier()

    start = time.monotonic()
    with pytest.raises(CollectiveTimeoutError) as caught:
        hangs()
    assert time.monotonic() - start < SOON
    assert isinstance(caught.value, (TimeoutError, RuntimeError))
    assert re.search(r"ranks 0, 2 in barrier at test_channel\.py:\d+\n  rank 1 in hangs at", str(caught.value))
    assert caught.value.rank in (0, 2)


@pytest.mark.slow("waits for a time-out of four seconds")
def test_a_rank_that_cannot_answer() -> None:
    """Of a rank whose native code never lets go of the interpreter the report says so, and where it was last seen."""

    @distributed(nprocs=2, launcher="fork", timeout=4)
    def hangs() -> None:
        dw.agree(True)
        if dw.rank() == 1:
            time.sleep(1.5)  # until it was seen once
            re.match(r"(a+)+$", "a" * 40 + "b")  # takes years, and holds the lock
        dw.barrier()

    start = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match=r"rank 1 does not answer.* ago it was in hangs .* agree"):
        hangs()
    assert time.monotonic() - start < SOON


@pytest.mark.slow("waits for a limit to pass")
def test_no_rank_moves() -> None:
    """When no rank has moved for `timeout` seconds, though none is in a collective, the run ends with their places.

    The report counts the batches that each rank's loader has given.
    """

    @distributed(nprocs=2, launcher="fork", timeout=1.5)
    def deadlock() -> None:
        for step, _ in enumerate(dw.shard_loader(torch.utils.data.DataLoader(range(40)))):  # type: ignore[arg-type]
            if step == 5 + dw.rank():
                queue.Queue[int]().get()

    start = time.monotonic()
    with pytest.raises(WorkerTimeoutError, match="no rank has moved") as caught:
        deadlock()
    assert time.monotonic() - start < SOON
    place = r"in get at test_channel\.py:\d+"
    assert re.search(rf"for 1.5 s:\n  rank 0 {place}, step 6\n  rank 1 {place}, step 7", str(caught.value))


def _failing(how: str) -> None:
    with dw.rank_zero_first():
        if dw.rank() == 0:
            if how == "raise":
                raise KeyError("first")
            if how == "exit":
                sys.exit(3)
            os._exit(3)
    dw.barrier()


@pytest.mark.parametrize(
    ("how", "error"), [("raise", KeyError), ("exit", SystemExit), ("die", WorkerDiedError)], ids=str
)
def test_who_is_waited_for_fails(how: str, error: type[BaseException]) -> None:
    """Nobody waits on for the work of a rank that has failed, whichever way."""
    start = time.monotonic()
    with pytest.raises(error):
        run_ranks(_failing, 2, how, timeout=LIMIT)
    assert time.monotonic() - start < SOON


def _leaves_early() -> None:
    if dw.rank() == 0:
        return
    with dw.rank_zero_first():
        pass


def test_who_is_waited_for_has_left() -> None:
    """Who waits for the work of a rank that has left the function is told so."""
    with pytest.raises(CollectiveError, match="rank 0, which has left"):
        run_ranks(_leaves_early, 2, timeout=LIMIT)


def _turns() -> list[object]:
    seen: list[object] = []

    @dw.rank_zero_only(broadcast=True)
    def compute(value: int) -> torch.Tensor:
        return torch.full((value,), float(dw.rank()))

    for value in (3, 100_000):
        seen.append(compute(value).shape[0])
    with dw.rank_zero_first():
        seen.append(time.time())
    return seen


def test_turns_are_kept_apart() -> None:
    """Several pieces of work follow each other, and each gives its own result; who goes first is first."""
    first, second, third = run_ranks(_turns, 3, timeout=LIMIT)
    assert [rank[:2] for rank in (first, second, third)] == [[3, 100_000]] * 3
    assert first[2] < min(second[2], third[2])


# Under an outer launcher, where nobody of ours watches the processes.

PROGRAM = """
import os, sys, time
import distwrap as dw
from distwrap.group import setup

if sys.argv[1] == "the first rank dies as it joins" and os.environ["RANK"] == "0":
    setup.agree_on_secret = lambda store, placement: os._exit(7)

@dw.distributed(timeout=float(os.environ.get("LIMIT", 40)))
def main(what):
    rank = dw.rank()
    if what == "raise" and rank == 1:
        raise ValueError("the first cause")
    if what == "raise while others compute" and rank == 1:
        time.sleep(0.5)
        raise ValueError("the first cause")
    while what == "raise while others compute":
        pass
    if what == "die" and rank == 1:
        os._exit(7)
    if what == "the first rank dies" and rank == 0:
        os._exit(7)
    if what == "zero dies at work":
        with dw.rank_zero_first():
            if rank == 0:
                time.sleep(0.5)
                os._exit(7)
    if what == "exit in order":
        sys.exit(0)
    dw.barrier()
    dw.barrier()

if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.slow(INTERPRETERS)
@pytest.mark.parametrize(
    ("what", "fails", "code", "words"),
    [
        ("raise", 1, 1, "rank 1 on .* ValueError: the first cause"),
        ("raise while others compute", 1, 1, "rank 0 ends, because rank 1 on .* ValueError: the first cause"),
        ("die", 1, 7, r"rank 1 on .* its process died without raising an exception"),
        ("the first rank dies", 0, 7, "rank 0 .* is gone: its store"),
        ("the first rank dies as it joins", 0, 7, "rank 1 on .* cannot join: rank 0 .* is gone: its store"),
        ("zero dies at work", 0, 7, "rank 1 waits for the work of rank 0, but rank 0 on .* is gone"),
    ],
)
def test_without_a_launcher(what: str, fails: int, code: int, words: str, tmp_path: Path) -> None:
    """The news of a failure travel between ranks that nobody watches, and the others leave with the first cause."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    start = time.monotonic()
    ended = by_hand(program, what)
    assert time.monotonic() - start < SOON
    assert ended[fails][0] == code
    assert ended[1 - fails][0] == 1
    assert re.search(words, ended[1 - fails][1]), ended[1 - fails][1]


@pytest.mark.slow(INTERPRETERS)
def test_an_exit_in_order_is_no_failure(tmp_path: Path) -> None:
    """`sys.exit(0)` on all ranks ends them all with 0."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert [code for code, _ in by_hand(program, "exit in order")] == [0, 0]


@pytest.mark.slow(INTERPRETERS)
def test_torchrun_shows_the_cause(tmp_path: Path) -> None:
    """Under torchrun its summary has the traceback of the first cause, though nobody has decorated with @record."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program, "raise"],
        env={**os.environ, "LIMIT": "12"},  # for which the other rank waits
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 1
    summary = done.stderr[done.stderr.index("Root Cause") :]
    assert "ValueError: the first cause" in summary
    assert "rank      : 1" in summary


MISSING = """
import os, sys
import distwrap.network.rendezvous as rendezvous
rendezvous.NOTICE_SECONDS = 1.0
import distwrap as dw
if os.environ["RANK"] == "2":
    sys.exit(5)
dw.setup_process_group(timeout=4)
"""


@pytest.mark.slow(INTERPRETERS)
def test_who_is_missing(tmp_path: Path) -> None:
    """Those who are here say who is not, first in a notice and in the end in an error."""
    program = tmp_path / "program.py"
    program.write_text(MISSING)
    ended = by_hand(program, nprocs=3)
    assert [code for code, _ in ended] == [1, 1, 5]
    assert re.search(r"distwrap: after 1 s 2 of 3 ranks are here; missing: rank 2\n", ended[0][1])
    assert "distwrap: after" not in ended[1][1]
    for _, output in ended[:2]:
        assert re.search(r"ArrivalError: .* waited 4 s at .*: 2 of 3 ranks are here; missing: rank 2", output)


VERSIONS = """
import os, sys, threading, time
import distwrap as dw
import distwrap.network.rendezvous as rendezvous

refused = sys.argv[0] + " is refused"

def end_with_the_other():  # or rank 0 would wait for one that can join
    while not os.path.exists(refused):
        time.sleep(0.05)
    os._exit(0)

if os.environ["RANK"] == "0":
    threading.Thread(target=end_with_the_other, daemon=True).start()
else:
    rendezvous.__version__ = "0.0.1"
try:
    dw.setup_process_group(timeout=20)
except dw.errors.ArrivalError:
    open(refused, "w").close()
    raise
"""


@pytest.mark.slow(INTERPRETERS)
def test_versions_that_differ(tmp_path: Path) -> None:
    """A rank with another version than rank 0 is refused at the start, naming both."""
    program = tmp_path / "program.py"
    program.write_text(VERSIONS)
    assert "ArrivalError: rank 1 on" in (output := by_hand(program)[1][1])
    assert "runs distwrap 0.0.1 and torch" in output


@pytest.mark.slow(INTERPRETERS)
def test_scripts_that_differ(tmp_path: Path) -> None:
    """A rank that runs another script than rank 0 remarks on it."""
    for name in ("first.py", "second.py"):
        (tmp_path / name).write_text("import distwrap as dw\nwith dw.setup_process_group(timeout=20): pass\n")
    program = tmp_path / "either.py"
    program.write_text(
        "import os, sys, runpy\nname = ['first.py', 'second.py'][int(os.environ['RANK'])]\n"
        "path = os.path.join(os.path.dirname(__file__), name)\nsys.argv[0] = path\nrunpy.run_path(path)\n"
    )
    ended = by_hand(program)
    assert [code for code, _ in ended] == [0, 0]
    assert re.search(
        r"rank 1 on .* runs second\.py, but rank 0 on .* runs first\.py\. If that is a "
        r"mistake",
        ended[1][1],
    )


UNCAUGHT = """
import os, sys, time
import distwrap as dw

if sys.argv[1] == "with":
    with dw.setup_process_group():
        if dw.rank() == 1:
            raise ValueError("the first cause")
        dw.barrier()
else:
    dw.setup_process_group()
    if dw.rank() == 1:
        raise ValueError("the first cause")
    while True:
        pass
"""


@pytest.mark.slow(INTERPRETERS)
@pytest.mark.parametrize("how", ["with", "plain"])
def test_without_the_decorator(how: str, tmp_path: Path) -> None:
    """An exception that nobody catches is told to the others also in a script that sets the group up itself."""
    program = tmp_path / "program.py"
    program.write_text(UNCAUGHT)
    first, second = by_hand(program, how)
    assert (first[0], second[0]) == (1, 1)
    assert "the first cause" in second[1]
    if how == "plain":
        assert re.search("rank 0 ends, because rank 1 on .* ValueError: the first cause", first[1])


@pytest.mark.slow(INTERPRETERS)
def test_the_agent_is_killed(tmp_path: Path) -> None:
    """When torchrun itself is killed by SIGKILL, its ranks are gone within seconds."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, time\nimport distwrap as dw\ndw.setup_process_group()\n"
        "open(f'pid{dw.rank()}', 'w').write(str(os.getpid()))\nos.rename(f'pid{dw.rank()}', f'is{dw.rank()}')\n"
        "while True: time.sleep(1)\n"
    )
    agent = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    try:
        notes = [tmp_path / f"is{rank}" for rank in range(2)]
        deadline = time.monotonic() + LIMIT
        while not all(note.exists() for note in notes):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        pids = [int(note.read_text()) for note in notes]
    finally:
        agent.send_signal(signal.SIGKILL)
        agent.wait()
    deadline = time.monotonic() + SOON
    while any(lives(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_group_of_the_users_own() -> None:
    """In a group that the user made the work of one rank is shared too, and the group stays."""
    assert run_ranks(_in_users_group, 2, timeout=LIMIT) == [(0, True), (0, True)]


def _in_users_group() -> tuple[int, bool]:
    dw.teardown_process_group()
    store = dist.FileStore(os.environ["DISTWRAP_STORE"] + "", -1)
    dist.init_process_group("gloo", store=dist.PrefixStore("mine", store), rank=int(os.environ["RANK"]), world_size=2)
    assert current_world().channel is None
    value = dw.rank_zero_only(dw.rank, broadcast=True) if False else dw.rank_zero_only(broadcast=True)(dw.rank)()
    dw.teardown_process_group()
    alive = dist.is_initialized()
    dist.destroy_process_group()
    return value, alive


def test_models_in_a_group_of_the_users_own() -> None:
    """After a decorated call models go on averaging, whether it wrapped them or they were wrapped before."""
    assert run_ranks(_averages_in_users_group, 2, timeout=LIMIT) == [[1.5, 1.5], [1.5, 1.5]]


def _averages_in_users_group() -> list[float]:
    dw.teardown_process_group()
    store = dist.FileStore(os.environ["DISTWRAP_STORE"] + "", -1)
    dist.init_process_group("gloo", store=dist.PrefixStore("mine", store), rank=int(os.environ["RANK"]), world_size=2)
    outside = dw.wrap_model(torch.nn.Linear(1, 1))
    inside = dw.distributed(lambda: dw.wrap_model(torch.nn.Linear(1, 1)))()
    for model in (outside, inside):
        model(torch.tensor([[dist.get_rank() + 1.0]])).sum().backward()
    return [next(model.parameters()).grad.item() for model in (outside, inside)]  # type: ignore[union-attr]


def test_worker_error_is_raised_where_work_failed() -> None:
    """The other ranks hear which rank failed first, and why."""
    assert "KeyError: 'first'" in str(run_ranks(_caught, 2, timeout=LIMIT)[1])


def _caught() -> str:
    try:
        _failing("raise")
    except (KeyError, WorkerError) as error:
        return str(error)
    return "nothing"


@pytest.mark.slow(INTERPRETERS)
def test_a_rank_whose_output_nobody_reads() -> None:
    """It ends also where who started it is gone, and with that the reader of its words."""
    code = """
import threading, time
from distwrap.supervision.failure_news import end_process
threading.Thread(target=end_process, args=(0, "it is to")).start()
time.sleep(60)
"""
    readable, writable = os.pipe()
    os.close(readable)
    start = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", code], stderr=writable) as process:
        os.close(writable)
        assert process.wait(100) == 1
    assert time.monotonic() - start < SOON


def test_the_side_channel_survives_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread looks again a moment later, and takes no process for dead of which it cannot read."""
    me = identities.identity()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as full:
        full.setattr("builtins.open", refuse)
        assert identities.lives(me)
        assert not identities.has_ended(me["pid"])
    looks: list[int] = []
    channel = SimpleNamespace(_stopped=SimpleNamespace(wait=lambda _: len(looks) > 2))

    def look() -> None:
        looks.append(1)
        refuse()

    channel.look = look
    Channel._run(channel)  # type: ignore[arg-type]
    assert len(looks) == 3
