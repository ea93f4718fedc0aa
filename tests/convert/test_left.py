"""What a conversion leaves to a hand, and says: a TODO line where ranks would go apart, a note where they only wait."""

from __future__ import annotations

import libcst as cst
import pytest

from distwrap.convert.conversion import ConversionOptions
from distwrap.convert.converting import Converted, convert
from distwrap.convert.edits import Edits
from distwrap.convert.findings import Outcome
from distwrap.convert.imports import unbound_names
from distwrap.convert.script import Script
from distwrap.errors import ConversionError

STEP = "loss = model(x).mean(); loss.backward(); optimizer.step()"
PLAIN = """
import argparse, json, os, random, time, torch
import numpy as np
import torch.nn.functional as F
from torch.utils.data import DataLoader
{above}
def main(args):
    {before}
    loader = DataLoader(data, batch_size=4)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.1)
    total = 0
    for x, y in loader:
        {step}
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
    dist.init_process_group("gloo"); dist.barrier(); torch.cuda.set_device(0)
    sampler = {sampler}
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in DataLoader(data, {given}=sampler):
        model(x).mean().backward()
        optimizer.step()
    dist.barrier(); dist.destroy_process_group()

if __name__ == "__main__":
    {start}
"""
FLAT = """
import torch
from torch.utils.data import DataLoader
{above}
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in {iterated}:
    model(x).mean().backward()
    optimizer.step()
{below}
"""
TRAINED_ELSEWHERE = """
import torch
from torch.utils.data import DataLoader

loaders = {"train": DataLoader(data, 4, shuffle=True), "val": DataLoader(data, 4)}

def train_model(model, optimizer):
    for phase in ("train", "val"):
        for x in loaders[phase]:
            model(x).mean().backward()
            optimizer.step()
    return model

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = train_model(model, optimizer)
"""


def plain(
    above: str = "", before: str = "", within: str = "", after: str = "", *, step: str = STEP, optimizer: str = "SGD",
    global_batch: bool = False,
) -> Converted:  # fmt: skip
    text = PLAIN.format(above=above, before=before, within=within, after=after, step=step, optimizer=optimizer)
    return convert(Script(text), ConversionOptions(global_batch=global_batch))


def ddp(sampler: str = "DistributedSampler(data)", given: str = "sampler", start: str = "main(0)") -> Converted:
    return convert(Script(DDP.format(sampler=sampler, given=given, start=start)))


def said(result: Converted, *outcomes: Outcome) -> dict[str, str]:
    """Return the code of the notes with some outcomes, by their rule."""
    assert result.is_result, [each.why for each in result.notes]
    return {each.rule: each.seen for each in result.notes.of(*outcomes)}


@pytest.mark.parametrize(
    ("words", "rule", "seen", "code"),
    [
        ({"before": "xs = list(loader)"}, "shard_loader", "xs = list(loader)", "a second DataLoader"),
        ({"after": "for x, y in loader: print(x)"}, "shard_loader", "for x, y in loader: print", "a second DataLoader"),
        ({"within": "total += loss", "after": "if total < 3: print(3)"}, "metric", "if total", "total = mean(total)"),
        ({"after": "best = min(loss, 3)"}, "metric", "best = min", "loss = mean(loss)"),
        ({"within": "meter.update(loss)", "after": "while meter.avg < 3: pass"}, "metric", "while", "= mean(meter"),
        (
            {"before": "plan = torch.optim.lr_scheduler.ReduceLROnPlateau(o)", "after": "plan.step(loss)"},
            "metric", "plan.step(loss)", "loss = mean(loss)",
        ),
        ({"within": "noise = torch.randn(3)"}, "draws", "noise = torch.randn(3)", "seed_everything(seed, apart=True)"),
        ({"after": "model.eval().half()"}, "moved", "model.eval().half()", "copy.deepcopy(unwrap_model(model))"),
        ({"before": 'name = f"{time.time()}.pt"'}, "file", "name = f", "name = broadcast(name)"),
        (
            {"after": 'torch.save(args, "a.pt")\n    args = torch.load("a.pt")'},
            "load", "args = torch.load", "barrier() above",
        ),
        (
            {"before": "norm = torch.nn.BatchNorm1d(2)", "after": "for y in DataLoader(test, 4): model(y)"},
            "buffers", "for y in DataLoader(test", "sync_buffers(model)",
        ),
        (
            {"step": f"def closure(): {STEP}; return loss\n        optimizer.step(closure)", "optimizer": "LBFGS"},
            "closure", "optimizer.step(closure)", "return mean(loss)",
        ),
        ({"within": "if y:\n            if time.time() > 3: break"}, "branch", "if time.time() > 3", "if agree("),
    ],
)  # fmt: skip
def test_a_todo_line(words: dict[str, str], rule: str, seen: str, code: str) -> None:
    """Where ranks would go apart, the line above says why, with the code to write; the list has it too."""
    before = {"before": "loader = DataLoader(data, 4)\n    " + words["before"]} if "list" in str(words) else {}
    result = plain(**{**words, **before})  # type: ignore[arg-type]
    assert said(result, "todo")[rule].startswith(seen)
    lines = result.text.splitlines()
    places = [number for number, line in enumerate(lines) if "# TODO(distwrap): " in line and code in line]
    assert [lines[each + 1].strip().startswith(seen) for each in places] == [True]


