"""Hosts with networks of their own on this machine: network namespaces on a bridge, each with a name.

Each host has eth0 on the bridge, and eth1, which leads nowhere.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SPACE = re.compile(r"dw(\d+)-")


def missing() -> str:
    """Say what this machine lacks for it; empty where nothing does."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "iproute2 and util-linux are not installed"
    name = f"dwtry{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "this machine allows no network namespaces"
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return ""


class Hosts:
    """Running hosts.

    Attributes:
        names: theirs.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.bridge = f"dwbr{os.getpid()}"
        self.subnet = _free_subnet()

    def address(self, name: str) -> str:
        """A host's address on the bridge."""
        return f"{self.subnet}.{self.names.index(name) + 1}"

    @property
    def nobody(self) -> str:
        """An address on the bridge that no host has."""
        return f"{self.subnet}.77"

    def start(self) -> None:
        """Make the bridge and the hosts."""
        _ip("link", "add", self.bridge, "type", "bridge")
        _ip("link", "set", self.bridge, "up")
        # The bridge has an address, for launchers that start ranks on the hosts from outside.
        _ip("addr", "add", f"{self.subnet}.254/24", "dev", self.bridge)
        for i, name in enumerate(self.names):
            space, veth = self.space(name), f"dwv{os.getpid()}-{i}"
            folder = Path("/etc/netns", space)
            folder.mkdir(parents=True)
            lines = ["127.0.0.1 localhost", *(f"{self.address(each)} {each}" for each in self.names)]
            (folder / "hosts").write_text("\n".join(lines) + "\n")
            _ip("netns", "add", space)
            _ip("link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", veth, "master", self.bridge, "up")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "add", "eth1", "type", "veth", "peer", "name", "nowhere")
            _ip("-n", space, "link", "set", "nowhere", "up")
            _ip("-n", space, "addr", "add", f"192.168.{200 + i}.1/24", "dev", "eth1")
            _ip("-n", space, "link", "set", "eth1", "up")

    def stop(self) -> None:
        """Remove them."""
        _remove([self.space(name) for name in self.names], os.getpid())
        with suppress(OSError):
            Path("/etc/netns").rmdir()

    def space(self, name: str) -> str:
        """The namespace's name."""
        return f"dw{os.getpid()}-{name}"

    def command(self, name: str, *command: str) -> list[str]:
        """What runs a command on a host."""
        inside = 'hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", self.space(name), "unshare", "--uts", "sh", "-c", inside, name, *command]

    def kill_all_on(self, name: str) -> None:
        """Take a host away: all its processes at once."""
        found = subprocess.run(["ip", "netns", "pids", self.space(name)], capture_output=True, text=True, check=True)
        for pid in found.stdout.split():
            os.kill(int(pid), signal.SIGKILL)

    def set_link(self, name: str, state: str) -> None:
        """Pull a host's cable, ``"down"``, or put it in again, ``"up"``."""
        _ip("link", "set", f"dwv{os.getpid()}-{self.names.index(name)}", state)

    def remote_shell(self, folder: Path) -> Path:
        """Write a program that stands in for ssh: ``program [-options] host command…``."""
        cases = "\n".join(
            f"  {name}|{self.address(name)}) space={self.space(name)} host={name};;" for name in self.names
        )
        path = folder / "remote_shell"
        options = 'while [ "${1#-}" != "$1" ]; do shift; done'
        inside = 'exec ip netns exec $space unshare --uts sh -c "hostname $host; $*"'
        path.write_text(f"#!/bin/sh\n{options}\nhost=$1; shift\ncase $host in\n{cases}\nesac\n{inside}\n")
        path.chmod(0o755)
        return path


def _free_subnet() -> str:
    """Find a network that no interface here is in: two bridges in one would answer each other's questions."""
    taken = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True, timeout=20).stdout
    return next(f"10.77.{i}" for i in range(3, 255) if f" 10.77.{i}." not in taken)


def _remove_what_the_killed_left() -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=20).stdout
    spaces: dict[int, list[str]] = {}
    for name in listed.split():
        if found := _SPACE.match(name):
            spaces.setdefault(int(found[1]), []).append(name)
    for pid, names in spaces.items():
        if not Path("/proc", str(pid)).exists():
            _remove(names, pid)


def _remove(spaces: list[str], pid: int) -> None:
    for i, space in enumerate(spaces):
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", f"dwv{pid}-{i}")
        with suppress(subprocess.CalledProcessError):
            _ip("netns", "del", space)
        shutil.rmtree(Path("/etc/netns", space), ignore_errors=True)
    with suppress(subprocess.CalledProcessError):
        _ip("link", "del", f"dwbr{pid}")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@contextmanager
def hosts(*names: str) -> Iterator[Hosts]:
    """Make hosts, and remove them."""
    _remove_what_the_killed_left()
    made = Hosts(names)
    try:
        made.start()
        yield made
    finally:
        made.stop()
