"""Private names of torchft.

Every function says which names it relies on, and what happens without them; all were seen in versions 2026.10.
"""

from collections.abc import Callable
from typing import Any


def on_loopback(make: Callable[..., Any], **arguments: Any) -> Any:
    """Make a manager whose server listens on loopback alone; its own listens on all addresses, and obeys anybody.

    Relies on ``torchft.manager:ManagerServer``.
    Without it: the server listens on all addresses.
    """
    from torchft import manager

    module: Any = manager
    server = getattr(module, "ManagerServer", None)
    if server is None:
        return make(**arguments)
    module.ManagerServer = lambda **given: server(**{**given, "bind": "127.0.0.1:0"})
    try:
        return make(**arguments)
    finally:
        module.ManagerServer = server
