"""Interfaces, addresses and the way to another machine, as far as one machine shows them."""

from __future__ import annotations

import socket
import time

import pytest

from distwrap.errors import ArrivalError, PlacementError
from distwrap.network import connectivity, interfaces
from tests.limits import SOON
from tests.ports import free_port


@pytest.fixture
def listener() -> socket.socket:
    """Somebody who listens and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made  # type: ignore[misc]


def test_loopback_is_an_interface() -> None:
    """This machine's loopback interface has its address, and is found by it."""
    name = interfaces.interface_of("127.0.0.1")
    assert name is not None
    assert "127.0.0.1" in interfaces.interfaces()[name]
    assert interfaces.source_address("127.0.0.1") == "127.0.0.1"


def test_ipv4_is_tried_first() -> None:
    """A name with both kinds of address leads to the IPv4 one, since many IPv6 addresses lead nowhere."""
    found = connectivity._resolve("localhost", time.monotonic(), 5)
    assert found[0] == "127.0.0.1"


def test_own_addresses_are_local() -> None:
    """Every address of an interface is local, and one of a documentation net is not."""
    assert interfaces.is_local("localhost")
    for addresses in interfaces.interfaces().values():
        assert all(interfaces.is_local(address) for address in addresses if not address.startswith("fe80"))
    assert not interfaces.is_local("203.0.113.7")
    assert not interfaces.is_local("no-such-host.invalid")


def test_who_listens_is_reached(listener: socket.socket) -> None:
    """The first of several ports at which somebody listens is returned, with a numeric address."""
    port = listener.getsockname()[1]
    assert connectivity.reach("localhost", [free_port(), port], 5) == ("127.0.0.1", port)
    assert connectivity.answers("127.0.0.1", port)
    assert not connectivity.answers("127.0.0.1", free_port())
    assert not connectivity.answers("no-such-host.invalid", port)


def test_who_comes_later_is_waited_for() -> None:
    """A refused connection is tried again until somebody listens."""
    port, told = free_port(), []

    def comes_later(why: str) -> None:
        told.append(why)
        if len(told) == 2:
            servers.append(socket.create_server(("127.0.0.1", port)))

    servers: list[socket.socket] = []
    try:
        assert connectivity.reach("127.0.0.1", [port], 10, comes_later)[1] == port
    finally:
        for server in servers:
            server.close()
    assert told[0] == f"127.0.0.1 port {port}: refused"


def test_nobody_listens() -> None:
    """After the limit the error says that the node is there, where it was tried, and this machine's addresses."""
    port, start = free_port(), time.monotonic()
    with pytest.raises(ArrivalError, match=f"port {port}: refused.*lo 127.0.0.1"):
        connectivity.reach("127.0.0.1", [port], 0.3)
    assert time.monotonic() - start < SOON


def test_a_name_that_nobody_knows() -> None:
    """A name that does not resolve is an error that says so, within the limit."""
    with pytest.raises(ArrivalError, match="cannot resolve"):
        connectivity.reach("no-such-host.invalid", [1], 0.2)


@pytest.mark.parametrize(
    ("variable", "value", "backend", "message"),
    [
        ("GLOO_SOCKET_IFNAME", "nope0", "gloo", "nope0 .*There are: lo"),
        ("GLOO_SOCKET_IFNAME", "^docker0,lo", "gloo", "NCCL understands"),
        ("GLOO_SOCKET_IFNAME", "lo,nope0", "gloo", r"no interface nope0"),
        ("NCCL_SOCKET_IFNAME", "nope", "nccl", r"no interface nope"),
        ("NCCL_SOCKET_IFNAME", "=l", "nccl", r"no interface l "),
    ],
)
def test_a_wrong_choice_is_refused(variable: str, value: str, backend: str, message: str) -> None:
    """An interface that is not here, or another library's syntax, with those that there are."""
    with pytest.raises(PlacementError, match=message):
        interfaces.check_users_choice({variable: value}, backend)


@pytest.mark.parametrize(
    ("variable", "value", "backend"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", "gloo"),
        ("GLOO_SOCKET_IFNAME", "nope0", "nccl"),
        ("NCCL_SOCKET_IFNAME", "l", "nccl"),
        ("NCCL_SOCKET_IFNAME", "=lo", "nccl"),
        ("NCCL_SOCKET_IFNAME", "^docker0", "nccl"),
        ("NCCL_SOCKET_IFNAME", "nope0", "gloo"),
    ],
)
def test_a_right_choice_is_left_alone(variable: str, value: str, backend: str) -> None:
    """NCCL's prefixes, exact names and exclusions; and what the backend at hand does not read."""
    interfaces.check_users_choice({variable: value}, backend)


def test_the_users_interface_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user has set is not touched, what was not set is gone afterwards."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    import os

    with interfaces.through("eth7"):
        assert (os.environ["NCCL_SOCKET_IFNAME"], os.environ["GLOO_SOCKET_IFNAME"]) == ("ib0", "eth7")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"
