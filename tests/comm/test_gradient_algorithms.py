"""Each gradient algorithm against NumPy, for one to five ranks: odd and empty buckets, small and large numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from distwrap.comm import (
    BF16,
    FP16,
    AllReduce,
    ByteGrad,
    GradientAlgorithm,
    Link,
    PowerSGD,
    QAdam,
    TopK,
    Traffic,
    compressed,
)
from distwrap.comm.base import Bucket
from distwrap.errors import OptionError
from distwrap.testing import run_ranks
from tests.comm import references
from tests.slow import MORE_RANKS, few, nightly, slow

RANKS = [1, 2, slow(4, why=MORE_RANKS), *(nightly(ranks, row="products", why="four ranks show it") for ranks in (3, 5))]
STEPS = 4
# Of one bucket each: with matrices that are worth approximating, and without; nothing at all; less than a rank each.
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "odd": [(37, 53), (19,), (3, 5, 7)],
    "two blocks": [(131, 1009), (3,)],
    "one": [(1,)],
    "three": [(3,)],
    "empty": [(0,)],
}
SCALES = [1e-12, 1.0, 1e12]
ALGORITHMS: dict[str, GradientAlgorithm] = {
    "allreduce": AllReduce(),
    "fp16": FP16(),
    "bf16": BF16(),
    "bytegrad": ByteGrad(),
    "bytegrad, error feedback": ByteGrad(error_feedback=True),
    "powersgd": PowerSGD(rank=2),
    "topk": TopK(ratio=0.1),
}
Reference = Callable[[Sequence[references.Array]], references.Array]


def count_of(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def gradients(rank: int, step: int, count: int, scale: float) -> torch.Tensor:
    """A part that all ranks share, and one of each rank's own."""
    shared = torch.randn(count, generator=torch.Generator().manual_seed(step))
    own = torch.randn(count, generator=torch.Generator().manual_seed(1000 * rank + step))
    return (shared + own) * scale


