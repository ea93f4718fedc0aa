"""The estimate of memory against the bytes of real runs, what it recommends, its command, and strategy="auto"."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distwrap import distributed, optimizer_step, wrap_model, wrap_optimizer
from distwrap.cli import main
from distwrap.devices.cpus import allowed_memory
from distwrap.errors import OptionError
from distwrap.group.world import is_rank_zero
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import bound_strategy
from distwrap.precision import InPrecision
from distwrap.strategies.activations import activation_bytes, input_of
from distwrap.strategies.auto import AutoStrategy
from distwrap.strategies.estimate import Need, estimate, fit, optimizer, recommended
from distwrap.testing import run_ranks
from tests.clusters.running import PYTHON, ROOT, run

STRATEGIES = ("ddp", "zero1", "fsdp")
ESTIMATE = [PYTHON, "-m", "distwrap", "estimate"]


class Net(nn.Module):
    """Four alike blocks between two layers, with a frozen weight and a buffer: 2 MB in float32."""

    def __init__(self, width: int = 250) -> None:
        super().__init__()
        self.first = nn.Linear(12, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(4)
        )
        self.last = nn.Linear(width, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(x) * self.frozen + self.shift  # type: ignore[no-any-return]


def needs_of(ranks: int = 2, a_node: int | None = None, precision: str = "32", name: str = "adamw") -> dict[str, Need]:
    in_precision = InPrecision(precision, torch.device("cpu"))
    with torch.device("meta"):
        found = estimate(Net(), ranks, a_node or ranks, in_precision, optimizer(name))
    return {need.strategy: need for need in found}


def train(model: nn.Module, stepper: torch.optim.Optimizer, share: slice, steps: int = 3) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        x, y = torch.randn(8, 12), torch.randn(8, 3)
        nn.functional.mse_loss(model(x.double()[share]), y.double()[share]).backward()  # type: ignore[no-untyped-call]
        if step < steps - 1:
            stepper.step()
            stepper.zero_grad()
    stepper.step()


def here(tensors: Any) -> int:
    """Return the bytes of what this rank holds of tensors."""
    local = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    return sum(each.nbytes for each in local if isinstance(each, torch.Tensor))


def real_bytes(name: str) -> tuple[int, int, int]:
    torch.manual_seed(0)
    model = wrap_model(Net(), strategy=name)
    stepper = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 12)).sum().backward()
    stepper.step()
    tensors = [*model.parameters(), *model.buffers()]
    state = [value for each in stepper.state.values() for value in each.values()]
    return here(tensors), here(each.grad for each in tensors if each.grad is not None), here(state)


@pytest.mark.slow("others of its kind are in make test")
def test_real_runs_hold_what_is_estimated() -> None:
    """Parameters, gradients and optimizer state of the rank with most are within 2 % of the estimate."""

    def on_rank() -> dict[str, tuple[int, int, int]]:
        return {name: real_bytes(name) for name in STRATEGIES}

    ranks = run_ranks(on_rank, 2, timeout=120)
    needs = needs_of()
    for name in STRATEGIES:
        most = max((found[name] for found in ranks), key=sum)
        need = needs[name]
        assert most == pytest.approx((need.parameters, need.gradients, need.optimizer), rel=0.02), name
    assert needs["ddp"].buckets == needs["ddp"].gradients == needs["zero1"].buckets


def test_what_is_gathered_under_fsdp() -> None:
    """Two units' weights and one's gradients, also on their way, beside what is in no unit; in autocast's types."""
    unit, root = 2 * 250 * 250 + 4 * 250, 12 * 250 + 250 + 250 * 3 + 3 + 3
    assert needs_of()["fsdp"].gathered == 4 * (root + 2 * unit + 2 * unit)
    assert needs_of(precision="bf16")["fsdp"].gathered == 2 * (root + 2 * unit + unit) + 4 * unit


def test_precision_and_optimizer_count() -> None:
    """Weights in bfloat16 take half, SGD has no state without momentum, Adafactor's is asked of itself."""
    full, half = needs_of()["ddp"], needs_of(precision="bf16-true")["ddp"]
    assert half.parameters * 2 == full.parameters
    assert needs_of(name="sgd")["ddp"].optimizer == 0
    assert needs_of(name="sgd(momentum=0.9)")["ddp"].optimizer == full.gradients
    assert 0 < needs_of(name="adafactor")["ddp"].optimizer < full.gradients // 20
    with pytest.raises(OptionError, match="cannot be estimated"):
        needs_of(name="lbfgs")


def test_nodes_and_single_ranks() -> None:
    """hsdp divides over the ranks of a node; where it is the same as another one, or there is one rank, it says so."""
    two_nodes, one_node = needs_of(4, 2), needs_of(4)
    assert two_nodes["hsdp"].total == needs_of(2)["fsdp"].total > two_nodes["fsdp"].total
    assert one_node["hsdp"].why_not == "one node: fsdp is the same"
    alone = needs_of(1)
    assert alone["ddp"].buckets == 0
    assert {name for name, need in alone.items() if need.why_not} == {"zero1", "hsdp", "fsdp"}


