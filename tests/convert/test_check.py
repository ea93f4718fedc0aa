"""``python -m distwrap check``: each rule finds what it is for, and nothing in a script that is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from distwrap.cli import main
from distwrap.convert.checking import check
from distwrap.convert.script import Script

HEAD = """
import random
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, random_split
from torchvision import transforms
import distwrap
import torch.nn.functional as F
from distwrap import agree, distributed, gather, is_rank_zero, mean, reduce, scale_loss, shard_loader, wrap_model

dist.init_process_group()
"""

DATA = "data = torch.utils.data.TensorDataset(x)\n"
TRAINING = """
optimizer = torch.optim.SGD(net.parameters())
for x, y in shard_loader(DataLoader(d), {options}):
    {line}
    optimizer.step()
"""
STATISTICS = """
net = wrap_model(torch.nn.Linear(1, 1))
loader = shard_loader(DataLoader(d))
{line}
optimizer = torch.optim.SGD(net.parameters())
for x in loader:
    net({used}).backward()
    optimizer.step()
"""
EVALUATION = """
def evaluate(loader):
    hits = 0
    for x, y in loader:
        hits += (net(x) == y).sum().item()
    return {result}
evaluate({loader})
"""
CLOSURE = """
optimizer = torch.optim.{name}(net.parameters())
for x in shard_loader(DataLoader(d)):
    def closure():
        loss = net(x)
        loss.backward()
        return {loss}
    optimizer.step(closure)
