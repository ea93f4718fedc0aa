"""``python -m distwrap check``: each rule finds what it is for, and nothing in a script that is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from distwrap.cli import main
from distwrap.convert.checking import check
from distwrap.convert.script import Script, read

CASES = Path(__file__).parent / "cases"

HEAD = """
import random
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, random_split
from torchvision import transforms
from distwrap import agree, distributed, gather, is_rank_zero, reduce, shard_loader, wrap_model

dist.init_process_group()
"""

FOUND = {
    "set-epoch": ["sampler = DistributedSampler(data)", "DataLoader(data, sampler=DistributedSampler(data))"],
    "module": [
        "model = DDP(net)\nmodel.module.state_dict()",
        "def f(m):\n    return m.module(x)\nf(DDP(net))",
        "model = wrap_model(net)\nmodel.module",
    ],
    "one-rank": [
        "if rank == 0:\n    dist.all_reduce(x)",
        "def f():\n    return gather(x)\nif is_rank_zero():\n    print(f())",
        "if dist.get_rank() == 0:\n    dist.barrier()",
    ],
    "save": ["torch.save(x, 'a.pt')", "def f():\n    torch.save(x, 'a.pt')\nf()"],
    "seed": ["torch.manual_seed(0)\nt = transforms.RandomCrop(3)", "a, b = random_split(data, [3, 4])"],
    "own-sum": [
        "total = 0\nfor x in shard_loader(DataLoader(d)):\n    total += x.item()\nprint(total)",
        "def f():\n    loader = DataLoader(d, sampler=DistributedSampler(d, shuffle=False))\n    total = 0\n"
        "    for x in loader:\n        total += x.item() * 2\n    return total",
        "loader = shard_loader(DataLoader(d))\nprint(sum(f(x).item() for x in loader) / len(d))",
        "def f():\n    total = sum([x.item() for x in shard_loader(DataLoader(d))])\n    return total",
    ],
    "shuffle": ["DataLoader(data, sampler=s, shuffle=True)"],
    "star-import": ["from distwrap import *"],
    "data-parallel": ["torch.nn.DataParallel(net)", "torch.nn.parallel.DataParallel(net, device_ids=[0])"],
    "not-sharded": [
        "optimizer = torch.optim.SGD(net.parameters())\nfor x in DataLoader(d):\n    net(x).backward()\n"
        "    optimizer.step()"
    ],
    "branch": [
        "optimizer = torch.optim.SGD(net.parameters())\nfor x in shard_loader(DataLoader(d)):\n    loss = net(x)\n"
        "    if loss.isnan():\n        continue\n    loss.backward()\n    optimizer.step()"
    ],
}

RIGHT = [
    "sampler = DistributedSampler(data)\nsampler.set_epoch(3)",
    "sampler = DistributedSampler(data, shuffle=False)",
    "net.module.state_dict()",
    "if rank == 0:\n    print(x)",
    "if args.gpu == 0:\n    torch.save(x, 'a.pt')",
    "if args.gpu is not None:\n    dist.barrier()",
    "if world_size > 1:\n    dist.barrier()",
    "if rank == 0:\n    torch.save(x, 'a.pt')",
    "def f():\n    torch.save(x, 'a.pt')\nif is_rank_zero():\n    f()",
    "torch.save(x, f'{rank}.pt')",
    "torch.manual_seed(rank)\nt = transforms.RandomCrop(3)",
    "torch.manual_seed(0)\nx = torch.randn(3)",
    "torch.manual_seed(0)\nx = random.Random(0).random()",
    "total = 0\nfor x in shard_loader(DataLoader(d)):\n    total += x.item()\n"
    "total = reduce(total, op='sum')\nprint(total)",
    "total = 0\nfor x in shard_loader(DataLoader(d)):\n    y, z = gather((x, x))\n    total += (y == z).sum().item()\n"
    "print(total)",
    "def f(d):\n    total = 0\n    for x in shard_loader(DataLoader(d)):\n        total += x.item()\n    return total\n"
    "print(reduce(f(d), op='sum'))",
    "print(reduce(sum(x.item() for x in shard_loader(DataLoader(d))), op='sum'))",
    "total = sum(x.item() for x in shard_loader(DataLoader(d)))\nprint(reduce(total / 3, op='sum'))",
    "print(sum(x.item() for x in DataLoader(d)))",
    "total = 0\nfor x in DataLoader(d):\n    total += x.item()\nprint(total)",
    "torch.save(x, 'a.pt')  # distwrap: ignore",
    "optimizer = torch.optim.SGD(net.parameters())\nfor x in shard_loader(DataLoader(d)):\n    loss = net(x)\n"
    "    if agree(loss.isnan(), 'any'):\n        continue\n    loss.backward()\n    optimizer.step()",
]


@pytest.mark.parametrize(("rule", "code"), [(rule, code) for rule, codes in FOUND.items() for code in codes])
def test_a_fault_is_found(rule: str, code: str) -> None:
    """Each rule finds its fault, at a line of the script, with a reason and what to write."""
    found = [each for each in check(Script(HEAD + code)) if each.rule == rule]
    assert len(found) == 1
    assert found[0].line > len(HEAD.splitlines())
    assert found[0].why
    assert found[0].fix


@pytest.mark.parametrize("code", RIGHT)
def test_what_is_right_is_not_found(code: str) -> None:
    """Nothing is found in code that is right, or is to be ignored."""
    assert not list(check(Script(HEAD + code)))


@pytest.mark.parametrize("path", sorted(CASES.glob("plain/*.py")), ids=lambda path: path.name)
def test_nothing_is_found_in_plain_scripts(path: Path) -> None:
    """A script for one process, and a converted one, have no faults."""
    assert not list(check(read(path)[0]))


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 without findings, 1 with some, 2 where a file cannot be read."""
    right, wrong, broken = tmp_path / "right.py", tmp_path / "wrong.py", tmp_path / "broken.py"
    right.write_text("x = 3\n")
    wrong.write_text("import torch\nmodel = torch.nn.DataParallel(net)\n")
    broken.write_text("def f(:\n")
    assert main(["check", str(right)]) == 0
    assert "0 findings" in capsys.readouterr().out
    assert main(["check", str(right), str(wrong)]) == 1
    assert "wrong.py:2: data-parallel: model = torch.nn.DataParallel(net)" in capsys.readouterr().out
    assert main(["check", str(broken)]) == 2
    assert "broken.py, line 1: Python 3 cannot read this" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "gone.py")]) == 2


def test_a_script_of_one_process_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No findings in a script that knows no ranks does not mean that it is right on several: the output says so."""
    plain = tmp_path / "plain.py"
    plain.write_text("import torch\nmodel = torch.nn.Linear(1, 1)\n")
    assert main(["check", str(plain)]) == 0
    assert "uses neither DistributedDataParallel nor distwrap, so there is nothing to check" in capsys.readouterr().out


def test_a_script_that_cannot_be_read_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The scripts after one that cannot be read are checked too."""
    broken, wrong = tmp_path / "broken.py", tmp_path / "wrong.py"
    broken.write_text("print 3\n")
    wrong.write_text("import torch\nmodel = torch.nn.DataParallel(torch.nn.Linear(1, 1))\n")
    assert main(["check", str(broken), str(wrong)]) == 2
    told = capsys.readouterr()
    assert "broken.py, line 1: Python 3 cannot read this" in told.err
    assert "wrong.py:2: data-parallel" in told.out