def _average_everything(dtype: torch.dtype = torch.float32) -> dict[tuple[str, str, float], list[Any]]:
    """Run on each rank: every algorithm over every bucket, some steps each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[tuple[str, str, float], list[Any]] = {}
    for name, algorithm in ALGORITHMS.items():
        for kind, shapes in SHAPES.items():
            for scale in SCALES:
                link = Link(dist.group.WORLD, list(range(size)), rank, Traffic())
                averager = algorithm.averager(link, torch.device("cpu"))
                parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
                results = []
                for step in range(STEPS):
                    values = gradients(rank, step, count_of(shapes), scale).to(dtype)
                    averager.average(Bucket(values, parameters))
                    results.append(values.double().numpy())
                found[name, kind, scale] = results
    return found


@cache
def everyones(ranks: int) -> list[dict[tuple[str, str, float], list[Any]]]:
    return run_ranks(_average_everything, ranks, timeout=100)


def reference_of(name: str, shapes: list[tuple[int, ...]], ranks: int) -> Reference:
    count = count_of(shapes)
    if name == "topk":
        return references.TopK(count, ranks, 0.1)
    if name == "powersgd":
        random, rights = torch.Generator().manual_seed(0), []
        powersgd = references.PowerSGD(shapes, ranks, 2, [])
        for shape in shapes:
            if not powersgd.small(shape):
                columns = math.prod(shape[1:])
                right = torch.randn(columns, min(2, shape[0], columns), generator=random)
                rights.append(right.double().numpy())
        return references.PowerSGD(shapes, ranks, 2, rights)
    coded: dict[str, references.Coded] = {
        "allreduce": lambda x: x,
        "fp16": references.as_float16,
        "bf16": references.as_bfloat16,
        "bytegrad": references.as_minmax8,
        "bytegrad, error feedback": references.as_minmax8,
    }
    return references.CompressedMean(coded[name], count, ranks, feedback="feedback" in name)


@pytest.mark.parametrize("name", few(ALGORITHMS, 4))
@pytest.mark.parametrize("ranks", RANKS)
def test_like_the_reference_and_alike_on_all_ranks(ranks: int, name: str) -> None:
    """Over buckets of every shape and size of numbers, in every step."""
    for kind, scale in product(SHAPES, SCALES):
        results = [of_rank[name, kind, scale] for of_rank in everyones(ranks)]
        reference, count = reference_of(name, SHAPES[kind], ranks), count_of(SHAPES[kind])
        for step in range(STEPS):
            where = f"bucket {kind!r}, scale {scale:g}, step {step}"
            got = results[0][step]
            for number, others in enumerate(results):
                assert np.array_equal(others[step], got, equal_nan=True), f"{where}: rank {number} is not rank 0"
            if name == "fp16" and ranks > 1 and scale == 1e12:
                assert not np.isfinite(got).any(), where  # beyond float16: never a number that looks right
                continue
            expected = reference([gradients(rank, step, count, scale).double().numpy() for rank in range(ranks)])
            off = np.abs(got - expected) > 2e-5 * (np.abs(expected) + scale)
            # In the middle between two codes a last bit decides, and the step of a code is 1/254 of the range.
            assert off.mean() < 2e-3 if off.size else not got.size, where
            assert np.abs(got - expected).max(initial=0) <= 0.1 * scale, where


PIECES = list(product(["fp16", "bytegrad, error feedback"], [100, 1000, 2084, 2085]))


def _in_pieces() -> dict[tuple[str, int], list[Any]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, at_once in PIECES:
        compressed._AT_ONCE = at_once
        link = Link(dist.group.WORLD, list(range(size)), rank, Traffic())
        averager = ALGORITHMS[name].averager(link, torch.device("cpu"))
        parameters = [nn.Parameter(torch.zeros(2085))]
        results = []
        for step in range(STEPS):
            values = gradients(rank, step, 2085, 1.0)
            averager.average(Bucket(values, parameters))
            results.append(values.double().numpy())
        found[name, at_once] = results
    return found


@pytest.mark.slow("runs all algorithms in turns")
def test_a_bucket_in_pieces_of_which_several_are_on_their_way() -> None:
    """Pieces of any size, also one that is almost the bucket and one that is all of it."""
    everyone = run_ranks(_in_pieces, 3)
    for name, at_once in PIECES:
        starts = range(0, 2085, at_once)
        references_of = [reference_of(name, [(min(at_once, 2085 - start),)], 3) for start in starts]
        for step in range(STEPS):
            where = f"{name}, pieces of {at_once}, step {step}"
            inputs = [gradients(rank, step, 2085, 1.0).double().numpy() for rank in range(3)]
            pieces = [[x[start : start + at_once] for x in inputs] for start in starts]
            expected = np.concatenate([mean(piece) for mean, piece in zip(references_of, pieces, strict=True)])
            results = [of_rank[name, at_once][step] for of_rank in everyone]
            assert all(np.array_equal(result, results[0]) for result in results), where
            assert (np.abs(results[0] - expected) > 2e-5).mean() < 2e-3, where


@pytest.mark.slow("averages everything on three ranks")
@pytest.mark.parametrize("name", ["bytegrad, error feedback", "topk", "powersgd"])
def test_what_is_not_sent_is_sent_later(name: str) -> None:
    """With error feedback, the sum of what came out follows the sum of what went in."""
    ranks, scale = 3, 1.0
    for kind in ("odd", "three"):
        count = count_of(SHAPES[kind])
        results = everyones(ranks)[0][name, kind, scale]
        truth = [
            np.mean([gradients(r, s, count, scale).double().numpy() for r in range(ranks)], axis=0)
            for s in range(STEPS)
        ]
        late = np.abs(np.sum(results, axis=0) - np.sum(truth, axis=0)).mean()
        if name == "bytegrad, error feedback":
            # A step's rounding, not four: without feedback errors would add up.
            assert late <= np.abs(results[0] - truth[0]).mean() * 2 + 1e-6
        else:
            assert late <= np.abs(np.sum(truth, axis=0)).mean() * 2


NOT_FINITE = [math.nan, math.inf, -math.inf]


def _with_bad_numbers() -> dict[str, list[tuple[str, list[float], int]]]:
    return {str(bad): _with_a_bad_number(bad) for bad in NOT_FINITE}


def _with_a_bad_number(bad: float) -> list[tuple[str, list[float], int]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for name, algorithm in ALGORITHMS.items():
        link = Link(dist.group.WORLD, list(range(size)), rank, Traffic())
        averager = algorithm.averager(link, torch.device("cpu"))
        parameters = [nn.Parameter(torch.zeros(20, 30)), nn.Parameter(torch.zeros(7))]
        names = {id(parameters[0]): "weight", id(parameters[1]): "bias"}
        reports: list[list[str]] = []
        for step in range(3):
            values = gradients(rank, step, 607, 1.0)
            if step == 1 and rank == size - 1:
                values[603] = bad
            averager.average(Bucket(values, parameters, name_of=names, report=reports.append))
            found.append((name, [float(values[603]), float(torch.isfinite(values).float().mean())], len(reports)))
        assert reports in ([], [["bias"]]), reports
    return found


def test_a_number_that_is_not_finite_is_reported_reaches_all_ranks_and_does_not_stay() -> None:
    """Both infinities and NaN."""
    ranks = 3
    for rank, by_number in enumerate(run_ranks(_with_bad_numbers, ranks)):
        assert set(by_number) == {"nan", "inf", "-inf"}
        for bad, found in by_number.items():
            for index, (name, (value, finite), reports) in enumerate(found):
                step = index % 3
                where = f"{bad} under {name}, step {step}, rank {rank}"
                if step != 1:
                    assert finite == 1.0, where  # error feedback has not kept it
                else:
                    assert not math.isfinite(value), where
                if name == "allreduce":
                    assert reports == 0, where  # as DDP
                elif name == "powersgd":
                    assert reports == int(step >= 1) * (1 if rank == ranks - 1 else reports), where
                else:
                    assert reports == int(step >= 1 and rank == ranks - 1), where


def _in_other_types() -> dict[str, list[float]]:
    return {
        str(dtype): [float(np.abs(values[0]).sum()) for values in _average_everything(dtype).values()]
        for dtype in (torch.float64, torch.bfloat16)
    }


@pytest.mark.slow("runs all algorithms in turns")
def test_gradients_of_other_types() -> None:
    """In float64 and in bfloat16 they are about what they are in float32, and alike on all ranks."""
    first, second = run_ranks(_in_other_types, 2, timeout=60)
    expected = [np.abs(values[0]).sum() for values in everyones(2)[0].values()]
    keys = list(everyones(2)[0])
    for dtype in ("torch.float64", "torch.bfloat16"):
        assert np.array_equal(first[dtype], second[dtype], equal_nan=True), dtype
        for key, got, wanted in zip(keys, first[dtype], expected, strict=True):
            if key[0] != "fp16" or key[2] != 1e12:
                assert got == pytest.approx(wanted, rel=0.05), (dtype, key)


WARM = 5
QADAMS: dict[str, dict[str, Any]] = {
    "8 bits": {"bits": 8},
    "8 bits, no feedback": {"bits": 8, "error_feedback": False},
    "1 bit": {"bits": 1},
}
DECAYS: dict[str, tuple[type[torch.optim.Optimizer], float]] = {
    "Adam": (torch.optim.Adam, 0.0),
    "Adam, decay": (torch.optim.Adam, 0.1),
    "AdamW, decay": (torch.optim.AdamW, 0.1),
}


class _ByQAdam:
    """292 weights of 1 in two parameters, trained in turn with the other ranks' by gradients that a test makes."""

    def __init__(self, algorithm: QAdam, optimizer_class: type[torch.optim.Optimizer], decay: float = 0.0) -> None:
        link = Link(dist.group.WORLD, list(range(dist.get_world_size())), dist.get_rank(), Traffic())
        self._averager = algorithm.averager(link, torch.device("cpu"))
        self._parameters = [nn.Parameter(torch.ones(41, 7)), nn.Parameter(torch.ones(5))]
        plain = optimizer_class(self._parameters, lr=0.01, weight_decay=decay)  # type: ignore[call-arg]
        self._optimizer = algorithm.prepare_optimizer(plain, self._averager)
        self.reported: list[str] = []

    def step(self, values: torch.Tensor) -> Any:
        """Take a step, and return the weights."""
        bucket = Bucket(values, self._parameters, name_of={id(p): str(i) for i, p in enumerate(self._parameters)})
        bucket.report = self.reported.extend
        bucket.views = [part.view(p.shape) for part, p in zip(bucket.parts(), self._parameters, strict=True)]
        self._averager.average(bucket)
        for parameter, view in zip(self._parameters, bucket.views, strict=True):
            parameter.grad = view.clone()
        self._optimizer.step()
        return torch.cat([p.detach().flatten() for p in self._parameters]).double().numpy()


