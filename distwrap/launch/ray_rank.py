"""A rank that is an actor on a Ray cluster, for a call under ``launcher="ray"``."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

from distwrap.launch import worker
from distwrap.launch.outcome import Outcome
from distwrap.launch.task import Assignment


class RayRank:
    """One rank: the class of an actor, whose process Ray has started.

    Args:
        desk: an actor of `OutcomeStore`, for outcomes of ranks that cannot return them.
    """

    def __init__(self, desk: Any) -> None:
        self._desk = desk

    def where(self) -> tuple[str, str, str, int]:
        """Return the node, its address, the name of its host, and this process's id."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return node, ray.util.get_node_ip_address(), socket.gethostname(), os.getpid()

    def run(self, assignment: Assignment) -> Outcome | None:
        """Be the rank, and return how that ended."""
        link = RayLink(assignment, self._desk)
        worker.work(link)
        return link.outcome


class OutcomeStore:
    """Outcomes of ranks that other threads than their main one have ended: the class of an actor."""

    def __init__(self) -> None:
        self._left: dict[int, Outcome] = {}

    def put(self, outcome: Outcome) -> None:
        """Keep an outcome."""
        self._left[outcome.rank] = outcome

    def get(self, rank: int) -> Outcome | None:
        """Return what a rank has left."""
        return self._left.get(rank)


class RayLink:
    """The link of a rank that is an actor: its method gets the assignment, and returns the outcome.

    Attributes:
        outcome: once it is there.
    """

    outcome: Outcome | None = None

    def __init__(self, assignment: Assignment, desk: Any) -> None:
        self._assignment, self._desk = assignment, desk

    def bind_lifetime(self) -> None:
        """Nothing: Ray ends its actors with their driver."""

    def assignment(self) -> Assignment:
        return self._assignment

    def report(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if threading.current_thread() is not threading.main_thread():  # which will not return
            import ray

            ray.get(self._desk.put.remote(outcome), timeout=10)
