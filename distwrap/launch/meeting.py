"""The store where the ranks of one machine meet: held by the caller, on a loopback port that nobody had to pick."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

ADDRESS = "127.0.0.1"


@contextmanager
def store() -> Iterator[int]:
    """Hold a store open, and yield its port.

    The socket is bound and listening before anybody learns its number, so no other process can take it in between;
    it listens on loopback alone.
    """
    listener = socket.socket()
    listener.bind((ADDRESS, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    held = TCPStore(
        ADDRESS,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),
    )
    try:
        yield port
    finally:
        del held