"""


def summed(line: str, options: str = 'batch_size="global"') -> str:
    return TRAINING.format(line=line, options=options)


def guarded(line: str) -> str:
    return summed(f"loss = net(x)\n    {line}\n        loss.backward()")


FOUND = {
    "sum": [
        summed("F.mse_loss(net(x), y, reduction='sum').backward()"),
        summed("loss = ((net(x) - y) ** 2).sum()\n    loss.backward()"),
        summed("F.cross_entropy(net(x), y, weight=w).backward()"),
        "criterion = torch.nn.CrossEntropyLoss(weight=w)" + summed("loss = criterion(net(x), y)\n    loss.backward()"),
        "criterion = torch.nn.MSELoss(reduction='sum')" + summed("distwrap.backward(criterion(net(x), y))"),
    ],
    "closure": [CLOSURE.format(name="LBFGS", loss="loss")],
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
        EVALUATION.format(result="hits / 9", loader="shard_loader(DataLoader(d))"),
        EVALUATION.format(result="hits", loader="shard_loader(DataLoader(d))").replace(
            "    return", "    if hits > 3:\n        return"
        ),
        "meter = Meter()\nfor x in shard_loader(DataLoader(d)):\n    meter.update(x)\nbest = min(best, meter.avg)",
    ],
    "shuffle": ["DataLoader(data, sampler=s, shuffle=True)"],
    "star-import": ["from distwrap import *"],
    "data-parallel": ["torch.nn.DataParallel(net)", "torch.nn.parallel.DataParallel(net, device_ids=[0])"],
    "not-sharded": [
        "optimizer = torch.optim.SGD(net.parameters())\nfor x in DataLoader(d):\n    net(x).backward()\n"
        "    optimizer.step()"
    ],
    "branch": [
        guarded("if not loss.isnan():"),
        summed("if distwrap.rank() == 1: continue\n    net(x).backward()"),
        "optimizer = torch.optim.SGD(net.parameters())\nfor x in shard_loader(DataLoader(d)):\n    loss = net(x)\n"
        "    if loss.isnan():\n        continue\n    loss.backward()\n    optimizer.step()",
    ],
}

RIGHT = [
    STATISTICS.format(line="xs = gather(torch.cat([x for x in loader]))\nmu = xs.mean(0)", used="x - mu"),
    STATISTICS.format(line="mu = mean(torch.cat([x for x in loader]).mean(0))", used="x - mu"),
    STATISTICS.format(line="xs = torch.cat([x for x in loader])\nmu = reduce(xs.sum(0), op='sum') / 9", used="x - mu"),
    STATISTICS.format(line="s = 0\nfor x in loader:\n    s += x.sum(0)\ns = reduce(s, op='sum')", used="x - s"),
    STATISTICS.format(line="xs = [x for x in loader]\nprint(xs[0].shape, len(xs))", used="x"),
    STATISTICS.format(line="n = sum(len(x) for x in loader)\nprint(n)", used="x / n"),
    STATISTICS.format(line="first = next(iter(loader))", used="x - first.mean()"),
    STATISTICS.format(line="for x in loader:\n    print(x.shape)\n    break", used="x"),
    STATISTICS.format(line="mu = torch.cat([x for x in DataLoader(d)]).mean(0)", used="x - mu"),
    EVALUATION.format(
        result="reduce(hits, op='sum') / len(loader.dataset)",
        loader="shard_loader(DataLoader(d, shuffle=True), mode='exact')",
    ),
    EVALUATION.format(result="reduce(hits, op='sum') / len(loader.dataset)", loader="shard_loader(DataLoader(d))"),
    DATA + EVALUATION.format(result="hits / len(data)", loader="DataLoader(data)"),
    DATA
    + EVALUATION.format(result="reduce(hits, op='sum') / len(data) / distwrap.world_size()", loader="DataLoader(data)"),
    DATA + EVALUATION.format(result="mean(hits / len(data))", loader="DataLoader(data)"),
    EVALUATION.format(result="reduce(hits, op='sum') / 9", loader="DataLoader(Own(distwrap.rank()))"),
    DATA + "t = n = 0\nfor x in DataLoader(data):\n    t += x.item()\n    n += len(x)\n"
    "t, n = reduce([t, n], op='sum')\nprint(t / n)",
    summed("F.mse_loss(net(x), y, reduction='sum').backward()", "mode='pad'"),
    summed("(F.mse_loss(net(x), y, reduction='sum') * distwrap.world_size()).backward()"),
    summed("scale_loss(F.cross_entropy(net(x), y, reduction='sum', weight=w), w[y].sum()).backward()"),
    summed("F.cross_entropy(net(x), y).backward()"),
    summed("loss = F.mse_loss(net(x), y, reduction='sum') / len(x)\n    loss.backward()"),
    summed("loss = F.mse_loss(net(x), y) + 0.1 * (net.weight ** 2).sum()\n    loss.backward()"),
    CLOSURE.format(name="LBFGS", loss="mean(loss)"),
    CLOSURE.format(name="SGD", loss="loss"),
    CLOSURE.format(name="LBFGS", loss="loss").replace("shard_loader(DataLoader(d))", "range(9)"),
    guarded("if agree(not loss.isnan(), 'all'):"),
    guarded("if x.shape[0] > 1:"),
    "for name in names:\n    optimizer = torch.optim.SGD(net.parameters())\n    if name != 'b':\n"
    "        net(x).backward()\n    optimizer.step()",
    summed("loss = net(x)\n    every = mean(loss.detach())\n    if every.isnan(): continue\n    loss.backward()"),
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


def test_ids_of_mistakes() -> None:
    """A finding names its mistake's id, which a comment on the line can ignore; another id ignores nothing."""
    code = f"{HEAD}for x in DataLoader(d):\n    net(x).sum().backward()\n    optimizer.step()\n"
    (found,) = [each for each in check(Script(code)) if each.rule == "not-sharded"]
    assert ": not-sharded (DW201): for x in" in found.text("a.py")
    for comment, count in (("ignore[DW204]", 1), ("ignore[DW204, DW201]", 0), ("ignore", 0)):
        ignored = code.replace("DataLoader(d):\n", f"DataLoader(d):  # distwrap: {comment}\n", 1)
        assert len([each for each in check(Script(ignored)) if each.rule == "not-sharded"]) == count


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
