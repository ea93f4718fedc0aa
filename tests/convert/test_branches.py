"""Ways through the rules that few scripts take: each becomes what is said here, or is refused with a reason."""

from __future__ import annotations

import pytest

from distwrap.convert.converting import Converted, convert
from distwrap.convert.script import Script
from tests.convert.test_left import left, plain

SCALED = """
import torch
from torch.utils.data import DataLoader

class Trainer:
    def __init__(self, data):
        self.model = torch.nn.Linear(2, 2)
        self.scaler = torch.amp.GradScaler("cuda")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = DataLoader(data, batch_size=4)

    def train(self):
        for x in self.loader:
            with torch.autocast("cuda"):
                loss = self.model(x).mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

def main():
    Trainer(data).train()

main()
"""

FILE = """
import torch
from torch.utils.data import DataLoader
{above}
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(data, batch_size=4):
    model(x).mean().backward()
    optimizer.step()
{below}
"""

TWO_LOADERS = """
import torch
from torch.utils.data import DataLoader

def train(model, optimizer, loader):
    total = 0.0
    for x in loader:
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total

def main():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    print(train(model, optimizer, DataLoader(data, batch_size=4)))
    print(train(model, optimizer, make_loader()))

main()
"""

FLAGGED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

def main(kind, distributed):
    model = torch.nn.Linear(2, 2)
    if kind == "wide":
        model = torch.nn.Linear(2, 3)
    elif {test}:
        print("first")
    else:
        print("second")
    if distributed:
        dist.init_process_group("gloo"); dist.barrier(); torch.cuda.set_device(0)
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in DataLoader(data, batch_size=4):
        model(x).mean().backward()
        optimizer.step()
    dist.barrier(); dist.destroy_process_group()

main("wide", True)
"""


def refused(result: Converted) -> list[str]:
    """Return the code for which a script was refused."""
    assert not result.is_result
    return [each.seen for each in result.notes.of("unsure")]


def test_a_scaler_that_is_an_attribute_is_converted() -> None:
    """A scaler that is an attribute of self goes with all its uses."""
    text = convert(Script(SCALED)).text
    assert "scaler" not in text
    assert "optimizer_step(self.optimizer)" in text


@pytest.mark.parametrize(
    ("above", "below", "seen"),
    [
        ("", 'exec("x = 3")', 'exec("x = 3")'),
        ("", "from os.path import *", "from os.path import *"),
        ("def count():\n    global turns\n    turns = 1\n", "if 3: turns = 0", ""),
        ("", 'if __name__ == "__main__":\n    print(3)\nelse:\n    print(4)', 'if __name__ == "__main__":'),
    ],
)
def test_a_file_that_cannot_be_a_function_is_refused(above: str, below: str, seen: str) -> None:
    """Code that means the file's own names is not put into a function, and the list names it."""
    assert refused(convert(Script(FILE.format(above=above, below=below)))) == [seen or "global turns"]


def test_sums_of_loaders_of_which_not_all_are_shared_are_said() -> None:
    """A sum over a loop stays rank 0's where one of its loaders is not shared, and the list names the read."""
    result = convert(Script(TWO_LOADERS))
    assert left(result)["metric"] == "return total"
    assert "reduce" not in result.text


def test_writers_of_a_run_are_rank_zeros() -> None:
    """A writer of TensorBoard and a run of wandb are rank 0's; elsewhere they take any call."""
    above = "from torch.utils.tensorboard import SummaryWriter\nimport wandb"
    text = plain(above, "writer = SummaryWriter(); wandb.init()", within='wandb.log({"loss": 3})').text
    assert "writer = on_rank_zero(lambda: SummaryWriter()); on_rank_zero(lambda: wandb.init())" in text
    assert 'if is_rank_zero(): wandb.log({"loss": 3})' in text


def test_a_choice_among_three_devices_is_one_device() -> None:
    """A choice of a device within another is replaced as a whole."""
    choice = "torch.device('cuda') if a else torch.device('mps') if b else torch.device('cpu')"
    assert "    place = device()\n" in plain(before=f"place = {choice}").text


@pytest.mark.parametrize(
    ("test", "kept"), [("distributed", "first"), ("not distributed", "second"), ("not distributed and kind", "second")]
)
def test_a_way_without_ranks_of_several_goes(test: str, kept: str) -> None:
    """Of an elif and its else the way with ranks stays, on lines of its own."""
    text = convert(Script(FLAGGED.format(test=test))).text
    assert f'    else:\n        print("{kept}")\n    barrier()\n' in text


def test_statements_that_share_a_line_go_one_by_one() -> None:
    """Of several statements on a line those of torch's group go, and the others stay."""
    text = convert(Script(FLAGGED.format(test="distributed"))).text
    assert text.count("    barrier()\n") == 2
    assert "init_process_group" not in text
    assert "set_device" not in text
