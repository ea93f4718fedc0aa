"""A simulation: ranks as threads of this process, with a store, groups and a side channel that know the turns."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from distwrap import simulated
from distwrap._internals.torch import default_device
from distwrap._internals.torch_simulation import BACKEND, simulated_torch
from distwrap.environments import Placement
from distwrap.errors import LaunchError
from distwrap.group.world import active_world, deactivate
from distwrap.network import rendezvous
from distwrap.options import QUIET, switched_on
from distwrap.supervision.channel import Channel
from distwrap.testing.simulation.groups import Exchanges, SimulatedGroup
from distwrap.testing.simulation.process_state import ProcessState
from distwrap.testing.simulation.scheduler import Cancelled, Rank, Scheduler, Signal, Task
from distwrap.testing.simulation.store import SimulatedStore
from distwrap.wording import print_notice


class Simulation:
    """Ranks in this process.

    Args:
        ranks: their number.
        seed: draws the order of their turns; ``None`` for the order in which they became ready.

    Attributes:
        device: of all ranks: the only one that there is, or the CPU.
        scheduler: of their threads.
    """

    def __init__(self, ranks: int, seed: int | None = None) -> None:
        self.scheduler = Scheduler(seed)
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self._ranks, self._store = ranks, SimulatedStore(self.scheduler, ranks)
        self._exchanges = Exchanges(self.scheduler)
        self._groups: Counter[Any] = Counter()
        self._makers: dict[int, int] = {}  # of modules, by their ids
        self._process = os.getpid()

    def announce(self, more: str) -> None:
        """Print the start line, unless the run is to be quiet."""
        if not switched_on(os.environ, QUIET):
            print_notice(f"{self._ranks} simulated ranks: threads of this process, which take turns{more}")

    def run(self, body: Callable[[int], object], state: Callable[[int], ProcessState], *, first_here: bool) -> None:
        """Run a function for each rank, until all have returned or none can go on; the scheduler knows of failures.

        Args:
            body: what each rank runs, given its number.
            state: returns that of a rank's process at the start.
            first_here: whether rank 0 runs in this thread, which gets signals.

        Raises:
            LaunchError: ranks are simulated in this process already.
        """
        if simulated.running is not None:
            raise LaunchError("ranks are simulated in this process already: one simulation runs at a time.")
        default, threads, clock = default_device(), torch.get_num_threads(), self.scheduler

        def run(rank: int) -> None:
            torch.set_num_threads(threads)  # which OpenMP keeps for each thread
            missing = default if default_device() != default else None  # the caller's is that of its thread alone
            with torch.autograd.set_multithreading_enabled(False), missing or nullcontext():
                try:
                    body(rank)
                except Cancelled:
                    raise
                except BaseException as error:
                    clock.fail(error, clock.current())  # before the rank leaves, which may lead to others
                    raise
                finally:
                    _leave()

        states = [state(rank) for rank in range(self._ranks)]
        for number, own in enumerate(states):
            Task(clock, Rank(number, own), partial(run, number), is_main=True).start()
        here = ProcessState.capture(owns_modules=states[0].modules is not None)
        with simulated_torch(self, self._store):
            simulated.running = self
            try:
                clock.run(first_here=first_here)
            finally:
                simulated.running = None
                here.enter()

    def make_group(self, options: Any) -> SimulatedGroup:
        """Return a process group of the rank whose turn it is."""
        key = (options.group_id, tuple(options.global_ranks_in_group))
        self._groups[self.rank(), key] += 1  # torch begins to count names anew where all groups were destroyed
        unique = (key, self._groups[self.rank(), key])
        return SimulatedGroup(self._exchanges, options.group_rank, options.group_size, unique)

    def rank(self) -> int:
        """Return the rank whose thread this is; 0 in any other thread."""
        task = self.scheduler.current()
        return 0 if task is None else task.rank.number

    # What torch, and `distwrap.simulated`, ask

    def is_rank(self) -> bool:
        # A process that a rank forks, as a loader's worker, is no rank.
        return simulated.running is self and self.scheduler.current() is not None and os.getpid() == self._process

    def note_maker(self, module: Any) -> None:
        self._makers[id(module)] = self.rank()

    def meet(self, placement: Placement) -> Store:
        store: Store = PrefixStore(f"distwrap/{rendezvous.begin_meeting()}", self._store)
        said = {**rendezvous.registration(self.device), "gpu": None, "address": None}
        store.set(f"here/{placement.rank}", json.dumps(said))
        return store

    def channel(self, *args: Any) -> Channel:
        return _SimulatedChannel(self, self._store.board.rings[self.rank()], *args)

    def thread(self, run: Callable[[], object]) -> Task:
        current = self.scheduler.current()
        assert current is not None
        return Task(self.scheduler, current.rank, run, is_main=False)

    def condition(self) -> Signal:
        return Signal(self.scheduler)

    def has_made(self, module: Any) -> bool:
        return self._makers.get(id(module)) == self.rank()


def _leave() -> None:
    """Leave what the rank has joined and not left, as where it has failed."""
    world = active_world()
    if world is not None:
        deactivate()
        for close in (world.close, world.cleanup.close):
            with suppress(Cancelled):
                close()
    if dist.is_initialized():  # torch knows a thread's groups by their names
        dist.destroy_process_group()


def _make_group(options: Any, _: Any = None) -> SimulatedGroup:
    if not isinstance(simulated.running, Simulation):
        raise LaunchError(f"the backend {BACKEND!r} is that of simulated ranks, and no ranks are simulated.")
    return simulated.running.make_group(options)


dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu", "cuda"])


class _SimulatedChannel(Channel):
    """Side channel of a simulated rank: it serves what others ask. Who is stuck, or gone, the scheduler knows."""

    def __init__(self, simulation: Simulation, ring: Signal, *args: Any) -> None:
        super().__init__(*args)
        self._ring, self._thread = ring, simulation.thread(self._run)  # type: ignore[assignment]

    def _halt(self) -> None:
        self._stopped.set()
        self._ring.notify_all()
        self._bells.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            heard = self._bells.heard()
            if heard == self._heard:
                self._ring.wait(words="news of other ranks")
            else:
                self._heard = heard
                self.work.look(True)
