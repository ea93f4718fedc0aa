"""What is to run, with which instructions for each rank, and on which nodes. Nothing here starts anything."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from distwrap.environments import Node, Placement
from distwrap.errors import OptionError
from distwrap.launch.accelerator import Accelerator
from distwrap.launch.settings import Settings
from distwrap.options import Options
from distwrap.protocols import Launcher
from distwrap.registry import launchers
from distwrap.seeding import RandomState

DEFAULT_PORT = 29400  # torch's own for a rendezvous endpoint without a port


@dataclass(frozen=True)
class Task:
    """A function, its arguments, and the options under which the ranks run it.

    Attributes:
        asked: names of the options that the code gives for this call, where no variable overrides them.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: Options
    asked: Set[str] = frozenset()

    @property
    def name(self) -> str:
        """The function's name, for messages."""
        return f"{getattr(self.function, '__qualname__', type(self.function).__qualname__)}()"


@dataclass(frozen=True)
class CallerContext:
    """State of a process in which the caller's function would run as it does in the caller."""

    environ: dict[str, str]
    directory: str
    path: list[str]
    argv: list[str]
    umask: int
    random: RandomState
    settings: Settings
    accelerator: Accelerator | None

    @classmethod
    def capture(cls) -> CallerContext:
        """Read the context of this process."""
        umask = os.umask(0)
        os.umask(umask)
        random, settings = RandomState.capture(), Settings()
        path, argv, accelerator = list(sys.path), list(sys.argv), Accelerator.capture()
        return cls(dict(os.environ), os.getcwd(), path, argv, umask, random, settings, accelerator)

    def restore(self) -> None:
        """Make this process like the one whose context these are, but for its settings, which imports change."""
        if dict(os.environ) != self.environ:
            os.environ.clear()
            os.environ.update(self.environ)
        os.chdir(self.directory)
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        os.umask(self.umask)
        self.random.restore()


@dataclass(frozen=True)
class Assignment:
    """Instructions for one rank; those of the ranks of a launch differ in the placement alone.

    Attributes:
        launcher: the launcher's name, for the line at the start.
        returns: whose value goes home: rank 0's, each rank's own, or rank 0's list of all that the ranks gather.
        threads: number of threads to compute with; ``None`` leaves it to the user's variables.
        payload: the packed task; ``None`` where the rank has it, as a fork does.
        context: ``None`` where the rank has them.
        random: the caller's random numbers, where the rank is a fork, in which Python seeds `random` anew.
        main_path: script to import before the payload is unpacked, where something in it goes by reference.
        main_module: the same as ``python -m`` names it, where the script was started so.
        placement: the rank's place among the others.
        store: where the ranks meet: a file, or ``"tcp://host:port/launch"``. Empty where they meet at the placement's
            address, as torchrun's do; nobody then stands by to end them all when one fails.
        secret: of the run, which the ranks inherit; empty where callers on several nodes start them, each without the
            others'.
    """

    launcher: str
    returns: Literal["rank0", "all", "gathered"] = "rank0"
    threads: int | None = None
    payload: bytes | None = None
    context: CallerContext | None = None
    random: RandomState | None = None
    main_path: str | None = None
    main_module: str | None = None
    placement: Placement = field(default_factory=Placement)
    store: str = ""
    secret: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class NodePlan:
    """The nodes of a launch.

    Attributes:
        min_nodes: number of nodes with which the run starts.
        max_nodes: number of nodes that may join.
        node_rank: number of this node; ``None`` where the nodes number themselves as they arrive.
        host: host of the rendezvous endpoint; ``None`` on one node.
        port: port of the rendezvous endpoint.
        max_restarts: how often the ranks are started again after a failure.
        nprocs: number of ranks that this node starts.
        elastic: whether torch elastic watches the ranks.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int | None = None
    host: str | None = None
    port: int = DEFAULT_PORT
    max_restarts: int = 0
    nprocs: int | Literal["auto"] = "auto"
    elastic: bool = False

    @property
    def several(self) -> bool:
        """Whether there may be more than one node."""
        return self.max_nodes > 1


def resolve(options: Options, node: Node | None, launcher: Launcher | None = None) -> NodePlan:
    """Return the plan on which the options and the environment of this node agree.

    Args:
        options: of the call.
        node: what the environment says.
        launcher: by default the one of the options.

    Raises:
        OptionError: they contradict each other, or half of what several nodes need is missing.

    Example:
        >>> resolve(Options().updated({"nnodes": 2, "node_rank": 1, "rdzv_endpoint": "head:1234"}), None).port
        1234
    """
    nnodes, node_rank, endpoint = options.nnodes, options.node_rank, options.rdzv_endpoint
    max_restarts, nprocs = options.max_restarts, options.nprocs
    if node is not None:
        _agree(node, "nnodes", nnodes, 1, node.nnodes)
        _agree(node, "node_rank", node_rank, None, node.node_rank)
        nnodes, node_rank = node.nnodes, node.node_rank
        endpoint = endpoint or node.endpoint
        max_restarts = max_restarts or node.max_restarts or 0
        nprocs = node.nprocs or nprocs
    fewest, _, most = str(nnodes).partition(":")
    low, high = int(fewest), int(most or fewest)
    host, port = _split(endpoint) if endpoint else (None, DEFAULT_PORT)
    if high > 1 and host is None:
        raise OptionError(
            f"nnodes={nnodes!r} needs rdzv_endpoint='host:port': the name of one of the nodes, the same on all of "
            f"them, and a port that is free there (or DISTWRAP_RDZV_ENDPOINT=host:port)."
        )
    if node_rank is not None and not 0 <= node_rank < high:
        how_many = " Say how many there are with nnodes." if high == 1 else f" It must be 0 to {high - 1}."
        raise OptionError(f"node_rank={node_rank}, but there are {high} node(s).{how_many}")
    launcher = launcher or launchers.make(options.launcher)
    restarts = low < high or max_restarts > 0
    cannot = "several nodes" if high > 1 and not launcher.several_nodes else ""
    if restarts and not (launcher.restarts or launcher.start_method):
        cannot = f"restarts (max_restarts={max_restarts}, nnodes={nnodes!r})"
    if cannot:
        raise OptionError(
            f"launcher={options.launcher!r} is not made for {cannot}. Leave launcher at 'auto', or choose 'spawn'."
        )
    elastic = restarts or launcher.restarts
    return NodePlan(low, high, node_rank, host, port, max_restarts, nprocs, elastic)


def _agree(node: Node, name: str, given: object, default: object, found: object) -> None:
    if given not in (default, found) and str(given) != str(found):
        raise OptionError(
            f"{name}={given!r}, but {node.source} says {found!r}: take {name} out of the code, or unset the "
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