def test_the_plainest_that_fits_is_recommended() -> None:
    """A quarter is left for activations that are not known, less beside known ones; else the least is taken."""
    needs = [Need("ddp", 500, 500), Need("zero1", 500, 200), Need("hsdp", why_not="one node"), Need("fsdp", 300, 100)]
    for memory, strategy in ((1334, "ddp"), (1333, "zero1"), (934, "zero1"), (933, "fsdp"), (534, "fsdp")):
        choice = recommended(needs, memory)
        assert (choice.strategy, choice.fits) == (strategy, True), memory
    assert recommended(needs, 1333).why == "it needs 700 B of 1.3 kB a rank; ddp 1.0 kB"
    least = recommended(needs, 500)
    assert (least.strategy, least.fits) == ("fsdp", False)
    assert least.why.startswith(
        "no strategy fits, and this one needs least: it needs 400 B of 500 B a rank; ddp 1.0 kB"
    )
    assert recommended(needs, 1250, activations=100).strategy == "ddp"
    assert [fit(needs[0], memory) for memory in (1334, 1000, 999)] == ["fits", "tight", "too large"]


def test_activations_are_those_of_a_real_forward() -> None:
    """What is counted without numbers is what a real forward keeps."""
    with torch.device("meta"):
        empty = Net()
    real = Net()
    batch = torch.randn(16, 12)
    assert activation_bytes(empty, [input_of("16x12")]) == activation_bytes(real, [batch]) > 16 * 250 * 4 * 12


@pytest.mark.slow("starts interpreters, each of which imports torch")
def test_auto_trains_as_one_process_whatever_it_chooses() -> None:
    """With less and less memory it takes the next strategy, on all ranks, and the weights are one process's."""
    torch.manual_seed(0)
    plain = Net().double()
    train(plain, torch.optim.AdamW(plain.parameters()), slice(None))
    with torch.device("meta"):
        needs = estimate(Net().double(), 2, 2, InPrecision("32", torch.device("cpu")), optimizer("adamw"))
    memories = [int(need.total / 0.75) + 100 for need in needs if not need.why_not]

    def on_rank(rank_memories: list[int]) -> list[tuple[str, dict[str, torch.Tensor]]]:
        found = []
        for memory in rank_memories:
            gc.collect()  # what other models take is no longer free
            torch.manual_seed(0)
            model = wrap_model(
                Net().double(), strategy=AutoStrategy(device_memory=memory if is_rank_zero() else memory * 2)
            )
            stepper = torch.optim.AdamW(model.parameters())
            train(model, stepper, slice(0, 4) if is_rank_zero() else slice(4, 8))
            strategy = bound_strategy(model)
            assert strategy is bound_strategy(stepper) is not None
            state = strategy.state(model, everywhere=True)
            found.append((repr(strategy), {name: value.clone() for name, value in state.items()}))
            del model, stepper
        return found

    for found in run_ranks(on_rank, 2, memories, timeout=120):
        names = [name for name, _ in found]
        for start, name in zip(("DDPStrategy", "ZeroStrategy", "FSDPStrategy"), names, strict=True):
            assert name.startswith(start), names
        for name, state in found:
            for key, value in plain.state_dict().items():
                assert torch.allclose(state[key], value, rtol=0, atol=1e-9), (name, key)


@pytest.mark.slow("others of its kind are in make test")
def test_auto_counts_the_other_models_of_a_run() -> None:
    """What one model takes is not there for the next; options that a strategy refuses leave it out."""

    def on_rank(memory: int) -> list[str]:
        chooses = AutoStrategy(device_memory=memory)
        models = [wrap_model(Net(), strategy=chooses) for _ in range(2)]
        again = wrap_model(unwrap_model(models[0]), strategy=chooses)
        compressed = wrap_model(Net(), strategy=AutoStrategy(device_memory=1000), comm="fp16")
        return [type(bound_strategy(each)).__name__ for each in (*models, again, compressed)]

    memory = int(needs_of()["ddp"].total * 2.2)
    assert (
        run_ranks(on_rank, 2, memory, timeout=60)
        == [["DDPStrategy", "ZeroStrategy", "DDPStrategy", "ZeroStrategy"]] * 2
    )


def test_an_optimizer_prepared_before_its_model_follows_the_choice() -> None:
    """Where the run is under "auto", the optimizer is divided as soon as the model's strategy is chosen."""

    @distributed(strategy=AutoStrategy(device_memory=1000), nprocs=2, returns="all")
    def on_rank() -> tuple[bool, int]:
        net = Net()
        stepper = wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        model = wrap_model(net, comm="fp16")  # which leaves ddp and zero1
        model(torch.ones(2, 12)).sum().backward()
        assert optimizer_step(stepper, max_norm=1.0)
        return bound_strategy(stepper) is bound_strategy(model), len(stepper.state)

    every = len([parameter for parameter in Net().parameters() if parameter.requires_grad])
    (first, own), (second, others) = on_rank()
    assert first
    assert second
    assert own + others == every


