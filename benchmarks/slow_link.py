"""Every algorithm of exchange on slow links: four hosts in network namespaces, each on a link of 10, 100, 1000 Mbit/s.

A byte-level language model of ten million weights (Bengio's, https://www.jmlr.org/papers/v3/bengio03a.html) learns from
the source of the standard library. Plain DDP takes its steps, and sets the loss that the others then have to reach; the
loss is that of a held-out text, on rank 0's weights. Horovod takes part where it is installed. Needs root, iproute2 and
the kernel's tbf, and says so without.

    python benchmarks/slow_link.py [--quick] [--rates 10 100 …] [--only ddp bytegrad …] [--json FILE] [--plot FILE.png]

A rate of 0 is an unshaped link. All four ranks share this machine's processors: on two cores compute and codecs take
twice the time that they take on hosts of their own, so the ratios are on the safe side.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from samples import in_turns
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

HOSTS = ("node0", "node1", "node2", "node3")
CONTEXT, BATCH, WIDTH, QUICK_WIDTH, EMBEDDING = 16, 64, 2900, 200, 32

# Name: what wrap_model takes, and how many of the steps are timed. A warm-up of full gradients is not timed.
WAYS: dict[str, tuple[str | None, int]] = {
    "ddp": (None, 0),
    "allreduce": ("allreduce", 0),
    "fp16": ("fp16", 0),
    "bf16": ("bf16", 0),
    "bytegrad": ("bytegrad", 0),
    "bytegrad, feedback": ("bytegrad(error_feedback=True)", 0),
    "powersgd": ("powersgd", 0),
    "topk 1 %": ("topk(ratio=0.01)", 0),
    "qadam, 8 bits": ("qadam(warmup_steps=4)", 4),
    "qadam, 1 bit": ("qadam(warmup_steps=4, bits=1)", 4),
    "decentralized": ("decentralized", 0),
    "shift_one": ("decentralized(peer_selection='shift_one')", 0),
    "low precision": ("low_precision_decentralized", 0),
    "async, 1 s": ("async(sync_interval_ms=1000)", 0),
    "local SGD, 16": ("local_sgd(sync_every=16)", 0),
    "local SGD, 48": ("local_sgd(sync_every=48)", 0),
    "diloco, 32": ("diloco(sync_every=32, outer_momentum=0.5)", 0),
    "diloco, 24, 8 bits": ("diloco(sync_every=24, outer_momentum=0.5, compression='8bit')", 0),
    "horovod": (None, 0),
    "horovod, fp16": (None, 0),
}
ROUND = {"local SGD, 16": 16, "local SGD, 48": 48, "diloco, 32": 32, "diloco, 24, 8 bits": 24}

# Per rate: plain DDP's steps, the steps in which a way is timed at least, and the steps after which it is given up.
STEPS = {10: (3, 2, 4), 100: (30, 5, 400), 1000: (60, 20, 400), 0: (60, 60, 120)}
GOALS = {"bytegrad": 3.0, "qadam, 1 bit": 8.0}


# On the hosts


class Net(nn.Module):
    """Bengio's model: embeds the bytes before, and predicts the next one through two wide layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, EMBEDDING)
        self.first, self.second = nn.Linear(CONTEXT * EMBEDDING, width), nn.Linear(width, width)
        self.out = nn.Linear(width, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(self.embedding(x).flatten(1)))
        result: torch.Tensor = self.out(torch.relu(self.second(h)))
        return result