@pytest.mark.parametrize(
    ("words", "rule", "seen"),
    [
        ({"above": "order = np.random.permutation(9)"}, "seed", "order = np.random.permutation(9)"),
        ({"within": "total += loss.item()", "after": "return total"}, "metric", "return total"),
        ({"after": "for y in DataLoader(test, 4): model(y)"}, "shard_loader", "for y in DataLoader(test"),
        ({"step": f'with torch.autocast("cpu"): {STEP}'}, "precision", "with torch.autocast"),
        ({"step": f"if x % 4 == 0: {STEP}"}, "accumulate", "for x, y in loader"),
        ({"within": 'if loss < 3:\n            torch.save(model.state_dict(), "best.pt")'}, "save", "if loss < 3"),
        ({"before": 'args = torch.load("a.pt")'}, "load", "args = torch.load"),
    ],
)
def test_a_note(words: dict[str, str], rule: str, seen: str) -> None:
    """What is right as it is and only takes longer, or is of one rank, is named with its line, and not changed."""
    result = plain(**words)  # type: ignore[arg-type]
    assert said(result, "left")[rule].startswith(seen)
    assert "TODO" not in result.text


@pytest.mark.parametrize(
    "within", ["step += 1", "total = reduce(loss)", "pbar.update(1)", "scaler.update()", "print(loss)"]
)
def test_what_is_alike_on_all_ranks(within: str) -> None:
    """A count of steps, what a collective gives, and progress bars decide alike on all ranks."""
    above = "from torch.distributed import all_gather as reduce"
    result = plain(above, "step = 0", within=within, after="if step > 3 or total > 3 or pbar.n > 3: print(4)")
    assert "metric" not in said(result, "todo", "left")


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


@pytest.mark.parametrize("test", ["time.time() > args.end", "random.random() < 0.1", "loss.isnan()"])
def test_ranks_leave_a_loop_together(test: str) -> None:
    """Ranks leave a loop together where the clock, chance or their own data decides."""
    assert f'if agree({test}, "any"):' in plain(within=f"if {test}: break").text


@pytest.mark.parametrize(
    "line", ['shutil.copyfile("a.pt", "best.pt")', 'np.save("a.npy", data)', 'frame.to_csv("a.csv")']
)
def test_rank_zero_writes(line: str) -> None:
    """A line that writes a file of another kind is rank 0's; one of a file with a rank in its name is each rank's."""
    assert f"    if is_rank_zero(): {line}\n" in plain(above="import shutil", after=line).text
    own = line.replace('"a', 'f"{rank}').replace('"best', 'f"{rank}')
    assert f"\n    {own}\n" in plain(above="import shutil", after=own).text


def test_what_is_written_to_an_open_file() -> None:
    """Rank 0 alone writes it; what the others write goes nowhere, and a folder may be there already."""
    result = plain(before='os.makedirs("out")', after='with open("log.txt", "w") as file: json.dump(args, file)')
    assert 'with open("log.txt" if is_rank_zero() else os.devnull, "w") as file: json.dump' in result.text
    assert 'os.makedirs("out", exist_ok=True)' in result.text


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ('torch.save(args, "a.pt")', 'if is_rank_zero(): torch.save(args, "a.pt")'),
        ('torch.save(model, "a.pt")', 'if is_rank_zero(): torch.save(unwrap_model(model), "a.pt")'),
        ('torch.save({"m": model.state_dict(), "n": 3}, "a.pt")', 'save({"m": model.state_dict(), "n": 3}, "a.pt")'),
        ('if args.rank == 0: torch.save(args, "a.pt")', 'if args.rank == 0: torch.save(args, "a.pt")'),
    ],
)  # fmt: skip
def test_what_is_saved(line: str, becomes: str) -> None:
    """What surely is plain is written by save; anything else by rank 0 alone, and a model without its wrapper."""
    assert f"    {becomes}\n" in plain(after=line).text


