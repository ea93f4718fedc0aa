"""Strategies and algorithms by name: registered ones, those of packages, wrong ones."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distwrap import (
    DDPStrategy,
    Strategy,
    available_algorithms,
    available_strategies,
    distributed,
    rank,
    register_algorithm,
    register_strategy,
    save,
    wrap_model,
    wrap_optimizer,
)
from distwrap.comm import ByteGrad, LocalSGD, traffic
from distwrap.errors import LaunchError, OptionError
from distwrap.group.world import World, current_world
from distwrap.model.wrapped_models import WrappedModels
from distwrap.name_table import Registry
from distwrap.options import Options
from distwrap.strategies import Wrapping
from distwrap.testing import run_ranks
from tests.interpreters import run_python
from tests.slow import INTERPRETERS, slow

ROOT = Path(__file__).parents[2]


def test_what_there_is() -> None:
    assert set(available_strategies()) >= {"ddp", "ddp2", "dp", "single", "bagua"}
    assert set(available_algorithms()) >= {
        "allreduce", "fp16", "bf16", "bytegrad", "powersgd", "topk", "qadam", "decentralized",
        "low_precision_decentralized", "async", "local_sgd", "diloco",
    }  # fmt: skip
    assert all(available_algorithms().values())


def test_every_algorithm_of_ours_can_be_made_by_name() -> None:
    registry = Registry("algorithm", ("attach",), "algorithms")
    registry.register("one", ByteGrad, "…", error_feedback=True)
    assert registry.make("one") == ByteGrad(error_feedback=True)
    assert registry.make("one(error_feedback=False, hierarchical=True)") == ByteGrad(hierarchical=True)
    made = LocalSGD(sync_every=3)
    assert registry.make(made) is made
    for name in available_algorithms():
        assert Options().updated({"comm": name}).comm is not None


@pytest.mark.parametrize(
    ("comm", "message"),
    [
        ("bytegard", r"unknown algorithm 'bytegard'. Did you mean 'bytegrad'\? Known: allreduce, "),
        ("bytegrad(feedback=True)", r"unknown option of algorithm 'bytegrad', 'feedback'\. .*Known: error_feedback"),
        ("bytegrad(error_feedback", "write it as a name"),
        ("bytegrad(1)", "write it as a name"),
        ("bytegrad(error_feedback=open('x'))", "write it as a name"),
        ("topk(ratio=2)", r"ratio=2: it must be a number above 0.0 to 1.0"),
        ("qadam(bits=4)", "8 bits a number, or 1"),
        (ByteGrad, r"give a name, or ByteGrad\(…\), an object of the class"),
        (3, "algorithm 3: give a name, or an object"),
    ],
)
def test_a_wrong_algorithm_is_refused_where_it_is_named(comm: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        distributed(comm=comm)
    with pytest.raises(OptionError, match=message):
        wrap_model(nn.Linear(1, 1), comm=comm)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (DDPStrategy, r"give a name, or DDPStrategy\(…\), an object"),
        ("ddp(static_grap=True)", "unknown option of DDPStrategy 'static_grap'. Did you mean 'static_graph'"),
        ("fsdp(shrad=2)", r"unknown option of strategy 'fsdp', 'shrad'\. Did you mean 'shard'\? Known: .*wrap"),
        ("bagua(algorithm='bytgrad')", "unknown algorithm of Bagua's 'bytgrad'. Did you mean 'bytegrad'"),
        (object(), "give a name, or an object"),
    ],
)
def test_a_wrong_strategy_is_refused_where_it_is_named(strategy: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        distributed(strategy=strategy)


def test_a_strategys_backend_and_another_one_contradict_each_other() -> None:
    with pytest.raises(OptionError, match="brings its own, 'gloo'"):
        distributed(strategy=DDPStrategy(backend="gloo"), backend="nccl")


def test_a_wrong_registration() -> None:
    with pytest.raises(OptionError, match="under a word"):
        register_strategy("my strategy", DDPStrategy)
    with pytest.raises(OptionError, match="class or a function"):
        register_algorithm("mine", 3)  # type: ignore[arg-type]
    registry = Registry("algorithm", ("attach",), "algorithms")
    registry.register("nothing", lambda: 3, "…")
    with pytest.raises(OptionError, match="without attach"):
        registry.make("nothing")


class _Buggy(DDPStrategy):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.table = len(None)  # type: ignore[arg-type]


def test_a_mistake_in_a_factory_comes_through() -> None:
    """A TypeError out of a factory is no wrong option: it keeps its type, and its traceback leads to the mistake."""
    registry: Registry[Strategy] = Registry("strategy", ("prepare_model",), "strategies")
    registry.register("buggy", _Buggy)
    with pytest.raises(TypeError, match="has no len") as caught:
        registry.make("buggy")
    assert caught.traceback[-1].name == "__init__"
    registry.register("passed_on", lambda **options: ByteGrad(**options))
    with pytest.raises(OptionError, match="unexpected keyword argument 'feedback'"):
        registry.make("passed_on(feedback=True)")


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("fsdp:FSDPStrategy", "tensor_paralel", "Did you mean 'tensor_parallel'"),
        ("fsdp:FSDPStrategy", "context_parallel", r"FSDPStrategy\(context_parallel=…\): "),
        ("pipeline:PipelineStrategy", "schedul", "Did you mean 'schedule'"),
        ("hivemind:HivemindStrategy", "batchsize", "Did you mean 'batch_size'"),
        ("single:SingleStrategy", "devices", "unknown option of SingleStrategy 'devices'"),
    ],
)
def test_a_misspelt_option_of_a_class_is_named(name: str, option: str, message: str) -> None:
    """As where a strategy is given as text; with the nearest name, or with what came in its place."""
    module, _, kind = name.partition(":")
    with pytest.raises(OptionError, match=message):
        getattr(importlib.import_module(f"distwrap.strategies.{module}"), kind)(**{option: 2})


def test_broken_and_doubled_entry_points_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name whose import fails, or that two packages have, is refused where it is chosen, with the places."""
    for package, points in (("one", "gone = nowhere:X\ntwin = one:X\n"), ("two", "twin = two:X\n")):
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[distwrap.strategies]\n{points}")
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[Strategy] = Registry("strategy", ("prepare_model",), "strategies")
    assert set(registry.available()) >= {"gone", "twin"}
    with pytest.raises(OptionError, match="'gone' cannot be imported"):
        registry.make("gone")
    with pytest.raises(OptionError, match=r"strategy 'twin' is in several packages: (one:X and two|two:X and one):X"):
        registry.make("twin")


