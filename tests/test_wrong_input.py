"""Wrong input is refused with a clear error before any process starts."""

from __future__ import annotations

from typing import Any

import pytest

import distwrap as dw
from distwrap import distributed
from distwrap.devices.selection import Devices
from distwrap.errors import LaunchError, OptionError, PlacementError
from distwrap.launch import base, processes


@pytest.fixture(autouse=True)
def no_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where anything is started."""

    def started(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a process was started")

    monkeypatch.setattr(base, "launch", started)
    monkeypatch.setattr(processes.subprocess, "Popen", started)
    monkeypatch.setattr("os.fork", started)


def train() -> None: ...


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"strategy": "ddpp"},
            r"@distributed: unknown strategy 'ddpp'\. Did you mean 'ddp'\? Known: auto, bagua, ddp, ",
        ),
        ({"strategy": 3}, r"strategy 3: give a name, or an object"),
        ({"nprocs": 0}, r"nprocs=0: it must be 'auto' or a whole number of at least 1"),
        ({"nprocs": -1}, r"nprocs=-1"),
        ({"nprocs": 2.5}, r"nprocs=2\.5"),
        ({"nprocs": True}, r"nprocs=True"),
        ({"nprocs": "four"}, r"nprocs='four'"),
        ({"precision": "bf61"}, r"unknown precision 'bf61'\. Did you mean 'bf16'\?"),
        ({"precision": "16-true"}, r"unknown precision"),
        ({"launcher": "frok"}, r"unknown launcher 'frok'\. Did you mean 'fork'\?"),
        ({"strategy": "ddp_spawn", "launcher": "fork"}, r"strategy='ddp_spawn' means launcher='spawn'"),
        ({"strategy": "single", "nprocs": 2}, r"strategy='single' runs in one process"),
        ({"strategy": "dp", "nprocs": 2}, r"strategy='dp' runs in one process, but nprocs=2 was given too"),
        ({"returns": "both"}, r"unknown value for returns 'both'"),
        ({"timeout": 0}, r"timeout=0"),
        ({"timeout": float("nan")}, r"timeout=nan"),
        ({"seed": -1}, r"seed=-1"),
        ({"retrofit": "yes"}, r"retrofit='yes'"),
        ({"nnodes": "two"}, r"nnodes='two': it must be a number of nodes"),
        ({"max_restarts": -1}, r"max_restarts=-1"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    """A wrong option is refused where the function is decorated, and by `.options()` alike."""
    with pytest.raises(OptionError, match=message):
        distributed(**options)
    with pytest.raises(ValueError, match=message.removeprefix("@distributed: ")):
        distributed(train).options(**options)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("DISTWRAP_STRATEGY", "dpp", r"DISTWRAP_STRATEGY: unknown strategy 'dpp'"),
        ("DISTWRAP_NPROCS", "two", r"DISTWRAP_NPROCS='two'"),
        ("DISTWRAP_NPROCS", "0", r"DISTWRAP_NPROCS: nprocs=0"),
        ("DISTWRAP_TIMEOUT", "soon", r"DISTWRAP_TIMEOUT='soon'"),
        ("DISTWRAP_DISABLE", "maybe", r"DISTWRAP_DISABLE='maybe': say 1, true"),
    ],
)
def test_environment(variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong override is refused by the variable's name."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(OptionError, match=message):
        distributed(nprocs=2)(train)()


def test_a_misspelt_backend() -> None:
    """A backend that torch does not know is refused with the nearest, and each of a device's own is looked at."""
    for backend in ("ncll", "cpu:gloo,cuda:ncll"):
        with pytest.raises(OptionError, match=r"unknown backend 'ncll'\. Did you mean 'nccl'\? Known: "):
            distributed(nprocs=2, backend=backend)(train)()
        with pytest.raises(OptionError, match=r"unknown backend 'ncll'"):
            dw.setup_process_group(backend)
    with pytest.raises(OptionError, match=r"unknown kind of device 'cdua'\. Did you mean 'cuda'\?"):
        distributed(nprocs=2, backend="cpu:gloo,cdua:gloo")(train)()
    with pytest.raises(OptionError, match=r"unknown backend 'glooo'"):
        distributed(nprocs=2, strategy=dw.DDPStrategy(backend="glooo"))(train)()


def test_more_processes_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """More processes than accelerators are refused."""
    monkeypatch.setattr("distwrap.launch.base.visible_devices", lambda: Devices("cuda", 2))
    with pytest.raises(OptionError, match=r"nprocs=4, but this node shows 2 cuda device\(s\)"):
        distributed(nprocs=4)(train)()


def test_half_set_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """RANK without WORLD_SIZE is refused, listing what is there and what is missing."""
    monkeypatch.setenv("RANK", "0")
    message = r"half set .*RANK=0, but not WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"
    with pytest.raises(PlacementError, match=message):
        distributed(nprocs=2)(train)()
    with pytest.raises(PlacementError, match=message):
        dw.setup_process_group()


def test_external_without_a_launcher() -> None:
    """launcher="external" runs only under an outer launcher."""
    with pytest.raises(LaunchError, match=r"none has started this process.*torchrun"):
        distributed(nprocs=2, launcher="external")(train)()
    with pytest.raises(LaunchError, match=r"none has started this process.*torchrun"):
        distributed(nnodes=2, max_restarts=1, launcher="external")(train)()


def test_arguments_that_do_not_fit() -> None:
    """Wrong arguments are a TypeError in the caller, with a hint where an option was meant."""
    with pytest.raises(TypeError, match=r"train\(\): too many positional arguments"):
        distributed(nprocs=2)(train)(3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'nprocs'.*\.options\(nprocs=…\)"):
        distributed(nprocs=2)(train)(nprocs=4)  # type: ignore[call-arg]


def test_retrofit_with_nothing_to_wrap() -> None:
    """retrofit=True on a function that takes no model, optimizer or loader is refused: every rank would train alone."""
    with pytest.raises(OptionError, match=r"retrofit=True finds no model, optimizer or loader among the arguments"):
        distributed(nprocs=2, retrofit=True)(train)()
