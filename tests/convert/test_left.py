"""What a conversion leaves, and says with its line: nothing of it is wrong in silence."""

from __future__ import annotations

import pytest

from distwrap.convert.converting import Converted, convert
from distwrap.convert.script import Script
from distwrap.errors import ConversionError

PLAIN = """
import argparse, json, random, time, torch
import numpy as np
from torch.utils.data import DataLoader
{above}
def main(args):
    {before}
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in DataLoader(data, batch_size=4):
        with {context}:
            loss = model(x).mean()
        loss.backward()
        optimizer.step()
        {within}
    {after}

if __name__ == "__main__":
    main(argparse.Namespace())
"""

DDP = """
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

def main(rank):
    dist.init_process_group("gloo")
    sampler = BatchSampler(DistributedSampler(data), 4, False)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in DataLoader(data, batch_sampler=sampler):
        model(x).mean().backward()
        optimizer.step()

if __name__ == "__main__":
    {start}
"""


def plain(
    above: str = "", before: str = "", context: str = "torch.enable_grad()", within: str = "", after: str = ""
) -> Converted:
    text = PLAIN.format(above=above, before=before, context=context, within=within, after=after)
    return convert(Script(text))


def left(result: Converted) -> dict[str, str]:
    """Return the code that was left, by its rule."""
    assert result.is_result
    return {each.rule: each.seen for each in result.notes.of("left", "unsure")}


@pytest.mark.parametrize(
    ("words", "rule", "seen"),
    [
        ({"above": "order = np.random.permutation(9)"}, "seed", "order = np.random.permutation(9)"),
        ({"after": 'log = open("log.txt", "a")'}, "file", 'log = open("log.txt", "a")'),
        ({"after": 'with open("log.txt", "w") as file: json.dump(args, file)'}, "file", 'with open("log.txt", "w") as'),
        ({"within": "args.total += loss.item()"}, "metric", "args.total += loss.item()"),
        (
            {"context": 'torch.autocast("cpu", dtype=torch.bfloat16)', "after": "print(model(data[0]).dtype)"},
            "precision", "print(model(data[0]).dtype)",
        ),
        (
            {"before": "best = 9", "within": 'if loss < best: torch.save(model.state_dict(), "best.pt")'},
            "save", "if loss < best:",
        ),
    ],
)  # fmt: skip
def test_what_is_said(words: dict[str, str], rule: str, seen: str) -> None:
    """Numbers that one rank alone has, or draws, and files that all ranks write, are named with their line."""
    assert left(plain(**words))[rule].startswith(seen)


@pytest.mark.parametrize(
    ("before", "seed"),
    [
        ("order = np.random.permutation(9)", True),
        ("torch.manual_seed(0); order = np.random.permutation(9)", True),
        ("if args.seed: np.random.seed(args.seed)\n    order = np.random.permutation(9)", True),
        ("np.random.seed(args.seed); order = np.random.permutation(9)", False),
        ("seed_everything(args.seed); order = np.random.permutation(9)", False),
    ],
)
def test_what_seeds_a_draw(before: str, seed: bool) -> None:
    """A draw is seeded by a seed of its own library that is always set; else ranks are seeded alike."""
    assert ("@distributed(seed=0)" in plain(before=before).text) is seed


@pytest.mark.parametrize("test", ["time.time() > args.end", "random.random() < 0.1"])
def test_the_clock_and_chance_differ_by_rank(test: str) -> None:
    """Ranks leave a loop together where the clock or chance decides."""
    assert f'if agree({test}, "any"):' in plain(within=f"if {test}: break").text


@pytest.mark.parametrize(
    "line", ['shutil.copyfile("a.pt", "best.pt")', 'np.save("a.npy", data)', 'frame.to_csv("a.csv")']
)
def test_rank_zero_writes(line: str) -> None:
    """A line that writes a file of another kind is rank 0's."""
    assert f"    if is_rank_zero(): {line}\n" in plain(above="import shutil", after=line).text


def test_a_sampler_that_stays_is_said() -> None:
    """A DistributedSampler that no loader is given by itself stays, which fails in one process."""
    assert "DistributedSampler" in left(convert(Script(DDP.format(start="main(0)"))))["sampler"]


def test_processes_that_start_ranks_are_refused() -> None:
    """A script that starts its ranks as processes is left, since each would start ranks again."""
    result = convert(Script(DDP.format(start="mp.Process(target=main, args=(0,)).start()")))
    assert not result.is_result
    assert [each.rule for each in result.notes] == ["entry"]


def test_steps_are_no_sum() -> None:
    """A count of steps, which all ranks take together, is alike on all of them."""
    result = plain(before="step = 0", within="step += 1", after="print(step)")
    assert "metric" not in left(result)


@pytest.mark.parametrize(
    ("added", "read"),
    [
        ("model(y).item()", "print(evaluate() / len(loader))"),
        ("model(y).item()", "mean = evaluate(); print(mean * (1 / len(loader)))"),
        ("model(y).item() / len(loader)", "print(evaluate())"),
    ],
)
def test_a_divisor_that_is_a_number_of_batches_is_said(added: str, read: str) -> None:
    """The list says where a sum of all ranks may be divided by the number of one rank's batches."""
    evaluate = f"total = 0\n        for y in loader:\n            total += {added}\n        return total"
    before = f"loader = DataLoader(data, batch_size=4)\n    def evaluate():\n        {evaluate}"
    result = plain(before=before, after=read)
    assert 'reduce(total, op="sum")' in result.text
    assert "len(loader)" in left(result)["metric"]


def test_what_is_saved_beside_a_load() -> None:
    """What may be no plain value rank 0 alone writes, and a load in the same run does not wait for that."""
    result = plain(after='torch.save(args, "args.pt")\n    args = torch.load("args.pt")')
    assert 'if is_rank_zero(): torch.save(args, "args.pt")' in result.text
    assert left(result)["save"].startswith("torch.save(args")
    assert "save" not in left(plain(after='torch.save(args, "args.pt")'))


def test_a_parameter_is_as_plain_as_what_callers_give() -> None:
    above = """
def store(model, epoch):
    torch.save({"model": model.state_dict(), "epoch": epoch}, "last.pt")
"""
    assert "    save({" in plain(above=above, after="store(model, 3)").text
    assert "if is_rank_zero(): torch.save({" in plain(above=above, after="store(model, args)").text


def test_a_class_that_becomes_mains_own() -> None:
    """Pickle does not find it there, so that a whole model of it cannot be written."""
    text = """
import torch
from torch.utils.data import DataLoader

loader = DataLoader(torch.randn(64, 2), batch_size=8)

class Net(torch.nn.Linear):
    pass

net = Net(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x in loader:
    net(x).mean().backward()
    optimizer.step()
torch.save({state}, "net.pt")
"""
    assert left(convert(Script(text.format(state="net"))))["save"].startswith("class Net")
    assert "save" not in left(convert(Script(text.format(state="net.state_dict()"))))


def test_a_file_with_a_zero_byte() -> None:
    """It is named without a line, which Python does not tell."""
    with pytest.raises(ConversionError, match=r"^train\.py: Python 3 cannot read this: source code .* null bytes"):
        Script("x = 1\0\n", "train.py")
