"""Names that a program registers are known in its ranks, also in those that are no copies of it."""

from __future__ import annotations

import threading

import pytest
from torch import nn

import distwrap as dw
from distwrap.errors import OptionError
from distwrap.registry import REGISTRIES, algorithms, launchers, precisions, strategies
from distwrap.strategies.ddp import DDPStrategy
from distwrap.testing import run_ranks

LIMIT = 60.0


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_rows", dict(registry._rows))
        monkeypatch.setattr(registry, "_own", set(registry._own))


def _uses() -> list[str]:
    dw.wrap_model(nn.Linear(1, 1), strategy="late", precision="bf16", comm="rarely")
    made = [strategies.make("late"), precisions.make("bf16"), algorithms.make("rarely"), launchers.make("fresh")]
    return [*(type(each).__name__ for each in made), str(algorithms.make("rarely"))]


def test_registered_names_travel() -> None:
    """A strategy, precision, algorithm and launcher; a class of a function's own; a name of ours with a new meaning."""

    class Late(DDPStrategy):
        pass

    dw.register_strategy("late", Late, "registered in the caller")
    dw.register_precision("bf16", "distwrap.precision.precisions:FullPrecision")
    dw.register_algorithm("rarely", "distwrap.comm:LocalSGD", sync_every=77)
    dw.register_launcher("fresh", "distwrap.launch.spawn:SpawnLauncher")
    for *names, algorithm in run_ranks(_uses, 2, timeout=LIMIT):
        assert names == ["Late", "FullPrecision", "LocalSGD", "SpawnLauncher"]
        assert "sync_every=77" in algorithm


def _asks_for_locked() -> str:
    try:
        dw.wrap_model(nn.Linear(1, 1), strategy="locked")
    except OptionError as error:
        return str(error)
    return ""


def test_what_cannot_be_sent_explains_itself() -> None:
    """A factory that cannot be pickled does not keep a call from running that does not ask for it."""
    lock = threading.Lock()
    dw.register_strategy("locked", lambda: lock and DDPStrategy())
    for said in run_ranks(_asks_for_locked, 2, timeout=LIMIT):
        assert said.startswith("'locked' was registered in the caller, and its factory cannot be sent to the ranks (")
        assert "lock" in said.partition("(")[2]
        assert "use launcher='fork'" in said
