"""What ranks decide apart, where they must not, is named: a metric, a learning rate, the end of a loop."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset

import distwrap as dw
from distwrap.errors import DriftError, WorkerError, WorkerTimeoutError
from distwrap.group.world import RunPart, current_world
from distwrap.supervision.activity import Activity
from distwrap.supervision.order_check import parted
from distwrap.testing import run_ranks
from tests.limits import SOON

STEPS = 40


def train(
    each: Callable[[int, float, torch.optim.Optimizer], bool | None], after: Callable[[], object] = lambda: None
) -> list[float]:
    torch.manual_seed(0)
    model = dw.wrap_model(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = dw.rank_generator(3)
    for step in range(STEPS):
        loss = model(torch.randn(8, 4, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if each(step, loss.item(), optimizer):
            break
    after()
    return [group["lr"] for group in optimizer.param_groups]


def plateau(shared: bool) -> list[float]:
    made: list[ReduceLROnPlateau] = []

    def each(step: int, loss: float, optimizer: torch.optim.Optimizer) -> None:
        made.extend([] if made else [ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)])
        if step % 5 == 4:
            made[0].step(dw.mean(loss) if shared else loss)

    return train(each)


def test_a_metric_of_each_ranks_own() -> None:
    """`ReduceLROnPlateau` that is stepped with another number on each rank is an error, once their rates differ."""
    with pytest.raises(DriftError) as refusal:
        run_ranks(plateau, 2, False)
    words = str(refusal.value)
    assert "learning rate" in words
    assert "scheduler.step(distwrap.mean(loss, count))" in words


def test_a_metric_of_all_ranks() -> None:
    """The same number on all ranks is right, and torch's method is not replaced."""
    one, other = run_ranks(plateau, 2, True)
    assert one == other
    assert one[0] < 0.1
    assert run_ranks(lambda: ReduceLROnPlateau.step.__module__, 2) == ["torch.optim.lr_scheduler"] * 2


def test_a_learning_rate_of_each_ranks_own() -> None:
    """A scheduler that one rank steps alone ends the run by name."""

    def on_rank() -> None:
        made: list[StepLR] = []

        def each(step: int, loss: float, optimizer: torch.optim.Optimizer) -> None:
            made.extend([] if made else [StepLR(optimizer, 1, gamma=0.5)])
            if dw.is_rank_zero() and step == 5:
                made[0].step()

        train(each)

    with pytest.raises(DriftError, match="the learning rate of SGD"):
        run_ranks(on_rank, 2)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.slow("others of its kind are in `make test`")
def test_learning_rates_that_move_alike() -> None:
    """Per step, by hand, and by groups of parameters: nobody is refused, also where a rank is ahead."""

    def on_rank() -> list[float]:
        made: list[LambdaLR] = []

        def each(step: int, loss: float, optimizer: torch.optim.Optimizer) -> None:
            made.extend([] if made else [LambdaLR(optimizer, lambda count: 0.9**count)])
            made[0].step()
            if step == 20:
                optimizer.param_groups[0]["lr"] *= 2
            time.sleep(0.02 if step % 2 == dw.rank() else 0.0)

        return train(each)

    one, other = run_ranks(on_rank, 2)
    assert one == other


AFTER: dict[str, Callable[[], object]] = {
    "mean": lambda: dw.mean(1.0),
    "barrier": dw.barrier,
    "gather": lambda: dw.gather(torch.ones(3)),
}


@pytest.mark.parametrize("what", AFTER)
@pytest.mark.slow("waits for a limit to pass")
def test_one_rank_stops_early(what: str) -> None:
    """A rank that has left the loop, and waits elsewhere, is named long before the time limit."""

    def on_rank() -> None:
        train(lambda step, *_: step == 9 and dw.rank() == 1, AFTER[what])

    with pytest.raises(WorkerTimeoutError) as refusal:
        run_ranks(on_rank, 2, timeout=100)
    words = str(refusal.value)
    assert "rank 1 has left the training after 10 averages of gradients, and waits in another collective" in words
    assert f"rank 1 in {what} at test_parted.py:" in words
    assert "distwrap.agree(flag) before the break" in words


