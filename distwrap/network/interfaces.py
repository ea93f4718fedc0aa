"""The network between machines: which interface leads to the others, and whether somebody answers there."""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from distwrap.errors import ArrivalError, PlacementError

PREFLIGHT_SECONDS = 15.0  # for a name to resolve and its machine to answer
_CONNECT_SECONDS = 3.0  # for one try at one address

ADVICE = (
    "Check that MASTER_ADDR names the machine of rank 0 as the others see it, and that a firewall lets its port "
    "through. Where machines have several networks, choose one with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (see "
    "`ip addr`). For NCCL, NCCL_DEBUG=INFO shows what it tries, and NCCL_IB_DISABLE=1 rules InfiniBand out."
)

_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def reach(
    host: str, ports: Sequence[int], seconds: float, on_wait: Callable[[str], None] | None = None
) -> tuple[str, int]:
    """Wait until somebody listens at one of the ports, and return the numeric address and the port that answer.

    A machine that refuses the connection is there, and its rank 0 may come yet; one that does not answer is not.

    Args:
        host: a name or an address.
        ports: those where rank 0 may listen.
        seconds: for somebody to listen.
        on_wait: told now and then why we still wait.

    Raises:
        ArrivalError: after `PREFLIGHT_SECONDS` where the name does not resolve or no machine answers; after `seconds`
            where nobody listens. Names the addresses tried.
    """
    start = time.monotonic()
    while True:
        refused, tried = False, []
        for address in _resolve(host, start, seconds):
            for port in ports:
                problem = _connect(address, port)
                if problem is None:
                    return address, port
                tried.append(f"{address} port {port}: {problem}")
                refused = refused or problem == "refused"
        waited = time.monotonic() - start
        what = "; ".join(dict.fromkeys(tried))
        if waited > (seconds if refused else min(seconds, PREFLIGHT_SECONDS)):
            missing = "the machine is there, but nobody listens" if refused else "no machine answers"
            here = ", ".join(f"{name} {' '.join(found)}" for name, found in interfaces().items())
            raise ArrivalError(
                f"{socket.gethostname()} found no meeting place at {host} within {waited:.0f} s: {missing} ({what}). "
                f"This machine's interfaces: {here}. Is rank 0 running? {ADVICE}"
            )
        if on_wait is not None:
            on_wait(what)
        time.sleep(min(0.25, 0.02 + waited / 10))


def _resolve(host: str, start: float, seconds: float) -> list[str]:
    """Look a name up, IPv4 first: many machines have an IPv6 address that leads nowhere."""
    while True:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            break
        except OSError as error:
            waited = time.monotonic() - start
            if waited > min(seconds, PREFLIGHT_SECONDS):
                raise ArrivalError(
                    f"{socket.gethostname()} cannot resolve the name {host!r} of the meeting place (tried for "
                    f"{waited:.0f} s: {error.strerror}). Use the machine's IP address, or a name that all machines "
                    f"know (try `getent hosts {host}`)."
                ) from None
            time.sleep(0.5)
    found.sort(key=lambda item: item[0] != socket.AF_INET)
    return list(dict.fromkeys(str(item[4][0]) for item in found))


def _connect(address: str, port: int) -> str | None:
    """Try a connection; return the problem in words."""
    try:
        socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return f"no answer in {_CONNECT_SECONDS:g} s"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "") + f" {error.strerror}"
    return None


def answers(host: str, port: int) -> bool:
    """Say whether somebody listens there now."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_connect(str(item[4][0]), port) is None for item in found)


def source_address(host: str) -> str | None:
    """Say from which of our addresses packets to a host would go; nothing is sent."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as udp:
            udp.connect(address)
            return str(udp.getsockname()[0])
    except OSError:
        return None


def is_loopback(address: str) -> bool:
    """Say whether an address stays on this machine."""
    return address.startswith("127.") or address == "::1"


def is_local(host: str) -> bool:
    """Say whether a host's name or address is one of this machine's own."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    own = {address for addresses in interfaces().values() for address in addresses}
    return any(str(item[4][0]) in own or is_loopback(str(item[4][0])) for item in found)


def interface_of(address: str) -> str | None:
    """Name the interface that has an address."""
    return next((name for name, addresses in interfaces().items() if address in addresses), None)


class _SockAddr(ctypes.Structure):
    _fields_ = (
        [("length", ctypes.c_uint8), ("family", ctypes.c_uint8)]
        if sys.platform == "darwin"
        else [("family", ctypes.c_uint16)]
    ) + [("data", ctypes.c_uint8 * 26)]


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SockAddr)),
]

_UP = 1


def interfaces() -> dict[str, list[str]]:
    """List the interfaces that are up, with their addresses. See getifaddrs(3)."""
    libc = ctypes.CDLL(None)
    head = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(head)) != 0:
        return {}
    found: dict[str, list[str]] = {}
    try:
        entry = head
        while entry:
            item = entry.contents
            if item.flags & _UP and item.address:
                at = item.address.contents
                data = bytes(at.data)
                if at.family == socket.AF_INET:
                    found.setdefault(item.name.decode(), []).append(socket.inet_ntop(socket.AF_INET, data[2:6]))
                elif at.family == socket.AF_INET6:
                    found.setdefault(item.name.decode(), []).append(socket.inet_ntop(socket.AF_INET6, data[6:22]))
            entry = item.next
    finally:
        libc.freeifaddrs(head)
    return found


def check_users_choice(env: Mapping[str, str], backend: str) -> None:
    """Refuse an interface that the user chose and that is not here.

    Raises:
        PlacementError: names the interfaces that there are.
    """
    here = interfaces()
    listed = ", ".join(f"{name} ({' '.join(addresses)})" for name, addresses in here.items())
    for variable in _VARIABLES:
        value = env.get(variable, "")
        if not value or variable[:4].lower() not in backend:
            continue
        gloo = variable.startswith("GLOO")
        if gloo and value[0] in "^=":
            raise PlacementError(
                f"{variable}={value} on {socket.gethostname()}: '{value[0]}' is NCCL's way to write it; gloo takes "
                f"interface names alone. There are: {listed}."
            )
        exact = gloo or value.startswith("=")
        names = [] if value.startswith("^") else value.lstrip("=").split(",")
        for name in names:
            if not any(each == name if exact else each.startswith(name.partition(":")[0]) for each in here):
                raise PlacementError(
                    f"{variable}={value}: {socket.gethostname()} has no interface {name} that is up. There are: "
                    f"{listed}. Unset {variable}, and distwrap takes the one that leads to rank 0."
                )


@contextmanager
def through(interface: str, *variables: str) -> Iterator[None]:
    """Let gloo and NCCL, or those of the variables given, use an interface, unless the user chose one."""
    ours = [name for name in variables or _VARIABLES if name not in os.environ]
    for name in ours:
        os.environ[name] = f"={interface}" if name.startswith("NCCL") else interface
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
