"""Connectivity: wait until a program listens on a host, and check that the nodes reach each other."""

import errno
import os
import socket
import time
from collections.abc import Callable, Sequence

from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap.environments import Placement
from distwrap.errors import ArrivalError
from distwrap.network.interfaces import ADVICE, addresses_of, interfaces
from distwrap.network.keys import find, read_all
from distwrap.network.waiting import are_all_counted, count_in

REPLY_SECONDS = 15.0  # for a name to resolve and its node to answer
_CONNECT_SECONDS = 3.0  # for one try at one address
_SLACK_SECONDS = 5.0  # for another node to have begun later


def reach(
    host: str, ports: Sequence[int], seconds: float, on_wait: Callable[[str], None] | None = None
) -> tuple[str, int]:
    """Wait until a program listens at one of the ports; return the numeric address and the port that answer.

    A node that refuses the connection is there, and its rank 0 may come yet; one that does not answer is not.

    Args:
        host: a name or an address.
        ports: those at which rank 0 may listen.
        seconds: time limit for somebody to listen.
        on_wait: called with the reason after each vain try.

    Raises:
        ArrivalError: the name does not resolve or no node answers within `REPLY_SECONDS`, or nobody listens within the
            time limit. Names the addresses tried.
    """
    start = time.monotonic()
    while True:
        tried: dict[str, str | None] = {}
        for address in _resolve(host, start, seconds):
            for port in ports:
                problem = _connect(address, port)
                if problem is None:
                    return address, port
                tried[f"{address} port {port}: {problem}"] = problem
        waited, refused, what = time.monotonic() - start, "refused" in tried.values(), "; ".join(tried)
        if waited > (seconds if refused else min(seconds, REPLY_SECONDS)):
            missing = "the node answers, but no program listens at the port" if refused else "no node answers"
            here = ", ".join(f"{name} {' '.join(found)}" for name, found in interfaces().items())
            raise ArrivalError(
                f"{socket.gethostname()} found no meeting place at {host} within {waited:.0f} s: {missing} ({what}). "
                f"This node's interfaces: {here}. Is rank 0 running? {ADVICE}"
            )
        if on_wait is not None:
            on_wait(what)
        time.sleep(min(0.25, 0.02 + waited / 10))


def answers(host: str, port: int) -> bool:
    """Return whether a program listens at a port now."""
    try:
        return any(_connect(address, port) is None for address in addresses_of(host))
    except OSError:
        return False


def _resolve(host: str, start: float, seconds: float) -> list[str]:
    while True:
        try:
            return addresses_of(host)
        except OSError as error:
            waited = time.monotonic() - start
            if waited > min(seconds, REPLY_SECONDS):
                raise ArrivalError(
                    f"{socket.gethostname()} cannot resolve the name {host!r} of the meeting place (tried for "
                    f"{waited:.0f} s: {error.strerror}). Use the node's IP address, or a name that all nodes know (try "
                    f"`getent hosts {host}`)."
                ) from None
            time.sleep(0.5)


def _connect(address: str, port: int) -> str | None:
    """Try a connection, and return the problem in words."""
    try:
        socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return f"no answer in {_CONNECT_SECONDS:g} s"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "") + f" {error.strerror}"
    return None


def check_nodes_connect(store: Store, placement: Placement, interface: str) -> None:
    """Let the first rank of each node exchange a byte with that of the next one, before the group is built.

    The ranks may meet although the addresses that gloo and NCCL are about to use lead nowhere: another interface, or a
    firewall that lets one port through. torch would wait for its whole time limit then, and not say which node.

    Raises:
        ArrivalError: names the nodes, the interface and the addresses, on all ranks.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", interface).split(",")[0]
    if placement.local_rank == 0:
        store.set(f"probe/{placement.node_rank}", _exchange_byte(store, placement, name))
        count_in(store, "probe", placement.nnodes)
    keys = [f"probe/{node}" for node in range(placement.nnodes)]
    if are_all_counted(store, "probe", placement.world_size, REPLY_SECONDS + _SLACK_SECONDS):
        results = read_all(store, keys)
    else:
        found = [find(store, key) for key in keys]
        results = [b"a node fell silent" if value is None else value for value in found]
    problems = [problem.decode() for problem in results if problem]
    if problems:
        raise ArrivalError(f"{'; '.join(problems)}. {ADVICE}")


def _exchange_byte(store: Store, placement: Placement, interface: str) -> str:
    """Connect to the next node, be connected to by the one before; return the problem in words."""
    host, node = socket.gethostname(), placement.node_rank
    addresses = sorted(interfaces().get(interface, []), key=lambda address: ":" in address)
    if not addresses:
        return f"node {node} ({host}) has no address on interface {interface}"
    own = addresses[0]
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    with socket.create_server((own, 0), family=family) as listener:
        listener.settimeout(REPLY_SECONDS)
        store.set(f"probe at/{node}", f"{own} {listener.getsockname()[1]} {host}")
        other = (node + 1) % placement.nnodes
        address, port, their_host = store.get(f"probe at/{other}").decode().split()
        way = f"node {node} ({host}) to node {other} ({their_host}) through {interface}: {own} to {address} port {port}"
        try:
            with socket.create_connection((address, int(port)), REPLY_SECONDS, source_address=(own, 0)) as outgoing:
                try:
                    incoming = listener.accept()[0]
                except TimeoutError:
                    return ""  # the node before this one says why it did not come
                with incoming:
                    incoming.sendall(b"!")
                    return "" if outgoing.recv(1) == b"!" else f"{way}: the connection was closed"
        except TimeoutError:
            return f"{way}: no answer in {REPLY_SECONDS:g} s"
        except OSError as error:
            return f"{way}: {error.strerror or error}"