@pytest.mark.parametrize(
    "step",
    [
        "loss = F.cross_entropy(model(x), y, weight=w); loss.backward(); optimizer.step()",
        "loss = F.mse_loss(model(x), y, reduction='sum'); loss.backward(); optimizer.step()",
    ],
)
def test_a_loss_that_is_no_mean_is_named(step: str) -> None:
    """Where the batch is divided, the list names losses whose gradients are not those of one process."""
    assert said(plain(step=step, global_batch=True), "left")["sum"] == step
    assert "sum" not in said(plain(step=step), "left")


def test_writers_of_a_run_are_rank_zeros() -> None:
    """A writer of TensorBoard and a run of wandb are rank 0's; elsewhere they take any call."""
    above = "from torch.utils.tensorboard import SummaryWriter\nimport wandb"
    text = plain(above, "writer = SummaryWriter(); wandb.init()", within='wandb.log({"loss": 3})').text
    assert "writer = on_rank_zero(lambda: SummaryWriter()); on_rank_zero(lambda: wandb.init())" in text
    assert 'if is_rank_zero(): wandb.log({"loss": 3})' in text


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ('"cuda:0"', '"cuda"'),
        ('torch.device("cuda:1" if args else "cpu")', 'torch.device("cuda" if args else "cpu")'),
        ("torch.device(0)", "device()"),
        ("x.cuda(0)", "x.to(device())"),
        ("x.to(1, non_blocking=True)", "x.to(device(), non_blocking=True)"),
        ('x.to("cuda")', 'x.to("cuda")'),
        ("x.cuda()", "x.cuda()"),
    ],
)
def test_a_device_has_no_number(given: str, becomes: str) -> None:
    """Without a number a device is the rank's own; one that has none stays."""
    assert f"    place = {becomes}\n" in plain(before=f"place = {given}").text


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("torch.jit.trace(model, data)", "torch.jit.trace(unwrap_model(model), data)"),
        ("writer.add_graph(model, data)", "writer.add_graph(unwrap_model(model), data)"),
        ("torch.jit.trace(other, data)", "torch.jit.trace(other, data)"),
        ("out = model(x).cpu()", "out = model(x).cpu()"),
    ],
)
def test_a_tracer_reads_the_model_itself(line: str, becomes: str) -> None:
    """What traces a model gets it without its wrapper; a model's output may be moved."""
    result = plain(after=line)
    assert f"    {becomes}\n" in result.text
    assert "TODO" not in result.text


def test_loaders_in_a_dict_and_a_model_that_comes_back() -> None:
    """A loop whose loader is not seen gets a TODO line, and a model is wrapped once, before it is trained."""
    result = convert(Script(TRAINED_ELSEWHERE))
    assert said(result, "todo") == {"shard_loader": "for x in loaders[phase]:"}
    assert "model = wrap_model(model)\noptimizer = " in result.text
    assert result.text.count("wrap_model(") == 1


@pytest.mark.parametrize(
    "iterated", ["range(9)", "torch.ones(9, 2)", "make_loader()", "zip(DataLoader(data, 4), others)"]
)
def test_a_loop_without_a_loader_that_is_seen(iterated: str) -> None:
    """All ranks may train on the same there, so that a TODO line names what divides the work."""
    result = convert(Script(FLAT.format(above="", below="", iterated=iterated)))
    assert said(result, "todo")["shard_loader"] == f"for x in {iterated}:"
    assert "shard_loader(loader), split(batch), or before it seed_everything(seed, apart=True)\nfor x" in result.text


@pytest.mark.parametrize(
    ("returned", "call", "name"),
    [
        ("total / 3", "loss = train(model)", "loss"),
        ("model, total", "net, loss = train(model)", "loss"),
        ("total, 3", "result = train(model)", "result"),
        ("reduce(total), 3", "loss = train(model)", ""),
        ("3, total", "loss, net = train(model)", ""),
    ],
)
def test_a_number_that_a_function_returns(returned: str, call: str, name: str) -> None:
    """Where the caller decides by it, it has the TODO line; the list names the function's line too."""
    above = f"""
from torch.distributed import all_gather as reduce
def train(model):
    for x in DataLoader(data, 4):
        model(x).backward()
        optimizer.step()
        total += x.sum()
    return {returned}
"""
    below = f"{call}\nif {call.split(' =')[0].split(', ')[-1] if name else 'loss'} < 3: print(3)"
    result = convert(Script(FLAT.format(above=above, below=below, iterated="DataLoader(data, 4)")))
    todo = f"# TODO(distwrap): {name} is of this rank's share, and ranks would decide apart: {name} = mean({name})\nif "
    assert (todo in result.text) is bool(name)
    assert ("metric" in said(result, "left")) is ("reduce" not in returned)


def test_one_of_two_loaders_is_not_seen() -> None:
    """A loop that trains on a loader that is seen, and on another one that is not, has its TODO line too."""
    text = FLAT.format(above="for loader in [3]: pass", below="", iterated="loader")
    result = convert(Script(text.replace("model = t", "if data:\n    loader = DataLoader(data, 4)\nmodel = t")))
    assert said(result, "todo")["shard_loader"] == "for x in loader:"
    assert "loader = shard_loader(DataLoader(data, 4))" in result.text


