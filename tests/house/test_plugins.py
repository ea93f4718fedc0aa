"""Another package adds a strategy, launcher, precision, algorithm, detector or kind of device by one file.

Each file has one entry point, and is installed into a folder as pip would do it, for a program that finds it there.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.docs.pages import run_command
from tests.house.package import ROOT
from tests.interpreters import run_python
from tests.ports import free_port

PLUGINS = Path(__file__).parent / "plugins"

# Where torch's own collectives and gradients show what was added.
RUN = """
import torch
from torch import nn
from distwrap import distributed, gather_object, rank, wrap_model

@distributed(nprocs=2, {option})
def main():
    model = wrap_model(nn.Linear(1, 1, dtype=torch.float32))
    loss = model(torch.full((1, 1), 10.0 * (rank() + 1))).sum()
    loss.backward()
    return gather_object((str(loss.dtype), model.weight.grad.item(), model.bias.grad is None))

if __name__ == "__main__":
    print(main())
"""

# Where ranks that hold different parts of the optimizer's state end with the weights of one process.
RESUMED = """
from pathlib import Path
import torch
from torch import nn
from distwrap import backward, distributed, gather_object, load, optimizer_step, rank, save, world_size
from distwrap import wrap_model, wrap_optimizer

class Net(nn.Linear):
    pass

@distributed
def main(steps, before, after):
    torch.manual_seed(rank())
    net = wrap_model(Net(4, 2, dtype=torch.float64))
    assert isinstance(net, Net) and list(net.state_dict()) == ["weight", "bias"]
    optimizer = wrap_optimizer(torch.optim.Adam(net.parameters(), lr=0.1), net)
    if before:
        load(before, into=[net, optimizer])
    for step in steps:
        x = torch.arange(16, dtype=torch.float64).reshape(4, 4).sin() + step
        backward((net(x[rank() :: world_size()]) - 1).square().mean())
        optimizer_step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
    save([net, optimizer], after)
    held = sorted(optimizer.state_dict()["state"])
    return gather_object((held, torch.cat([each.detach().flatten() for each in net.parameters()])))

if __name__ == "__main__":
    first, last = Path(__file__).with_name("first.pt"), Path(__file__).with_name("last.pt")
    two = main.options(nprocs=2, strategy="owners")
    [(_, whole)] = main(range(6), None, last)
    two(range(3), None, first)
    for go_on, held in ((main, [[0, 1]]), (two, [[0], [1]])):
        ends = go_on(range(3, 6), first, last)
        assert [each for each, _ in ends] == held
        for _, weights in ends:
            torch.testing.assert_close(weights, whole, rtol=0, atol=1e-12)
    print("as in one process")
"""


def install(folder: Path, file: str, entry_point: str) -> None:
    """Install one file as a package, with one entry point, as ``pip install --target`` leaves it."""
    group, _, point = entry_point.partition(" ")
    shutil.copy(PLUGINS / f"{file}.py", folder / f"their_{file}.py")
    info = folder / f"their_{file}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: their-{file}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{point}\n")


def output(folder: Path, program: str, *options: str, **env: str) -> str:
    """Return what a program prints last that finds what is installed in a folder; fail with its errors.

    With options of Python it is a process, and no fork.
    """
    (folder / "program.py").write_text(program)
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", **env}
    done = run_python(*options, folder / "program.py", cwd=folder, env=env, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("file", "entry_point", "option", "rank_result"),
    [
        (
            "strategy",
            "distwrap.strategies frozen = their_strategy:Frozen",
            "strategy='frozen'",
            ("torch.float32", 15.0, True),
        ),
        (
            "precision",
            "distwrap.precisions double = their_precision:Double",
            "precision='double'",
            ("torch.float64", 15.0, False),
        ),
        (
            "algorithm",
            "distwrap.algorithms clamped = their_algorithm:Clamped",
            "comm='clamped(limit=12.0)'",
            ("torch.float32", 11.0, False),  # the mean of 10 and of 20, held to 12
        ),
    ],
)
@pytest.mark.slow("installs a package")
def test_an_option_of_a_package(file: str, entry_point: str, option: str, rank_result: object, tmp_path: Path) -> None:
    """A name that a package brings is a value of the option, in the caller and in the ranks."""
    install(tmp_path, file, entry_point)
    assert output(tmp_path, RUN.format(option=option)) == str([rank_result, rank_result])


@pytest.mark.slow("installs a package")
def test_a_strategy_of_a_package_that_is_not_ddp(tmp_path: Path) -> None:
    """It divides the optimizer's state, trains as one process does, and goes on from a checkpoint in any number."""
    install(tmp_path, "owners", "distwrap.strategies owners = their_owners:Owners")
    assert output(tmp_path, RESUMED) == "as in one process"


@pytest.mark.slow("its ranks are interpreters of their own")
def test_a_launcher_of_a_package(tmp_path: Path) -> None:
    """A name that a package brings is a launcher, and its ranks run as it starts them."""
    install(tmp_path, "launcher", "distwrap.launchers nice = their_launcher:NiceLauncher")
    program = (
        "import os\nfrom distwrap import distributed, gather_object\n\n"
        "@distributed(nprocs=2, launcher='nice')\ndef main():\n    return gather_object(os.nice(0))\n\n"
        "if __name__ == '__main__':\n    here = os.nice(0)\n    print([value - here for value in main()])\n"
    )
    assert output(tmp_path, program, "-X", "utf8") == "[3, 3]"  # a fork would be as nice as the tests' interpreter


@pytest.mark.slow("installs a package")
def test_a_detector_of_a_package(tmp_path: Path) -> None:
    """A launcher that only the package knows starts two processes, and each finds its rank."""
    install(tmp_path, "detector", "distwrap.detectors seats = their_detector:detect")
    program = (
        "from distwrap import gather_object, rank, setup_process_group, teardown_process_group\n"
        "setup_process_group()\nprint(gather_object(rank()))\nteardown_process_group()\n"
    )
    seats = {"SEATS": "2", "TABLE": f"127.0.0.1:{free_port()}"}
    (tmp_path / "program.py").write_text(program)
    both = "SEAT=0 python program.py & SEAT=1 python program.py; wait $!"
    printed = run_command(["sh", "-euc", both], tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}", **seats)
    assert printed.splitlines() == ["[0, 1]", "[0, 1]"]


@pytest.mark.slow("installs a package")
def test_a_kind_of_device_of_a_package(tmp_path: Path) -> None:
    """A type of device that the package knows is treated as it says, and as torch treats any where it says nothing."""
    install(tmp_path, "device_kind", "distwrap.device_kinds meta = their_device_kind:Meta")
    program = (
        "import torch\nfrom distwrap.devices.kinds import kind_of\nkind = kind_of(torch.device('meta'))\n"
        "print(kind.count(), kind.unique_name(torch.device('meta', 1)), kind.backend())\n"
    )
    assert output(tmp_path, program) == "2 meta 1 gloo"
