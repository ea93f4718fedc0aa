"""A training in which ranks die at given places, and which writes down what each of them does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import distwrap as dw

SAMPLES, BATCH, EPOCHS = 96, 4, 3


class Numbered(Dataset[Any]):
    """Samples that know their numbers."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(SAMPLES, 6, generator=generator)
        self.y = self.x @ torch.randn(6, 2, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, self.x[index], self.y[index]


class Killer:
    """Kills of ranks, each at its place, and each once.

    Args:
        folder: in which they are noted.
        kills: of the rank that the launcher numbers so, at an epoch, a step of that epoch, and a place in the step.
    """

    def __init__(self, folder: Path, kills: list[tuple[int, int, int, str]], how: int = signal.SIGKILL) -> None:
        self.folder, self.kills, self.how = folder, kills, how
        self.number = dw.rank()

    def at(self, epoch: int, step: int, where: str) -> None:
        """Die here, if somebody is to."""
        if (self.number, epoch, step, where) in self.kills:
            mark = self.folder / f"killed-{self.number}-{epoch}-{step}-{where}"
            if not mark.exists():
                mark.write_text(str(time.time()))
                os.kill(os.getpid(), self.how)
                time.sleep(60)


def train(
    folder: Path,
    kills: list[tuple[int, int, int, str]],
    *,
    number_of: dict[int, int] | None = None,
    workers: int = 0,
    scheduled: bool = True,
    pause: float = 0.0,
    logged: bool = False,
    how: int = signal.SIGKILL,
) -> dict[str, Any]:
    """Train, and return the weights, the loss over all samples, and the learning rate."""
    torch.manual_seed(11)
    count = dw.world_size()
    killer = Killer(folder, kills, how)
    killer.number = first_number(folder)
    data = Numbered()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model = dw.wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7) if scheduled else None
    loader = dw.shard_loader(DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers))
    evaluation = dw.shard_loader(DataLoader(data, batch_size=BATCH))
    killer.at(-1, 0, "setup")
    means = []
    with open(folder / f"steps-{killer.number}-{os.getpid()}", "w", buffering=1) as steps:
        for epoch in dw.resumable(range(EPOCHS)):
            for step, (numbers, x, y) in enumerate(loader):
                killer.at(epoch, step, "forward")
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                killer.at(epoch, step, "averaged")
                before = model[0].weight.detach().clone()
                optimizer.step()
                taken = not torch.equal(before, model[0].weight)
                line = {"epoch": epoch, "numbers": numbers.tolist(), "taken": taken, "time": time.time()}
                steps.write(json.dumps({**line, "weights": digest(model)}) + "\n")
                killer.at(epoch, step, "stepped")
                if logged:
                    assert dw.agree(True, "all")
                    dw.mean(loss.item())
                    killer.at(epoch, step, "logged")
                time.sleep(pause)
            if scheduler is not None:
                scheduler.step()
            killer.at(epoch, 0, "between")
            means.append(mean_loss(model, evaluation, killer, epoch))
    assert 0 < dw.gather(torch.tensor([1])).numel() <= count
    await_all(count)
    return {
        "weights": nn.utils.parameters_to_vector(model.parameters()).detach(),
        "loss": nn.functional.mse_loss(model(data.x), data.y).item(),
        "means": means,
        "lr": optimizer.param_groups[0]["lr"],
        "rank": dw.rank(),
    }


def await_all(count: int = 3) -> None:
    """Wait until all ranks are there: on busy cores one may come back late."""
    for _ in dw.resumable(range(600)):
        if dw.agree(dw.world_size() == count, "all"):
            break
        time.sleep(0.1)


def first_number(folder: Path) -> int:
    """Return the number that the launcher has given this rank, which keeps it when it comes back."""
    from distwrap.group.world import current_world

    members = current_world().members
    return dw.rank() if members is None else members.number  # type: ignore[attr-defined]


@torch.no_grad()
def mean_loss(model: nn.Module, loader: DataLoader[Any], killer: Killer, epoch: int) -> float:
    """Return the mean over all samples, of which each rank takes its share."""
    total, count = 0.0, 0
    for step, (_, x, y) in enumerate(loader):
        killer.at(epoch, step, "evaluation")
        total += nn.functional.mse_loss(model(x), y).item() * len(x)
        count += len(x)
    killer.at(epoch, 0, "evaluated")
    return float(dw.mean(total / count, count))


def digest(model: nn.Module) -> float:
    return nn.utils.parameters_to_vector(model.parameters()).detach().double().sum().item()


