"""The algorithms under DDP as loops use them: buckets, windows, fp16, unused parameters, uneven inputs, failures."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from distwrap import (
    accumulate,
    assert_in_sync,
    backward,
    consolidate,
    distributed,
    load,
    lockstep,
    optimizer_step,
    run_state,
    save,
    wrap_model,
    wrap_optimizer,
)
from distwrap.comm import AllReduce, Averager, Bucket, GradientAlgorithm, Link, traffic
from distwrap.comm.compressed import Residuals
from distwrap.comm.gradients import GradientExchange
from distwrap.comm.weights import WeightExchanges
from distwrap.errors import CollectiveTimeoutError, ModelError, OptionError, WorkerDiedError
from distwrap.group.world import World, current_world, rank, world_size
from distwrap.model.distributed import DistributedModel
from distwrap.model.wrapped_models import handle_of
from distwrap.precision import LossScaling
from distwrap.testing import run_ranks
from distwrap.versions import ENDS_GROUPS_LOCKED
from tests.limits import SOON
from tests.slow import few, nightly, slow

GRADIENT = [
    "allreduce",
    "fp16",
    "bf16",
    "bytegrad",
    "bytegrad(error_feedback=True)",
    "powersgd",
    "topk(ratio=0.3)",
    "qadam(warmup_steps=3)",
    "qadam(warmup_steps=3, bits=1)",
]
WEIGHT = [
    "local_sgd(sync_every=2)",
    "diloco(sync_every=2)",
    "diloco(sync_every=4, fragments=2, delay=1, mixing=0.5, compression='8bit')",
    "decentralized",
    "decentralized(peer_selection='shift_one')",
    "low_precision_decentralized",
    "async(sync_interval_ms=1)",
]


class Net(nn.Module):
    """Several buckets' worth, and a branch that not every rank takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 64), nn.Linear(64, 3)
        self.odd, self.even = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, branch: int | None = None) -> torch.Tensor:
        h = torch.relu(self.first(x))
        if branch is None:
            h = torch.relu(self.odd(h)) + torch.relu(self.even(h))
        else:
            h = torch.relu(self.odd(h) if branch % 2 else self.even(h))
        out: torch.Tensor = self.last(h)
        return out


def inputs(step: int, of: int) -> torch.Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + of))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def loss_of(model: nn.Module, x: torch.Tensor, **how: Any) -> torch.Tensor:
    return (model(x, **how) - x[:, :3]).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, inputs(step, rank())).backward()
        optimizer.step()


