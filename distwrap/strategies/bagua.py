"""Bagua's algorithms under Bagua's names, for loops that used it; its package can no longer be installed.

Source: https://github.com/BaguaSys/bagua (``bagua.torch_api.algorithms``), and Lightning 1.9's ``BaguaStrategy``.
"""

from dataclasses import replace
from typing import Any

from torch import nn

from distwrap.errors import OptionError
from distwrap.group.world import World
from distwrap.protocols import Algorithm
from distwrap.registry import algorithms
from distwrap.strategies.base import Wrapping
from distwrap.strategies.ddp import DDPStrategy
from distwrap.wording import unknown_name

# By Bagua's name: distwrap's name, the options with other names, and whether Bagua's is hierarchical by default.
_NAMES: dict[str, tuple[str, dict[str, str], bool]] = {
    "gradient_allreduce": ("allreduce", {}, False),
    "bytegrad": ("bytegrad", {}, True),
    "decentralized": ("decentralized", {"peer_selection_mode": "peer_selection"}, True),
    "low_precision_decentralized": ("low_precision_decentralized", {}, True),
    "qadam": ("qadam", {}, True),
    "async": ("async", {"peer_selection_mode": ""}, False),
}
_OPTIONS = ("hierarchical", "peer_selection_mode", "communication_interval", "sync_interval_ms", "warmup_steps")
# Options of Bagua's that choose between ways of which distwrap has only one.
_IGNORED = ("flatten", "do_flatten", "average")


class BaguaStrategy(DDPStrategy):
    """DDP with one of Bagua's algorithms of exchange.

    Args:
        algorithm: ``"gradient_allreduce"``, ``"bytegrad"``, ``"decentralized"``, ``"low_precision_decentralized"``,
            ``"qadam"`` or ``"async"``.
        **options: options of the algorithm, under Bagua's names, and of DDP.

    Raises:
        OptionError: Bagua has no such algorithm, or neither it nor DDP has the option.
    """

    def __init__(self, algorithm: str = "gradient_allreduce", **options: Any) -> None:
        own, ddp = _split(options)
        super().__init__(comm=translated(algorithm, own), **ddp)
        self.algorithm = algorithm

    def prepare_model(self, model: nn.Module, world: World, wrapping: Wrapping) -> nn.Module:
        own, ddp = _split(wrapping.options)
        name = ddp.pop("algorithm", self.algorithm)
        comm = wrapping.comm
        if comm is None and (own or name != self.algorithm):
            comm = translated(name, own)
        return super().prepare_model(model, world, replace(wrapping, comm=comm, options=ddp))


def translated(name: str, options: dict[str, Any]) -> Algorithm:
    """Return distwrap's algorithm for Bagua's name and options.

    Raises:
        OptionError: there is no such algorithm, or it has no such option.

    Example:
        >>> translated("decentralized", {"peer_selection_mode": "shift_one", "hierarchical": False})
        Decentralized(hierarchical=False, warmup_steps=0, peer_selection='shift_one', communication_interval=1)
    """
    if name not in _NAMES:
        raise OptionError(unknown_name("algorithm of Bagua's", name, _NAMES))
    ours, names, hierarchical = _NAMES[name]
    given = {names.get(key, key): value for key, value in options.items() if key not in _IGNORED}
    if given.pop("", "all") != "all":
        raise OptionError(f"algorithm={name!r} averages over all ranks: peer_selection_mode='all' is the only one.")
    given.setdefault("hierarchical", hierarchical)
    text = ", ".join(f"{key}={value!r}" for key, value in given.items())
    return algorithms.make(f"{ours}({text})")


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    own = {key: value for key, value in options.items() if key in (*_OPTIONS, *_IGNORED)}
    return own, {key: value for key, value in options.items() if key not in own}