class Text:
    """The source of the standard library's modules: nine tenths to learn from, one to test on."""

    def __init__(self) -> None:
        text = bytearray()
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += file.read_bytes()
            if len(text) > 1_000_000:
                break
        self._data = torch.tensor(bytearray(byte for byte in text if byte < 128))
        self._cut = len(self._data) * 9 // 10
        self.held_out = self._windows(torch.Generator().manual_seed(-1), self._cut, len(self._data), 1024)

    def batch(self, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw contexts, and the bytes that follow them."""
        return self._windows(random, 0, self._cut, BATCH)

    def _windows(self, random: torch.Generator, low: int, high: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(low, high - CONTEXT - 1, (count, 1), generator=random)
        windows = self._data[starts + torch.arange(CONTEXT + 1)].long()
        return windows[:, :-1], windows[:, -1]

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """Return a model's loss on the test text."""
        return F.cross_entropy(model(self.held_out[0]), self.held_out[1]).item()


@dataclass
class Ranks:
    """Messages between the ranks of a way outside of the timed part.

    Attributes:
        rank: this one.
        agree: whether any rank says so.
        sent: bytes that this rank has sent by the way's own count.
        consolidate: give all ranks the mean of their weights.
    """

    rank: int
    agree: Callable[[bool], bool]
    sent: Callable[[], int]
    consolidate: Callable[[], object]


def step_of(model: nn.Module, optimizer: Any, text: Text, random: torch.Generator) -> float:
    """Take a step, and return its seconds."""
    start = time.perf_counter()
    x, y = text.batch(random)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return time.perf_counter() - start


def course(name: str, model: nn.Module, optimizer: Any, text: Text, ranks: Ranks, args: argparse.Namespace) -> float:
    """Train by one way, print its figures on rank 0, and return the seconds it took."""
    every, warm = ROUND.get(name, 1), WAYS[name][1]
    first_steps, least, most = args.steps
    limit = first_steps if name == "ddp" else max(most, every) + warm
    random = torch.Generator().manual_seed(ranks.rank)
    taken: list[float] = []
    curve: list[tuple[float, float]] = []
    sent = kernel = counted_from = 0
    for step in range(limit):
        if step in (0, warm):
            ranks.agree(False)
            sent, kernel, counted_from = ranks.sent(), sent_by_the_kernel(), step
        taken.append(step_of(model, optimizer, text, random))
        done = step + 1
        if done % every and done != limit:
            continue
        if ranks.rank == 0:
            curve.append((sum(taken), text.loss(model)))
        # All go on together, so that no rank computes while rank 0 evaluates, outside of the clock.
        if done % max(every, 4 if "async" in name else 1) == 0:
            there = ranks.rank == 0 and (curve[-1][1] <= args.target or sum(taken) > args.patience)
            there = ranks.agree(there)
            if name == "allreduce" and done >= least:
                break  # its curve is DDP's
            if name != "ddp" and there and done >= max(least + warm, min(2 * every, most)):
                break
    ranks.agree(False)
    steps = len(taken) - counted_from
    sent, kernel = ranks.sent() - sent, sent_by_the_kernel() - kernel
    ranks.consolidate()
    if ranks.rank == 0:
        if name == "ddp":
            args.target = min(loss for _, loss in curve)
        timed = (taken[warm + 1 :] if every == 1 else taken) or taken
        figures = {
            "way": name,
            "weights": sum(parameter.numel() for parameter in model.parameters()),
            "step": statistics.median(timed) if every == 1 else sum(timed) / len(timed),
            "sent": sent / steps,
            "kernel": kernel / steps,
            "curve": curve,
            "to_target": next((seconds for seconds, loss in curve if loss <= args.target), None),
            "mean_of_all": text.loss(model),
            "target": args.target,
        }
        print("FIGURES", json.dumps(figures), flush=True)
    return sum(taken)


def sent_by_the_kernel() -> int:
    """Return the bytes that have left this host."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def job(args: argparse.Namespace) -> None:
    """Run on each rank: all ways but Horovod's, one after the other."""
    from distwrap import agree, consolidate, distributed, rank, wrap_model, wrap_optimizer
    from distwrap.comm import traffic

    def trained(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = wrap_model(Net(args.width), comm=WAYS[name][0])
        return model, wrap_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3), model)

    @distributed(timeout=400)
    def run() -> None:
        text = Text()
        for name in args.only:
            model, optimizer = trained(name)
            ranks = Ranks(
                rank(), agree, lambda model=model: traffic(model).sent, lambda model=model: consolidate(model)
            )
            seconds = course(name, model, optimizer, text, ranks, args)
            if name == "ddp":
                args.patience = seconds
        if args.turns and "allreduce" in args.only:
            random = torch.Generator().manual_seed(rank())
            ways = {name: partial(step_of, *trained(name), text, random) for name in ("ddp", "allreduce")}
            in_turns(ways, 2)  # DDP arranges its buckets anew after the first backward
            taken = in_turns(ways, args.turns)
            if rank() == 0:
                print("IN TURNS", taken["allreduce"].median / taken["ddp"].median, flush=True)

    run()


def horovod_job(args: argparse.Namespace) -> None:
    """Run on each rank: Horovod as its documentation has it, on the same text and model."""
    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    model = Net(args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    fp16 = args.only == ["horovod, fp16"]
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if fp16 else hvd.Compression.none,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def agree(flag: bool) -> bool:
        return bool(hvd.allreduce(torch.tensor([float(flag)]), op=hvd.Sum).item())

    course(args.only[0], model, optimizer, Text(), Ranks(hvd.rank(), agree, lambda: 0, lambda: None), args)
    hvd.shutdown()


# Here


@contextmanager
def shaped_hosts(mbit: int) -> Iterator[Any]:
    """Make the hosts, and slow their links in both directions."""
    from tests.clusters import namespaces

    with namespaces.hosts(*HOSTS) as hosts:
        if mbit:
            for i, name in enumerate(HOSTS):
                inside = ["ip", "netns", "exec", hosts.space(name)]
                for command in (
                    [*inside, "tc", "qdisc", "add", "dev", "eth0"],
                    ["tc", "qdisc", "add", "dev", f"dwv{os.getpid()}-{i}"],
                ):
                    shape = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "128kb", "limit", "4mb"]
                    subprocess.run([*command, *shape], check=True, capture_output=True, timeout=20)
        yield hosts


