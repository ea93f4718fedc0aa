"""Before the group is built: see that each machine reaches the next through the chosen interface.

The meeting place may answer while the addresses that gloo and NCCL are about to use do not: another interface, or a
firewall that lets one port through. torch would wait for its whole time limit then, and not say which machine.
"""

from __future__ import annotations

import os
import socket
import time

from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap.environments import Placement
from distwrap.errors import ArrivalError
from distwrap.network import interfaces

SECONDS = interfaces.PREFLIGHT_SECONDS
_SLACK_SECONDS = 5.0  # for another machine to have begun later


def reach_each_other(store: Store, placement: Placement, interface: str) -> None:
    """Let the first rank of each machine exchange a byte with that of the next one; all ranks learn how it went.

    Raises:
        ArrivalError: names the machines, the interface and the addresses.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", interface).split(",")[0]
    if placement.local_rank == 0:
        store.set(f"probe/{placement.node_rank}", _exchange(store, placement, name))
    keys = [f"probe/{node}" for node in range(placement.nnodes)]
    deadline = time.monotonic() + SECONDS + _SLACK_SECONDS
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(0.005)
    told = [store.get(key).decode() if store.check([key]) else "a machine fell silent" for key in keys]
    problems = [text for text in told if text]
    if problems:
        raise ArrivalError(f"{'; '.join(problems)}. {interfaces.ADVICE}")


def _exchange(store: Store, placement: Placement, interface: str) -> str:
    """Connect to the next machine, be connected to by the one before; return the problem in words."""
    host, node = socket.gethostname(), placement.node_rank
    addresses = sorted(interfaces.interfaces().get(interface, []), key=lambda address: ":" in address)
    if not addresses:
        return f"node {node} ({host}) has no address on interface {interface}"
    own = addresses[0]
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    with socket.create_server((own, 0), family=family) as listener:
        listener.settimeout(SECONDS)
        store.set(f"probe at/{node}", f"{own} {listener.getsockname()[1]} {host}")
        other = (node + 1) % placement.nnodes
        address, port, their_host = store.get(f"probe at/{other}").decode().split()
        way = f"node {node} ({host}) to node {other} ({their_host}) through {interface}: {own} to {address} port {port}"
        try:
            with socket.create_connection((address, int(port)), SECONDS, source_address=(own, 0)) as outgoing:
                try:
                    incoming = listener.accept()[0]
                except TimeoutError:
                    return ""  # the machine before us says why it did not come
                with incoming:
                    incoming.sendall(b"!")
                    if outgoing.recv(1) == b"!":
                        return ""
                return f"{way}: the connection was closed"
        except TimeoutError:
            return f"{way}: no answer in {SECONDS:g} s"
        except OSError as error:
            return f"{way}: {error.strerror or error}"
