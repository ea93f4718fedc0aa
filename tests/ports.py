"""A port for a test."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Find one that nobody has, and that no connection going out gets meanwhile: systems give those higher ones."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