class _NoGroup(DDPStrategy):
    def init_process_group(self, backend: str, **arguments: Any) -> None:
        pass


def test_a_strategy_that_makes_no_process_group() -> None:
    with pytest.raises(LaunchError, match="no process group"):
        distributed(nprocs=2, strategy=_NoGroup(), timeout=20)(_static)()


def _static() -> tuple[str, bool, str]:
    model = wrap_model(nn.Linear(1, 1))
    return type(model).__name__, bool(model.static_graph), torch.distributed.get_backend()


@pytest.mark.parametrize("launcher", ["fork", "forkserver", slow("spawn", why=INTERPRETERS)])
def test_a_strategy_with_options_travels_to_the_ranks(launcher: str) -> None:
    run = distributed(nprocs=2, launcher=launcher, strategy=DDPStrategy(static_graph=True, backend="gloo"))(_static)
    assert run() == ("DistributedModel", True, "gloo")


class _Inside(DDPStrategy):
    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        return nn.Sequential(super().prepare_model(model, world, wrapping))


def _trains_inside(comm: str) -> tuple[list[str], float]:
    net = nn.Linear(1, 1)
    model = wrap_model(net, strategy=_Inside(), comm=comm)
    optimizer = wrap_optimizer(torch.optim.Adam(model.parameters()))
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    kinds = [type(each).__name__ for each in current_world().part(WrappedModels)]
    anew = wrap_model(net)
    anew(torch.full((1, 1), rank() + 1.0)).sum().backward()
    assert net.weight.grad is not None
    return [*kinds, type(optimizer).__name__], net.weight.grad.item()


def test_a_subclass_may_put_something_around_the_model() -> None:
    """The model within is one of the run's as ever: for wrap_optimizer, a second wrap_model, and the end of the run."""
    assert run_ranks(_trains_inside, 2, "qadam") == [(["DistributedModel", "Adam"], 1.5)] * 2


def _sent() -> int:
    model = wrap_model(nn.Linear(100, 100, bias=False))
    model(torch.ones(1, 100)).sum().backward()
    return traffic(model).sent


def test_the_algorithm_is_chosen_by_argument_option_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    full, byte, half = 40_000, 10_016, 20_000
    run = distributed(nprocs=2)(_sent)
    assert run() == 0  # DDP's own exchange is not counted
    assert run.options(comm="allreduce")() == full
    assert run.options(comm=ByteGrad())() == byte
    assert run.options(strategy=DDPStrategy(comm="fp16"))() == half
    monkeypatch.setenv("DISTWRAP_COMM", "fp16")
    assert distributed(nprocs=2, comm="allreduce")(_sent)() == half
    assert run.options(comm="bytegrad")() == byte
    monkeypatch.setenv("DISTWRAP_COMM", "fp61")
    with pytest.raises(OptionError, match=r"DISTWRAP_COMM: .*'fp61'"):
        run()


