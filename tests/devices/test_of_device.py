"""Strategies by type of device, as Lightning names them: with a stand-in of the maker's package, and without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from distwrap.devices import kinds
from distwrap.devices.kinds import VENDORS, accelerator_of_torch, kind_of
from distwrap.devices.selection import choose_backend, choose_device, visible_devices
from distwrap.environments import Placement
from distwrap.errors import OptionError, PlacementError
from distwrap.options import Options
from distwrap.registry import strategies
from distwrap.strategies.ddp import DDPStrategy
from distwrap.strategies.single import SingleStrategy
from distwrap.versions import TORCH_RELEASE
from tests.accelerator.build import build, missing
from tests.accelerator.elsewhere import environment

AS_NEWER_TORCH = "the stand-in is that of a package for torch 2.7 or newer"
# Of a package that tells torch of a type when it is imported.
STAND_IN = """
import sys, types, torch

module = types.ModuleType("torch.{name}")
module.device_count = lambda: 8
module.is_available = lambda: True
module.is_initialized = lambda: False
sys.modules["torch.{name}"] = torch.{name} = module
torch.accelerator.current_accelerator = lambda check_available=False: torch.device("{name}")
torch.distributed.Backend.default_device_backend_map["{name}"] = "{backend}"
"""


def installed(folder: Path, package: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package of one module."""
    place = folder.joinpath(*package.split("."))
    place.mkdir(parents=True)
    for each in {place, folder / package.split(".")[0]}:
        each.joinpath("__init__.py").touch()
    place.joinpath("__init__.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture(autouse=True)
def _asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask a torch that is built for CUDA too, also an older one, which would start its driver."""
    monkeypatch.setattr(kinds, "ASKS_WITHOUT_DRIVER", True)


@pytest.fixture
def _torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", torch.accelerator.current_accelerator)
    monkeypatch.setattr(
        torch.distributed.Backend,
        "default_device_backend_map",
        dict(torch.distributed.Backend.default_device_backend_map),
    )
    for name in ("hpu", "xpu"):
        monkeypatch.setitem(sys.modules, f"torch.{name}", sys.modules.get(f"torch.{name}", ModuleType(name)))
        monkeypatch.setattr(torch, name, getattr(torch, name, None), raising=False)


@pytest.mark.skipif(TORCH_RELEASE < (2, 7), reason=AS_NEWER_TORCH)
@pytest.mark.usefixtures("_torch_as_it_was")
@pytest.mark.parametrize(("spelling", "kind"), [("hpu_parallel", DDPStrategy), ("hpu_single", SingleStrategy)])
def test_gaudi(spelling: str, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its package there, which torch has not imported by itself, the strategy is DDP on its devices."""
    installed(tmp_path, "habana_frameworks.torch", STAND_IN.format(name="hpu", backend="hccl"), monkeypatch)
    made = strategies.make(spelling)
    try:
        assert type(made) is kind
        assert accelerator_of_torch() == "hpu"
        assert visible_devices().count == 8
        device = choose_device(Placement(3, 8, local_rank=3, local_world_size=8), visible_devices())
        assert device == torch.device("hpu", 3)
        assert choose_backend("auto", device) == "hccl"
        with pytest.raises(
            PlacementError, match=r"9 ranks on this node see 8 hpu devices.*\(by HABANA_VISIBLE_MODULES\)"
        ):
            choose_device(Placement(3, 9, local_rank=3, local_world_size=9), visible_devices())
    finally:
        for name in ("habana_frameworks.torch", "habana_frameworks"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        pytest.param(
            "hpu_parallel",
            r"strategy 'hpu_parallel': .*'hpu', Intel's Gaudi, .*habana_frameworks\.torch, is not installed",
            marks=pytest.mark.skipif(TORCH_RELEASE < (2, 7), reason=AS_NEWER_TORCH),
        ),
        ("xla", r"'xla', Google's TPUs, .*torch_xla, is not installed"),
        ("tpu_spawn", r"torch_xla, is not installed"),
        ("mps", r"'mps', Apple's GPUs, .*this torch is built for"),
        ("of_device(type='npu')", r"'npu', Huawei's Ascend, .*torch_npu, is not installed"),
        ("of_device(type='cuda')", r"'cuda' needs torch to have some, and "),
        ("ipu_strategy", r"whose package poptorch has ended: write 'ddp'"),
    ],
)
def test_absent(spelling: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any process starts an error says which package it is, and what to write."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    with pytest.raises(OptionError, match=words) as caught:
        Options().updated({"strategy": spelling})
    assert "rite strategy=" in str(caught.value) or "write 'ddp'" in str(caught.value)


def test_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """``strategy="mps"`` is one process on its GPU, which no run takes by itself: torch has no process group there."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert visible_devices().count == 0
    made = strategies.make("mps")
    assert isinstance(made, SingleStrategy)
    assert made.device == torch.device("mps")
    states = [torch.zeros(1)]
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: states[-1])
    monkeypatch.setattr(torch.mps, "set_rng_state", states.append)
    mps, device = kind_of("mps"), torch.device("mps")
    mps.use(device)
    state = mps.random_state(device)
    assert state is not None
    mps.set_random_state(device, state + 1)
    assert states[-1].item() == 1
    assert (mps.streams(), mps.unique_name(device)) == (None, None)


ASCEND = """
import torch
from torch import nn
import distwrap as dw

def main():
    model = dw.wrap_model(nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()
    return str(dw.device()), str(next(model.parameters()).grad.device), torch.distributed.get_backend()

if __name__ == "__main__":
    for launcher in ("spawn", "forkserver"):
        print(dw.distributed(nprocs=2, strategy="of_device(type='npu')", launcher=launcher, returns="all")(main)())
"""


@pytest.mark.nightly(row="accelerator", why="test_torch_xlas_own_launch, and test_gaudi")
def test_ascend_trains_by_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that torch does not load by itself is imported by caller and ranks, which train on its devices."""
    if (why := missing()) is not None:
        pytest.skip(why)
    build()
    installed(tmp_path, "torch_npu", "from tests.accelerator.pretend import _autoload\n_autoload()\n", monkeypatch)
    script = tmp_path / "train.py"
    script.write_text(ASCEND)
    env = environment(2) | {"PRETEND_NAME": "npu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    expected = str([(f"npu:{rank}", f"npu:{rank}", "pccl") for rank in range(2)])
    assert done.stdout.split("\n")[-3:-1] == [expected] * 2, done.stdout + done.stderr


# As torch_xla's: processes, each of which runs its rank in a thread; its devices are the pretended ones.
TORCH_XLA = {
    "__init__.py": """
import itertools, multiprocessing, os, threading, torch

def device():
    return torch.device("pretend", int(os.environ["XLA_ORDINAL"]))

def sync(wait=False):
    synced.append(1)

def _process(ordinal, run, fn, args):
    os.environ["XLA_ORDINAL"] = str(ordinal)
    os.environ["XLA_STORE"] += f".{run}"  # the file of the run before names ports of ranks that are gone
    thread = threading.Thread(target=fn, args=(ordinal, *args))
    thread.start()
    thread.join()

def launch(fn, args=(), start_method="spawn", debug_single_process=False):
    context = multiprocessing.get_context(start_method)
    run = next(runs)
    processes = [context.Process(target=_process, args=(each, run, fn, args)) for each in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("a process has ended")

synced, runs = [], itertools.count()
""",
    "runtime.py": """
import os

def global_ordinal():
    return int(os.environ["XLA_ORDINAL"])

def world_size():
    return 2
""",
    "core/xla_model.py": "def xla_device_hw(device):\n    return 'PRETENDED'\n",
    "distributed/xla_backend.py": """
import os
import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler
from tests.accelerator.pretend import _collectives

def handler(url, timeout=None, **kwargs):
    rank = int(os.environ["XLA_ORDINAL"])
    yield dist.FileStore(os.environ["XLA_STORE"], 2), rank, 2

register_rendezvous_handler("xla", handler)
dist.Backend.register_backend("xla", _collectives, extended_api=True, devices=["pretend"])
""",
}

ON_XLA = """
import sys
import torch
import torch_xla
from torch import nn
import distwrap as dw

def main(fails):
    if fails and dw.rank() == 1:
        raise KeyError("of rank 1")
    torch.manual_seed(dw.rank())
    model = dw.wrap_model(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    dw.assert_in_sync(model)
    return str(dw.device()), torch.distributed.get_backend(), len(torch_xla.synced), float(dw.reduce(dw.rank(), "sum"))

if __name__ == "__main__":
    run = dw.distributed(strategy="xla", returns="all", timeout=60)(main)
    print(run(False))
    try:
        run(True)
    except KeyError as error:
        print("failed:", error)
"""


@pytest.mark.slow("starts interpreters, each of which imports torch and a stand-in")
def test_torch_xlas_own_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are the ranks, its backend their group; results and failures come home, and each step is synced."""
    if (why := missing()) is not None:
        pytest.skip(why)
    build()
    for name, text in TORCH_XLA.items():
        place = tmp_path / "torch_xla" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    script = tmp_path / "train.py"
    script.write_text(ON_XLA)
    env = environment(2) | {"XLA_STORE": str(tmp_path / "store")}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    expected = str([(f"pretend:{rank}", "xla", 1, 1.0) for rank in range(2)])
    assert done.stdout.split("\n")[-3:-1] == [expected, "failed: 'of rank 1'"], done.stdout + done.stderr


def test_every_maker_is_documented() -> None:
    """Each row of the table names where it comes from; the variable is the kind's."""
    assert all(each.source.startswith("https://") for each in VENDORS.values())
    for name, each in VENDORS.items():
        assert kind_of(name).visible_by == each.visible_by
