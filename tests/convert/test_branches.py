"""Ways through the rules that few scripts take: each becomes what is said here, or is refused with a reason."""

from __future__ import annotations

import pytest

from distwrap.convert.converting import Converted, convert
from distwrap.convert.script import Script
from tests.convert.test_left import left, plain

HOROVOD = """
import torch
import horovod.torch as hvd
from torch.utils.data import DataLoader

def main():
    hvd.init()
    model = torch.nn.Linear(2, 2)
    {compression}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
    for x in DataLoader(data, batch_size=4):
        model(x).mean().backward()
        optimizer.step()

main()
"""

FABRIC = """
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

def main():
    fabric = Fabric()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    with fabric.rank_zero_first({arguments}):
        prepare_data()
    for x in fabric.setup_dataloaders(DataLoader(data, batch_size=4)):
        fabric.backward(model(x).mean())
        optimizer.step()

main()
"""

TRAINER = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

class Trainer:
    def __init__(self, data):
        self.accelerator = Accelerator(mixed_precision="fp16")
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = DataLoader(data, batch_size=4)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(self.model, self.optimizer, self.loader)

    def train(self):
        for x in self.loader:
            self.accelerator.backward(self.model(x).mean())
            self.optimizer.step()

def main():
    trainer = Trainer(data)
    trainer.train()
    {code}

main()
"""

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

STEPS = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

def train(accelerator, model, optimizer, scheduler, loader):
    for x in loader:
        accelerator.backward(model(x).mean())
        optimizer.step()
        scheduler.step()

def main():
    accelerator = Accelerator(mixed_precision="fp16")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    loader = DataLoader(data, batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    train(accelerator, model, optimizer, scheduler, loader)

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


@pytest.mark.parametrize(
    ("compression", "is_said"),
    [("hvd.Compression.none", False), ("hvd.Compression.fp16 if half else hvd.Compression.none", True)],
)
def test_a_compression_goes(compression: str, is_said: bool) -> None:
    """A variable for Horovod's compression goes with its optimizer, and the list says so where it halved precision."""
    result = convert(Script(HOROVOD.format(compression=f"compression = {compression}")))
    assert "compression" not in result.text
    assert ("comm" in left(result)) is is_said


def test_a_compression_that_is_used_otherwise_is_refused() -> None:
    """A compression that goes anywhere but to the optimizer is not removed."""
    line = "compression = hvd.Compression.fp16; print(compression)"
    assert refused(convert(Script(HOROVOD.format(compression=line)))) == [line]


@pytest.mark.parametrize(
    ("arguments", "becomes"), [("", ""), ("local=False", ""), ("local=True", "local=True"), ("True", "local=True")]
)
def test_fabrics_first_rank(arguments: str, becomes: str) -> None:
    """Fabric's block for rank 0 first is distwrap's, on each node where ``local=`` says so."""
    assert f"with rank_zero_first({becomes}):" in convert(Script(FABRIC.format(arguments=arguments))).text


def test_fabrics_first_rank_with_other_arguments_is_refused() -> None:
    """Arguments that rank_zero_first does not have are not guessed."""
    assert refused(convert(Script(FABRIC.format(arguments="False, True")))) == [
        "with fabric.rank_zero_first(False, True):"
    ]


def test_an_object_that_is_an_attribute_is_converted() -> None:
    """All uses of an Accelerator that is an attribute of self are converted, or none is."""
    text = convert(Script(TRAINER.format(code="pass"))).text
    assert "accelerator" not in text.lower()
    assert "optimizer_step(self.optimizer)" in text
    assert refused(convert(Script(TRAINER.format(code="trainer.accelerator.print(3)"))))


def test_a_scaler_that_is_an_attribute_is_converted() -> None:
    """A scaler that is an attribute of self goes with all its uses."""
    text = convert(Script(SCALED)).text
    assert "scaler" not in text
    assert "optimizer_step(self.optimizer)" in text


def test_prepared_steps_in_another_function() -> None:
    """A function that is handed a prepared optimizer and schedule steps both as Accelerate does."""
    text = convert(Script(STEPS)).text
    assert "        optimizer_step(optimizer)\n        for _ in range(world_size()): scheduler.step()\n" in text
    assert "train(model, optimizer, scheduler, loader)" in text


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
