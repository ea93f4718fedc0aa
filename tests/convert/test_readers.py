"""What a conversion does where a loader of the training is read elsewhere, and where a loss is no mean."""

from __future__ import annotations

import pytest

from distwrap.convert.conversion import ConversionOptions
from distwrap.convert.converting import Converted, convert
from distwrap.convert.script import Script
from tests.convert.test_left import left

STEP = "loss = model(x).mean(); loss.backward(); optimizer.step()"
READ = """
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
{above}
def main():
    loader = DataLoader(data, batch_size=4, shuffle={shuffle})
    {before}
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.1)
    total = 0
    for x, y in loader:
        {step}
        total += loss.item() * len(x)
    {after}

main()
"""
TRAINER = """
import torch
from torch.utils.data import DataLoader

class Trainer:
    def __init__(self):
        self.loader = DataLoader(data, batch_size=4)
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.mean = torch.cat([x for x in self.loader]).mean(0)

    def train(self):
        for x in self.loader:
            self.model(x - self.mean).mean().backward()
            self.optimizer.step()

def main():
    Trainer().train()

main()
"""


def read(
    above: str = "",
    before: str = "",
    after: str = "",
    *,
    step: str = STEP,
    shuffle: bool = False,
    optimizer: str = "SGD",
    global_batch: bool = False,
) -> Converted:
    text = READ.format(above=above, before=before, after=after, step=step, shuffle=shuffle, optimizer=optimizer)
    return convert(Script(text), ConversionOptions(global_batch=global_batch))


@pytest.mark.parametrize(
    ("before", "becomes"),
    [
        ("xs = list(loader)", "xs = list(whole_loader)"),
        ("xs = [x for x, _ in loader]", "xs = [x for x, _ in whole_loader]"),
        ("n = sum(len(x) for _, (x, y) in enumerate(loader))", "for _, (x, y) in enumerate(whole_loader))"),
        ("xs = [*loader]", "xs = [*whole_loader]"),
    ],
)
def test_a_whole_pass_keeps_all_samples(before: str, becomes: str) -> None:
    """What goes through a loader of the training elsewhere gets all samples, and the list says so."""
    result = read(before=before)
    assert becomes in result.text
    assert "loader = shard_loader(whole_loader)" in result.text
    assert "for x, y in loader:" in result.text
    line = READ[: READ.index("{before}")].count("\n") + 1
    assert any(each.line == line and each.rule == "shard_loader" for each in result.notes.of("done"))


@pytest.mark.parametrize(
    "before", ["x, y = next(iter(loader))", "print(len(loader))", "print(loader)", "n = len(loader)"]
)
def test_a_look_at_a_loader_changes_nothing(before: str) -> None:
    """What goes through no samples, or one batch alone, reads the sharded loader."""
    assert "loader = shard_loader(DataLoader(" in read(before=before).text


def test_a_name_that_is_taken() -> None:
    """The loader of all samples gets a name that the script does not use."""
    assert "list(whole_loader_)" in read(above="whole_loader = 3", before="xs = list(loader)").text


def test_a_name_with_two_values_is_left() -> None:
    """Where the loader's name is given twice, nothing can be renamed, and the list names the line."""
    result = read(before="xs = list(loader)", after="loader = None")
    assert left(result)["shard_loader"] == "xs = list(loader)"


def test_an_attribute_is_left() -> None:
    """A whole pass over an attribute is named with its line."""
    assert left(convert(Script(TRAINER)))["shard_loader"].startswith("self.mean = ")


def test_what_other_files_get_is_named() -> None:
    """The list names a call of another library that gets the sharded loader."""
    result = read(above="from torch.optim.swa_utils import update_bn", after="update_bn(loader, model)")
    assert left(result)["shard_loader"] == "update_bn(loader, model)"


def test_sums_of_a_shuffled_training_are_named() -> None:
    """The list says where a sum with repeated samples is divided by the number of samples."""
    result = read(after="print(total / len(loader.dataset))", shuffle=True)
    assert left(result)["metric"] == "print(total / len(loader.dataset))"
    assert "metric" not in left(read(after="print(total / len(loader.dataset))"))


@pytest.mark.parametrize(
    "step",
    [
        "loss = F.cross_entropy(model(x), y, weight=w); loss.backward(); optimizer.step()",
        "loss = F.mse_loss(model(x), y, reduction='sum'); loss.backward(); optimizer.step()",
    ],
)
def test_a_loss_that_is_no_mean_is_named(step: str) -> None:
    """Where the batch is divided, the list names losses whose gradients are not those of one process."""
    assert left(read(step=step, global_batch=True))["sum"] == step
    assert "sum" not in left(read(step=step))


CLOSURE = "def closure(): loss = model(x).mean(); loss.backward(); return loss"


def test_a_closure_that_cannot_be_changed_is_named() -> None:
    """An optimizer that decides by the loss of a lambda is named."""
    step = f"{CLOSURE}\n        loss = optimizer.step(lambda: closure())"
    assert left(read(step=step, optimizer="LBFGS"))["closure"].startswith("loss = optimizer.step(")


def test_what_a_step_returns_is_named() -> None:
    """The loss that another optimizer's step returns is rank 0's own, and the list says so."""
    result = read(step=f"{CLOSURE}\n        loss = optimizer.step(closure)")
    assert left(result)["closure"] == "loss = optimizer.step(closure)"
    assert "return mean(loss)" not in result.text


def test_a_closure_returns_the_mean() -> None:
    """The closure of LBFGS returns the mean over the ranks."""
    result = read(step=f"{CLOSURE}\n        loss = optimizer.step(closure)", optimizer="LBFGS")
    assert "return mean(loss)" in result.text
    assert "closure" not in left(result)
