"""``launcher="auto"``: the fastest way that is safe here."""

from distwrap.launch import fork_safety
from distwrap.launch.local import LocalLauncher


def fastest() -> LocalLauncher:
    """Return the launcher that forks this process where that is safe, else the one with the fork server."""
    if fork_safety.refusal() is None:
        from distwrap.launch.fork import ForkLauncher

        return ForkLauncher()
    from distwrap.launch.forkserver import ForkServerLauncher

    launcher = ForkServerLauncher()
    launcher.start_method = "spawn"  # multiprocessing's own fork server would stay behind
    return launcher
