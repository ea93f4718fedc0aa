"""Five short acts about one training loop, in some 40 seconds on two cores: `make demo`.

    python examples/demo.py
    python examples/demo.py --fast               # less of each, as CI runs it
    python examples/demo.py --json found.json    # also writes every number that it prints

The loop is `train`, above the acts; each act shows the lines of code that make it.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shlex
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap
from distwrap.errors import DeadlockError, LoaderError, ProofError, WorkerDiedError
from distwrap.testing import simulate

FREE = 1.8  # cores that two processes must get for a comparison of their seconds to mean something


class Net(nn.Sequential):
    """A small network for images; in float64, where the order of a sum does not show in what is printed."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(width * 64, 10),
        )
        self.double()


def images(count: int) -> TensorDataset:
    """Make images of noise, each of the class of the teacher's choice."""
    torch.manual_seed(0)
    x = torch.randn(count, 1, 8, 8, dtype=torch.float64)
    return TensorDataset(x, (x.flatten(1) @ torch.randn(64, 10, dtype=torch.float64)).argmax(1))


def train_epoch(model, optimizer, loader, loss_of=F.cross_entropy):
    for x, y in loader:
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return distwrap.mean(loss.item(), len(y))


@distwrap.distributed(nprocs=2, seed=0)
def train(epochs, loss_of=F.cross_entropy):
    model = distwrap.wrap_model(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = DataLoader(images(960), batch_size=48, shuffle=True)
    data = distwrap.shard_loader(data, batch_size="global", order="stream")
    losses = []
    for _ in range(epochs):
        losses.append(train_epoch(model, optimizer, data, loss_of))
    return losses


# Act 1


def same_losses(fast: bool) -> dict[str, object]:
    show(train_epoch, train)
    epochs = 2 if fast else 5
    one = train.options(nprocs=1)(epochs)
    two = train(epochs)
    print(f"{'':12}train.options(nprocs=1)({epochs})    train({epochs}): two processes")
    for epoch, losses in enumerate(zip(one, two, strict=True), 1):
        print(f"    epoch {epoch}    loss {losses[0]:.10f}       loss {losses[1]:.10f}")
    equal = [f"{loss:.10f}" for loss in one] == [f"{loss:.10f}" for loss in two]
    holds = verdict(equal, "Equal to all printed digits: two ranks share the batches of one process.")
    return {"holds": holds, "losses": [one, two]}


# Act 2


@distwrap.distributed(nprocs=2, seed=0, returns="all")
def measure(samples: int, width: int) -> tuple[float, float]:
    """Return the seconds of an epoch, with one thread a process, and those in which this rank computed."""
    torch.set_num_threads(1)
    model = distwrap.wrap_model(Net(width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = DataLoader(images(samples), batch_size=64, shuffle=True)
    data = distwrap.shard_loader(data, batch_size="global", order="stream")
    distwrap.barrier()
    began, computed = time.perf_counter(), time.process_time()
    train_epoch(model, optimizer, data)
    return time.perf_counter() - began, time.process_time() - computed


@distwrap.distributed(nprocs=2, returns="all")
def keep_busy(seconds: float) -> tuple[int, float]:
    """Return how many products this process gets done meanwhile, and its share of a core."""
    torch.set_num_threads(1)
    matrix = torch.rand(128, 128)
    distwrap.barrier()
    began, computed, done = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() < began + seconds:
        matrix @ matrix
        done += 1
    return done, (time.process_time() - computed) / (time.perf_counter() - began)


def faster_epochs(fast: bool) -> dict[str, object]:
    samples, width, rounds, seconds = (128, 32, 2, 0.1) if fast else (960, 96, 5, 0.3)
    call = f"({samples}, width={width})"
    show(f"measure.options(nprocs=1){call}    # the same loop, with a larger net", f"measure{call}")
    one, two, waiting, cores = [], [], [], []
    began, threads = time.perf_counter(), torch.get_num_threads()
    for number in range(rounds):  # in turns, so that they share a slow minute of the machine
        bar(number / rounds)
        one.append(measure.options(nprocs=1)(samples, width)[0][0])
        bar((number + 0.5) / rounds)
        ranks = measure(samples, width)
        two.append(max(seconds for seconds, _ in ranks))
        waiting.append(1 - sum(computed for _, computed in ranks) / sum(seconds for seconds, _ in ranks))
        [(alone, share)] = keep_busy.options(nprocs=1)(seconds)
        cores.append(share * sum(done for done, _ in keep_busy(seconds)) / max(alone, 1))
        if time.perf_counter() - began > 20:
            break
    torch.set_num_threads(threads)  # a rank that is this process has changed it
    bar(1)
    found = {"seconds": [median(one), median(two)], "waiting": max(0.0, median(waiting)), "cores": median(cores)}
    print("    Seconds of an epoch, with one thread a process:")
    print(f"    one process {median(one):6.2f} s    two ranks {median(two):6.2f} s")
    waits = f"the ranks waited {found['waiting']:.0%} of their time"
    if found["cores"] < FREE:
        busy = f"Two busy processes get only {found['cores']:.1f} cores here now"
        verdict(True, f"{busy}, so these times say nothing; {waits}.")
    else:
        found["times"] = median(one) / median(two)
        verdict(found["times"] > 1, f"{found['times']:.2f} times as fast on {found['cores']:.1f} free cores; {waits}.")
    return {"holds": True, **found}  # seconds are no claim: something else may run here at any time


# Act 3


def summed(outputs, y):
    return F.cross_entropy(outputs, y, reduction="sum")


@distwrap.distributed(nprocs=2, seed=0)
def train_unsharded():
    model = distwrap.wrap_model(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = DataLoader(images(960), batch_size=48, shuffle=True)
    return train_epoch(model, optimizer, data)  # not sharded


def proofs(fast: bool) -> dict[str, object]:
    ranks = [2] if fast else [2, 3, 4]
    call = f"train.prove(ranks={ranks}, steps=4)"
    show(f"{call}(1)    # against one process")
    proof = train.prove(ranks=ranks, steps=4)(1)
    quote(*str(proof).splitlines())
    show(summed, f"{call}(1, summed)    # a silent mistake")
    try:
        train.prove(ranks=ranks, steps=4)(1, summed)
        mistake = ""
    except ProofError as error:
        mistake = str(error)
        quote(*mistake.splitlines())
    show(train_unsharded, "train_unsharded()")
    try:
        train_unsharded()
        refused = ""
    except LoaderError as error:
        refused = f"LoaderError: {error}"
        quote(refused)
    good = proof.verdict == "equal" and "0.500 times" in mistake and bool(refused)
    holds = verdict(good, "The loop is proven, and both mistakes are named, with the fix.")
    return {"holds": holds, "verdict": proof.verdict, "mistake": mistake, "refused": refused}


# Act 4


def leave_early(steps):
    for step in range(steps):
        if distwrap.rank() == 5 and step == 2:
            return  # as if its data had run out
        distwrap.barrier()


def deadlock(fast: bool) -> dict[str, object]:
    show(leave_early, "simulate(leave_early, 8, 10)    # eight ranks, in this process, ten steps")
    simulate(distwrap.barrier, 8)  # the first call imports
    began = time.perf_counter()
    try:
        simulate(leave_early, 8, 10)
        told = ""
    except DeadlockError as error:
        told = str(error)
    milliseconds = 1e3 * (time.perf_counter() - began)
    quote(*told.splitlines())
    real = "Under torchrun, the others wait up to gloo's 30 minutes while rank 5 is alive."
    holds = verdict("rank 5 has returned" in told, f"Named after {milliseconds:.0f} ms. {real}")
    return {"holds": holds, "told": told, "milliseconds": milliseconds}


# Act 5


@distwrap.distributed(nprocs=2, seed=0)
def train_on(folder, epochs, killed_in=None):
    model = distwrap.wrap_model(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    data = DataLoader(images(960), batch_size=48, shuffle=True)
    data = distwrap.shard_loader(data, batch_size="global")
    objects = {"model": model, "optimizer": optimizer, "loader": data}
    state = distwrap.resume_from(folder / "last.pt", into=objects)
    for epoch in range(state["epoch"] if state else 0, epochs):
        (folder / f"rank_{distwrap.rank()}").write_text(str(os.getpid()))
        if distwrap.rank() == 1 and epoch == killed_in:
            # as the kernel does when memory runs out
            os.kill(os.getpid(), signal.SIGKILL)
        train_epoch(model, optimizer, data)
        distwrap.save({**objects, "epoch": epoch + 1}, folder / "last.pt")
    return model.state_dict()


def killed_rank(fast: bool) -> dict[str, object]:
    epochs, killed_in = (2, 1) if fast else (4, 2)
    show(train_on, f"train_on(folder, {epochs}, killed_in={killed_in})")
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        folder = Path(first)
        try:
            train_on(folder, epochs, killed_in)
            sys.exit("A rank was killed, and the caller was not told.")
        except WorkerDiedError as error:
            dead = error
        seconds = time.time() - (folder / "rank_1").stat().st_mtime
        quote(str(dead).splitlines()[0])
        left = [path for path in folder.glob("rank_*") if is_running(int(path.read_text()))]
        print(f"    The caller knew after {1e3 * seconds:.0f} ms, and {len(left)} of the 2 processes are left.")
        show(f"train_on(folder, {epochs})    # again: it goes on where the last checkpoint is")
        resumed, unbroken = train_on(folder, epochs), train_on(Path(second), epochs)
    compared = sum(weights.numel() for weights in unbroken.values())
    differ = sum(int((resumed[name] != weights).sum()) for name, weights in unbroken.items())
    print(f"    {differ} of {compared} weights differ from those of a run in an empty folder.")
    holds = verdict(not differ and not left, "The weights are bit for bit those of a run that was not interrupted.")
    found = {"rank": dead.rank, "signal": dead.signal, "seconds": seconds, "left": len(left), "differ": differ}
    return {"holds": holds, **found}


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# What the acts print with


TERMINAL = sys.stdout.isatty()
GREEN, RED, BLUE, BOLD = ("32", "31", "36", "1")


def coloured(text: str, colour: str) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if TERMINAL and "NO_COLOR" not in os.environ else text


def show(*code: Callable[..., object] | str) -> None:
    """Print lines of code: a function's own, or a call."""
    texts = [each if isinstance(each, str) else inspect.getsource(inspect.unwrap(each)) for each in code]
    print(f"\n{coloured(textwrap.indent(chr(10).join(texts).rstrip(), '  '), BLUE)}\n", flush=True)


def quote(*lines: str) -> None:
    """Print what distwrap has said, in lines of a terminal."""
    for line in lines:
        print(textwrap.fill(line.strip(), 78, initial_indent="    > ", subsequent_indent="    > "))


def verdict(good: bool, text: str) -> bool:
    """Print the end of an act, and return whether it was as it should be."""
    print(f"\n{coloured(textwrap.fill(text, 78), GREEN if good else RED)}", flush=True)
    return good


def bar(done: float) -> None:
    """Draw how much is measured, on a terminal alone."""
    if TERMINAL:
        print("\r" + (f"    [{'#' * round(30 * done):<30}]" if done < 1 else " " * 40 + "\r"), end="", flush=True)


ACTS = {
    "The same loop, in one process and on two": same_losses,
    "Seconds of an epoch, when each step does real work": faster_epochs,
    "Is the loop right? A proof, and two mistakes": proofs,
    "Eight ranks in this process, one of which leaves early": deadlock,
    "A rank is killed": killed_rank,
}


def main(fast: bool) -> dict[str, dict[str, object]]:
    """Show all acts, and return the numbers of each."""
    print(coloured("distwrap in five acts. All of them run on this machine's CPU.", BOLD))
    found = {}
    for number, (title, act) in enumerate(ACTS.items(), 1):
        print(coloured(f"\n{number}. {title}", BOLD))
        found[act.__name__] = act(fast)
    print(coloured("\nWhat to type next, with a script of yours, for torchrun or with @distributed:\n", BOLD))
    activate = Path(sys.prefix) / "bin" / "activate"
    if activate.exists():
        near = activate.is_relative_to(Path.cwd())
        print(f"    . {shlex.quote(os.path.relpath(activate) if near else str(activate))}")
    print("    python -m distwrap prove train.py            # is it right?")
    print("    python -m distwrap simulate -n 8 train.py    # eight ranks, one debugger")
    print("    python -m distwrap doctor                    # does this machine work?")
    print("\ndocs/start.md is five minutes from here to your own loop on two processes.")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Show what distwrap does, in five acts.")
    parser.add_argument("--fast", action="store_true", help="less of each act")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # steps of this size would show nothing on a GPU
    os.environ.setdefault("DISTWRAP_QUIET", "1")
    numbers = main(args.fast)
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=1))
    sys.exit(not all(act["holds"] for act in numbers.values()))
