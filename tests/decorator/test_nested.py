"""A decorated call inside another joins its ranks: its options are heeded, are those of the run, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distwrap as dw
from distwrap import distributed
from distwrap.errors import OptionError
from distwrap.testing import run_ranks

LIMIT = 60.0


def _draw() -> tuple[int, float]:
    return dw.world_size(), torch.rand(1).item()


def _refusal(**options: Any) -> str:
    """Return how a call with these options is refused in the current run; "" where it is not."""
    try:
        distributed(**options)(_draw)()
    except OptionError as error:
        return str(error)
    return ""


DIFFER: list[dict[str, Any]] = [
    {"nprocs": 7},
    {"nnodes": 2, "rdzv_endpoint": "localhost"},
    {"launcher": "spawn"},
    {"strategy": "single"},
    {"strategy": "ddp(static_graph=True)"},
    {"strategy": dw.DDPStrategy(bucket_cap_mb=1)},
    {"precision": "32"},
    {"precision": "bf16-true"},
    {"comm": "bytegrad"},
    {"backend": "fake"},
    {"timeout": 3},
    {"max_restarts": 1},
    {"log_dir": "logs"},
]
FIT: list[dict[str, Any]] = [
    {},
    {"nprocs": 2, "nnodes": 1, "launcher": "fork", "strategy": "ddp", "precision": "bf16-mixed", "backend": "gloo"},
    {"nprocs": "auto", "launcher": "auto", "strategy": dw.DDPStrategy(), "timeout": 600, "comm": None},
]


def test_options_of_a_call_inside_another() -> None:
    """What the run does not have is refused by its name, and nothing else is, also where it is said twice."""

    @distributed(nprocs=2, launcher="fork", precision="bf16")
    def outer() -> tuple[list[str], list[str]]:
        return [_refusal(**options) for options in DIFFER], [_refusal(**options) for options in FIT]

    refusals, none = outer()
    assert none == [""] * len(FIT)
    for options, refusal in zip(DIFFER, refusals, strict=True):
        name = next(iter(options))
        assert refusal.startswith(f"_draw() asks for {name}="), options
        assert f" inside a run that has {name}=" in refusal
    assert "asks for nprocs=7 inside a run that has nprocs=2. A call inside" in refusals[0]


def test_options_of_the_call_itself_are_heeded() -> None:
    """Its seed, and whose values it returns."""

    @distributed(nprocs=2, launcher="fork")
    def outer() -> list[tuple[int, float]]:
        inner: list[tuple[int, float]] = distributed(seed=3, returns="all")(_draw)()
        return inner

    torch.manual_seed(3)
    assert outer() == [(2, torch.rand(1).item())] * 2


def test_variables_decide_for_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a variable sets is no wish of the call inside, whose run had it from .options()."""
    monkeypatch.setenv("DISTWRAP_PRECISION", "fp16")

    @distributed(nprocs=2, launcher="fork")
    def outer() -> str:
        return _refusal(precision="bf16")

    assert outer.options(precision="32")() == ""


def test_the_seed_of_a_variable_is_set_once_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """DISTWRAP_SEED seeds the run, over the decorator's seed, and no call inside begins its numbers again."""
    monkeypatch.setenv("DISTWRAP_SEED", "7")

    @distributed(nprocs=2, launcher="fork", seed=1)
    def outer() -> list[float]:
        inner = distributed(_draw), distributed(seed=3)(_draw), distributed(nprocs=2)(_draw).options(seed=5)
        return [call()[1] for call in inner]

    found = outer()
    torch.manual_seed(7)
    assert found[:2] == [torch.rand(1).item(), torch.rand(1).item()]
    torch.manual_seed(5)
    assert found[2] == torch.rand(1).item()


def test_one_process_refuses_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for two ranks inside one process is refused too; with DISTWRAP_DISABLE it stays in this process."""
    outer = distributed(nprocs=1)(lambda: (_refusal(nprocs=2), _refusal(comm="bytegrad")))
    nprocs, comm = outer()
    assert "nprocs=2 inside a run that has nprocs=1" in nprocs
    assert "inside a run that has comm=None" in comm
    monkeypatch.setenv("DISTWRAP_DISABLE", "1")
    assert outer()[0] == ""


def _in_a_group_of_the_caller() -> str:
    return _refusal(precision="bf16")


def test_a_call_after_setup_process_group() -> None:
    """The same where no decorated call has begun the run."""
    said = run_ranks(_in_a_group_of_the_caller, 2, timeout=LIMIT)[1]
    assert "precision='bf16' inside a run that has precision='32'" in said
    assert "or the setup_process_group(), that begins" in said