def prepared(comm: Any, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = wrap_model(Net(), comm=comm, bucket_cap_mb=0.01, **options)  # a bucket for each matrix
    return model, wrap_optimizer(torch.optim.Adam(model.parameters(), lr=3e-3), model)


def _plainly(comms: list[Any], steps: int = 6, **options: Any) -> dict[Any, list[float]]:
    found = {}
    for comm in comms:
        model, optimizer = prepared(comm, **options)
        train(model, optimizer, range(steps))
        consolidate(model)
        assert_in_sync(model)
        found[comm] = flat(model).tolist()
    return found


@pytest.mark.parametrize("options", few([{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], 1), ids=str)
@pytest.mark.parametrize("ranks", [2, nightly(3, row="products", why="two ranks show it")])
def test_allreduce_is_plain_ddp_to_the_bit(ranks: int, options: dict[str, Any]) -> None:
    for found in run_ranks(_with_options, ranks, options):
        assert found["allreduce"] == found[None]


def _with_options(options: dict[str, Any]) -> dict[Any, list[float]]:
    return _plainly([None, "allreduce"], **options)


@pytest.mark.parametrize("ranks", [2, nightly(4, row="products", why="two ranks show it")])
@pytest.mark.slow("runs all algorithms in turns")
def test_many_buckets_end_alike_on_all_ranks(ranks: int) -> None:
    everyone = run_ranks(_plainly, ranks, [*GRADIENT, *WEIGHT], timeout=60)
    for comm in (*GRADIENT, *WEIGHT):
        assert all(found[comm] == everyone[0][comm] for found in everyone), comm
        assert torch.isfinite(torch.tensor(everyone[0][comm])).all(), comm


def _in_windows(comms: list[Any]) -> dict[Any, tuple[list[float], int, int]]:
    return {comm: _in_windows_by(comm) for comm in comms}


def _in_windows_by(comm: Any) -> tuple[list[float], int, int]:
    model, optimizer = prepared(comm)
    batches = [inputs(step, rank()) for step in range(7)]
    for x, window in accumulate(batches, 3, model):
        (loss_of(model, x) / window.size).backward()
        if window.last:
            optimizer.step()
            optimizer.zero_grad()
    exchanges = traffic(model).exchanges
    consolidate(model)
    return flat(model).tolist(), exchanges, len(list(model.parameters()))


@pytest.mark.slow("runs all algorithms in turns")
def test_a_window_is_exchanged_once() -> None:
    weights = ["local_sgd(sync_every=1)", "decentralized"]
    first, second = run_ranks(_in_windows, 2, [None, *GRADIENT, *weights], timeout=60)
    assert first["allreduce"][0] == first[None][0]
    for comm in (*GRADIENT, *weights):
        assert first[comm][0] == second[comm][0], comm
    for comm in GRADIENT:
        assert first[comm][1] <= 3 * 2 * 8, comm  # three windows, two exchanges for each of at most eight buckets


def _in_fp16(comms: list[str]) -> dict[str, tuple[list[float], list[bool], float]]:
    world = current_world()
    world.options = replace(world.options, precision="fp16")
    scaling = world.part(LossScaling)
    found = {}
    for comm in comms:
        scaling.scaler = None
        scaling.forget()
        model, optimizer = prepared(comm)
        scaling.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)  # it moves all the time
        stepped = []
        for step in range(8):
            optimizer.zero_grad()
            x = inputs(step, rank())
            if step == 4 and rank() == 1:
                x = x * 1e30  # overflows on one rank
            backward(loss_of(model, x))
            stepped.append(optimizer_step(optimizer, max_norm=100.0))
        consolidate(model)
        found[comm] = flat(model).tolist(), stepped, scaling.scaler.get_scale()
    return found


@pytest.mark.slow("runs all algorithms in turns")
def test_fp16_with_a_scale_that_moves_and_an_overflow_on_one_rank() -> None:
    first, second = run_ranks(_in_fp16, 2, [*GRADIENT, *WEIGHT], timeout=60)
    for comm in (*GRADIENT, *WEIGHT):
        assert first[comm][0] == second[comm][0], comm
        assert torch.isfinite(torch.tensor(first[comm][0])).all(), comm
        if comm in GRADIENT:
            assert first[comm][1] == second[comm][1] == [True] * 4 + [False] + [True] * 3, comm
        else:  # each rank for itself, and nobody waits for a step that the other has skipped
            assert first[comm][1] == [True] * 8, comm
            assert not second[comm][1][4], comm


def test_residuals_follow_the_scale_and_the_buckets() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (2, 3)]
    residuals = Residuals()
    residuals.of(Bucket(torch.zeros(5), parameters, scale=4.0)).copy_(torch.arange(5.0))
    residual = residuals.of(Bucket(torch.zeros(5), parameters, scale=2.0))
    assert residual.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]
    second = residuals.of(Bucket(torch.zeros(3), parameters[1:], scale=4.0))
    first = residuals.of(Bucket(torch.zeros(2), parameters[:1], scale=4.0))
    assert (first.tolist(), second.tolist()) == ([0.0] * 2, [0.0] * 3), "DDP has rearranged its buckets"
    again = residuals.of(Bucket(torch.zeros(5), parameters, scale=2.0))
    assert again.tolist() == [0.0] * 5, "errors of parts of it are not kept twice"


def _with_branches(comms: list[Any]) -> dict[Any, list[float]]:
    found = {}
    for comm in comms:
        model, optimizer = prepared(comm, find_unused_parameters=True)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, inputs(step, rank()), branch=rank() + (step > 3)).backward()
            optimizer.step()
        consolidate(model)
        found[comm] = flat(model).tolist()
    return found


@pytest.mark.slow("runs all algorithms in turns")
def test_unused_parameters() -> None:
    comms = [None, *GRADIENT, *WEIGHT]
    first, second = run_ranks(_with_branches, 2, comms, timeout=60)
    assert first == second
    assert first["allreduce"] == first[None]


def _joined(comms: list[Any]) -> dict[Any, list[float]]:
    found = {}
    for comm in comms:
        model, optimizer = prepared(comm)
        with Join([model]):
            train(model, optimizer, range(4 + 2 * rank()))
        found[comm] = flat(model).tolist()
    return found


