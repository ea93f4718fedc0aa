"""Options of `HivemindStrategy`, checked before a process starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from distwrap.checks import SECONDS, Check, either, one_of, whole
from distwrap.comm.base import option
from distwrap.errors import OptionError

COMPRESSIONS = {"none": "NoCompression", "fp16": "Float16Compression", "8bit": "Uniform8BitQuantization"}

_YES_OR_NO = Check("True or False", lambda value: isinstance(value, bool))
_RUN_ID = Check(
    "a word without a dot, the same for all that train together",
    lambda value: isinstance(value, str) and value.strip() != "" and "." not in value,
)
_ADDRESS = Check(
    "'auto', 'loopback', or an address of this node, as '0.0.0.0' for all of them",
    lambda value: isinstance(value, str) and (value in ("auto", "loopback") or value.count(".") == 3),
)


def _peers(name: str, value: Any) -> tuple[str, ...]:
    """Return addresses of peers as a tuple of texts."""
    if isinstance(value, str):
        raise OptionError(f"{name}={value!r}: give a list of addresses, as [{value!r}].")
    if not isinstance(value, Sequence):
        raise OptionError(f"{name}={value!r}: it must be a list of addresses, as another run prints them.")
    for each in value:
        if not str(each).startswith("/") or "/p2p/" not in str(each):
            raise OptionError(
                f"{name}: {each!r} is no address of a peer. Copy one that another run prints, as "
                f"'/ip4/10.0.0.1/tcp/41001/p2p/12D3KooW…'."
            )
    return tuple(map(str, value))


@dataclass(frozen=True, kw_only=True)
class HivemindOptions:
    """Options of the strategy, which `HivemindStrategy` explains."""

    target_batch_size: int | None = option(None, either(None, whole(1)))
    batch_size: int | None = option(None, either(None, whole(1)))
    run_id: str = option("distwrap", _RUN_ID)
    initial_peers: tuple[str, ...] = option((), _peers)
    compression: str = option("none", one_of("compression", COMPRESSIONS))
    average_state_every: int = option(1, whole(1))
    local_updates: bool = option(False, _YES_OR_NO)
    matchmaking_seconds: float = option(3.0, SECONDS)
    averaging_seconds: float = option(60.0, SECONDS)
    client_mode: bool = option(False, _YES_OR_NO)
    peer_seconds: float = option(30.0, SECONDS)
    host: str = option("auto", _ADDRESS)
    verbose: bool = option(False, _YES_OR_NO)

    def __post_init__(self) -> None:
        for each in fields(self):
            given = getattr(self, each.name)
            try:
                object.__setattr__(self, each.name, each.metadata["check"](each.name, given))
            except OptionError as error:
                raise OptionError(f"HivemindStrategy: {error}") from None
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        if None not in (self.target_batch_size, self.batch_size) and self.target_batch_size < self.batch_size:  # type: ignore[operator]
            raise OptionError(
                f"HivemindStrategy(target_batch_size={self.target_batch_size}, batch_size={self.batch_size}): the "
                f"first is in samples over all peers, the second in samples of one step of one rank, so it cannot be "
                f"the larger one."
            )
        if self.averaging_seconds <= self.matchmaking_seconds:
            raise OptionError(
                f"HivemindStrategy(averaging_seconds={self.averaging_seconds:g}): it is the limit of a whole round, "
                f"and looking for peers alone takes matchmaking_seconds={self.matchmaking_seconds:g} of it. Make it "
                f"longer."
            )
        if self.client_mode and not self.initial_peers:
            raise OptionError(
                "HivemindStrategy(client_mode=True): a client takes no connections, so it needs others to connect to: "
                "give initial_peers=[…], as a run without client_mode prints them."
            )
        if self.initial_peers and self.target_batch_size is None:
            raise OptionError(
                "HivemindStrategy(initial_peers=[…]): give target_batch_size too, the same as the peers have. Its "
                "default is one step of each rank of this run alone."
            )

    def require_batch_size(self) -> int:
        """Return the number of samples of a step.

        Raises:
            OptionError: `batch_size` was not given.
        """
        if self.batch_size is None:
            raise OptionError(
                "strategy='hivemind' counts samples, and must be told how many a step has. Write "
                "strategy='hivemind(target_batch_size=64, batch_size=16)': batch_size is the number of samples "
                "of one step of one rank, and target_batch_size that of all peers after which the weights change."
            )
        return self.batch_size

    def target(self, world_size: int) -> int:
        """Return the samples of all peers after which the weights change; by default one step of each rank."""
        batch_size = self.require_batch_size()
        return batch_size * world_size if self.target_batch_size is None else self.target_batch_size
