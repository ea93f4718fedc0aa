"""Which machines take part: what the options and the environment say together. Nothing here starts anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from distwrap.environments import Node
from distwrap.errors import OptionError
from distwrap.options import Options

DEFAULT_PORT = 29400  # torch's own for a rendezvous endpoint without a port


@dataclass(frozen=True)
class NodePlan:
    """The machines of a launch.

    Attributes:
        fewest: with how many it starts.
        most: how many may join.
        node_rank: which one this is; ``None`` where they count off as they come.
        host: where they meet; ``None`` on one machine.
        port: the port there.
        max_restarts: how often the ranks are started again after a failure.
        nprocs: how many ranks this one starts.
        elastic: whether torch elastic is to watch the ranks.
    """

    fewest: int = 1
    most: int = 1
    node_rank: int | None = None
    host: str | None = None
    port: int = DEFAULT_PORT
    max_restarts: int = 0
    nprocs: int | Literal["auto"] = "auto"
    elastic: bool = False

    @property
    def several(self) -> bool:
        """Whether there may be more than one."""
        return self.most > 1


def resolve(options: Options, machine: Node | None) -> NodePlan:
    """Bring together what the options say and what the environment says of this machine.

    Raises:
        OptionError: they contradict each other, or half of what several machines need is missing.

    Example:
        >>> resolve(Options().updated({"nnodes": 2, "node_rank": 1, "rdzv_endpoint": "head:1234"}), None).port
        1234
    """
    nnodes, node_rank, endpoint = options.nnodes, options.node_rank, options.rdzv_endpoint
    max_restarts, nprocs = options.max_restarts, options.nprocs
    if machine is not None:
        _agree(machine, "nnodes", nnodes, 1, machine.nnodes)
        _agree(machine, "node_rank", node_rank, None, machine.node_rank)
        nnodes, node_rank = machine.nnodes, machine.node_rank
        endpoint = endpoint or machine.endpoint
        max_restarts = max_restarts or machine.max_restarts or 0
        nprocs = machine.nprocs or nprocs
    fewest, _, most = str(nnodes).partition(":")
    low, high = int(fewest), int(most or fewest)
    host, port = _split(endpoint) if endpoint else (None, DEFAULT_PORT)
    if high > 1 and host is None:
        raise OptionError(
            f"nnodes={nnodes!r} needs rdzv_endpoint='host:port': the name of one of the machines, the same on all of "
            f"them, and a port that is free there (or DISTWRAP_RDZV_ENDPOINT=host:port)."
        )
    if node_rank is not None and not 0 <= node_rank < high:
        how_many = " Say how many there are with nnodes." if high == 1 else f" It must be 0 to {high - 1}."
        raise OptionError(f"node_rank={node_rank}, but there are {high} machine(s).{how_many}")
    elastic = low < high or max_restarts > 0 or options.launcher == "elastic"
    if options.launcher == "script" and (elastic or high > 1):
        raise OptionError(
            "launcher='script' is for one machine and no restarts. Leave launcher at 'auto', or choose 'spawn'."
        )
    return NodePlan(low, high, node_rank, host, port, max_restarts, nprocs, elastic)


def _agree(machine: Node, name: str, given: object, default: object, found: object) -> None:
    if given not in (default, found) and str(given) != str(found):
        raise OptionError(
            f"{name}={given!r}, but {machine.source} says {found!r}: take {name} out of the code, or unset the "
            f"launcher's variables."
        )


def _split(endpoint: str) -> tuple[str, int]:
    """Split ``host:port``, ``host`` or ``[address]:port``.

    Example:
        >>> _split("[fd00::2]:1234")
        ('fd00::2', 1234)
    """
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        host, port = endpoint, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise OptionError(f"rdzv_endpoint={endpoint!r}: it must be 'host:port', as 'node1:29400'.")
    return host, int(port)