def missing() -> str:
    """Return what this machine lacks, in words; empty where it lacks nothing."""
    from tests.clusters import namespaces

    lacking = namespaces.missing()
    if lacking:
        return lacking
    try:
        with shaped_hosts(100):
            return ""
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        return f"the link cannot be shaped: {error}"


def measure(mbit: int, only: list[str], quick: bool) -> dict[str, dict[str, Any]]:
    """Run the ways on hosts of one rate, and return their figures."""
    steps = (3, 2, 4) if quick else STEPS.get(mbit, STEPS[100])
    found: dict[str, dict[str, Any]] = {}
    names = HOSTS[:2] if quick else HOSTS
    with shaped_hosts(mbit) as hosts:
        ours = [name for name in only if not name.startswith("horovod")]
        meeting = {"MASTER_ADDR": hosts.address(HOSTS[0]), "MASTER_PORT": "29500", "WORLD_SIZE": str(len(names))}
        variables = [{**meeting, "RANK": str(i), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} for i in range(len(names))]
        turns = [] if mbit else ["--turns", "58"]  # so that a slow minute of the machine is shared by both
        size = ["--width", str(QUICK_WIDTH)] if quick else []
        _run(hosts, mbit, ["--job", *size, "--steps", *map(str, steps), *turns, "--only", *ours], variables, found)
        for name in [name for name in only if name.startswith("horovod")]:
            goal = ["--target", str(found["ddp"]["target"]), "--patience", str(found["ddp"]["curve"][-1][0])]
            words_of_job = ["--horovod-job", *size, "--steps", *map(str, steps), *goal, "--only", name]
            with horovod_variables(hosts, names) as variables:
                try:
                    _run(hosts, mbit, words_of_job, variables, found)
                except RuntimeError as error:
                    print(f"  {mbit:>4} Mbit/s  {name}: {error}", flush=True)
    return found


def _run(
    hosts: Any, mbit: int, words_of_job: list[str], variables: list[dict[str, str]], found: dict[str, dict[str, Any]]
) -> None:
    """Start a job on every host, and take rank 0's figures as they come."""
    common = {name: value for name, value in os.environ.items() if not name.startswith(("DISTWRAP_", "HOROVOD_"))}
    common |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "DISTWRAP_QUIET": "1"}
    ranks = [
        subprocess.Popen(
            hosts.command(name, sys.executable, __file__, *words_of_job),
            env={**common, **own},
            stdout=subprocess.PIPE if i == 0 else subprocess.DEVNULL,
            text=True,
        )
        for i, (name, own) in enumerate(zip(HOSTS, variables, strict=False))  # a quick run takes the first ones
    ]
    try:
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            if line.startswith("FIGURES "):
                figures = json.loads(line.partition(" ")[2])
                found[figures["way"]] = figures
                print(f"  {mbit:>4} Mbit/s  {words(figures, found['ddp'])}", flush=True)
            elif line.startswith("IN TURNS "):
                found["allreduce"]["in_turns"] = float(line.split()[-1])
        codes = [rank.wait(60) for rank in ranks]
    finally:
        for name in HOSTS:
            hosts.kill_all_on(name)
        for rank in ranks:
            rank.wait(10)
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}")