def _train_by_qadam() -> dict[tuple[str, str], list[Any]]:
    found = {}
    for name, options in QADAMS.items():
        for kind, (optimizer_class, decay) in DECAYS.items():
            trained = _ByQAdam(QAdam(warmup_steps=WARM, **options), optimizer_class, decay)
            gradients_of = partial(gradients, dist.get_rank(), count=292, scale=1.0)
            found[name, kind] = [trained.step(gradients_of(step)) for step in range(WARM + 4)]
    return found


@pytest.mark.parametrize("ranks", RANKS)
def test_qadam_like_the_reference(ranks: int) -> None:
    everyone = run_ranks(_train_by_qadam, ranks)
    for (name, kind), history in everyone[0].items():
        options, (optimizer_class, decay) = QADAMS[name], DECAYS[kind]
        coded = references.as_sign if options["bits"] == 1 else references.as_minmax8
        feedback = options.get("error_feedback", True)
        mean = references.CompressedMean(coded, 292, ranks, feedback=feedback)
        reference = references.QAdam(
            np.ones(292), mean, warmup=WARM, lr=0.01, decay=decay, decoupled=optimizer_class is torch.optim.AdamW
        )
        for step in range(WARM + 4):
            reference.step([gradients(rank, step, 292, 1.0).double().numpy() for rank in range(ranks)])
            for other in everyone[1:]:
                assert np.array_equal(other[name, kind][step], history[step])
            off = np.abs(history[step] - reference.weights) > 1e-4
            assert off.mean() < 0.02, (name, kind, step, np.abs(history[step] - reference.weights).max())