@pytest.mark.slow("runs all algorithms in turns")
def test_uneven_inputs_under_join() -> None:
    """torch's Join gives a rank that is out of data zeros to exchange, and the final weights of one that was not."""
    comms = [comm for comm in GRADIENT if not comm.startswith("qadam")]
    first, second = run_ranks(_joined, 2, [None, *comms], timeout=60)
    assert first == second
    assert first["allreduce"] == first[None]


def _in_lockstep(comms: list[str]) -> dict[str, list[float]]:
    found = {}
    for comm in comms:
        model, optimizer = prepared(comm)
        train(model, optimizer, lockstep(range(3 + rank())))
        consolidate(model)
        found[comm] = flat(model).tolist()
    return found


@pytest.mark.slow("runs all algorithms in turns")
def test_uneven_inputs_in_lockstep() -> None:
    first, second = run_ranks(_in_lockstep, 2, [*GRADIENT, *WEIGHT], timeout=60)
    assert first == second


@dataclass(frozen=True, kw_only=True)
class Failing(GradientAlgorithm):
    """Fails on one rank, in the model's thread."""

    how: str = "raise"

    def averager(self, link: Link, device: torch.device) -> Averager:
        return _Failing(link, self.how)


class _Failing(Averager):
    def __init__(self, link: Link, how: str) -> None:
        self._link, self._how, self._count = link, how, 0

    def average(self, bucket: Bucket) -> None:
        self._count += 1
        if self._count == 9 and self._link.rank == 1:
            if self._how == "raise":
                raise ZeroDivisionError("in the thread")
            os._exit(7)
        self._link.mean(bucket.values)


@pytest.mark.parametrize(("how", "error"), [("raise", ZeroDivisionError), ("die", WorkerDiedError)])
def test_a_failure_in_the_thread_is_raised_in_the_backward_and_nobody_hangs(how: str, error: type[Exception]) -> None:
    began = time.monotonic()
    with pytest.raises(error):
        run_ranks(_plainly, 2, [Failing(how=how)], timeout=2 * SOON)
    assert time.monotonic() - began < SOON


class _Counted(GradientExchange):
    buckets = 0

    def submit(self, bucket: Any) -> Any:
        self.buckets += 1
        return super().submit(bucket)


class Counting(AllReduce):
    """Has an exchange of its own, that acts at each of DDP's buckets."""

    def attach(self, model: DistributedModel, world: World) -> GradientExchange:
        return _Counted(self, model, world)


def _count() -> int:
    model, optimizer = prepared(Counting())
    train(model, optimizer, range(1))
    exchange: Any = handle_of(model).exchange
    return int(exchange.buckets)


def test_an_exchange_of_ones_own_gets_the_buckets() -> None:
    first, second = run_ranks(_count, 2)
    assert first == second > 0


def _one_leaves() -> None:
    world = current_world()
    world.options = replace(world.options, timeout=2.0)
    model, optimizer = prepared("bytegrad")
    train(model, optimizer, range(4 - 2 * rank()))
    time.sleep(6)


@pytest.mark.slow("waits for a time-out")
def test_a_rank_that_does_not_come_is_an_error_in_time() -> None:
    with pytest.raises((CollectiveTimeoutError, RuntimeError), match=r"[Tt]im|closed"):
        run_ranks(_one_leaves, 2)


def _report(value: float, scaled: bool) -> tuple[str, int, bool]:
    os.environ.pop("DISTWRAP_QUIET", None)
    model, _ = prepared("bytegrad")
    with contextlib.redirect_stderr(io.StringIO()) as told:
        for step in range(3):
            model.zero_grad()
            loss = loss_of(model, inputs(step, rank()))
            if rank() == 1:
                loss = loss + model.odd.weight[0, 0] * value
            loss.backward()
    exchange: Any = handle_of(model).exchange
    return told.getvalue(), exchange.reports, bool(torch.isfinite(model.odd.weight.grad).all())


def test_a_gradient_that_is_not_finite_is_reported_by_name_on_its_rank() -> None:
    first, second = run_ranks(_report, 2, float("nan"), False)
    assert first == ("", 0, False)  # it gets NaN too, and is not to blame
    assert second[0].startswith("distwrap: rank 1: the gradient of odd.weight is not finite")
    assert second[1] == 3


