"""The fork server has hivemind, which each rank would import anew: it takes a core more than three seconds."""

from __future__ import annotations

from distwrap.launch import forkserver as server

server._SERVER = server._SERVER.replace("prepare()", "prepare(); import hivemind")
