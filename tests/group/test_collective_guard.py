"""A collective where only some ranks are is refused at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distwrap as dw
from distwrap import distributed
from distwrap.errors import CollectiveError, CollectiveInRankZeroError, WorkerError
from distwrap.group import failures
from distwrap.group.collective_guard import guard_collectives
from distwrap.testing import run_ranks
from tests.limits import SOON

LIMIT = 60.0


def _refused(body: Callable[[], Any]) -> str:
    try:
        dw.rank_zero_only(body)()
    except CollectiveInRankZeroError as error:
        return str(error)
    return ""


class Net(nn.Sequential):
    """A model that also trains by a method."""

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).mean()


def _collectives() -> dict[str, str]:
    model: Any = dw.wrap_model(Net(nn.Linear(2, 1), nn.BatchNorm1d(1)))
    x, one = torch.ones(4, 2), torch.ones(1)
    with_gradients = model(x)  # on all ranks
    bodies: dict[str, Callable[[], Any]] = {
        "gather()": lambda: dw.gather(one),
        "gather_object()": lambda: dw.gather_object(1),
        "reduce()": lambda: dw.reduce(1.0),
        "broadcast()": lambda: dw.broadcast(1),
        "agree()": lambda: dw.agree(True),
        "barrier()": dw.barrier,
        "torch.distributed's allreduce()": lambda: dist.all_reduce(one),
        "torch.distributed's barrier()": dist.barrier,
        "torch.distributed's broadcast()": lambda: dist.broadcast_object_list([1]),
        "torch.distributed's allgather": lambda: dist.all_gather_object([None, None], 1),
        "the forward of the wrapped Net with gradients on": lambda: model(x),
        "the forward of the wrapped Net with gradients": lambda: model.loss(x),
        "rank_zero_first()": lambda: dw.rank_zero_first().__enter__(),
        "the rank-zero function": lambda: dw.rank_zero_only(broadcast=True)(lambda: 1)(),
    }
    if dw.rank() == 0:
        bodies["torch.distributed's allreduce() "] = lambda: with_gradients.sum().backward()
    told = {name: _refused(body) for name, body in bodies.items()}
    dw.barrier()
    return told


def test_every_collective_is_refused() -> None:
    """Ours, torch's, a training forward and a backward: each raises at once, and names itself and the function."""
    start = time.monotonic()
    first, second = run_ranks(_collectives, 2, timeout=LIMIT)
    assert time.monotonic() - start < SOON
    for name, told in first.items():
        assert f"rank 0 called {name.strip()}" in told, (name, told)
        assert "inside the rank-zero function " in told
    assert set(second.values()) == {""}


def _harmless() -> list[Any]:
    model = dw.wrap_model(nn.Linear(2, 1))
    alone = dist.new_group([0])
    seen: list[Any] = []

    @dw.rank_zero_only
    def body() -> None:
        with torch.no_grad():
            seen.append(tuple(model(torch.ones(3, 2)).shape))
        model.eval()
        seen.append(tuple(model.module(torch.ones(3, 2)).shape))
        one = torch.ones(1)
        dist.all_reduce(one, group=alone)
        seen.append(one.item())
        dist.send(one, dst=1)
        nn.Linear(2, 1)(torch.ones(1, 2)).sum().backward()

    body()
    if dw.rank() == 1:
        received = torch.zeros(1)
        dist.recv(received, src=0)
        seen.append(received.item())
    model.train()
    model(torch.ones(3, 2)).sum().backward()  # works again outside
    seen.append(model.weight.grad is not None)
    return seen


def test_what_needs_no_other_rank_is_allowed() -> None:
    """Evaluation, a group of one's own, a message to one rank and a model of one's own work inside, all else after."""
    first, second = run_ranks(_harmless, 2, timeout=LIMIT)
    assert first == [(3, 1), (3, 1), 1.0, True]
    assert second == [1.0, True]


def test_in_the_caller() -> None:
    """The caller gets the error in its own type, from the rank that made the mistake."""

    @distributed(nprocs=2, launcher="fork")
    def main() -> None:
        @dw.rank_zero_only
        def report() -> float:
            return float(dw.mean(1.0))

        report()
        dw.barrier()

    with pytest.raises(
        CollectiveInRankZeroError, match=r"rank 0 called mean\(\) inside the rank-zero function .*report"
    ):
        main()


def test_the_model_keeps_its_precision() -> None:
    """In work of one rank, also one piece within another, and after it, a wrapped model computes as before."""

    @distributed(nprocs=2, launcher="fork", precision="bf16", returns="all")
    def main() -> list[bool]:
        model, x = dw.wrap_model(nn.Linear(8, 8)), torch.linspace(0, 1, 32).reshape(4, 8)
        before = model(x).detach()
        model(x).sum().backward()
        computed = []

        @dw.rank_zero_only
        def compute() -> None:
            with torch.no_grad():
                computed.append(model(x))

        dw.rank_zero_only(compute)()
        compute()
        with pytest.raises(ZeroDivisionError):
            dw.rank_zero_only(broadcast=True)(lambda: 1 / 0)()
        computed.append(model(x).detach())
        return [torch.equal(each, before) for each in computed]

    assert main() == [[True] * 3, [True]]


def test_in_a_single_process() -> None:
    """In a single process everything is allowed, since nobody is waited for."""
    with guard_collectives("f()"):
        assert dw.gather([1]) == [1]


def _saves(path: Path) -> list[Any]:
    if dw.is_rank_zero():
        dw.save({"epoch": 1}, path, alone=True)
    dw.barrier()
    dw.rank_zero_only(dw.save)({"epoch": 2}, path)
    dw.barrier()
    seen = [dw.load(path)["epoch"]]
    dw.barrier()
    dw.save({"epoch": 3}, path)
    seen.append(dw.load(path)["epoch"])
    return seen


def test_rank_zero_may_save_alone(tmp_path: Path) -> None:
    """`save` with alone=True under `if is_rank_zero()`, or inside a rank-zero function, writes, and nobody waits."""
    assert run_ranks(_saves, 2, tmp_path / "last.pt", timeout=LIMIT)[0] == [2, 3]


def _first_with_collective() -> None:
    with dw.rank_zero_first():
        dw.barrier()


def test_a_collective_in_rank_zero_first() -> None:
    """Inside rank_zero_first() the ranks are not together either."""
    with pytest.raises(CollectiveError, match=r"rank 0 called barrier\(\) inside rank_zero_first\(\)"):
        run_ranks(_first_with_collective, 2, timeout=LIMIT)


def _followers() -> list[bool]:
    """Return of errors that rank 1 raises since rank 0 has failed whether they say so."""
    said = []
    for kind in (ValueError, SystemExit):
        try:
            dw.rank_zero_only(broadcast=True)(_fails)(kind)
        except WorkerError as error:
            said.append(error.secondary)
        except BaseException:  # noqa: BLE001 - rank 0's own
            pass
    try:
        with dw.rank_zero_first():
            if dw.rank() == 0:
                raise ValueError("no")
    except WorkerError as error:
        said.append(error.secondary)
    except ValueError:
        pass
    return said


def _fails(kind: type[BaseException]) -> None:
    raise kind("no")


def test_what_follows_from_another_ranks_failure_says_so() -> None:
    """What a rank raises only because another has failed gives way to that one's own error, whichever comes first."""
    assert run_ranks(_followers, 2, timeout=LIMIT) == [[], [True, True]]
    assert failures.is_secondary(WorkerError("rank 0 ended", secondary=True))
    assert not failures.is_secondary(WorkerError("on n2: OSError: Broken pipe"))