def _late(rank: int, step: int) -> torch.Tensor:
    """Gradients of which every seventh is next to nothing during the warm-up of 10 steps."""
    values = gradients(rank, step, 292, 1.0)
    if step < 10:
        values[::7] *= 1e-6
    return values


def _train_late() -> dict[str, Any]:
    found = {}
    for name, options in QADAMS.items():
        trained = _ByQAdam(QAdam(warmup_steps=10, **options), torch.optim.Adam)
        found[name] = [trained.step(_late(dist.get_rank(), step)) for step in range(20)]
    return found


def test_a_variance_frozen_too_early_does_no_harm() -> None:
    """Unbounded, the late ones would move by 10³ a step, and the codes of a block that holds one be as coarse."""
    everyone = run_ranks(_train_late, 2)
    exact = references.QAdam(np.ones(292), lambda moves: np.mean(moves, axis=0), warmup=10, lr=0.01)
    others = np.arange(292) % 7 != 0
    for step in range(20):
        exact.step([_late(rank, step).double().numpy() for rank in range(2)])
    for name, history in everyone[0].items():
        steps = np.abs(np.diff(np.stack(history), axis=0))
        assert steps.max() < 0.01 * 0.1 / np.sqrt(0.001) * 1.05, name
        far = np.abs(history[-1] - exact.weights)[others].mean()
        assert far < (0.03 if "1 bit" in name else 0.003), name


def _overflow_by_qadam() -> dict[str, list[tuple[str, float, float, list[str]]]]:
    return {str(bad): _overflow_of_qadam(bad) for bad in NOT_FINITE}


def _overflow_of_qadam(bad: float) -> list[tuple[str, float, float, list[str]]]:
    found = []
    for name, options in QADAMS.items():
        trained = _ByQAdam(QAdam(warmup_steps=3, **options), torch.optim.Adam)
        for step in range(5):
            values = gradients(dist.get_rank(), step, 292, 1.0)
            if step == 4 and dist.get_rank() == 1:
                values[290] = bad
            weights = trained.step(values)
            if step == 3:
                assert np.isfinite(weights).all()
                assert not trained.reported
        found.append((name, float(weights[290]), float(np.isfinite(weights).mean()), trained.reported))
    return found


def test_after_qadams_warm_up_what_is_not_finite_is_not_held_to_the_bound() -> None:
    """Both infinities and NaN."""
    for rank, by_number in enumerate(run_ranks(_overflow_by_qadam, 2)):
        assert set(by_number) == {"nan", "inf", "-inf"}
        for bad, found in by_number.items():
            for name, weight, finite, reported in found:
                assert not math.isfinite(weight), (bad, name)
                assert finite < 1, (bad, name)
                assert ("1" in reported) == (rank == 1), (bad, name, reported)


OWN_DECAY = (
    {"decoupled_weight_decay": True} if "decoupled_weight_decay" in torch.optim.Adam([nn.Parameter()]).defaults else {}
)


