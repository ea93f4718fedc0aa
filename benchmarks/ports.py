"""A port for the ranks of a benchmark."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Return a free port below those that the system gives to outgoing connections, which might take it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
