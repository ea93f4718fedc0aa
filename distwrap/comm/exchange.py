"""The exchange of one model on one rank, with the thread that runs it, and all exchanges of a run."""

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.optim.optimizer import Optimizer

from distwrap._internals.torch import after_backward, current_backward
from distwrap.comm.base import Algorithm, Link, Traffic
from distwrap.devices.kinds import SideStream
from distwrap.group.collectives import gather_object
from distwrap.group.world import RunPart, World, say
from distwrap.model.distributed import DistributedModel
from distwrap.simulated import simulation
from distwrap.versions import ENDS_GROUPS_LOCKED
from distwrap.wording import first_names

_REPORTS = 3  # lines about gradients that are not finite, for each model

PATIENCE = 0.5  # seconds for the thread to end, which may wait in a collective for ranks that have left

A = TypeVar("A", bound=Algorithm)
T = TypeVar("T")


class Engine:
    """Thread of a model that runs its exchanges one after the other; on an accelerator it uses its own stream.

    A DDP hook that starts a second collective when the first has ended may deadlock, because ranks differ in which
    bucket ends first. A single queue has one order. DDP waits for the future that a hook returns, and the thread sets.

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


class Exchange(ABC, Generic[A]):
    """Exchange of one model with the other ranks, made on every rank in the same order.

    Attributes:
        algorithm: the options.
        traffic: the count of what this rank has sent.
        node: the link between the ranks of this node if the algorithm is hierarchical, else ``None``.
        link: the link between the ranks that run the algorithm: all ranks, or the first rank of each node if it is
            hierarchical; ``None`` on the other ranks of a node.
        nnodes: the number of ranks, or of nodes, that run the algorithm.
        reports: how often this rank's gradients were not finite.
    """

    def __init__(self, algorithm: A, model: DistributedModel, world: World) -> None:
        self._exchanges = world.part(RunExchanges)
        self._exchanges.close_unused()
        placement = world.placement
        self.algorithm, self.device = algorithm, world.device
        self.rank, self.world_size = placement.rank, placement.world_size
        self.traffic, self.reports = Traffic(), 0
        self._model = ref(model)
        self._groups: list[Any] = []
        nodes = [[rank] for rank in range(self.world_size)]
        if algorithm.hierarchical:
            nodes = _ranks_of_nodes(placement.node_rank)
        self.nnodes = len(nodes)
        algorithm.check(self.nnodes)
        self.node: Link | None = None
        if algorithm.hierarchical:
            links = [self.between(world, ranks, crosses_nodes=False) for ranks in nodes]
            self.node = next(link for link in links if link is not None)
        self.link = self.between(world, [ranks[0] for ranks in nodes])
        self.engine = Engine(world.device)
        model.register_comm_hook(self, lambda exchange, bucket: exchange.submit(bucket))
        self._exchanges.known.append(self)

    def between(self, world: World, ranks: list[int], *, crosses_nodes: bool = True) -> Link | None:
        """Make a link between some ranks; every rank calls this. Return ``None`` if this one is not among them."""
        group = back = None
        if len(ranks) > 1:
            group = world.new_group(ranks)
            if crosses_nodes and "gloo" in str(world.backend):
                back = world.new_group(ranks)
        if self.rank not in ranks:
            return None
        self._groups += [group, back]
        return Link(group, ranks, self.rank, self.traffic, back=back, crosses_nodes=crosses_nodes)

    @property
    def runs(self) -> bool:
        """Whether a background thread runs that ends only together with those of the other ranks."""
        return False

    @property
    def model(self) -> DistributedModel | None:
        """The wrapped model, or ``None`` when nothing refers to it any more."""
        return self._model()

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer for the loop to step."""
        return optimizer

    def paused(self) -> AbstractContextManager[None]:
        """Stop the background work within a ``with``."""
        return nullcontext()

    def submit(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Queue one of DDP's buckets, and return a future of its buffer with the mean.

        A failure in the model's thread is raised at the end of this backward, after DDP's own callback.
        """
        if current_backward() == -1:
            self.engine.raise_failure()  # in Join, which calls the hook for a rank that is out of data
        elif bucket.index() == 0:
            after_backward(lambda: after_backward(self.engine.raise_failure))
        return self.average(bucket)

    @abstractmethod
    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Queue a bucket of gradients, and return a future of its buffer with the mean."""

    def report(self, names: list[str]) -> None:
        """Print which gradients of this rank are not finite."""
        self.reports += 1
        if self.reports <= _REPORTS:
            say(
                f"rank {self.rank}: the gradient of {first_names(names)} is not finite (NaN or infinity), so "
                "the average with it is NaN on all ranks.",
                every_rank=True,
            )

    def keep_groups(self) -> None:
        """Keep the process groups until the process ends, since a thread is still inside one."""
        self._groups = []

    def close(self) -> None:
        """End the thread, and destroy the groups if this needs no other rank."""
        with suppress(ValueError):
            self._exchanges.known.remove(self)
        if not self.engine.close() or ENDS_GROUPS_LOCKED:
            self.keep_groups()
        groups, self._groups = self._groups, []
        for group in groups:
            if group is not None and dist.is_initialized():
                with suppress(ValueError):  # the group was destroyed with the world's
                    if dist.get_backend(group) == "gloo":
                        dist.destroy_process_group(group)


class RunExchanges(RunPart):
    """Exchanges of all models of a run.

    Attributes:
        known: those that are not closed, in the order in which the models were wrapped.
    """

    def __init__(self, world: World) -> None:
        self.known: list[Exchange[Any]] = []

    def close_unused(self) -> None:
        """Close the exchanges of models to which nothing refers any more.

        This is left to the next wrapped model, since garbage collection may happen in any thread and at any point, also
        while a group is being made.
        """
        for exchange in list(self.known):
            if exchange.model is None and not exchange.runs:
                exchange.close()

    def close(self) -> None:
        with ExitStack() as stack:
            for exchange in self.known:
                stack.callback(exchange.close)


def _ranks_of_nodes(node_rank: int) -> list[list[int]]:
    """Return the ranks of each node; a collective."""
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(gather_object(node_rank)):
        nodes.setdefault(node, []).append(rank)
    return [nodes[node] for node in sorted(nodes)]
