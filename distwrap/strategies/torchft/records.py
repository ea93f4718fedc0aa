"""Records of the collectives before the loop, whose results a rank needs when it comes back."""

from __future__ import annotations

from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap.errors import ModelError
from distwrap.group.signing import sign, verify

_MOST_BYTES = 2**24  # of the largest result that is kept


class StartRecords:
    """Results of the collectives before the loop, in order.

    Args:
        store: the store of the launch, which outlives any rank.
        secret: the secret of the run.
    """

    def __init__(self, store: Store, secret: bytes) -> None:
        self._store, self._secret, self._count = store, secret, 0

    def keep(self, what: str, result: Any, *, writes: bool) -> None:
        """Count a collective, and keep its result on the one rank that `writes`."""
        self._count += 1
        if writes:
            message = sign((what, result), self._secret)
            if len(message) > _MOST_BYTES:
                message = sign((what, _TooLarge()), self._secret)
            self._store.set(f"start/{self._count}", message.hex())

    def next(self, what: str) -> Any:
        """Return the result that the others got from the next collective.

        Raises:
            ModelError: they made another collective there, or none, or its result was not kept.
        """
        self._count += 1
        key = f"start/{self._count}"
        theirs, result = "none", None
        if self._store.check([key]):
            theirs, result = verify(bytes.fromhex(self._store.get(key).decode()), self._secret, 0)
        if theirs != what:
            raise ModelError(
                f"this rank has come back, and called {what}() before the loop, where the others called {theirs}: the "
                f"code before the loop must make the same calls each time the function begins."
            )
        if isinstance(result, _TooLarge):
            raise ModelError(
                f"this rank has come back, and cannot get what {what}() gave the others before the loop: it is "
                f"larger than {_MOST_BYTES >> 20} MiB, and was not kept. Exchange such large objects inside of "
                "the loop."
            )
        return result


class _TooLarge:
    """Placeholder for a result that was not kept."""
