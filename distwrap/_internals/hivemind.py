"""Private names of hivemind.

The function says which name it relies on, and what happens without it; it was seen in version 1.1.12.
"""

from typing import Any


def put_sockets_in(prefix: str) -> str:
    """Let hivemind's processes make their sockets under a path prefix, as ``"/unix/tmp/mine-"``.

    Relies on ``hivemind.p2p:P2P()._UNIX_SOCKET_PREFIX``.
    Without it: sockets are in /tmp, and those of a killed rank stay there.

    Returns:
        The previous prefix.
    """
    from hivemind.p2p import P2P

    kind: Any = P2P
    before = str(getattr(kind, "_UNIX_SOCKET_PREFIX", prefix))
    kind._UNIX_SOCKET_PREFIX = prefix
    return before
