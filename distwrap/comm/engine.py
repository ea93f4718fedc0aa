"""The thread of a model that runs its exchanges one after the other, in the same order on every rank.

A DDP hook that starts a second collective when the first has ended may deadlock, because ranks differ in which bucket
ends first. A single queue has one order. DDP waits for the future that a hook returns, which the thread sets.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.futures import Future

from distwrap.devices.streams import SideStream
from distwrap.simulated import simulation

T = TypeVar("T")

PATIENCE = 0.5  # seconds for the thread to end, which may wait in a collective for ranks that have left


class Engine:
    """First-in-first-out thread; on an accelerator it uses its own stream.

    After an exception it runs no more work. It still sets the futures, so that nobody hangs, and `raise_failure` raises
    the exception.

    Args:
        device: the device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Any, Future[Any], Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._stream = SideStream(device)

    def submit(self, work: Callable[[], T], otherwise: Any = None) -> Future[T]:
        """Queue some work, and return a future of its value, or of `otherwise` after a failure.

        On an accelerator, the work waits for what is already in the current stream.
        """
        if simulation() is not None:  # whose collectives end where they are waited for, in the order of the calls
            done: Future[T] = Future()
            done.set_result(self._done(work, otherwise))
            return done
        if self._thread is None:
            # The thread refers to this engine, not to the model, and ends with the model.
            self._thread = threading.Thread(target=self._run, name="distwrap-comm", daemon=True)
            self._thread.start()
        future: Future[T] = Future() if self._device.type == "cpu" else Future(devices=[self._device])
        self._queue.put((work, otherwise, future, self._stream.moment()))
        return future

    def call(self, work: Callable[[], T]) -> T:
        """Queue some work, wait for it, and return its value.

        Raises:
            BaseException: this work, or earlier work, has failed.
        """
        return self.result(self.submit(work))

    def result(self, future: Future[T]) -> T:
        """Wait for submitted work, and return its value; raise as `call` does."""
        value = future.wait()
        self.raise_failure()
        return value

    def raise_failure(self) -> None:
        """Raise the exception of failed work, if there was one."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> bool:
        """End the thread after the queued work, and return whether it has ended."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return thread is None
        self._queue.put(None)
        thread.join(PATIENCE)
        self._thread = None
        return not thread.is_alive()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, otherwise, future, ready = item
            with self._stream.current():
                self._stream.wait(ready)
                future.set_result(self._done(work, otherwise))
            del item, work, otherwise, future, ready  # they would hold the model's buffers while the thread waits

    def _done(self, work: Callable[[], Any], otherwise: Any) -> Any:
        if self._failure is None:
            try:
                return work()
            except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                self._failure = error
        return otherwise