def steps_of(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of a rank and one of its steps, for all steps of all ranks."""
    for path in sorted(folder.glob("steps-*")):
        for line in path.read_text().splitlines():
            yield int(path.name.split("-")[1]), json.loads(line)


def meet_before_the_loop(folder: Path) -> list[Any]:
    """Exchange values before the loop, lose rank 1 in it, and return what each process got before."""
    number = first_number(folder)
    dw.barrier()
    with dw.rank_zero_first():
        first = (folder / "first").exists()
        (folder / "first").touch()
    model = dw.wrap_model(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    got = [
        dw.broadcast("of rank 0" if number == 0 else "wrong"),
        dw.mean(float(number)),
        dw.gather_object(number),
        given_by_rank_zero(number),
        dw.gather(torch.tensor([number])).tolist(),
    ]
    for epoch in dw.resumable(range(6)):
        if number == 1 and epoch == 2 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    await_all()
    return [got, first, float(model.weight.detach().sum())]


@dw.rank_zero_only(broadcast=True)
def given_by_rank_zero(number: int) -> str:
    return f"made by {number}"


def save_each_epoch(folder: Path, lost: int) -> list[Any]:
    """Save in the loop, lose a rank, and return what was saved last."""
    number = first_number(folder)
    model = dw.wrap_model(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = dw.shard_loader(DataLoader(Numbered(), batch_size=BATCH, shuffle=True))
    for epoch in dw.resumable(range(4)):
        for _, x, _ in loader:
            optimizer.zero_grad()
            model(x[:, :2]).square().mean().backward()
            optimizer.step()
            time.sleep(0.02)
        if number == lost and epoch == 1 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        dw.save({"model": model, "optimizer": optimizer, "epoch": epoch}, folder / "last.pt")
        dw.save({"epoch": epoch}, folder / f"{epoch}.pt")
    await_all()
    saved = dw.load(folder / "last.pt")
    return [saved["epoch"], torch.equal(saved["model"]["weight"], model.weight.detach()), (folder / "3.pt").exists()]


def leave_a_loop(folder: Path) -> list[float]:
    """Stop early, go through another loop, and return the weight that each has left."""
    model = dw.wrap_model(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    left = []
    for steps in (5, 7):
        for step in dw.resumable(range(10)):
            optimizer.zero_grad()
            (model(torch.ones(1, 1)) * (1 + dw.rank())).sum().backward()
            optimizer.step()
            if dw.agree(step == steps):
                break
        dw.barrier()
        left.append(model.weight.item())
    return left


def three_steps() -> nn.Module:
    """Train for three steps, and return the model."""
    model = dw.wrap_model(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in dw.resumable(range(3)):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    return model


def raise_after_the_loop() -> float:
    """Train, and fail on rank 0 alone, when the others are done."""
    model = three_steps()
    if dw.rank() == 0:
        time.sleep(1.5)
        raise OSError("the disk is full")
    return model.weight.item()


def work_long_after_the_loop(folder: Path, seconds: float) -> str:
    """Train, and let rank 0 work on for longer than a collective may take."""
    three_steps()
    if dw.rank() == 0:
        time.sleep(seconds)
        (folder / "exported").touch()
    return f"of rank {dw.rank()}"


def unfreeze() -> None:
    """Make a parameter trainable when the model is wrapped already."""
    model = nn.Linear(1, 1)
    model.bias.requires_grad_(False)
    wrapped = dw.wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.bias.requires_grad_(True)
    for _ in dw.resumable(range(3)):
        wrapped(torch.ones(1, 1)).sum().backward()
        optimizer.step()


def other_elements(folder: Path) -> None:
    """Loop over what a rank that comes back sees otherwise, as after a newer checkpoint."""
    number = first_number(folder)
    model = dw.wrap_model(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = 2 if (folder / "killed").exists() else 0
    for epoch in dw.resumable(range(first, first + 20)):
        if number == 1 and epoch == 1:
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()


def raise_nothing() -> None:
    """Train in one process."""
    model = dw.wrap_model(nn.Linear(1, 1))
    for _ in dw.resumable(range(2)):
        model(torch.ones(1, 1)).sum().backward()


def losing(folder: Path, number: int, here: bool) -> None:
    """Kill rank 1 here, once."""
    if here and number == 1 and not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def left_passes(folder: Path, dies: bool) -> list[list[int]]:
    """Leave each pass after three batches, and return how many batches, and which samples, each epoch has had."""
    number = first_number(folder)
    model = dw.wrap_model(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = dw.shard_loader(DataLoader(Numbered(), batch_size=BATCH, shuffle=True))
    evaluation = dw.shard_loader(DataLoader(Numbered(), batch_size=BATCH))
    seen: list[list[int]] = []
    for epoch in dw.resumable(range(4)):
        batches, samples = 0, []
        for step, (_, x, _) in enumerate(loader):
            losing(folder, number, dies and epoch == 1 and step == 1)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            batches += 1
            if step == 2:
                break
        with torch.no_grad():
            for step, (numbers, _, _) in enumerate(evaluation):
                samples += numbers.tolist()
                if step == 1:
                    break
        seen.append([batches, *sorted(dw.gather(torch.tensor(samples)).tolist())])
    return seen


def before_the_batches(folder: Path) -> list[Any]:
    """Evaluate and step a scheduler before an epoch's batches, lose a rank in them, and return what it all led to."""
    number, printed = first_number(folder), folder / "printed"
    model = dw.wrap_model(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = dw.shard_loader(DataLoader(Numbered(), batch_size=BATCH, shuffle=True))
    evaluation = dw.shard_loader(DataLoader(Numbered(), batch_size=BATCH))
    for epoch in dw.resumable(range(3)):
        if epoch:
            scheduler.step()
        mean_loss(lambda x: model(x)[:, :1].expand(-1, 2), evaluation, Killer(folder, []), epoch)
        if dw.rank() == 0:
            with printed.open("a") as file:
                file.write(f"{epoch}\n")
        model.train()
        for step, (_, x, _) in enumerate(loader):
            losing(folder, number, epoch == 1 and step == 2)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            time.sleep(0.3)
    await_all()
    numbers = [*model.parameters(), *(each for each in model.buffers() if each.is_floating_point())]
    return [scheduler.last_epoch, scheduler.get_last_lr(), float(sum(each.detach().double().sum() for each in numbers))]


def count_in_passes(folder: Path) -> list[Any]:
    """Exchange a mean each three batches of a pass, counted by the loop."""
    number, means = first_number(folder), 0
    model = dw.wrap_model(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = dw.shard_loader(DataLoader(Numbered(), batch_size=2, shuffle=True))
    for epoch in dw.resumable(range(4)):
        for step, (_, x, _) in enumerate(loader):
            losing(folder, number, epoch == 1 and step == 2)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            if step % 3 == 0:
                assert 0 < dw.mean(loss.item()) < 100
                means += 1
            time.sleep(0.05)
    await_all()
    return [float(model.weight.detach().sum())]


def several_steps_an_element(folder: Path) -> float:
    """Take three batches of an iterator of the user's own in each element, as a critic's steps."""
    number = first_number(folder)
    model = dw.wrap_model(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = dw.shard_loader(DataLoader(Numbered(), batch_size=2, shuffle=True))
    batches = iter(loader)
    for element in dw.resumable(range(12)):
        for turn in range(3):
            losing(folder, number, element == 3 and turn == 1)
            try:
                _, x, _ = next(batches)
            except StopIteration:
                batches = iter(loader)
                _, x, _ = next(batches)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            time.sleep(0.1)
    await_all()
    return float(model.weight.detach().sum())


def rate_of_a_counter(folder: Path) -> None:
    """Set the learning rate from a counter of the loop's own, which a rank that comes back does not take over."""
    number, steps = first_number(folder), 0
    model = dw.wrap_model(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = dw.shard_loader(DataLoader(Numbered(), batch_size=BATCH, shuffle=True))
    for epoch in dw.resumable(range(9)):
        for step, (_, x, _) in enumerate(loader):
            losing(folder, number, epoch == 1 and step == 2)
            steps += 1
            optimizer.param_groups[0]["lr"] = 0.1 / steps
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            time.sleep(0.02)


def two_loops(folder: Path) -> list[Any]:
    """Go through two loops, with another optimizer and a mean between them, and lose a rank in the second."""
    number, means = first_number(folder), []
    model = dw.wrap_model(nn.Linear(6, 1))
    loader = dw.shard_loader(DataLoader(Numbered(), batch_size=BATCH, shuffle=True))
    for phase in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if phase == 0 else torch.optim.Adam(model.parameters())
        means.append(dw.mean(float(number + 10 * phase)))
        for epoch in dw.resumable(range(2)):
            for step, (_, x, _) in enumerate(loader):
                losing(folder, number, phase == 1 and epoch == 0 and step == 2)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                time.sleep(0.1)
        del optimizer
    await_all()
    return [means, float(model.weight.detach().sum())]


def sample_batch() -> float:
    """Look at a batch before the loop, with gradients on, as to build a model by it."""
    loader = dw.shard_loader(DataLoader(Numbered(), batch_size=BATCH, shuffle=True))
    _, first, _ = next(iter(loader))
    model = dw.wrap_model(nn.Linear(first.shape[1], 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in dw.resumable(range(2)):
        for _, x, _ in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return float(model.weight.detach().sum())


def addresses_at_work() -> list[str]:
    """Return the addresses at which this rank listens while it trains."""
    model = dw.wrap_model(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[str] = []
    for _ in dw.resumable(range(2)):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        found = addresses_of("self")
        dw.barrier()
    return found


def addresses_of(process: str) -> list[str]:
    """Return the addresses at which a process listens, as the kernel writes them."""
    sockets = set()
    for each in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):  # of the listing itself
            sockets.add(os.readlink(each))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.append(fields[1].partition(":")[0])
    return found


def learn(folder: Path, kills: list[tuple[int, int, int, str]]) -> float:
    """Train to the end, and return the loss over all samples, which are noisy, so that it ends above zero."""
    torch.manual_seed(11)
    count, killer = dw.world_size(), Killer(folder, kills)
    killer.number = first_number(folder)
    data = Numbered()
    targets = data.y + torch.randn(data.y.shape, generator=torch.Generator().manual_seed(3))
    model = dw.wrap_model(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    loader = dw.shard_loader(DataLoader(data, batch_size=BATCH, shuffle=True))
    for epoch in dw.resumable(range(12)):
        for step, (numbers, x, _) in enumerate(loader):
            killer.at(epoch, step, "forward")
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), targets[numbers]).backward()
            optimizer.step()
            time.sleep(0.02)
        scheduler.step()
    await_all(count)
    with torch.no_grad():
        return nn.functional.mse_loss(model(data.x), targets).item()
