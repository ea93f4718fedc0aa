"""Where ranks meet when nobody gave a port, or somebody else sits on it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from distwrap.environments import Placement
from distwrap.errors import ArrivalError
from distwrap.network import stores
from distwrap.versions import SERVERS_TAKE_SOCKETS
from tests.clusters.running import environment
from tests.interpreters import run_python
from tests.limits import SOON


def test_a_store_is_found_among_strangers() -> None:
    """Where a stranger has the first port, rank 0 takes the next, and the others find it there."""
    ports = stores.ports_of("a job of this test")
    with socket.create_server(("127.0.0.1", ports[0])):
        store, port = stores.serve("127.0.0.1", ports, "mine", 10)
        assert port == ports[1]
        client, found = stores.connect("127.0.0.1", ports[1:], "mine", 10, "rank 1")
        client.set("a", "b")
        assert (store.get("a"), found) == (b"b", port)


def test_another_jobs_store_is_passed_over() -> None:
    """A store of another job at the first port is not taken for ours."""
    other, first = stores.serve("127.0.0.1", [0], "other", 10)
    mine, second = stores.serve("127.0.0.1", [0], "mine", 10)
    assert stores.connect("127.0.0.1", [first, second], "mine", 10, "rank 1")[1] == second
    del other, mine


def test_a_taken_port_is_told() -> None:
    """Where the only port is taken, the error says which, and how to see by whom."""
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(ArrivalError, match="already in use"):
        stores.serve("127.0.0.1", [listener.getsockname()[1]], "mine", 10)


def test_a_port_that_is_refused_for_an_instant_is_asked_for_again() -> None:
    """Two callers that start together may both be refused, because each is about to listen."""
    holder = socket.socket()
    holder.bind(("0.0.0.0", 0))
    port = holder.getsockname()[1]
    timer = threading.Timer(0.005, holder.close)
    timer.start()
    store, found = stores.serve(None, [port], "mine", 10)
    timer.join()
    assert found == port
    del store


def found_beside(be_rank_zero: Callable[[], None], port: int) -> int:
    """Return at which port rank 1 finds the store, while a thread does what rank 0 does."""
    thread = threading.Thread(target=be_rank_zero)
    thread.start()
    try:
        return stores.connect("127.0.0.1", [port], "mine", 10, "rank 1")[1]
    finally:
        thread.join()


@pytest.mark.skipif(not SERVERS_TAKE_SOCKETS, reason="torch cannot listen at a socket that it is given")
def test_a_store_that_closes_as_the_next_one_opens_is_no_stranger() -> None:
    """The connection to an earlier group's store ends, and the port answers all the time."""
    listener = socket.create_server(("127.0.0.1", 0))
    port, held = listener.getsockname()[1], []

    def serve(descriptor: int) -> None:
        held.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor))

    def be_rank_zero() -> None:
        time.sleep(0.5)
        held.clear()
        serve(listener.detach())
        held[0].set("job", "mine")

    serve(os.dup(listener.fileno()))  # it has no name yet, for which rank 1 waits
    assert found_beside(be_rank_zero, port) == port


@pytest.mark.slow("waits for a limit to pass")
def test_a_store_that_closes_just_now_is_no_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may close an earlier group's store while the others come for the next, and take its time to come."""
    monkeypatch.setattr(stores, "_ROUND_TRIP_SECONDS", 1.0)
    earlier, held = socket.create_server(("127.0.0.1", 0)), []
    port = earlier.getsockname()[1]

    def be_rank_zero() -> None:
        earlier.accept()[0].close()
        earlier.close()
        time.sleep(2.5)
        held.append(stores.serve("127.0.0.1", [port], "mine", 10))

    assert found_beside(be_rank_zero, port) == port


def test_ports_follow_from_the_job() -> None:
    """The same job gives the same ports on every machine, in a range that systems do not give away."""
    jobs = [f"slurm {job}.{step}" for job in range(100, 200) for step in range(3)]
    first = [stores.ports_of(job)[0] for job in jobs]
    assert first == [stores.ports_of(job)[0] for job in jobs]
    assert all(20_000 <= port < 30_000 for port in first)
    assert len(set(first)) > 0.95 * len(first)


@pytest.mark.slow("waits for a limit to pass")
def test_a_stranger_that_never_answers() -> None:
    """Who listens and does not speak our language is told within the limit, though torch itself would wait."""
    # In a process of its own: the thread that asks stays until the stranger is gone.
    program = (
        "import socket; from distwrap.network import stores; stores._ROUND_TRIP_SECONDS = 1.0\n"
        "with socket.create_server(('127.0.0.1', 0)) as s:\n"
        "    try: stores.connect('127.0.0.1', [s.getsockname()[1]], 'mine', 5, 'rank 1')\n"
        "    except Exception as error: print(error, flush=True)\n"
        "    import os; os._exit(0)\n"
    )
    start = time.monotonic()
    done = run_python("-c", program, env=environment(), timeout=60)
    assert "a program listens at 127.0.0.1 port" in done.stdout
    assert "it is not rank 0 of this run" in done.stdout
    assert time.monotonic() - start < SOON


def test_one_machine_listens_on_loopback_alone() -> None:
    """The store of ranks on one machine cannot be reached from another."""
    place = Placement(0, 2, 0, 2, 0, 1, "some-name", None, "open_mpi", "open_mpi 1")
    store = stores.open_store(place, 10)
    ports = stores.ports_of(place.job)
    found = [address for address, port in listening() if port in ports]
    assert found
    assert set(found) == {"0100007F"}  # 127.0.0.1, as the kernel writes it
    del store


def listening() -> list[tuple[str, int]]:
    """Every address and port at which somebody on this machine listens."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                address, _, port = fields[1].partition(":")
                found.append((address, int(port, 16)))
    return found
