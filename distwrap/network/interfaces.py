"""Network interfaces of this node: their addresses, and which of them leads to the other nodes."""

import ctypes
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager

from distwrap.environments.variables import variables_set
from distwrap.errors import PlacementError

ADVICE = (
    "Check that MASTER_ADDR names the node of rank 0 as the others see it, and that a firewall lets its port "
    "through. Where nodes have several networks, choose one with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (see "
    "`ip addr`). For NCCL, NCCL_DEBUG=INFO shows what it tries, and NCCL_IB_DISABLE=1 rules InfiniBand out."
)
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


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
_ADDRESS_BYTES = {socket.AF_INET: slice(2, 6), socket.AF_INET6: slice(6, 22)}


def interfaces() -> dict[str, list[str]]:
    """Return the interfaces that are up, with their addresses. See getifaddrs(3)."""
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
                if at.family in _ADDRESS_BYTES:
                    address = socket.inet_ntop(at.family, bytes(at.data)[_ADDRESS_BYTES[at.family]])
                    found.setdefault(item.name.decode(), []).append(address)
            entry = item.next
    finally:
        libc.freeifaddrs(head)
    return found


def addresses_of(host: str) -> list[str]:
    """Look a host up, and return its addresses, IPv4 first: many nodes have an IPv6 address that leads nowhere.

    Raises:
        OSError: the name does not resolve.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda item: item[0] != socket.AF_INET)
    return list(dict.fromkeys(str(item[4][0]) for item in found))


def source_address(host: str) -> str | None:
    """Return the address of this node from which packets to a host would go; nothing is sent."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as udp:
            udp.connect(address)
            return str(udp.getsockname()[0])
    except OSError:
        return None


def is_loopback(address: str) -> bool:
    """Return whether an address stays on this node."""
    return address.startswith("127.") or address == "::1"


def is_local(host: str) -> bool:
    """Return whether a host's name or address is one of this node's own."""
    try:
        found = addresses_of(host)
    except OSError:
        return False
    return any(is_loopback(address) or interface_of(address) is not None for address in found)


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address."""
    return next((name for name, addresses in interfaces().items() if address in addresses), None)


def check_users_choice(env: Mapping[str, str], backend: str) -> None:
    """Raise an error if the user chose an interface that is not here.

    Raises:
        PlacementError: lists the interfaces that there are.
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
                f"{variable}={value} on {socket.gethostname()}: NCCL understands '{value[0]}', but gloo takes "
                f"names of interfaces only. There are: {listed}."
            )
        exact = gloo or value.startswith("=")
        names = [] if value.startswith("^") else value.lstrip("=").split(",")
        for name in names:
            if not any(each == name if exact else each.startswith(name.partition(":")[0]) for each in here):
                raise PlacementError(
                    f"{variable}={value}: {socket.gethostname()} has no interface {name} that is up. There "
                    f"are: {listed}. Unset {variable}, and distwrap takes the interface that leads to rank 0."
                )


def through(interface: str, *variables: str) -> AbstractContextManager[None]:
    """Let gloo and NCCL, or those of the variables given, use an interface unless the user chose one."""
    unset = [name for name in variables or _VARIABLES if name not in os.environ]
    return variables_set({name: f"={interface}" if name.startswith("NCCL") else interface for name in unset})
