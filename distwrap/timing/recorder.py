"""Measuring on this rank, for reports and traces, and what all ranks have measured together."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch

from distwrap.devices.cpus import allowed_cpus, processor_name
from distwrap.devices.kinds import kind_of
from distwrap.group.collectives import gather_object
from distwrap.group.world import RunPart, World
from distwrap.stopwatch import Stopwatch, clock_of
from distwrap.timing.instruments import Instruments
from distwrap.timing.measured import RankSettings, RankTimes, Rows


class Measuring(RunPart):
    """The stopwatch of a run and its instruments, which are in place as long as a report or a trace uses them.

    Attributes:
        has_report: whether a report uses them.
    """

    has_report = False

    def __init__(self, world: World) -> None:
        self._world, self._wanted = world, 0
        self._instruments: Instruments | None = None

    def begin(self) -> Instruments:
        """Return the instruments, from now on in their places."""
        if self._instruments is None:
            self._instruments = Instruments(self._world, Stopwatch(clock_of(self._world.device)))
            self._instruments.place()
        self._wanted += 1
        return self._instruments

    def end(self) -> None:
        """Take the instruments away, unless another report or trace uses them."""
        self._wanted -= 1
        if not self._wanted:
            self.close()

    def close(self) -> None:
        """Take the instruments away, also where the run failed."""
        if self._instruments is not None:
            self._instruments.take_away()
        self._instruments, self._wanted = None, 0

    @contextmanager
    def report(self) -> Iterator[Callable[[], list[RankTimes]]]:
        """Measure within a ``with``, for a report.

        Yields:
            A function that returns what all ranks have measured until it is called; every rank must call it.
        """
        instruments, rows, device = self.begin(), Rows(), self._world.device
        self.has_report = True
        instruments.count_from_here()
        instruments.stopwatch.on_row.append(rows.add)

        def measured() -> list[RankTimes]:
            kind_of(device).finish(device)
            instruments.stopwatch.settle()
            instruments.look()
            return [RankTimes.from_dict(sent) for sent in gather_object(asdict(self._measured(instruments, rows)))]

        try:
            yield measured
        finally:
            instruments.stopwatch.on_row.remove(rows.add)
            self.has_report = False
            self.end()

    def _measured(self, instruments: Instruments, rows: Rows) -> RankTimes:
        device = self._world.device
        steps, queued = max(1, rows.count), instruments.queued_share()
        return RankTimes(
            rank=self._world.placement.rank,
            host=socket.gethostname(),
            device=str(device),
            steps=rows.count,
            total=rows.total,
            kept=rows.kept,
            batches=self._world.layout.size,
            samples=instruments.samples / steps,
            unevenness=instruments.unevenness(),
            queued=None if queued is None else queued * sum(rows.total) / steps,
            process_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            device_memory=kind_of(device).peak_memory(device),
            gradient_bytes=instruments.gradient_bytes,
            waiting_calls={name: count / steps for name, count in instruments.waiting_calls.items()},
            settings=RankSettings(
                cpus=len(allowed_cpus()),
                threads=torch.get_num_threads(),
                processor=processor_name() if device.type == "cpu" else kind_of(device).processor(device),
                **instruments.settings,
            ),
        )