class Recording(DDPStrategy):
    """Notes what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def init_process_group(self, backend: str, **arguments: Any) -> None:
        self.asked.append("group")
        super().init_process_group(backend, **arguments)

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        self.asked.append("model")
        return super().prepare_model(model, world, wrapping)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module | None) -> torch.optim.Optimizer:
        self.asked.append("optimizer")
        return super().prepare_optimizer(optimizer, model)

    def backward(self, loss: torch.Tensor) -> None:
        self.asked.append("backward")
        super().backward(loss)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.asked.append("step")
        super().step(optimizer)

    def checkpoint_io(self) -> Any:
        self.asked.append("io")
        return super().checkpoint_io()


def _through_all_of_it(path: Path) -> list[str]:
    from distwrap import backward, optimizer_step

    model = wrap_model(nn.Linear(1, 1))
    optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    backward(model(torch.ones(1, 1)).sum())
    optimizer_step(optimizer)
    save(model, path)
    strategy: Any = current_world().options.strategy
    asked: list[str] = strategy.asked
    return asked


def test_a_strategy_of_ones_own_is_asked_for_everything(tmp_path: Path) -> None:
    run = distributed(nprocs=2, strategy=Recording())(_through_all_of_it)
    assert run(tmp_path / "x.pt") == ["group", "model", "optimizer", "backward", "step", "io"]


def test_a_strategy_without_prepare_model_says_so() -> None:
    with pytest.raises(NotImplementedError, match="has no prepare_model"):
        wrap_model(nn.Linear(1, 1), strategy=Strategy())


PACKAGE = """
from distwrap import DDPStrategy
from distwrap.comm import LocalSGD

class Theirs(DDPStrategy):
    pass

def rarely():
    return LocalSGD(sync_every=1000)
"""
POINTS = (
    "[distwrap.strategies]\ntheirs = their_package:Theirs\n\n[distwrap.algorithms]\nrarely = their_package:rarely\n"
)
PROGRAM = """
from distwrap import available_algorithms, available_strategies, distributed, wrap_model
from torch import nn

@distributed(nprocs=2, strategy="theirs", comm="rarely")
def main():
    return type(wrap_model(nn.Linear(1, 1))).__name__

if __name__ == "__main__":
    print(available_strategies()["theirs"], available_algorithms()["rarely"], main())
"""


@pytest.mark.slow(INTERPRETERS)
def test_a_package_adds_its_own_without_our_knowing(tmp_path: Path) -> None:
    """By entry points, as pip installs them, in a fresh interpreter."""
    (tmp_path / "their_package.py").write_text(PACKAGE)
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_python(
        str(tmp_path / "program.py"), env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "of their_package of their_package ReplicaModel"


def _nodes() -> list[int]:
    from distwrap import gather_object

    model = wrap_model(nn.Linear(1, 1), strategy="ddp2")
    model(torch.ones(1, 1)).sum().backward()
    return gather_object(rank())


def test_ddp2_is_one_process_a_node() -> None:
    run = distributed(strategy="ddp2")(_nodes)
    assert run() == [0]
    with pytest.raises(OptionError, match="one process on"):
        run.options(nprocs=2)()
    with pytest.raises(OptionError, match="this node has 2"):
        run_ranks(_nodes, 2)


@pytest.mark.slow(INTERPRETERS)
def test_ddp2_between_two_nodes(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\nfrom torch import nn\nfrom distwrap import assert_in_sync, distributed, rank, wrap_model\n\n"
        "@distributed(strategy='ddp2', comm='bytegrad', timeout=60)\ndef main():\n"
        "    model = wrap_model(nn.Linear(9, 9))\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    model(torch.randn(4, 9)).square().sum().backward()\n    optimizer.step()\n    assert_in_sync(model)\n"
        "    print('trained', rank(), flush=True)\n\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1"]
    from tests.ports import free_port

    port = free_port()
    env = {name: value for name, value in os.environ.items() if not name.startswith("DISTWRAP_")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            [*command[:3], "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", f"--master-port={port}",
             "--master-addr=127.0.0.1", str(program)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in (0, 1)
    ]  # fmt: skip
    try:
        printed = "".join(node.communicate(timeout=100)[0] for node in nodes)
    finally:
        for node in nodes:
            node.kill()
    assert "trained 0" in printed, printed
    assert "trained 1" in printed, printed
