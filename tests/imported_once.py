"""What the fork server imports in tests besides its own: each of its ranks would import it anew, for seconds."""

from __future__ import annotations

from pathlib import Path

from distwrap.launch import forkserver

_STARTED = str(Path(__file__).with_name("started.py"))


def import_in_server(*modules: str) -> None:
    """Let the fork servers that this process starts from now on import modules before they serve."""
    assert "prepare()" in forkserver._SERVER
    words = f"prepare(); import {', '.join(modules)}; import runpy; runpy.run_path({_STARTED!r})"
    forkserver._SERVER = forkserver._SERVER.replace("prepare()", words)