@pytest.mark.parametrize(
    ("kind", "options"), [(torch.optim.AdamW, {}), (torch.optim.Adam, {}), (torch.optim.Adam, OWN_DECAY)]
)
def test_qadams_warm_up_is_plain_adam(kind: Any, options: dict[str, bool]) -> None:
    def train(prepared: bool) -> torch.Tensor:
        parameter = nn.Parameter(torch.ones(9))
        optimizer: torch.optim.Optimizer = kind([parameter], lr=0.1, weight_decay=0.3, **options)
        if prepared:
            optimizer = QAdam(warmup_steps=5).prepare_optimizer(optimizer, None)
        for step in range(5):
            parameter.grad = gradients(0, step, 9, 1.0)
            optimizer.step()
        return parameter.detach()

    assert torch.allclose(train(True), train(False), atol=1e-6)


@pytest.mark.parametrize("without", [0, 3])
def test_qadam_says_what_it_does_not_train_any_more(
    without: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISTWRAP_QUIET", raising=False)
    parameter, unused = nn.Parameter(torch.ones(1500)), nn.Parameter(torch.ones(without))
    optimizer = QAdam(warmup_steps=2).prepare_optimizer(torch.optim.Adam([parameter, unused]), None)
    for step in range(5):
        parameter.grad = gradients(0, step, 1500, 1.0)
        if step < 2:
            parameter.grad[:without] = 0
        optimizer.step()
    told = capsys.readouterr().err
    assert told.count("comm='qadam'") == (1 if without else 0)
    assert ("after 2 steps, in which 6 of 1,503 weights had no gradient" in told) == bool(without)
    assert (parameter == 1).sum() == without


def _steps(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, first: int, last: int) -> None:
    for step in range(first, last):
        parameter.grad = gradients(0, step, 9, 1.0)
        optimizer.step()


@pytest.mark.parametrize("cut", [2, 5, 7])
def test_qadams_optimizer_goes_on_from_its_state(cut: int) -> None:
    """To the bit, before and after the warm-up; and from a plain Adam's state, which counts as its warm-up."""
    algorithm = QAdam(warmup_steps=5)
    whole, resumed, plain = (nn.Parameter(torch.ones(9)) for _ in range(3))
    optimizer = algorithm.prepare_optimizer(torch.optim.AdamW([whole], lr=0.1), None)
    _steps(optimizer, whole, 0, 10)
    first = algorithm.prepare_optimizer(torch.optim.AdamW([resumed], lr=0.1), None)
    _steps(first, resumed, 0, cut)
    second = algorithm.prepare_optimizer(torch.optim.AdamW([resumed], lr=0.1), None)
    second.load_state_dict(first.state_dict())
    assert algorithm.prepare_optimizer(second, None) is second
    _steps(second, resumed, cut, 10)
    assert torch.equal(whole, resumed)
    if cut <= 5:
        adam = torch.optim.AdamW([plain], lr=0.1)
        _steps(adam, plain, 0, cut)
        third = algorithm.prepare_optimizer(torch.optim.AdamW([plain], lr=0.1), None)
        third.load_state_dict(adam.state_dict())
        _steps(third, plain, cut, 10)
        assert torch.allclose(whole, plain, atol=1e-5)


class Halving(torch.optim.Adam):
    """Adam with a step of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_qadam_refuses_an_adam_whose_step_it_would_not_call() -> None:
    with pytest.raises(OptionError, match="not Halving, whose step is its own"):
        QAdam().prepare_optimizer(Halving([nn.Parameter(torch.ones(2))]), None)


def test_qadam_acts_for_the_users_adam() -> None:
    """Schedulers and step hooks of the Adam that was given go on, also when either of both has loaded a state."""
    parameter, called = nn.Parameter(torch.ones(9)), []
    adam = torch.optim.AdamW([parameter], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 1, gamma=0.5)
    adam.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer = QAdam(warmup_steps=5).prepare_optimizer(adam, None)
    adam.register_step_post_hook(lambda *_: called.append("after"))
    rates = []
    for step, loads in enumerate((None, optimizer, adam)):
        if loads is not None:
            loads.load_state_dict(optimizer.state_dict())
        _steps(optimizer, parameter, step, step + 1)
        scheduler.step()  # warns, which is an error, if it has seen no step
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.05, 0.025, 0.0125]
    assert called == ["before", "after"] * 3
    assert optimizer.state[parameter]["step"] == 3
