"""What a simulation is: each rank a process of its own, one at a time; what fails, or is stuck, is told at once."""

from __future__ import annotations

import copy
import os
import pickle
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distwrap as dw
from distwrap._internals.torch import collectives_begun
from distwrap.errors import CollectiveError, DeadlockError, LaunchError, ModelError, OptionError, WorkerDiedError
from distwrap.testing import run_ranks, simulate
from tests.slow import slow


def _own(given: list[int]) -> dict[str, Any]:
    rank = dw.rank()
    given.append(rank)
    os.environ["OF_A_RANK"] = str(rank)
    torch.manual_seed(rank)
    random.seed(rank)
    torch.set_default_dtype(torch.float64 if rank else torch.float32)
    dw.barrier()
    numbers = torch.rand(1).item(), random.random()
    dw.barrier()
    return {
        "rank": dist.get_rank(),
        "given": given,
        "variables": (os.environ["OF_A_RANK"], os.environ["RANK"], os.environ["LOCAL_RANK"]),
        "numbers": numbers,
        "next": torch.rand(1, dtype=torch.float32).item(),
        "dtype": torch.zeros(1).dtype,
        "size": dw.world_size(),
    }


def test_each_rank_has_a_process_of_its_own() -> None:
    """Arguments, variables, random numbers and defaults."""
    given: list[int] = []
    before = torch.get_rng_state(), random.getstate(), dict(os.environ), torch.get_default_dtype()
    found = simulate(_own, 3, given)
    after = torch.get_rng_state(), random.getstate(), dict(os.environ), torch.get_default_dtype()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert given == []
    for rank, of_rank in enumerate(found):
        generator = torch.Generator().manual_seed(rank)
        numbers = [torch.rand(1, generator=generator, dtype=torch.float64 if rank else torch.float32).item()]
        assert of_rank["numbers"] == (numbers[0], random.Random(rank).random())
        assert of_rank["given"] == [rank]
        assert of_rank["variables"] == (str(rank),) * 3
        assert of_rank["dtype"] == (torch.float64 if rank else torch.float32)
        assert (of_rank["rank"], of_rank["size"]) == (rank, 3)
    assert not dist.is_initialized()
    assert dw.world_size() == 1


def _parted() -> None:
    if dw.rank() == 1:
        dist.all_reduce(torch.ones(2))
    elif dw.rank() == 2:
        dist.recv(torch.ones(1), 0)


def test_a_deadlock_is_an_error_at_once() -> None:
    """It names for what each rank waits, and where; nothing waits for a time limit."""
    with pytest.raises(DeadlockError) as error:
        simulate(_parted, 4)
    words = str(error.value)
    assert "rank 0 has returned" in words
    assert (
        "rank 1 waits for all_reduce(float32[2], sum), to which ranks 0, 2, 3 did not come at test_simulate.py:"
        in words
    )
    assert "rank 2 waits for recv(float32[1], from rank 0) at test_simulate.py:" in words
    assert threading.active_count() == 1


def _unlike(what: str) -> None:
    shape = (2, 3) if dw.rank() == 1 and what == "shape" else (3, 2)
    tensor = torch.ones(shape, dtype=torch.int64 if dw.rank() == 1 and what == "type" else torch.float32)
    if what == "operation" and dw.rank() == 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    elif what == "root":
        dist.broadcast(tensor, src=dw.rank())
    elif what in ("collective", "monitored") and dw.rank() == 1:
        dist.barrier()
    elif what == "monitored":
        dist.monitored_barrier()
    else:
        dist.all_reduce(tensor)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", "rank 1: all_reduce(float32[2, 3], sum)"),
        ("type", "rank 1: all_reduce(int64[3, 2], sum)"),
        ("operation", "rank 1: all_reduce(float32[3, 2], max)"),
        ("root", "rank 1: broadcast(float32[3, 2], from rank 1)"),
        ("collective", "rank 1: barrier()"),
        ("monitored", "rank 1: barrier()"),
    ],
)
def test_a_mismatch_is_an_error_at_once(what: str, words: str) -> None:
    """Whether it is the shape, the type, the operation, the root, or the collective itself."""
    with pytest.raises(CollectiveError, match="different collectives") as error:
        simulate(_unlike, 3, what)
    assert f"{words} at test_simulate.py:" in str(error.value)


