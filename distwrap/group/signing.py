"""Signed objects between ranks: nothing is unpickled that did not come from a rank of this run.

gloo's sockets ask nobody who they are, so an object that came through them is unpickled only if its signature was made
with the run's secret. Where the ranks have no secret, only plain data travels, in pickles that name no function.
"""

import hmac
import os
import pickle
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from distwrap._internals.torch import default_store
from distwrap.errors import CollectiveError
from distwrap.group import own_device, tensors_apart
from distwrap.group.world import current_world
from distwrap.network.secret import SIZE, agree_on_secret, signature
from distwrap.options import switched_on

_agreements = 0


def run_secret() -> bytes:
    """Return the run's secret, empty where there is none. Ranks in a group that the user made agree on it here."""
    global _agreements
    world = current_world()
    if world.secret is None:
        store, number = default_store(), _agreements
        _agreements += 1
        world.secret = b""
        if store is not None:
            world.secret = agree_on_secret(PrefixStore(f"distwrap/secret/{number}", store), world.placement)
    return world.secret


def only_plain(secret: bytes) -> bool:
    """Return whether only plain data may be sent: its sender cannot be verified, and the user has not allowed more."""
    return not secret and not switched_on(os.environ, "DISTWRAP_TRUST_NETWORK")


def sign(value: Any, secret: bytes) -> bytes:
    """Return a pickled object with its HMAC signature in front."""
    plain = only_plain(secret)
    data = tensors_apart.dump_plain(value) if plain else own_device.dumps(value)
    return signature(data, secret) + data


def verify(message: bytes, secret: bytes, source: int) -> Any:
    """Return the object of a message, which is unpickled only if its signature is right.

    Args:
        message: what was received.
        secret: the run's; empty where there is none.
        source: the rank it is said to come from, for the error.

    Raises:
        CollectiveError: the signature is not of this run, or the object cannot be unpickled here.
    """
    given, data = message[:SIZE], message[SIZE:]
    if not hmac.compare_digest(given, signature(data, secret)):
        raise CollectiveError(
            f"the data that arrived as rank {source}'s object has no valid signature of this run, and was not "
            "read: another process writes to the ports of this run, or a collective was not called on every rank."
        )
    try:
        return tensors_apart.load_plain(data) if only_plain(secret) else pickle.loads(data)
    except Exception as error:
        raise CollectiveError(
            f"rank {source}'s object cannot be unpickled on the other ranks: {type(error).__name__}: {error}"
        ) from error
