"""What the fork server imports in tests besides its own: each of its ranks would import it anew, for seconds."""

from __future__ import annotations

from distwrap.launch import forkserver


def import_in_server(*modules: str) -> None:
    """Let the fork servers that this process starts from now on import modules before they serve."""
    forkserver._SERVER = forkserver._SERVER.replace("prepare()", f"prepare(); import {', '.join(modules)}")