def _one_raises(folder: Path) -> None:
    try:
        if dw.rank() == 1:
            raise KeyError("no such sample")
        dw.barrier()
    finally:
        (folder / f"rank {dw.rank()} ended").touch()


def test_an_exception_of_a_rank_is_the_callers(tmp_path: Path) -> None:
    """With its type, and the rank's name; the other ranks end where they wait."""
    with pytest.raises(KeyError, match="no such sample") as error:
        simulate(_one_raises, 3, tmp_path)
    assert "rank 1 on" in str(error.value.__cause__)
    assert {each.name for each in tmp_path.iterdir()} >= {"rank 0 ended", "rank 1 ended"}
    assert threading.active_count() == 1


def _looks_for_a_file(path: Path) -> float:
    if dw.rank() == 0:
        time.sleep(5)
        path.touch()
    begun = time.monotonic()
    while not path.exists():
        time.sleep(0.1)
    return time.monotonic() - begun


def test_a_sleep_lets_others_go_on_and_takes_no_time(tmp_path: Path) -> None:
    begun = time.monotonic()
    assert simulate(_looks_for_a_file, 2, tmp_path / "done")[1] > 4.5
    assert time.monotonic() - begun < 4  # a guard: nobody has slept


def _looks_forever(path: Path) -> None:
    while not path.exists():
        time.sleep(1)


@pytest.mark.slow("looks thousands of times")
def test_looking_forever_is_a_deadlock(tmp_path: Path) -> None:
    with pytest.raises(DeadlockError, match="a sleep of 1 s"):
        simulate(_looks_forever, 2, tmp_path / "never")


def _reads_before_the_wait() -> list[float]:
    tensor = torch.ones(1)
    work = dist.all_reduce(tensor, async_op=True)
    dw.barrier()
    before = tensor.item()
    assert work is not None
    work.wait()
    return [before, tensor.item()]


def test_a_handle_is_done_where_it_is_waited_for() -> None:
    """So what reads before has the old number each time, and not now and then."""
    assert simulate(_reads_before_the_wait, 3, schedule=range(3)) == [[1.0, 3.0]] * 3


def _trains_on_and_saves(folder: Path) -> list[float]:
    dw.seed_everything(0)
    model = dw.wrap_model(nn.Linear(2, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "run": dw.run_state()}
    data = torch.arange(20, dtype=torch.float64).view(10, 2)
    loader = dw.shard_loader(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=2))
    for (batch,) in dw.lockstep(loader):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dw.save(state, folder / "last.pt")
    return [dw.mean(model(data).sum().item(), 1), *(p.sum().item() for p in model.parameters())]


@pytest.mark.parametrize("orders", [3, slow(100, why="three orders show what a hundred do")])
def test_a_loop_under_many_orders(orders: int, tmp_path: Path) -> None:
    """With lockstep, a save and an evaluation: the same bits in each order."""
    found = {str(simulate(_trains_on_and_saves, 3, tmp_path, schedule=seed)) for seed in range(orders)}
    assert len(found) == 1


def _trains_by_hand(way: str) -> None:
    model = nn.Linear(2, 1)
    if way == "copied":
        model = copy.deepcopy(model)
    elif way == "unpickled":
        model = pickle.loads(pickle.dumps(model))
    data = torch.utils.data.TensorDataset(torch.arange(24.0).view(12, 2))
    for (batch,) in dw.shard_loader(torch.utils.data.DataLoader(data, batch_size=2), batch_size="global"):
        model(batch).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data -= 0.001 * parameter.grad


