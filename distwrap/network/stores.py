"""Stores in which ranks meet: a file, torchrun's, or one that rank 0 serves."""

import gc
import hashlib
import os
import secrets
import socket
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial

import torch.distributed as dist
from torch.distributed import FileStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from distwrap.environments import Placement, distwrap_environment
from distwrap.environments.identity import process_status
from distwrap.errors import ArrivalError
from distwrap.network import connectivity
from distwrap.network.keys import read
from distwrap.network.waiting import run_within
from distwrap.options import notice_seconds
from distwrap.versions import SERVERS_TAKE_SOCKETS, STORES_CLONE
from distwrap.wording import first_line, print_notice

NOTICE_SECONDS = 20.0  # until those who are here say who is not

GIVEN = "given"  # the job's name where its port is given

_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
_PORTS = range(20_000, 30_000)  # below those that systems give to anybody
_CANDIDATES = 8  # ports, where somebody may sit on the first
_LOOPBACK = "127.0.0.1"
_ROUND_TRIP_SECONDS = 15.0
_MPI_LAUNCHERS = ("hydra", "pmi_proxy", "mpirun", "mpiexec", "orted", "prted", "palsd", "mpispawn")


def held_elsewhere(placement: Placement) -> bool:
    """Return whether the store outlives the ranks, in a file or in their launcher's process."""
    is_ours = placement.master_addr is None or distwrap_environment.STORE in os.environ
    return is_ours or (os.environ.get(_AGENT) == "True" and not _may_restart())


def where(placement: Placement) -> str:
    """Return in words where the ranks meet."""
    if placement.master_addr is None:
        return "the launching process"
    return f"{placement.master_addr}:{placement.master_port or 'a port of the job'}"


def open_store(placement: Placement, seconds: float) -> Store:
    """Open the store of this rank's world.

    Raises:
        ArrivalError: nobody answers at the meeting place, or another program does.
    """
    limit = timedelta(seconds=seconds)
    if placement.master_addr is None:
        return FileStore(_opened(os.environ.get(distwrap_environment.STORE, placement.job)), placement.world_size)
    try:
        if os.environ.get(_AGENT) == "True":
            store: Store = next(iter(rendezvous("env://", placement.rank, placement.world_size, timeout=limit)))[0]
            return _fresh_store(store, placement, seconds) if _may_restart() else store
        return _tcp_store(placement, seconds)
    except (dist.DistError, ValueError, OSError) as error:
        if isinstance(error, ArrivalError):
            raise
        raise ArrivalError(
            f"rank {placement.rank} on {socket.gethostname()} found no meeting place at {where(placement)} within "
            f"{seconds:.0f} s ({first_line(error)}). Is rank 0 running, and MASTER_ADDR and MASTER_PORT right?"
        ) from error


def client_of(store: Store) -> Store:
    """Return another client of a store, on which a thread may wait; the same where torch cannot clone one."""
    return store.clone() if STORES_CLONE else store  # type: ignore[attr-defined]


def _may_restart() -> bool:
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def _fresh_store(agents: Store, placement: Placement, seconds: float) -> Store:
    """Open a store that only this attempt has.

    torchrun's agents keep one store over all restarts, so that ranks would read what those of an earlier
    attempt have left, and no two agents count the attempts alike. Rank 0 holds this one, and writes into the agents'
    store where it is; the store of an earlier attempt is gone with its rank 0.
    """
    key = "distwrap store"
    if placement.rank == 0:
        token = secrets.token_hex(8)
        store, port = serve(_LOOPBACK if placement.nnodes == 1 else None, [0], token, seconds)
        agents.set(key, f"{port} {token}")
        return store
    address, deadline = _address(placement), time.monotonic() + seconds
    while time.monotonic() < deadline:
        port_and_token = read(agents, key).decode().split()
        if port_and_token and connectivity.answers(address, int(port_and_token[0])):
            found = _round_trip(address, int(port_and_token[0]), port_and_token[1], seconds)
            if found is not None:
                return found
        time.sleep(0.02)
    raise ArrivalError(
        f"rank {placement.rank} on {socket.gethostname()} waited {seconds:.0f} s for rank 0 at {address}: rank "
        "0 did not reach setup_process_group(). Look at what it printed last."
    )


def from_outside(place: str, seconds: float = 10.0) -> Store:
    """Open the store of a launch in a process that is none of its ranks."""
    host, port = distwrap_environment.address(place)
    if host is None or port is None:
        return FileStore(place)
    return connect(host, [port], GIVEN, seconds, "the caller")[0]


def ports_of(job: str) -> list[int]:
    """Return ports that follow from the job's name.

    Example:
        >>> ports_of("slurm 7.0") == ports_of("slurm 7.0") != ports_of("slurm 7.1")
        True
    """
    digest = hashlib.sha256(job.encode()).digest()
    return [_PORTS[int.from_bytes(digest[2 * i : 2 * i + 2], "big") % len(_PORTS)] for i in range(_CANDIDATES)]