def _several() -> tuple[int, int, int]:
    groups = lambda: len(dist.distributed_c10d._world.pg_map)  # noqa: E731
    threads, before = threading.active_count(), groups()
    for _ in range(3):
        pairs = [prepared(comm) for comm in ("bytegrad", "local_sgd", "async(sync_interval_ms=1)")]  # as in a GAN
        for step in range(3):
            for model, optimizer in pairs:
                optimizer.zero_grad()
                loss_of(model, inputs(step, rank())).backward()
                optimizer.step()
        for model, _ in pairs:
            consolidate(model)
        del pairs, model, optimizer, _
        gc.collect()
        dist.barrier()
    last, _ = prepared("bytegrad")  # ends what is left of the others
    before += len(handle_of(last).exchange._groups)
    dist.barrier()  # nobody leaves while another one is still making the group
    return threading.active_count() - threads, groups() - before, len(current_world().part(WeightExchanges).known)


@pytest.mark.slow("runs all algorithms in turns")
def test_a_model_that_nobody_holds_leaves_no_thread_and_no_group() -> None:
    threads, groups, exchanges = zip(*run_ranks(_several, 2), strict=True)
    assert set(threads) == set(exchanges) == {0}
    assert set(groups) == {0} or ENDS_GROUPS_LOCKED  # which cannot end a group safely


def _one_rank_drops_it() -> list[float]:
    model, optimizer = prepared("async(sync_interval_ms=1)")
    train(model, optimizer, range(5))
    if rank() == 1:
        current_world().cleanup.callback(id, model)  # held to the end
    model, optimizer = prepared("bytegrad")
    gc.collect()
    model, optimizer = prepared("bytegrad")
    train(model, optimizer, range(5))
    return flat(model).tolist()


def test_a_model_at_work_that_one_rank_drops_ends_with_the_others() -> None:
    first, second = run_ranks(_one_rank_drops_it, 2, timeout=30)
    assert first == second


def _wrapped_anew() -> list[float]:
    net = Net()
    for comm in ("bytegrad", "local_sgd(sync_every=1)", None):
        model = wrap_model(net, comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(3):
            loss_of(model, inputs(step, rank())).backward()
            optimizer.step()
    assert_in_sync(model)
    return flat(model).tolist()


def test_the_same_model_wrapped_anew() -> None:
    first, second = run_ranks(_wrapped_anew, 2)
    assert first == second


def _qadam_without_its_optimizer() -> None:
    model = wrap_model(Net(), comm="qadam")
    loss_of(model, inputs(0, rank())).backward()


def test_qadam_asks_for_wrap_optimizer() -> None:
    with pytest.raises(ModelError, match="wrap_optimizer"):
        run_ranks(_qadam_without_its_optimizer, 2)


def _refused(kind: str) -> None:
    if kind == "sgd":
        model = wrap_model(Net(), comm="qadam")
        wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    elif kind == "amsgrad":
        model = wrap_model(Net(), comm="qadam")
        wrap_optimizer(torch.optim.Adam(model.parameters(), amsgrad=True), model)
    elif kind == "sparse":
        wrap_model(nn.Embedding(3, 3, sparse=True), comm="bytegrad")
    else:
        wrap_model(Net(), comm="bytegrad", process_group=dist.group.WORLD)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("sgd", "needs torch.optim.Adam"), ("amsgrad", "amsgrad"), ("sparse", "sparse=False"), ("group", "process_group")],
)
def test_what_does_not_go_together_is_refused(kind: str, message: str) -> None:
    with pytest.raises((OptionError, ModelError), match=message):
        run_ranks(_refused, 2, kind)


def _goes_on(comm: str, path: str, first: int) -> tuple[list[float], list[float], int, int]:
    def sgd() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = prepared(comm)
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    model, optimizer = sgd()
    train(model, optimizer, range(16))
    consolidate(model)
    whole, sent = flat(model).tolist(), traffic(model).sent
    model, optimizer = sgd()
    train(model, optimizer, range(first))
    before = traffic(model).sent
    with consolidate(model):
        save({"model": model, "optimizer": optimizer, "run": run_state()}, path)
    model, optimizer = sgd()
    load(path, into={"model": model, "optimizer": optimizer, "run": run_state()})
    train(model, optimizer, range(first, 16))
    consolidate(model)
    return whole, flat(model).tolist(), sent, before + traffic(model).sent


