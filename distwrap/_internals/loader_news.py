"""torch's news that a loader's worker has ended badly, which it raises once, wherever the main thread is just then."""

import contextlib
import signal
from collections.abc import Iterator

from torch.utils.data._utils.signal_handling import _error_if_any_worker_fails  # type: ignore[attr-defined]  # of torch._C


@contextlib.contextmanager
def loader_news_kept_away() -> Iterator[None]:
    """Keep the news out of a ``with`` in the main thread, and of what comes after it: an error was there before."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):
            _error_if_any_worker_fails()  # forgets what it tells
        signal.signal(signal.SIGCHLD, before)
