"""A detector of another package's launcher."""

from __future__ import annotations

from collections.abc import Mapping

from distwrap.environments.base import Node, Placement


def detect(env: Mapping[str, str], /) -> Placement | Node | str:
    """Read the variables of a launcher that numbers its processes by SEAT."""
    if "SEAT" not in env:
        return "no SEAT"
    seat, seats = int(env["SEAT"]), int(env["SEATS"])
    host, port = env["TABLE"].split(":")
    return Placement(seat, seats, seat, seats, master_addr=host, master_port=int(port), source="seats")