@pytest.mark.parametrize(
    ("comm", "first", "alike"),
    [
        ("diloco(sync_every=4, warmup_steps=2)", 10, True),
        ("local_sgd(sync_every=4, warmup_steps=8)", 5, True),
        *(
            slow(*each, why="others of their kind are in `make test`")
            for each in [
                ("diloco(sync_every=4, fragments=2)", 8, False),
                ("diloco(sync_every=4)", 2, False),
                ("local_sgd(sync_every=3, warmup_steps=4)", 10, True),
                ("decentralized(communication_interval=3)", 7, False),
            ]
        ),
    ],
)
def test_a_run_goes_on_from_the_mean(tmp_path: Path, comm: str, first: int, alike: bool) -> None:
    """Saved where the ranks were alike, it is the run that was never cut: phase, warm-up and outer momentum go on."""
    everyone = run_ranks(_goes_on, 2, comm, str(tmp_path / "x.pt"), first)
    for whole, resumed, sent, in_two in everyone:
        assert resumed == everyone[0][1]
        assert in_two == pytest.approx(sent, rel=1e-3)
        if alike:
            assert torch.allclose(torch.tensor(whole), torch.tensor(resumed), atol=1e-6)


def _other_comm(path: str) -> str:
    model, _ = prepared("local_sgd")
    save({"run": run_state()}, path)
    os.environ.pop("DISTWRAP_QUIET", None)
    model, _ = prepared("bytegrad")
    with contextlib.redirect_stderr(io.StringIO()) as told:
        load(path, into={"run": run_state()})
    del model
    return told.getvalue()


def test_a_run_that_goes_on_under_another_algorithm_says_so(tmp_path: Path) -> None:
    assert "saved with LocalSGD and goes on with another comm=" in run_ranks(_other_comm, 2, str(tmp_path / "x.pt"))[0]


def _notes() -> str:
    os.environ.pop("DISTWRAP_QUIET", None)
    with contextlib.redirect_stderr(io.StringIO()) as told:
        model, optimizer = prepared("local_sgd(sync_every=3)")
        model.eval()
        model.train()
        for step in range(2):
            loss_of(model, inputs(step, rank())).backward()
            optimizer.step()
        with consolidate(model):
            model.eval()
            model.train()
            model.state_dict()
        quiet = told.getvalue()
        model.eval()
        model.state_dict()
    assert not quiet, quiet
    return told.getvalue()


def test_own_weights_are_not_evaluated_without_a_word() -> None:
    first, second = run_ranks(_notes, 2)
    assert first.count("consolidate(model)") == 1
    assert not second
    assert world_size() == 1


def _untouched_loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    train(model, optimizer, range(5))
    return flat(model).tolist()


def test_a_retrofitted_caller_gets_the_mean_of_all_ranks() -> None:
    torch.manual_seed(0)
    net = Net()
    run = distributed(nprocs=2, retrofit=True, comm="local_sgd(sync_every=100)", returns="all")(_untouched_loop)
    first, second = run(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert first != second
    assert torch.allclose(flat(net), (torch.tensor(first) + torch.tensor(second)) / 2, atol=1e-6)


def _qadam_goes_on(path: str, plain_first: bool) -> tuple[list[float], list[float], float]:
    comm = "qadam(warmup_steps=3, error_feedback=False)"

    model, optimizer = prepared(comm)
    train(model, optimizer, range(8))
    whole = flat(model).tolist()
    if plain_first:  # the warm-up without distwrap's optimizer, as from a checkpoint of plain DDP
        model, optimizer = prepared(None)
        train(model, optimizer, range(3))
    else:
        model, optimizer = prepared(comm)
        train(model, optimizer, range(5))
    save({"model": model, "optimizer": optimizer}, path)
    model, optimizer = prepared(comm)
    load(path, into={"model": model, "optimizer": optimizer})
    before = traffic(model).sent
    train(model, optimizer, range(3 if plain_first else 5, 8))
    sent = (traffic(model).sent - before) / (3 if not plain_first else 5)
    return whole, flat(model).tolist(), sent / (4 * len(whole))


@pytest.mark.parametrize("plain_first", [False, True])
@pytest.mark.slow("others of its kind are in make test")
def test_qadam_goes_on_from_a_checkpoint(tmp_path: Path, plain_first: bool) -> None:
    """In the phase in which it was saved: no second warm-up, and about the weights of the uninterrupted run."""
    everyone = run_ranks(_qadam_goes_on, 2, str(tmp_path / "x.pt"), plain_first)
    for whole, resumed, sent in everyone:
        assert (torch.tensor(whole) - torch.tensor(resumed)).abs().mean() < 3e-3  # a step's length
        assert resumed == everyone[0][1]
        assert sent < 0.27
