"""A simulation: ranks as threads of this process, with a store, groups and a side channel that know the turns."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
from distwrap.supervision.channel import TICK_SECONDS, Channel
from distwrap.testing.simulation.groups import Exchanges, SimulatedGroup
from distwrap.testing.simulation.process_state import ProcessState
from distwrap.testing.simulation.scheduler import Cancelled, Rank, Scheduler, Signal, Task
from distwrap.testing.simulation.store import SimulatedStore

STEP_SECONDS = 0.1  # simulated, for a step of an algorithm that averages in the background


class Simulation:
    """Ranks in this process.

    Args:
        ranks: their number.
        seed: draws the order of their turns; ``None`` for the order in which they became ready.

    Attributes:
        device: of all ranks: the only one that there is, or the CPU.
        scheduler: of their threads.
        store: in which they meet.
    """

    def __init__(self, ranks: int, seed: int | None = None) -> None:
        self.scheduler = Scheduler(seed)
        self.store = SimulatedStore(self.scheduler, ranks)
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self._exchanges = Exchanges(self.scheduler)
        self._groups: Counter[Any] = Counter()

    def run(self, bodies: Sequence[Callable[[], object]], states: Sequence[ProcessState], *, first_here: bool) -> None:
        """Run a function for each rank, until all have returned or none can go on; `Scheduler.failure` says why.

        Args:
            bodies: what each rank runs.
            states: of their processes at the start.
            first_here: whether rank 0 runs in this thread, which gets signals.

        Raises:
            LaunchError: ranks are simulated in this process already.
        """
        if simulated.running is not None:
            raise LaunchError("ranks are simulated in this process already: one simulation runs at a time.")
        default, threads = default_device(), torch.get_num_threads()
        for number, (body, state) in enumerate(zip(bodies, states, strict=True)):
            self.scheduler.add(Rank(number, state), _in_thread(body, default, threads), is_main=True)
        here, clock = ProcessState.capture(owns_modules=states[0].owns_modules), self.scheduler
        with simulated_torch(lambda: self.store, self.is_rank, clock.sleep, lambda: clock.slept):
            simulated.running = self
            try:
                self.scheduler.run(first_here=first_here)
            finally:
                simulated.running = None
                here.enter()

    def make_group(self, options: Any) -> SimulatedGroup:
        """Return a process group of the rank whose turn it is."""
        task = self.scheduler.current()
        assert task is not None
        key = (options.group_id, tuple(options.global_ranks_in_group))
        self._groups[task.rank.number, key] += 1  # torch begins to count names anew where all groups were destroyed
        generation = self._groups[task.rank.number, key]
        return SimulatedGroup(
            self._exchanges, options.group_rank, options.group_size, (*key, generation), options.group_id
        )

    # What `distwrap.simulated` asks

    def is_rank(self) -> bool:
        return simulated.running is self and self.scheduler.current() is not None

    def rank(self) -> int:
        """Return the rank whose thread this is; 0 in any other thread."""
        task = self.scheduler.current()
        return 0 if task is None else task.rank.number

    def meet(self, placement: Placement) -> Store:
        store: Store = PrefixStore(f"distwrap/{rendezvous.begin_meeting()}", self.store)
        said = {**rendezvous.registration(self.device), "gpu": None, "address": None}
        store.set(f"here/{placement.rank}", json.dumps(said))
        return store

    def channel(self, *args: Any) -> Channel:
        return _SimulatedChannel(self, *args)

    def thread(self, run: Callable[[], object]) -> _SimulatedThread:
        return _SimulatedThread(self.scheduler, run)

    def condition(self) -> _SimulatedCondition:
        return _SimulatedCondition(self.scheduler)

    def whereabouts(self) -> str:
        return self.scheduler.whereabouts()

    def pass_step(self) -> None:
        self.scheduler.sleep(STEP_SECONDS)


def _in_thread(body: Callable[[], object], device: torch.device | None, threads: int) -> Callable[[], object]:
    def run() -> object:
        torch.set_num_threads(threads)  # which OpenMP keeps for each thread
        try:
            with torch.autograd.set_multithreading_enabled(False), _default_device(device):
                return body()
        finally:
            world = active_world()
            if world is not None:  # the rank has failed
                deactivate()
                for close in (world.close, world.cleanup.close):
                    with suppress(Cancelled):
                        close()
            if dist.is_initialized():  # torch knows a thread's groups by their names
                dist.destroy_process_group()

    return run


@contextmanager
def _default_device(device: torch.device | None) -> Iterator[None]:
    """Make tensors on a device within a ``with``: the caller's default is that of its thread alone."""
    if device is None or default_device() == device:
        yield
    else:
        with device:
            yield


def _make_group(options: Any, _: Any = None) -> SimulatedGroup:
    assert isinstance(simulated.running, Simulation)
    return simulated.running.make_group(options)


def _end_in_child() -> None:
    """Let a process that a rank forks, as a loader's worker, be no rank."""
    simulated.running = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_in_child)

# Nobody can ask for it by name but while ranks are simulated.
dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu", "cuda"])
dist.Backend.backend_list.remove(BACKEND)


class _SimulatedThread:
    def __init__(self, scheduler: Scheduler, run: Callable[[], object]) -> None:
        self._scheduler, self._run = scheduler, run
        self._task: Task | None = None

    def start(self) -> None:
        current = self._scheduler.current()
        assert current is not None
        self._task = self._scheduler.add(current.rank, self._run, is_main=False)

    def join(self, timeout: float | None = None) -> None:
        while self._task is not None and not self._task.has_ended:
            if not self._scheduler.wait(self._task.ended, "a thread of its own", timeout):
                return

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.has_ended


class _SimulatedCondition:
    """Condition of threads that take turns: nothing changes within a ``with``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._signal = scheduler, Signal()

    def __enter__(self) -> _SimulatedCondition:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait(self, timeout: float | None = None) -> bool:
        return self._scheduler.wait(self._signal, "a thread of its own", timeout)

    def notify_all(self) -> None:
        self._scheduler.notify(self._signal)


class _SimulatedChannel(Channel):
    """Side channel of a simulated rank: it serves what others ask. Who is stuck, or gone, the scheduler knows."""

    def __init__(self, simulation: Simulation, *args: Any) -> None:
        super().__init__(*args)
        self._thread: Any = simulation.thread(self._run)

    def start(self) -> None:
        self._thread.start()

    def _halt(self) -> None:
        self._stopped.set()
        self._bells.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.look()
            self._bells.clock.sleep(TICK_SECONDS)

    def look(self) -> None:
        heard = self._bells.heard()
        if heard != self._heard:
            self._heard = heard
            self.on_ring()
            self.work.look(True)