@pytest.mark.parametrize(
    ("above", "below"),
    [
        ("", 'exec("x = 3"); print(vars(), globals())'),
        ("", "from os.path import *"),
        ("def count():\n    global turns\n    turns = 1\n", "if 3: turns = 0"),
        ("", 'if __name__ == "__main__":\n    print(3)\nelse:\n    print(4)'),
        ("async def wait():\n    pass\n", ""),
    ],
)
def test_a_flat_script_stays_flat(above: str, below: str) -> None:
    """Nothing moves into a function: the group is set up at the top, and all of the script's lines stay."""
    before = FLAT.format(above=above, below=below, iterated="DataLoader(data, batch_size=4)")
    result = convert(Script(before))
    assert result.command == "distwrap run -n 2"
    assert "\n\nsetup_process_group()\n" in result.text
    lines = [line for line in before.splitlines() if "DataLoader(data" not in line and "exec" not in line]
    assert set(lines) - set(result.text.splitlines()) <= {below.split("\n")[-1]}


@pytest.mark.parametrize(
    ("sampler", "given", "start"),
    [
        ("BatchSampler(DistributedSampler(data), 4, False)", "batch_sampler", "main(0)"),
        ("DistributedSampler(data, other=3)", "sampler", "main(0)"),
    ],
)  # fmt: skip
def test_a_sampler_that_stays_is_said(sampler: str, given: str, start: str) -> None:
    """A DistributedSampler that is used for more than a loader stays, which fails in one process."""
    assert "DistributedSampler" in said(ddp(sampler, given, start), "todo")["sampler"]


def test_statements_that_share_a_line_go_one_by_one() -> None:
    """Of several statements on a line those of torch's group go, and the others stay."""
    text = ddp().text
    assert "    setup_process_group(); barrier()\n" in text
    assert "    barrier()\n" in text
    assert "set_device" not in text


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        (
            DDP.replace("torch.nn.Linear(2, 2))", 'torch.nn.Linear(2, 2).to("cuda:1"), device_ids=[0])'),
            'wrap_model(torch.nn.Linear(2, 2).to("cuda"))',
        ),
        (DDP, 'main.options(nprocs=2)("cuda", 3)'),
        (
            FLAT.replace("model = torch.nn.Linear(2, 2)", "model = torch.nn.DataParallel(net.cuda(0))"),
            "net.to(device())",
        ),
    ],
)
def test_a_change_within_a_change(text: str, becomes: str) -> None:
    """What is rewritten in an argument stays so where the call around it is rewritten too."""
    start = 'mp.spawn(main, args=("cuda:0", 3), nprocs=2)'
    words = {"sampler": "DistributedSampler(data)", "given": "sampler", "start": start, "above": "", "below": ""}
    assert becomes in convert(Script(text.format(**words, iterated="DataLoader(data, 4)"))).text


def test_a_change_that_swallows_another_is_an_error() -> None:
    """An edit inside of a replaced range would be lost, unless the range says that it drops what is inside."""
    script = Script("x = f(g(3))\n")
    outer, inner = script.find(cst.Call)
    for drops in (False, True):
        edits = Edits(script)
        edits.replace(inner, "h(3)")
        edits.replace(outer, "f()", drops=drops)
        if drops:
            assert edits.apply() == "x = f()\n"
        else:
            with pytest.raises(ConversionError, match=r"line 1: two changes want the same text.* error of distwrap's"):
                edits.apply()


def test_a_name_that_nobody_binds() -> None:
    """Names that a result would not know are found in all that binds a name."""
    code = "import a.b, c as d\nfrom e import f\ndef g(h, *i, **j): k = [l for l in h]\nclass m: pass\n"
    code += "try: pass\nexcept Exception as n: pass\nwith o as p: (q := 3)\nmatch a:\n    case [r, *s]: pass\n"
    assert unbound_names(f"{code}print(a, d, f, g, h, i, j, k, l, m, n, p, q, r, s, t)") == {"o", "t"}


def test_processes_that_start_ranks_are_refused() -> None:
    """A script that starts its ranks as processes is left, since each would start ranks again."""
    result = ddp(start="mp.Process(target=main, args=(0,)).start()")
    assert not result.is_result
    assert [each.rule for each in result.notes] == ["entry"]


def test_a_file_with_a_zero_byte() -> None:
    """It is named without a line, which Python does not tell."""
    with pytest.raises(ConversionError, match=r"^train\.py: Python 3 cannot read this: source code .* null bytes"):
        Script("x = 1\0\n", "train.py")