@pytest.mark.slow("starts interpreters, each of which imports torch")
def test_the_command(tmp_path: Path) -> None:
    """It prints a row for each strategy, and the recommendation, and allocates none of 40 billion weights."""
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n"
        "def large(width, depth=2):\n"
        "    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))\n"
    )
    arguments = ["nets:large", "--kwargs", "width=20_000", "depth=100", "--nprocs", "8", "--nnodes", "4"]
    done = run([*ESTIMATE, *arguments, "--device-memory", "80GB"], PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert done.code == 0, done.output
    assert "nets:large: 40,000,000,000 parameters; 32 ranks, precision 32, adamw" in done.output
    assert "ddp         160.0 GB   160.0 GB  160.0 GB   320.0 GB         -  800.0 GB  too large" in done.output
    assert "Recommended: strategy='fsdp'" in done.output


@pytest.mark.slow("others of its kind are in make test")
def test_the_command_with_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """Activations are measured where they can be, and else it says that they are not in it, and why."""
    place = f"{__name__}:Net"
    arguments = ["estimate", place, "--args", "8", "--nprocs", "2", "--device-memory", "1GB"]
    assert main([*arguments, "--batch", "16x12"]) == 0
    said = capsys.readouterr().out
    assert "kB besides, for the backward of one batch" in said
    assert "Recommended: strategy='ddp': it needs" in said
    assert "tp        " in said
    assert "pipeline  -  as its stages" in said
    for more, remark in (
        ([], "not in it; --batch measures them"),
        (["--batch", "16x12", "--precision", "bf16"], "not in it: autocast does nothing on the meta device"),
        (["--batch", "16x13"], "not in it: a forward on the meta device raised RuntimeError"),
    ):
        assert main([*arguments, *more]) == 0
        assert f"Activations: {remark}" in capsys.readouterr().out
    assert main([*arguments[:-1], "1kB"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.nets:Net"], "cannot import 'nowhere.nets': ModuleNotFoundError: No module named 'nowhere'."),
        (["nets/gpt.py:Net"], "Write the module's name, as nets.gpt."),
        (["torch.nn"], "does not name a model: write module:Model"),
        (["torch.nn:Transfomer"], "unknown model of 'torch.nn' 'Transfomer'. Did you mean 'Transformer'?"),
        (["torch.nn:Linear"], "torch.nn:Linear cannot be called so: missing a required argument: 'in_features'. Its"),
        (["torch:ones", "--args", "3"], "torch:ones has returned a Tensor"),
        (["torch.nn:Linear", "--kwargs", "3"], "--kwargs 3: write it as key=value."),
        (["torch.nn:Linear", "--args", "a", "b"], "torch.nn:Linear cannot be made on the meta device"),
        (["torch.nn:ReLU", "--optimizer", "adamv"], "unknown optimizer 'adamv'. Did you mean 'adam'?"),
        (["torch.nn:Linear", "--args", "2", "2", "--optimizer", "sgd(mom=1)"], "'sgd(mom=1)' cannot be made"),
        (["torch.nn:ReLU", "--device-memory", "lots"], "--device-memory='lots': it must be a number of bytes"),
        (["torch.nn:ReLU", "--nprocs", "0"], "--nprocs=0: it must be a whole number of at least 1"),
        (["torch.nn:ReLU", "--batch", "axb"], "--batch axb: it is a shape with the batch first"),
        (["torch.nn:ReLU", "--precision", "bf61"], "unknown precision 'bf61'. Did you mean 'bf16'?"),
    ],
)
def test_wrong_input_to_the_command(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    """What is wrong is said in a sentence, with the nearest name or the way to write it."""
    before = list(sys.path)
    assert main(["estimate", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert sys.path == before


def test_auto_says_what_it_took_and_why(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line names the strategy, the numbers, and what was assumed; once for all models of a class that are alike."""
    monkeypatch.delenv("DISTWRAP_QUIET", raising=False)
    for _ in range(2):
        wrap_model(Net(), strategy=AutoStrategy(device_memory="1GB"))
    total = needs_of(1)["ddp"].total
    assert capsys.readouterr().err == (
        f"distwrap: strategy='auto' is 'ddp' for Net: it needs {total / 1e6:.1f} MB of 1.0 GB a rank (assuming adamw, "
        f"without activations)\n"
    )


def test_auto_divides_the_hosts_memory_among_the_ranks_of_the_cpu() -> None:
    """Where nobody gives the memory, it is this rank's share of what the host has."""
    assert AutoStrategy()._memory(torch.device("cpu"), 4) == (allowed_memory() or 0) // 4 > 0


def test_wrong_options_of_auto() -> None:
    """They are refused where the strategy is made, in the caller."""
    with pytest.raises(OptionError, match="number of bytes"):
        AutoStrategy(device_memory="much")
    with pytest.raises(OptionError, match=r"unknown optimizer 'adamq'"):
        AutoStrategy(optimizer="adamq")