@contextmanager
def horovod_variables(hosts: Any, names: Sequence[str]) -> Iterator[list[dict[str, str]]]:
    """Start the server where Horovod's ranks meet, as horovodrun does, and return what each rank must know."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer(0)
    port = server.start()
    plan = get_host_assignments(parse_hosts(",".join(f"{name}:1" for name in names)), len(names))
    server.init(plan)
    meeting = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{hosts.subnet}.254",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": "eth0",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "600",  # a step at 10 Mbit/s takes longer than the default
    }
    try:
        yield [{**meeting, **create_slot_env_vars(slot)} for slot in plan]
    finally:
        server.stop()


def words(figures: dict[str, Any], ddp: dict[str, Any]) -> str:
    """Write a way's figures in a line, beside plain DDP's."""
    goal = ddp["to_target"]
    if figures["to_target"] is None or goal is None:
        there = "-"
    else:
        there = f"{figures['to_target']:7.2f} s, {goal / max(1e-9, figures['to_target']):5.1f} x sooner"
    return (
        f"{figures['way']:<20} {figures['step'] * 1e3:9.1f} ms {ddp['step'] / figures['step']:6.2f} x"
        f"  sent {figures['sent'] / 1e6:7.3f} MB, on the wire {figures['kernel'] / 1e6:7.3f}"
        f"  to the loss {there}  (end {figures['mean_of_all']:.3f})"
    )


def verdicts(found: dict[int, dict[str, dict[str, Any]]]) -> list[str]:
    """Return a sentence for each goal that the figures meet or miss."""
    lines = []

    def goal(text: str, figure: float, met: bool) -> None:
        lines.append(f"{'met   ' if met else 'MISSED'} {text}: {figure:.2f}")

    if 100 in found:
        ways = found[100]
        for name, factor in GOALS.items():
            if name in ways:
                ratio = ways["ddp"]["step"] / ways[name]["step"]
                goal(
                    f"at 100 Mbit/s a step of {name} at least {factor:g} times faster than DDP's",
                    ratio,
                    ratio >= factor,
                )
        sooner = [
            ways["ddp"]["to_target"] / ways[name]["to_target"]
            for name in ROUND
            if name in ways and ways[name]["to_target"]
        ]
        if sooner:
            goal(
                "at 100 Mbit/s diloco or local SGD reaches DDP's loss at least 10 times sooner",
                max(sooner),
                max(sooner) >= 10,
            )
    if 0 in found and "allreduce" in found[0]:
        ratio = found[0]["allreduce"]["in_turns"]
        goal(
            "on an unshaped link a step of allreduce, in turns with DDP's, at most 1.1 times as long",
            ratio,
            ratio <= 1.1,
        )
    return lines


def draw(found: dict[int, dict[str, dict[str, Any]]], path: str) -> None:
    """Draw milliseconds a step by rate, and the loss against wall time of the slowest rate that has a curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(15, 6.5), layout="constrained")
    rates = sorted(found)
    names = [name for name in found[rates[0]] if all(name in found[rate] for rate in rates)]
    for shift, rate in enumerate(rates):
        places = [y + 0.8 * (shift + 0.5) / len(rates) - 0.4 for y in range(len(names))]
        label = f"{rate} Mbit/s" if rate else "unshaped"
        left.barh(places, [1e3 * found[rate][name]["step"] for name in names], 0.8 / len(rates), label=label)
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set_xscale("log")
    left.set_xlabel("ms a step, four ranks on two cores")
    left.legend()
    shown = 100 if 100 in found else rates[-1]
    colors = pyplot.get_cmap("tab20")
    for i, name in enumerate(names):
        seconds, losses = zip(*found[shown][name]["curve"], strict=True)
        style = {"color": colors(i % 20), "linestyle": "--" if i % 2 else "-", "linewidth": 2}
        right.plot(seconds, losses, label=name, marker=".", markersize=3, **style)
    losses_of_all = [loss for name in names for _, loss in found[shown][name]["curve"]]
    start = found[shown]["ddp"]["curve"][0][1]
    right.set_ylim(0.98 * min(losses_of_all), 1.05 * start)  # what diverges leaves the picture, and flattens nothing
    right.axhline(found[shown]["ddp"]["target"], color="gray", linestyle=":")
    right.set_xscale("log")
    right.set_xlabel(f"seconds at {shown} Mbit/s")
    right.set_ylabel("loss of a held-out text, rank 0's weights")
    right.legend(fontsize=7)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Read the command line; on the hosts do the job, here all else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps of a small model, two hosts, one rate")
    parser.add_argument("--rates", type=int, nargs="+", default=[10, 100, 1000, 0], help="Mbit/s; 0 is unshaped")
    parser.add_argument("--only", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY", help="some ways")
    parser.add_argument("--json", metavar="FILE", help="write every figure there")
    parser.add_argument("--plot", metavar="FILE.png", help="draw them there (matplotlib)")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--horovod-job", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=WIDTH, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--target", type=float, default=float("-inf"), help=argparse.SUPPRESS)
    parser.add_argument("--patience", type=float, default=float("inf"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job(args)
        return
    if args.horovod_job:
        horovod_job(args)
        return
    lacking = missing()
    if lacking:
        print(f"slow_link needs network namespaces and tbf, and {lacking}.")
        return
    theirs = [name for name in args.only if name.startswith("horovod")]
    if theirs and importlib.util.find_spec("horovod") is None:
        print("horovod: not installed")
        args.only = [name for name in args.only if name not in theirs]
    args.only = ["ddp", *(name for name in args.only if name != "ddp")]
    rates = [100] if args.quick else args.rates
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for rate in rates:
        found[rate] = measure(rate, args.only, args.quick)
        if args.json:
            Path(args.json).write_text(json.dumps(found, indent=1))
        if args.plot:
            draw(found, args.plot)
    if not args.quick:
        print("\n".join(verdicts(found)))


if __name__ == "__main__":
    main()