def train_in_step(what: str, rows: Callable[[int], torch.Tensor]) -> None:
    """Go through a loop that all ranks take together, of whose third step rank 1 leaves out a part."""
    model = dw.wrap_model(nn.Linear(4, 3))
    loop: Iterable[int] = range(STEPS)
    loop = dw.shard_loader(DataLoader(_Stream()), split="dispatch") if "dispatch" in what else dw.lockstep(loop)
    for step, _ in enumerate(loop):
        if step == 2 and dw.rank() == 1:
            if "skips" in what:
                continue
            break
        if "gather" in what:
            dw.gather(rows(step))
        else:
            model(rows(step)).square().mean().backward()


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(STEPS))


@pytest.mark.parametrize(
    ("what", "words", "place"),
    [
        ("leaves a gather", "rank 1 has left a step of a loop", "rank 1 at the end of its function"),
        ("skips a gather", "rank 1 has left a step of a loop", "rank 1 in lockstep at test_parted.py:"),
        ("leaves an average", "rank 1 has left the training after 2 averages", "rank 1 at the end of its function"),
        ("skips an average", "rank 1 has left the training after 2 averages", "rank 1 in lockstep at test_parted.py:"),
        ("leaves a dispatch", "rank 1 has left the training after 2 averages", "rank 1 at the end of its function"),
    ],
)
@pytest.mark.slow("waits for a limit to pass")
def test_one_rank_leaves_a_step(what: str, words: str, place: str) -> None:
    """A rank that leaves out what the others exchange in a step of their common loop is named, and where it is now."""

    def on_rank() -> None:
        generator = dw.rank_generator(3)
        train_in_step(what, lambda step: torch.randn(8, 4, generator=generator))

    with pytest.raises(WorkerTimeoutError) as refusal:
        run_ranks(on_rank, 2, timeout=100)
    assert words in str(refusal.value)
    assert place in str(refusal.value)


def test_one_rank_stops_after_one_step() -> None:
    """In the second forward DDP's ranks agree on groups of gradients: one that is not there is named all the same."""

    def on_rank() -> None:
        train(lambda step, *_: step == 0 and dw.rank() == 1, dw.barrier)

    with pytest.raises(WorkerTimeoutError, match=r"rank 1 has left .* after 1 averages"):
        run_ranks(on_rank, 2, timeout=100)