@pytest.mark.parametrize("way", ["made", "copied", "unpickled"])
@pytest.mark.parametrize("start", [simulate, run_ranks])
def test_a_model_that_each_rank_trains_by_hand_is_refused(start: Any, way: str) -> None:
    """As in real ranks: each rank's models are known, of which all are in this process."""
    with pytest.raises(ModelError, match=r"wrap_model\(\) has not wrapped, have changed"):
        start(_trains_by_hand, 2, way)


def _saves(folder: Path) -> None:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 1.0)
    dw.save({"model": model}, folder / "last.pt")
    nn.init.constant_(model.weight, 2.0)
    dw.save({"model": model}, folder / "last.pt")


def test_a_rank_that_dies_at_any_event_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    events: list[tuple[int, int]] = []
    simulate(_saves, 2, tmp_path, fail=lambda rank, number, what: events.append((rank, number)))
    assert any(number > 9 for rank, number in events if rank == 0)
    for number, (rank, event) in enumerate(sorted(set(events))):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(WorkerDiedError) as error:
            simulate(_saves, 2, folder, fail=(rank, event))
        assert error.value.rank == rank
        if (folder / "last.pt").exists():
            weight = torch.load(folder / "last.pt")["model"]["weight"]
            assert weight.tolist() in ([[1.0, 1.0]], [[2.0, 2.0]])


def _counts_collectives() -> int:
    before = collectives_begun() or 0
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    return (collectives_begun() or 0) - before


@pytest.mark.parametrize("start", [simulate, run_ranks])
def test_a_group_counts_its_collectives(start: Any) -> None:
    """By which distwrap knows whether gradients were averaged by hand."""
    assert start(_counts_collectives, 2) == [3, 3]


def _meets() -> str:
    dw.barrier()
    return "met"


def test_what_fails_on_demand() -> None:
    """An exception of an event, a rank that is late, and one that dies."""

    def fails(rank: int, number: int, what: str) -> Any:
        return OSError("the cable was pulled") if (rank, what) == (1, "barrier()") else None

    with pytest.raises(OSError, match="cable"):
        simulate(_meets, 2, fail=fails)
    assert simulate(_meets, 2, fail=lambda rank, number, what: 3.0 if rank else None) == ["met", "met"]
    with pytest.raises(WorkerDiedError, match="rank 1 was killed"):
        simulate(_meets, 2, fail=lambda rank, number, what: "die" if (rank, what) == (1, "barrier()") else None)


def _ends_its_process(how: str) -> None:
    if dw.rank() == 1:
        os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)
    dw.barrier()


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_rank_that_ends_its_process_dies_alone(how: str) -> None:
    with pytest.raises(WorkerDiedError, match="rank 1 was killed"):
        simulate(_ends_its_process, 3, how)


def _interrupted() -> None:
    if dw.rank() == 0:
        dw.barrier()
    os.kill(os.getpid(), signal.SIGINT)
    while True:  # until the thread that gets signals has had its turn, which takes a while on busy cores
        dw.barrier()


def test_ctrl_c_ends_all_ranks() -> None:
    with pytest.raises(KeyboardInterrupt):
        simulate(_interrupted, 2)
    assert threading.active_count() == 1
    assert simulate(_meets, 2) == ["met", "met"]


def _simulates() -> None:
    simulate(_meets, 2)


@pytest.mark.parametrize("strategy", ["deepspeed", "horovod", "hivemind(target_batch_size=64, batch_size=16)"])
def test_a_strategy_that_meets_in_a_way_of_its_own_is_refused(strategy: str) -> None:
    with pytest.raises(OptionError, match="Strategy meets in a way of its own, which cannot be simulated"):
        simulate(abs, 2, -1, strategy=strategy)


