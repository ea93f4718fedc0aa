"""Another package adds a strategy, launcher, precision, algorithm, detector or kind of device by one file.

Each file has one entry point, and is installed into a folder as pip would do it, for a program in a fresh interpreter.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.package import ROOT
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


def install(folder: Path, file: str, entry_point: str) -> None:
    """Install one file as a package, with one entry point, as ``pip install --target`` leaves it."""
    group, _, point = entry_point.partition(" ")
    shutil.copy(PLUGINS / f"{file}.py", folder / f"their_{file}.py")
    info = folder / f"their_{file}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: their-{file}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{point}\n")


def start(folder: Path, program: str, **env: str) -> subprocess.Popen[str]:
    """Start a program that finds what is installed in a folder."""
    (folder / "program.py").write_text(program)
    return subprocess.Popen(
        [sys.executable, str(folder / "program.py")],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(*programs: subprocess.Popen[str]) -> list[str]:
    """Return what each program printed last; fail with its errors where it fails."""
    lines = []
    try:
        for program in programs:
            out, err = program.communicate(timeout=100)
            assert program.returncode == 0, err
            lines.append(out.splitlines()[-1])
    finally:
        for program in programs:
            program.kill()
    return lines


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
def test_an_option_of_a_package(file: str, entry_point: str, option: str, rank_result: object, tmp_path: Path) -> None:
    """A name that a package brings is a value of the option, in the caller and in the ranks."""
    install(tmp_path, file, entry_point)
    assert output(start(tmp_path, RUN.format(option=option))) == [str([rank_result, rank_result])]


def test_a_launcher_of_a_package(tmp_path: Path) -> None:
    """A name that a package brings is a launcher, and its ranks run as it starts them."""
    install(tmp_path, "launcher", "distwrap.launchers nice = their_launcher:NiceLauncher")
    program = (
        "import os\nfrom distwrap import distributed, gather_object\n\n"
        "@distributed(nprocs=2, launcher='nice')\ndef main():\n    return gather_object(os.nice(0))\n\n"
        "if __name__ == '__main__':\n    here = os.nice(0)\n    print([value - here for value in main()])\n"
    )
    assert output(start(tmp_path, program)) == ["[3, 3]"]


def test_a_detector_of_a_package(tmp_path: Path) -> None:
    """A launcher that only the package knows starts two processes, and each finds its rank."""
    install(tmp_path, "detector", "distwrap.detectors seats = their_detector:detect")
    program = (
        "from distwrap import gather_object, rank, setup_process_group, teardown_process_group\n"
        "setup_process_group()\nprint(gather_object(rank()))\nteardown_process_group()\n"
    )
    table = f"127.0.0.1:{free_port()}"
    ranks = [start(tmp_path, program, SEAT=str(seat), SEATS="2", TABLE=table) for seat in (0, 1)]
    assert output(*ranks) == ["[0, 1]", "[0, 1]"]


def test_a_kind_of_device_of_a_package(tmp_path: Path) -> None:
    """A type of device that the package knows is treated as it says, and as torch treats any where it says nothing."""
    install(tmp_path, "device_kind", "distwrap.device_kinds meta = their_device_kind:Meta")
    program = (
        "import torch\nfrom distwrap.devices.kinds import kind_of\nkind = kind_of(torch.device('meta'))\n"
        "print(kind.count(), kind.unique_name(torch.device('meta', 1)), kind.backend())\n"
    )
    assert output(start(tmp_path, program)) == ["2 meta 1 gloo"]
