"""``launcher="ray"``: ranks that are actors on a Ray cluster; the extra ``ray``.

The caller is Ray's driver. It reserves the resources of all ranks at once, so that they start together or not at all,
and gets results and exceptions as under the other launchers.
Source: https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Literal, get_args

from distwrap.checks import AT_LEAST_ONE, SECONDS, is_number, one_of
from distwrap.environments import Placement
from distwrap.errors import ArrivalError, LaunchError, OptionError, WorkerDiedError
from distwrap.launch.base import Job, Launcher
from distwrap.launch.outcome import CAUSE_SECONDS, Outcome, collect, died, raise_if_failed
from distwrap.launch.ray_rank import OutcomeStore, RayRank
from distwrap.launch.task import Assignment
from distwrap.packages import require_package
from distwrap.seeding import RandomState
from distwrap.wording import first_line

Spread = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

_START_SECONDS = 120.0  # for the actors' processes, which import torch


class RayLauncher(Launcher):
    """Ranks on a Ray cluster: the one that this process is connected to, that of ``RAY_ADDRESS``, or one on this node.

    Args:
        address: of another cluster, as for ``ray.init``.
        cpus: CPUs of a rank, which is also its number of threads.
        gpus: GPUs of a rank; ``"auto"`` is one where the cluster has some.
        resources: of a rank besides, by name.
        runtime_env: Ray's runtime environment of a rank, as ``{"working_dir": ".", "pip": [...]}``.
        spread: how Ray places the ranks on its nodes.
        wait: seconds for the cluster to have room for all ranks.

    Raises:
        OptionError: one of them is of no such kind.

    Example:
        >>> RayLauncher(cpus=2, spread="SPREAD").cpus
        2
    """

    name = "ray"
    runs_one_rank = True

    def __init__(
        self,
        *,
        address: str | None = None,
        cpus: int = 1,
        gpus: float | Literal["auto"] = "auto",
        resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        spread: Spread = "PACK",
        wait: float = 60.0,
    ) -> None:
        one_of("spread", get_args(Spread))("spread", spread)
        AT_LEAST_ONE("RayLauncher: cpus", cpus)
        SECONDS("RayLauncher: wait", wait)
        if gpus != "auto" and not (is_number(gpus) and gpus >= 0):
            raise OptionError(f"RayLauncher(gpus={gpus!r}): it is 'auto', or a number from 0.")
        self.address, self.cpus, self.gpus, self.spread, self.wait = address, cpus, gpus, spread, wait
        self.resources, self.runtime_env = dict(resources or {}), dict(runtime_env or {})

    def count(self, nprocs: int | Literal["auto"]) -> int:
        self._stack = ExitStack()  # of this call
        if nprocs != "auto":
            return nprocs
        total = self._connected().cluster_resources()
        return int(total.get("GPU", 0)) or max(1, int(total.get("CPU", 1)) // self.cpus)

    def check(self, job: Job) -> None:
        require_package("ray", "launcher='ray'")

    def plan(self, job: Job) -> Assignment:
        # The nodes have context of their own, which runtime_env= describes.
        plan = super().plan(job)
        return replace(plan, context=None, random=RandomState.capture(), threads=self.cpus)

    def run(self, job: Job, plan: Assignment) -> Sequence[Outcome]:
        with self._stack as stack:
            ray = self._connected()
            actors, desk = self._started(ray, job.nprocs, stack)
            where = _get(ray, [actor.where.remote() for actor in actors], _START_SECONDS)
            nodes = list(dict.fromkeys(node for node, *_ in where))
            # Of a node one after the other; sorted() keeps their order.
            ranks = sorted(zip(where, actors, strict=True), key=lambda rank: nodes.index(rank[0][0]))
            where = [place for place, _ in ranks]
            running = {
                actor.run.remote(replace(plan, placement=placement)): placement.rank
                for (_, actor), placement in zip(ranks, _placements(where), strict=True)
            }

            def receive(seconds: float | None, _: object) -> list[Outcome]:
                ready = ray.wait(list(running), num_returns=1, timeout=seconds)[0] if running else []
                return [_outcome(ray, desk, each, where[rank := running.pop(each)], rank) for each in ready]

            outcomes = collect(receive)
            raise_if_failed(outcomes)
            return sorted(outcomes, key=lambda outcome: outcome.rank)

    def _connected(self) -> Any:
        """Return the package, connected to a cluster until the call ends, where it was not before."""
        require_package("ray", "launcher='ray'")
        import ray

        if not ray.is_initialized():
            ray.init(address=self.address, logging_level="ERROR", configure_logging=True)
            self._stack.callback(ray.shutdown)
        return ray

    def _started(self, ray: Any, nprocs: int, stack: ExitStack) -> tuple[list[Any], Any]:
        """Start an actor for each rank, in room that is reserved for all of them.

        Raises:
            ArrivalError: the cluster has no room for them.
        """
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        total = ray.cluster_resources()
        gpus = float(total.get("GPU", 0) > 0) if self.gpus == "auto" else self.gpus
        bundle = {"CPU": self.cpus, **({"GPU": gpus} if gpus else {}), **self.resources}
        group = placement_group([bundle] * nprocs, strategy=self.spread)
        stack.callback(remove_placement_group, group)
        if not ray.wait([group.ready()], timeout=self.wait)[0]:
            free = ray.available_resources()
            has = {name: f"{free.get(name, 0):g} of {total.get(name, 0):g}" for name in bundle}
            raise ArrivalError(
                f"the Ray cluster had no room for {nprocs} ranks within {self.wait:g} s: each rank needs "
                f"{bundle}, placed by {self.spread}, and {has} are free on {len(ray.nodes())} node(s). Ask for "
                "fewer ranks or resources (nprocs=, launcher='ray(cpus=…)'), or add nodes."
            )
        environ = {name: value for name, value in os.environ.items() if name.startswith("DISTWRAP_")}
        given = self.runtime_env.get("env_vars", {})
        options = {
            "num_cpus": self.cpus,
            "num_gpus": gpus,
            "resources": self.resources,
            "max_restarts": 0,
            "max_task_retries": 0,
            "runtime_env": {**self.runtime_env, "env_vars": {**environ, **given}},
        }
        desk = ray.remote(OutcomeStore).options(num_cpus=0).remote()
        stack.callback(_end, ray, [desk])
        actors: list[Any] = []
        stack.callback(_end, ray, actors)
        for number in range(nprocs):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            actors.append(ray.remote(RayRank).options(**options, scheduling_strategy=place).remote(desk))
        return actors, desk


def _outcome(ray: Any, desk: Any, reference: Any, where: tuple[str, str, str, int], rank: int) -> Outcome:
    """Return the outcome of an actor that has ended: what it returned, or else what it has left at the desk."""
    _, _, host, pid = where
    try:
        outcome: Outcome | None = ray.get(reference)
        words = "it has returned nothing"
    except ray.exceptions.RayError as error:
        outcome, words = None, " ".join(str(error).split()).partition(" Some common causes")[0]
    if outcome is None:
        with suppress(ray.exceptions.RayError):
            outcome = ray.get(desk.get.remote(rank), timeout=CAUSE_SECONDS)
    text = f"rank {rank} on {host} (pid {pid}), an actor of Ray's, died without raising an exception: {words}"
    return outcome or died(WorkerDiedError(text, rank=rank, host=host), rank, pid)


def _get(ray: Any, references: list[Any], seconds: float) -> list[Any]:
    """Return the values of actors that have just started.

    Raises:
        LaunchError: they did not start.
    """
    try:
        return list(ray.get(references, timeout=seconds))
    except ray.exceptions.RayError as error:
        raise LaunchError(
            f"the ranks' actors did not start on the Ray cluster ({type(error).__name__}: {first_line(error)}). Is "
            f"distwrap, of this version, installed on all of its nodes, or in runtime_env=?"
        ) from error


def _placements(where: Sequence[tuple[str, str, str, int]]) -> list[Placement]:
    """Return the placement of each rank, given the nodes of all in rank order, those of a node one after the other.

    Example:
        >>> [(each.node_rank, each.local_rank) for each in _placements([("a", "::1", "a", 1), ("b", "::2", "b", 2)])]
        [(0, 0), (1, 0)]
    """
    nodes = list(dict.fromkeys(node for node, *_ in where))
    job, seen = f"ray-{secrets.token_hex(8)}", dict.fromkeys(nodes, 0)
    placements = []
    for rank, (node, *_) in enumerate(where):
        placements.append(
            Placement(
                rank=rank,
                world_size=len(where),
                local_rank=seen[node],
                local_world_size=sum(other == node for other, *_ in where),
                node_rank=nodes.index(node),
                nnodes=len(nodes),
                master_addr=where[0][1],
                master_port=None,
                source="ray",
                job=job,
            )
        )
        seen[node] += 1
    return placements


def _end(ray: Any, actors: list[Any]) -> None:
    for actor in actors:
        ray.kill(actor)
