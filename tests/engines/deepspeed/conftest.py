"""The fork server has DeepSpeed, which each rank would import anew: it takes a core more than three seconds."""

from __future__ import annotations

from distwrap.launch import forkserver as server
from tests.engines.deepspeed import imported

server._SERVER = server._SERVER.replace("prepare()", f"prepare(); import {imported.__name__}")