def test_what_is_refused() -> None:
    with pytest.raises(LaunchError, match="one simulation"):
        simulate(_simulates, 2)
    with pytest.raises(OptionError, match="nprocs"):
        simulate(_meets, 0)


def test_the_launcher_and_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decorated function, by an option and without an edit."""
    assert dw.distributed(launcher="simulate", nprocs=3, returns="all")(dw.rank)() == [0, 1, 2]
    assert dw.distributed(launcher="simulate(schedule=4)", nprocs=2)(dw.world_size)() == 2
    monkeypatch.setenv("DISTWRAP_SIMULATE", "5")
    assert dw.distributed(nprocs=2, launcher="spawn")(dw.world_size)() == 5
    assert dw.distributed(dw.world_size).options(nprocs=2, launcher="spawn")() == 5
    monkeypatch.setenv("DISTWRAP_SIMULATE", "many")
    with pytest.raises(OptionError, match="DISTWRAP_SIMULATE"):
        dw.distributed(dw.world_size)()


def _asks_where() -> None:
    if dw.rank() == 1:
        dw.where()
    dw.barrier()


def test_where_each_rank_is(capsys: pytest.CaptureFixture[str]) -> None:
    simulate(_asks_where, 2)
    words = capsys.readouterr().err
    assert "rank 0 waits for barrier(), to which rank 1 did not come at test_simulate.py:" in words
    assert "rank 1 is at test_simulate.py:" in words


def test_many_ranks() -> None:
    """A hundred meet, and none is left."""
    assert simulate(_meets, 100) == ["met"] * 100
    assert threading.active_count() == 1
    assert "tests.simulate" in sys.modules


def _splits_unevenly() -> None:
    dist.all_to_all_single(torch.zeros(3), torch.arange(3.0))


def _unlike_parts() -> None:
    parts = [torch.ones(2), torch.ones(2 if dw.rank() == 0 else 1)]
    dist.reduce_scatter(torch.zeros(2), parts)


def test_what_gloo_refuses_is_refused() -> None:
    with pytest.raises(RuntimeError, match="split"):
        simulate(_splits_unevenly, 2)
    with pytest.raises(CollectiveError, match="different collectives"):
        simulate(_unlike_parts, 2)


def _in_a_column(collective: str) -> None:
    column = torch.ones(3, 2)[:, 0]
    if collective == "scatter":
        dist.scatter(column, [torch.ones(3)] * 2 if dw.rank() == 0 else None, src=0)
    else:
        getattr(dist, collective)(column, **{} if collective == "all_reduce" else {"src": 0})


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "scatter"])
def test_what_gloo_computes_wrongly_is_refused(collective: str) -> None:
    """It takes the numbers between those of a view."""
    with pytest.raises(CollectiveError, match=r"Give it a \.contiguous\(\) copy"):
        simulate(_in_a_column, 2, collective)


def _in_a_thread() -> None:
    thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),))
    thread.start()
    thread.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_collective_in_a_thread_of_the_loops_own_ends_the_run() -> None:
    """Also where it is joined, which raises nothing."""
    with pytest.raises(RuntimeError, match="is none of a simulated rank"):
        simulate(_in_a_thread, 2)


def _two_steps() -> float:
    model = dw.wrap_model(nn.Linear(2, 1), same_inputs=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        dw.backward(model(torch.ones(1, 2)).sum())
        assert dw.optimizer_step(optimizer)
        optimizer.zero_grad()
    return float(dw.world_size())


def test_a_process_that_has_trained_before() -> None:
    """Ranks do not call what listens to the steps of this process, which goes on listening after them."""
    model = dw.wrap_model(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def half() -> None:
        for _ in dw.accumulate([1, 2], 2, model):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    with pytest.raises(ModelError, match="micro-batch 1 of 2"):
        half()
    assert simulate(_two_steps, 2) == [2.0, 2.0]
    with pytest.raises(ModelError, match="micro-batch 1 of 2"):
        half()