@pytest.mark.slow("others of its kind are in `make test`")
def test_one_rank_leaves_out_a_backward_before_no_sync() -> None:
    """Its next backward, in `no_sync`, is then the average for which the others wait: it counts as one."""

    def on_rank() -> None:
        model = dw.wrap_model(nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = dw.rank_generator(3)
        for step in range(9):
            is_last = step % 3 == 2
            with nullcontext() if is_last else dw.no_sync(model):
                loss = model(torch.randn(8, 4, generator=generator)).square().mean()
                if step == 5 and dw.rank() == 1:
                    continue
                loss.backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(DriftError, match="same weights"):
        run_ranks(on_rank, 2)


def test_ranks_in_different_calls() -> None:
    """Both calls are the next one of their rank, and neither ends: they are named at once, and not after 100 s."""

    def on_rank() -> None:
        dw.mean(1.0)
        if dw.rank() == 0:
            dw.gather(torch.ones(2))
        dw.barrier()

    began = time.monotonic()
    with pytest.raises(WorkerTimeoutError) as raised:
        run_ranks(on_rank, 2, timeout=2 * SOON)
    assert time.monotonic() - began < SOON
    words = str(raised.value)
    place = r"test_parted\.py:\d+"
    assert re.match(
        rf"rank 0 waits in gather at {place}, and rank 1 in barrier at {place}: they will never meet", words
    )
    assert "All ranks must make the same calls in the same order" in words


@pytest.mark.slow("others of its kind are in `make test`")
def test_one_rank_stops_early_in_a_collective_like_the_others() -> None:
    """gloo ends a process that all-reduces other numbers than the others; the error says so."""

    def on_rank() -> None:
        train(lambda step, *_: step == 9 and dw.rank() == 1, lambda: dw.agree(True))

    with pytest.raises(WorkerError, match=r"ranks call different collectives|has left the training"):
        run_ranks(on_rank, 2, timeout=100)


def test_all_ranks_stop_early() -> None:
    """Ranks that leave together go on together."""

    def on_rank() -> list[float]:
        return train(lambda step, *_: dw.agree(step == 9 and dw.rank() == 1), lambda: dw.mean(1.0))

    assert run_ranks(on_rank, 2) == [[0.1]] * 2


@pytest.mark.slow("others of its kind are in `make test`")
def test_ranks_that_torch_joins() -> None:
    """Under torch's ``Join`` ranks may take other numbers of steps, and meet afterwards."""

    def on_rank() -> float:
        model = dw.wrap_model(nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = dw.rank_generator(3)
        with dist.algorithms.join.Join([model]):
            for _ in range(5 + 5 * dw.rank()):
                model(torch.randn(8, 4, generator=generator)).square().mean().backward()
                optimizer.step()
        return dw.mean(1.0, 1)

    assert run_ranks(on_rank, 2) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("one", "other", "is_apart"),
    [
        ((0, 10, 1, 0), (0, 12, 0, 0), True),
        ((0, 12, 0, 0), (0, 10, 1, 0), True),
        ((0, 3, 0, 0), (0, 2, 1, 0), True),
        ((0, 10, 1, 2), (0, 10, 2, 1), True),
        ((0, 10, 1, 3), (0, 12, 1, 2), True),
        ((0, 10, 1, 0), (0, 12, 1, 0), False),
        ((0, 10, 0, 0), (0, 12, 0, 0), False),
        ((0, 10, 1, 0), (0, 10, 2, 0), False),
        ((0, 10, 1, 2), (0, 12, 1, 3), False),
        ((1, 10, 1, 0), (0, 12, 0, 0), False),
    ],
)
def test_when_ranks_have_parted(
    one: tuple[int, int, int, int], other: tuple[int, int, int, int], is_apart: bool
) -> None:
    """They have where each is ahead of the other in something, unless one has begun to count anew."""
    assert bool(parted({0: one, 1: other})) == is_apart


def counts_anew() -> bool:
    channel, activity = current_world().channel, current_world().part(Activity)
    assert channel is not None
    activity.averages = lambda: (0, 8)
    limit = time.monotonic() + SOON
    while any(channel.order._notes.read("begun", rank) is None for rank in range(2)):
        assert time.monotonic() < limit
        time.sleep(0.1)
    channel.order.begin_anew()
    dist.barrier()
    if dw.rank() == 0:
        activity.collectives = 3  # more than rank 1 has noted that it has begun, which has averaged before
        time.sleep(3)
    dist.barrier()
    return True


@pytest.mark.slow("waits until ranks compare what they have begun")
def test_ranks_that_count_anew_have_not_parted() -> None:
    """What a rank has begun before all of them count anew is compared with nothing that comes after."""
    assert all(run_ranks(counts_anew, 2))


def keeps_a_model() -> float:
    def trained(steps: int) -> nn.Module:
        model = dw.wrap_model(nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(torch.ones(8, 4)).square().mean().backward()
            optimizer.step()
        return model

    kept = [trained(1)]
    if dw.rank() == 0:
        kept.clear()
        gc.collect()
    trained(5)
    if dw.rank() == 1:
        time.sleep(3)
    return dw.mean(1.0)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.slow("waits until ranks compare what they have begun")
def test_a_model_that_is_gone_on_one_rank_alone(strategy: str) -> None:
    """Ranks have not parted where one holds a model longer than the other."""
    run = dw.distributed(strategy=strategy, nprocs=2, returns="all", timeout=60)
    assert run(keeps_a_model)() == [1.0, 1.0]


class SettlesLate(RunPart):
    """Part of a run that takes long to end, while the ranks' counts say that they have parted."""

    def __init__(self, world: object) -> None:
        activity = current_world().part(Activity)
        activity.averages = lambda: (0, 6 + 2 * dw.rank())
        activity.collectives = 10 - dw.rank()

    def settle(self) -> None:
        time.sleep(5)


@pytest.mark.slow("waits until ranks compare what they have begun")
def test_what_ends_a_rank_after_its_result(capfd: pytest.CaptureFixture[str]) -> None:
    """A rank that is ended when its result is there already says why."""
    run = dw.distributed(nprocs=2, timeout=60)
    with pytest.warns(RuntimeWarning, match="result is complete"):
        run(lambda: current_world().part(SettlesLate) and None)()
    assert "rank 0 has left the training after 3 averages of gradients" in capfd.readouterr().err
