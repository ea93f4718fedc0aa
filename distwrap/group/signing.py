"""Signed objects between ranks: nothing is unpickled that did not come from a rank of this run.

Each run has a secret, which its ranks find in the store where they meet; for ranks that distwrap started, nobody else
can read that. gloo's sockets ask nobody who they are, so an object that came through them is unpickled only if its
signature (HMAC-SHA256, RFC 2104) was made with the secret.
"""

import hmac
import pickle
import secrets
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap.errors import CollectiveError

_SIZE = 32


def agree_on_secret(store: Store, rank: int) -> bytes:
    """Return the run's secret: rank 0 makes it, the others wait for it."""
    if rank == 0:
        store.set("secret", secrets.token_hex(_SIZE))
    return bytes.fromhex(store.get("secret").decode())


def sign(value: Any, secret: bytes) -> bytes:
    """Return a pickled object with its HMAC signature in front."""
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return _signature(data, secret) + data


def verify(message: bytes, secret: bytes, source: int) -> Any:
    """Return the object of a message, which is unpickled only if its signature is right.

    Args:
        message: what was received.
        secret: the run's.
        source: the rank it is said to come from, for the error.

    Raises:
        CollectiveError: the signature is not of this run, or the object cannot be unpickled here.
    """
    given, data = message[:_SIZE], message[_SIZE:]
    if not hmac.compare_digest(given, _signature(data, secret)):
        raise CollectiveError(
            f"what came in place of rank {source}'s object was not made by a rank of this run, and was not read: "
            f"another process writes to this machine's ports, or a collective was not called on every rank."
        )
    try:
        return pickle.loads(data)
    except Exception as error:
        raise CollectiveError(
            f"rank {source}'s object cannot be unpickled on the other ranks: {type(error).__name__}: {error}"
        ) from error


def _signature(data: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, data, "sha256")
