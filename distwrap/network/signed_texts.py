"""Texts in a store that anybody may write to, by whose signature a rank knows what ranks of its run have written."""

import hmac

from torch.distributed import Store  # type: ignore[attr-defined]

from distwrap.network.keys import find
from distwrap.network.secret import SIZE, signature
from distwrap.options import SECRET_FILE
from distwrap.wording import print_notice


class SignedTexts:
    """Texts in a store, of which those that no rank of this run has written are ignored, where the run has a secret.

    Args:
        store: the store.
        secret: the run's; empty where there is none, and anybody's text is believed.
    """

    def __init__(self, store: Store, secret: bytes) -> None:
        self._store, self._secret = store, secret
        self._ignored: set[str] = set()

    def set(self, key: str, text: str) -> None:
        """Write a text."""
        self._store.set(key, self._signed(key, text))

    def set_first(self, key: str, text: str) -> bool:
        """Write a text where no rank has written one before; return whether it stands there now."""
        self._store.compare_set(key, "", self._signed(key, text))
        if self.read(key) is None:
            self.set(key, text)
        return self.read(key) == text

    def read(self, key: str) -> str | None:
        """Return a text; ``None`` where no rank has written it."""
        value = find(self._store, key)
        if value is None:
            return None
        found = value.decode(errors="replace")
        text = found[2 * SIZE :]
        if hmac.compare_digest(found.encode(), self._signed(key, text).encode()):
            return text
        if key not in self._ignored:
            self._ignored.add(key)
            print_notice(
                f"{key!r} in the ranks' store has no valid signature of this run, and is ignored: a rank has "
                f"no {SECRET_FILE} or another one, or another program writes to the port at which the ranks meet"
            )
        return None

    def _signed(self, key: str, text: str) -> str:
        return signature(f"{len(key)} {key} {text}".encode(), self._secret).hex() + text