def serve(address: str | None, ports: list[int], job: str, seconds: float) -> tuple[TCPStore, int]:
    """Hold a store in this process, at the first of the ports that is free; return it and the port.

    Args:
        address: address at which to listen; ``None`` for all of this node's.
        ports: ports to try; 0 is any.
        job: name by which others know the store.
        seconds: time limit of an operation on the store.

    Raises:
        ArrivalError: none of the ports is free.
    """
    problem: OSError | None = None
    for port in ports:
        try:
            listener = _listener(address, port)
        except OSError as error:
            problem = error
            continue
        port = listener.getsockname()[1]
        listen = partial(
            TCPStore,
            address or _LOOPBACK,
            port,
            is_master=True,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        store = listen() if SERVERS_TAKE_SOCKETS else listen(use_libuv=False)
        store.set("job", job)
        return store, port
    assert problem is not None
    raise ArrivalError(
        f"{socket.gethostname()} cannot listen at port {', '.join(map(str, ports))}: {problem.strerror}. "
        "Another program, or an earlier run that has not ended, uses it (`ss -ltnp` names the program). Choose "
        "another port."
    )


def connect(address: str, ports: list[int], job: str, seconds: float, who: str) -> tuple[TCPStore, int]:
    """Reach a store that another process serves, which may come yet; return it and its port.

    Args:
        address: host of the other process.
        ports: ports at which the store may be.
        job: name that the store must have.
        seconds: time limit for it to be there.
        who: this process in words.

    Raises:
        ArrivalError: nobody listens there within the time limit, or another program does.
    """
    start, noticed, patience = time.monotonic(), False, notice_seconds(os.environ, NOTICE_SECONDS)

    def notice(why: str) -> None:
        nonlocal noticed
        waited = time.monotonic() - start
        if patience and waited > min(patience, seconds) and not noticed:
            noticed = True
            print_notice(f"{who} on {socket.gethostname()} waits for rank 0 at {address} for {waited:.0f} s ({why})")

    strangers: list[int] = []
    hung_up: set[int] = set()
    while True:
        left = seconds - (time.monotonic() - start)
        numeric, port = connectivity.reach(address, [p for p in ports if p not in strangers] or ports, left, notice)
        asked = time.monotonic()
        store = _round_trip(numeric, port, job, seconds)
        if store is not None:
            return store, port
        # The store of an earlier group, which rank 0 has closed meanwhile; it may hold the next one's already.
        first_time = time.monotonic() - asked < _ROUND_TRIP_SECONDS and port not in hung_up
        if first_time or not connectivity.answers(numeric, port):
            hung_up.add(port)
            continue
        strangers.append(port)
        if time.monotonic() - start > seconds or len(ports) == 1:
            raise ArrivalError(
                f"{who} on {socket.gethostname()}: a program listens at {address} port {port}, but it is not "
                f"rank 0 of this run (it hung up, or did not answer within {_ROUND_TRIP_SECONDS:g} s). Choose another "
                "MASTER_PORT."
            )


def _round_trip(address: str, port: int, job: str, seconds: float) -> TCPStore | None:
    """Return the store at a port; ``None`` where it is not the store of the job."""

    def ask() -> TCPStore | None:
        limit = timedelta(seconds=min(_ROUND_TRIP_SECONDS, seconds))
        store = TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
        if store.get("job").decode() != job:
            return None
        store.set_timeout(timedelta(seconds=seconds))
        return store

    return run_within(ask, _ROUND_TRIP_SECONDS)


def _tcp_store(placement: Placement, seconds: float) -> Store:
    """Serve the store on rank 0, reach it on the others; a launcher of ours serves it for all."""
    job = placement.job or (f"{placement.source} {_starter()}" if placement.master_port is None else GIVEN)
    ports = ports_of(job) if placement.master_port is None else [placement.master_port]
    if placement.rank == 0 and distwrap_environment.STORE not in os.environ:
        return serve(_LOOPBACK if placement.nnodes == 1 else None, ports, job, seconds)[0]
    return connect(_address(placement), ports, job, seconds, f"rank {placement.rank}")[0]


def _address(placement: Placement) -> str:
    return _LOOPBACK if placement.nnodes == 1 else str(placement.master_addr)


def _listener(address: str | None, port: int) -> socket.socket:
    """Listen at a port. Of two processes that ask at the same instant Linux now and then refuses both: ask again."""
    for _ in range(2):
        try:
            return _listen(address, port)
        except OSError:
            gc.collect()  # a wrapped model of an earlier group that nobody holds may hold its store
            time.sleep(secrets.SystemRandom().uniform(0.01, 0.04))
    return _listen(address, port)


def _listen(address: str | None, port: int) -> socket.socket:
    if address is None and socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=2048)
    return socket.create_server((address or "0.0.0.0", port), backlog=2048)


def _starter() -> str:
    """Return the number and birth of the process that started all ranks of this node."""
    pid = os.getppid()
    with suppress(OSError):
        while pid > 0:
            name, fields = process_status(pid)
            if any(launcher in name for launcher in _MPI_LAUNCHERS):
                return f"{pid} {fields[19]}"
            pid = int(fields[1])
    return str(os.getppid())


@cache
def _opened(path: str) -> str:
    """Hold the launching process's file open ourselves, and return the path to it.

    torch opens the path again at each access, the last one being when the store is deleted, whenever that is; the
    number in the launching process may lead to another file by then.
    """
    return f"/proc/self/fd/{os.open(path, os.O_RDWR)}" if path.startswith("/proc/") else path
