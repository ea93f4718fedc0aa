"""A node of Ray's that the command ``ray start`` starts, and whose processes alone end with it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from tests.limits import SOON
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
WORKER_PORTS = 20_000  # below which Ray takes any for its workers


class RealNode:
    """A node with a folder and a session of its own; ``ray stop`` would end the nodes of other people too.

    Args:
        address: of the head; without it the node is a head, at a port of its own.
        resources: that it has, by name, beside two CPUs.

    Attributes:
        address: of the head.
        folder: of its sockets, whose paths have to be short.
    """

    def __init__(self, address: str | None = None, *, resources: dict[str, int]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        port = next(port for port in iter(free_port, None) if port > WORKER_PORTS)
        self.address = address or f"{ray.util.get_node_ip_address()}:{port}"
        which = ["--address", address] if address else ["--head", "--port", str(port), "--include-dashboard=false"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *which, "--block", "--disable-usage-stats"]
        command += ["--temp-dir", str(self.folder), "--num-cpus", "2"]
        command += ["--dashboard-agent-listen-port", "0", "--object-store-memory", str(100 * 2**20)]
        with (self.folder / "said").open("w") as said:
            self._process = subprocess.Popen(
                [*command, "--resources", json.dumps(resources)],
                env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"},  # whatever ~/.ray has
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    @property
    def has_ended(self) -> bool:
        """Whether the command has ended by itself, as one that could not start the node."""
        return self._process.poll() is not None

    @property
    def said(self) -> str:
        """What the command has printed."""
        return (self.folder / "said").read_text()

    def close(self) -> None:
        """End the node, and what it leaves of its session; nothing else."""
        self._process.terminate()
        try:
            self._process.wait(SOON)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in self._left():
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + SOON
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, left
        shutil.rmtree(self.folder, ignore_errors=True)

    def _left(self) -> list[int]:
        """Return the living processes of the command's session, and those whose command line has the folder."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                state, _, _, session = (place / "stat").read_text().rpartition(")")[2].split()[:4]
                words = (place / "cmdline").read_bytes()
            except OSError:
                continue
            is_ours = int(session) == self._process.pid or os.fsencode(self.folder) in words
            if is_ours and state != "Z" and int(place.name) != self._process.pid:
                found.append(int(place.name))
        return found


def wait_for_nodes(head: RealNode, count: int) -> Any:
    """Wait until as many nodes have come to a head, and return what each has, seen by a driver of its own."""
    deadline = time.monotonic() + SOON
    while True:
        assert not head.has_ended, head.said
        try:
            with ray.init(address=head.address, logging_level="ERROR", log_to_driver=False):
                nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        except (ConnectionError, RuntimeError):
            nodes = []
        if len(nodes) == count:
            return nodes
        assert time.monotonic() < deadline, (nodes, head.said)
        time.sleep(0.5)
