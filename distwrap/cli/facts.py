"""The view of one process: what is here, and what would be decided. Starts nothing, touches no accelerator."""

import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from distwrap._version import __version__
from distwrap.devices import cpus, selection
from distwrap.devices.kinds import VENDORS, kind_of_torch, unused_devices
from distwrap.environments import Node, Placement, detect, explain
from distwrap.errors import DistwrapError
from distwrap.launch import fork_safety
from distwrap.launch.task import NodePlan, resolve
from distwrap.network import interfaces
from distwrap.options import Options
from distwrap.versions import TORCH

SHARED_MEMORY_BYTES = 1 << 30  # below, loader workers may die of a bus error
OPEN_FILES = 1024

# By which a process sees some devices.
VISIBLE_BY = ("CUDA_VISIBLE", "HIP_VISIBLE", *(each.visible_by for each in VENDORS.values() if each.visible_by))
_PREFIXES = ("DISTWRAP_", "NCCL_", "GLOO_", "OMP_NUM", "MASTER_", "TORCH_NCCL", *VISIBLE_BY)


@dataclass
class Facts:
    """View of one process.

    Attributes:
        host: the name of this node.
        rank: the global rank, 0 where no ranks run yet.
        local_rank: the rank among those of this node.
        versions: of distwrap, torch, Python and the device's libraries.
        launchers: the answer of each detector.
        decided: what would be done, by heading.
        variables: environment variables that distwrap or its libraries read.
        problems: what would go wrong, with what to do.
        remarks: what is worth knowing.
        device: the accelerator that this rank uses, once it does: which, its model, its bytes, its unique name.
    """

    host: str
    rank: int = 0
    local_rank: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    launchers: dict[str, str] = field(default_factory=dict)
    decided: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    device: tuple[str, str, int | None, str | None] | None = None

    @contextmanager
    def noting_problems(self) -> Iterator[None]:
        """Note the error of ours that is raised inside, which ends the ``with``, and go on after it."""
        try:
            yield
        except DistwrapError as error:
            self.problems.append(str(error))


def look(nprocs: int | None = None) -> Facts:
    """Collect the facts of this process.

    Args:
        nprocs: how many ranks the real test starts; by default as many as ``@distributed`` would.
    """
    env = dict(os.environ)
    versions = {"distwrap": __version__, "torch": TORCH, "python": platform.python_version()}
    facts = Facts(socket.gethostname(), versions=versions | kind_of_torch().versions(), launchers=explain(env))
    facts.variables = {name: env[name] for name in sorted(env) if name.startswith(_PREFIXES)}
    found: Placement | Node = Placement()
    options = Options()
    with facts.noting_problems():
        found = detect(env)
    with facts.noting_problems():
        options = options.with_environment(env).simulated(env)
    visible = selection.visible_devices()
    if isinstance(found, Placement) and found.source != "single":
        facts.rank, facts.local_rank = found.rank, found.local_rank
        _decide_joining(facts, found, visible)
    else:
        with facts.noting_problems():
            plan = resolve(options, found if isinstance(found, Node) else None)
            _decide_launch(facts, plan, options, visible, nprocs)
    _look_at_node(facts, visible)
    return facts


def _decide_joining(facts: Facts, place: Placement, visible: selection.Devices) -> None:
    """Decide for a process that is a rank already."""
    facts.decided["ranks"] = (
        f"{place.world_size} on {place.nnodes} node(s), started by {place.source}; this is rank {place.rank}, local "
        f"rank {place.local_rank} of {place.local_world_size}, node {place.node_rank}"
    )
    where = f"{place.master_addr}:{place.master_port or f'a port that follows from {place.job or place.source}'}"
    facts.decided["meeting place"] = where if place.master_addr is not None else "the launching process"
    _decide_device(facts, place, visible)
    _decide_interface(facts, place.nnodes, place.master_addr)


def _decide_launch(
    facts: Facts, plan: NodePlan, options: Options, visible: selection.Devices, nprocs: int | None
) -> None:
    """Decide for a process that would launch ranks."""
    here = selection.choose_nprocs(plan.nprocs, visible)
    why = f"{visible.count} {visible.kind} device(s) visible" if visible.count else "no accelerator visible"
    several = f" on each of {plan.min_nodes} to {plan.max_nodes} nodes" if plan.several else ""
    facts.decided["ranks"] = f"{here}{several} by default ({why})" + (f"; {nprocs} in this test" if nprocs else "")
    refusal = fork_safety.refusal()
    if plan.elastic:
        facts.decided["launcher"] = f"torch elastic, at most {plan.max_restarts} restarts"
    elif options.launcher != "auto":
        facts.decided["launcher"] = str(options.launcher)
    else:
        facts.decided["launcher"] = f"forkserver ({refusal})" if refusal else "fork (it is safe here)"
    local = nprocs or here
    threads, allowed = cpus.choose_threads(local), len(cpus.allowed_cpus())
    facts.decided["threads"] = f"{threads} a rank ({allowed} CPUs for {local} ranks)"
    if threads is None:
        facts.decided["threads"] = f"{os.environ.get('OMP_NUM_THREADS')}, by OMP_NUM_THREADS"
    _decide_device(facts, Placement(0, max(1, local), 0, max(1, local)), visible)
    _decide_interface(facts, plan.max_nodes, plan.host)


def _decide_device(facts: Facts, place: Placement, visible: selection.Devices) -> None:
    with facts.noting_problems():
        device = selection.choose_device(place, visible)
        facts.decided["device"] = str(device)
        facts.decided["backend"] = selection.choose_backend("auto", device)


def _decide_interface(facts: Facts, nnodes: int, master: str | None) -> None:
    users = os.environ.get("GLOO_SOCKET_IFNAME")
    here = interfaces.interfaces()
    facts.decided["interfaces"] = "; ".join(f"{name} {' '.join(found)}" for name, found in here.items())
    with facts.noting_problems():
        interfaces.check_users_choice(os.environ, facts.decided.get("backend", "gloo"))
    if users:
        facts.decided["network"] = f"{users}, by GLOO_SOCKET_IFNAME"
    elif nnodes == 1:
        facts.decided["network"] = "loopback: one node"
    else:
        address = interfaces.source_address(str(master))
        name = interfaces.interface_of(address) if address else None
        facts.decided["network"] = f"{name or '?'} ({address or 'no way'} leads to {master})"
        if address is None:
            facts.problems.append(f"{facts.host} has no route to {master}. {interfaces.ADVICE}")


def _look_at_node(facts: Facts, visible: selection.Devices) -> None:
    if os.path.isdir("/dev/shm"):
        memory = shutil.disk_usage("/dev/shm")
        facts.decided["shared memory"] = f"{memory.free / 2**30:.1f} GiB free of {memory.total / 2**30:.1f}"
        if memory.free < SHARED_MEMORY_BYTES:
            facts.remarks.append(
                f"/dev/shm has only {memory.free >> 20} MiB free, so that loader workers may die of a bus "
                "error. In Docker, start with --shm-size=8g or --ipc=host; or use num_workers=0."
            )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    facts.decided["open files"] = f"{soft} (could be {hard})" if soft != hard else str(soft)
    if soft < OPEN_FILES:
        facts.remarks.append(
            f"a process may have only {soft} open files here: raise the limit with `ulimit -n {min(hard, 65536)}`."
        )
    if visible.count == 0:
        facts.remarks += unused_devices()
    if sys.platform not in ("linux", "darwin"):
        facts.problems.append(f"{sys.platform} is not supported.")
