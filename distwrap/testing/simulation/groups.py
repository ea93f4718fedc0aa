"""torch's process groups of simulated ranks: each collective ends where the last of its ranks has come to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distwrap.errors import CollectiveError
from distwrap.group.collective_guard import check_collectives_allowed
from distwrap.supervision import stacks
from distwrap.testing.simulation.scheduler import Scheduler, Signal

Values = list[list[Tensor]]  # for each rank of a group what its output tensors become
Combine = Callable[[list["Call"]], Values]


@dataclass
class Call:
    """One rank's call of a collective.

    Attributes:
        what: the collective, the shapes and types of its tensors, the operation and the root: alike on all ranks.
        inputs: the rank's tensors, which it may not change before it has waited.
        outputs: the tensors that are written where it waits.
        place: the line of the user's that has called it; empty until somebody asks.
    """

    what: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    place: str


@dataclass(eq=False)
class Collective:
    """One collective of a group, which ends when all its ranks have called it."""

    calls: dict[int, Call] = field(default_factory=dict)
    values: Values | None = None
    error: BaseException | None = None
    signal: Signal = field(default_factory=Signal)


@dataclass(eq=False)
class Mailbox:
    """Messages of one rank to another under one tag: the n-th that is awaited is the n-th that was sent."""

    sent: list[list[Tensor]] = field(default_factory=list)
    awaited: int = 0
    taken: Signal = field(default_factory=Signal)
    signal: Signal = field(default_factory=Signal)


class Exchanges:
    """Collectives and messages of a simulation that are under way."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.collectives: dict[Any, Collective] = {}
        self.mail: defaultdict[Any, Mailbox] = defaultdict(Mailbox)
        self.any_mail: defaultdict[Any, Signal] = defaultdict(Signal)


class SimulatedWork(dist.Work):
    """Handle of a collective or message: `wait` gives up the rank's turn until it has ended, and writes the outputs.

    Args:
        wait: waits, and returns the output tensors.
        source: the rank from which a message came, once it has.
        is_done: gives up the rank's turn once, and returns whether `wait` would return at once.
    """

    def __init__(
        self,
        wait: Callable[[], list[Tensor]],
        source: Callable[[], int] = lambda: -1,
        is_done: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__()
        self._wait, self._source, self._is_done = wait, source, is_done
        self._result: list[Tensor] | None = None

    def wait(self, timeout: Any = None) -> bool:
        if self._result is None:
            self._result = self._wait()
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        assert self._result is not None
        future.set_result(self._result)
        return future

    def result(self) -> list[Tensor]:
        self.wait()
        assert self._result is not None
        return self._result

    def is_completed(self) -> bool:
        return (self._result is not None or self._is_done()) and self.wait()

    def is_success(self) -> bool:
        return self._result is not None

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._source()

    def _source_rank(self) -> int:
        return self._source()


_ProcessGroup: type[Any] = dist.ProcessGroup  # whose stubs declare other ways to call each method too


class SimulatedGroup(_ProcessGroup):  # type: ignore[misc]
    """Process group of a simulated rank.

    Args:
        exchanges: of the simulation.
        rank: this rank's number in the group.
        size: number of ranks in it.
        key: the group, the same on all its ranks, and on no other group of the simulation.
        name: torch's.
    """

    def __init__(self, exchanges: Exchanges, rank: int, size: int, key: Any, name: str) -> None:
        super().__init__(rank, size)
        self._exchanges, self._rank, self._size, self._key, self._begun = exchanges, rank, size, key, 0
        self._name, self._description = name, ""
        self._ranks: list[int] = []  # in the world, which torch knows once the group is made
        self._together: list[SimulatedWork] = []  # begun since the last `_start_coalescing`

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return "simulated"

    def name(self) -> str:
        return "simulated"

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, text: str) -> None:
        self._description = text

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_sequence_number_for_group(self) -> int:
        return self._begun

    def _set_sequence_number_for_group(self) -> None: ...

    def set_timeout(self, timeout: Any) -> None: ...

    def shutdown(self) -> None: ...

    def abort(self) -> None: ...

    def _start_coalescing(self, device: Any) -> None:
        self._together = []

    def _end_coalescing(self, device: Any) -> SimulatedWork:
        works = self._together
        return SimulatedWork(lambda: [tensor for work in works for tensor in work.result()])

    # Collectives

    def _begin(
        self, what: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], combine: Combine, result: Any = None
    ) -> SimulatedWork:
        """Take part in the group's next collective.

        Args:
            what: its name, and what must be alike on all ranks.
            inputs: this rank's.
            outputs: tensors to write to.
            combine: returns for each rank what its outputs become, given the calls in the order of the ranks.
            result: what a future of it holds; by default the outputs.
        """
        exchanges, scheduler = self._exchanges, self._exchanges.scheduler
        if self._size > 1:  # whose operators torch's dispatcher never sees
            check_collectives_allowed(f"torch.distributed's {what.partition('(')[0]}()")
        scheduler.event(what)
        self._ranks = self._ranks or dist.get_process_group_ranks(self)
        key = (self._key, self._begun)
        self._begun += 1
        place = stacks.locate(stacks.of_frame(stacks.users_frame()))[1]
        collective = exchanges.collectives.setdefault(key, Collective())
        call = Call(what, list(inputs), list(outputs), place)
        collective.calls[self._rank] = call
        if next(iter(collective.calls.values())).what != what:
            collective.error = collective.error or self._mismatch(collective)
            scheduler.notify(collective.signal)
        elif len(collective.calls) == self._size:
            del exchanges.collectives[key]
            calls = [collective.calls[rank] for rank in range(self._size)]
            try:
                with torch.no_grad():
                    collective.values = combine(calls)
            except (RuntimeError, NotImplementedError) as error:  # on every rank, as a backend refuses it
                collective.error = error
            scheduler.notify(collective.signal)

        def wait() -> list[Tensor]:
            while collective.values is None and collective.error is None:
                scheduler.wait(collective.signal, lambda: self._awaited(collective, what))
            if collective.values is None:
                assert collective.error is not None
                raise collective.error
            values, collective.values[self._rank] = collective.values[self._rank], []
            for output, value in zip(call.outputs, values, strict=True):
                _write(output, value)
            return call.outputs if result is None else result

        def is_done() -> bool:
            scheduler.sleep(0)
            return collective.values is not None or collective.error is not None

        work = SimulatedWork(wait, is_done=is_done)
        self._together.append(work)
        return work

    def _awaited(self, collective: Collective, what: str) -> str:
        ranks = self._ranks
        missing = [ranks[each] for each in range(self._size) if each not in collective.calls]
        return f"{what}, to which rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:8]))} did not come"

    def _mismatch(self, collective: Collective) -> CollectiveError:
        ranks = self._ranks
        lines = [f"rank {ranks[rank]}: {call.what} at {call.place}" for rank, call in sorted(collective.calls.items())]
        return CollectiveError(
            "the ranks are in different collectives:\n" + "\n".join(lines) + "\nEvery rank must call the same "
            "collectives in the same order, with tensors of the same shapes and types."
        )

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        operation = _operation(opts)

        def combine(calls: list[Call]) -> Values:
            sums = [_reduced([call.inputs[i] for call in calls], operation) for i in range(len(tensors))]
            return [sums for _ in calls]

        return self._begin(f"all_reduce({_shapes(tensors)}, {_name_of(operation)})", tensors, tensors, combine)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        operation, root = _operation(opts), opts.rootRank if opts is not None else 0

        def combine(calls: list[Call]) -> Values:
            total = [_reduced([call.inputs[0] for call in calls], operation)]
            return [total if rank == root else [] for rank in range(len(calls))]

        what = f"reduce({_shapes(tensors)}, {_name_of(operation)}, to rank {root})"
        return self._begin(what, tensors, tensors if self._rank == root else [], combine, tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        root = opts.rootRank if opts is not None else 0

        def combine(calls: list[Call]) -> Values:
            values = [each.detach().clone() for each in calls[root].inputs]
            return [[] if rank == root else values for rank in range(len(calls))]

        outputs = [] if self._rank == root else tensors
        return self._begin(f"broadcast({_shapes(tensors)}, from rank {root})", tensors, outputs, combine, tensors)

    def barrier(self, opts: Any = None) -> SimulatedWork:
        return self._begin("barrier()", [], [], lambda calls: [[] for _ in calls])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        def combine(calls: list[Call]) -> Values:
            values = [call.inputs[0].detach().clone() for call in calls]
            return [values for _ in calls]

        return self._begin(f"all_gather({_shapes(inputs)})", inputs, outputs[0], combine, outputs)

    def _gather_into(self, outputs: list[Tensor], inputs: list[Tensor]) -> SimulatedWork:
        def combine(calls: list[Call]) -> Values:
            values = [torch.cat([call.inputs[i].detach().reshape(-1) for call in calls]) for i in range(len(inputs))]
            return [values for _ in calls]

        return self._begin(f"all_gather_into_tensor({_shapes(inputs)})", inputs, outputs, combine)

    def all_gather_single(self, output: Tensor, value: Tensor, opts: Any = None) -> SimulatedWork:
        return self._gather_into([output], [value])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._gather_into(outputs, inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        def combine(calls: list[Call]) -> Values:
            values = [each.detach().clone() for call in calls for each in call.inputs]
            return [values for _ in calls]

        flat = [each for row in outputs for each in row]
        return self._begin(f"all_gather_coalesced({_shapes(inputs)})", inputs, flat, combine, outputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> SimulatedWork:
        operation = _operation(opts)

        def combine(calls: list[Call]) -> Values:
            return [[_reduced([call.inputs[rank] for call in calls], operation)] for rank in range(len(calls))]

        what = f"reduce_scatter({_shapes(inputs[0])}, {_name_of(operation)})"
        return self._begin(what, inputs[0], outputs, combine)

    def _reduce_scatter_of(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> SimulatedWork:
        operation = _operation(opts)

        def combine(calls: list[Call]) -> Values:
            sums = [_reduced([call.inputs[i] for call in calls], operation) for i in range(len(inputs))]
            rows = [each.reshape(len(calls), -1) for each in sums]
            return [[row[rank] for row in rows] for rank in range(len(calls))]

        what = f"reduce_scatter_tensor({_shapes(inputs)}, {_name_of(operation)})"
        return self._begin(what, inputs, outputs, combine)

    def reduce_scatter_single(self, output: Tensor, value: Tensor, opts: Any = None) -> SimulatedWork:
        return self._reduce_scatter_of([output], [value], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._reduce_scatter_of(outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        def combine(calls: list[Call]) -> Values:
            return [[call.inputs[rank].detach().clone() for call in calls] for rank in range(len(calls))]

        return self._begin(f"all_to_all({_types(inputs)})", inputs, outputs, combine)

    def all_to_all_single(
        self, output: Tensor, value: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> SimulatedWork:
        def parts(tensor: Tensor, sizes: list[int]) -> list[Tensor]:
            each = sizes or [tensor.shape[0] // self._size] * self._size
            return list(torch.split(tensor.detach(), list(each)))

        def combine(calls: list[Call]) -> Values:
            return [[call.inputs[rank].detach().clone() for call in calls] for rank in range(len(calls))]

        outputs, inputs = parts(output, output_sizes), parts(value, input_sizes)
        return self._begin(f"all_to_all_single({_types([value])})", inputs, outputs, combine, [output])

    alltoall_base = all_to_all_single

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        root = opts.rootRank if opts is not None else 0

        def combine(calls: list[Call]) -> Values:
            values = [call.inputs[0].detach().clone() for call in calls]
            return [values if rank == root else [] for rank in range(len(calls))]

        own = outputs[0] if self._rank == root else []
        return self._begin(f"gather({_shapes(inputs)}, to rank {root})", inputs, own, combine, outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> SimulatedWork:
        root = opts.rootRank if opts is not None else 0

        def combine(calls: list[Call]) -> Values:
            return [[each.detach().clone()] for each in calls[root].inputs]

        own = inputs[0] if self._rank == root else []
        return self._begin(f"scatter({_shapes(outputs)}, from rank {root})", own, outputs, combine)

    # Messages

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> SimulatedWork:
        exchanges = self._exchanges
        exchanges.scheduler.event(f"send({_shapes(tensors)}, to rank {to})")
        box = exchanges.mail[self._key, self._rank, to, tag]
        box.sent.append([each.detach().clone() for each in tensors])
        number, what = len(box.sent), f"send({_shapes(tensors)}, to rank {to})"
        exchanges.scheduler.notify(box.signal)
        exchanges.scheduler.notify(exchanges.any_mail[self._key, to, tag])

        def wait() -> list[Tensor]:
            while box.awaited < number:  # a backend keeps no message for a rank that does not wait for it
                exchanges.scheduler.wait(box.taken, what)
            return tensors

        return SimulatedWork(wait, is_done=lambda: box.awaited >= number)

    def recv(self, tensors: list[Tensor], by: int, tag: int = 0) -> SimulatedWork:
        exchanges = self._exchanges
        what = f"recv({_shapes(tensors)}, from rank {by})"
        exchanges.scheduler.event(what)
        box = exchanges.mail[self._key, by, self._rank, tag]
        number = box.awaited
        box.awaited += 1
        exchanges.scheduler.notify(box.taken)

        def is_done() -> bool:
            exchanges.scheduler.sleep(0)
            return len(box.sent) > number

        def wait() -> list[Tensor]:
            while len(box.sent) <= number:
                exchanges.scheduler.wait(box.signal, what)
            self._take(tensors, box, number)
            return tensors

        return SimulatedWork(wait, lambda: by, is_done)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> SimulatedWork:
        exchanges = self._exchanges
        what = f"recv({_shapes(tensors)}, from any rank)"
        exchanges.scheduler.event(what)
        found: list[int] = []

        def wait() -> list[Tensor]:
            while True:
                for rank in range(self._size):
                    box = exchanges.mail[self._key, rank, self._rank, tag]
                    if len(box.sent) > box.awaited:
                        found.append(rank)
                        box.awaited += 1
                        exchanges.scheduler.notify(box.taken)
                        self._take(tensors, box, box.awaited - 1)
                        return tensors
                exchanges.scheduler.wait(exchanges.any_mail[self._key, self._rank, tag], what)

        return SimulatedWork(wait, lambda: found[0] if found else -1)

    def _take(self, tensors: list[Tensor], box: Mailbox, number: int) -> None:
        message, box.sent[number] = box.sent[number], []
        for tensor, value in zip(tensors, message, strict=True):
            _write(tensor, value)


def _operation(opts: Any) -> Any:
    operation = getattr(opts, "reduceOp", ReduceOp.SUM)
    return getattr(operation, "op", operation)


def _name_of(operation: Any) -> str:
    return str(operation).rpartition(".")[2].lower()


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(map(_shape, tensors[:4])) + ", …" * (len(tensors) > 4)


def _shape(tensor: Tensor) -> str:
    # A backend sends memory as it lies: ranks whose tensors lie otherwise would exchange other numbers.
    lies = "" if tensor.layout != torch.strided or tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    return f"{_dtype(tensor)}{list(tensor.shape)}{lies}"


def _write(output: Tensor, value: Tensor) -> None:
    """Write what a rank has received, as a backend does, of which autograd knows nothing."""
    if output.shape.numel() != value.shape.numel() or output.dtype != value.dtype:
        raise CollectiveError(f"rank {dist.get_rank()} was sent {_shape(value)}, and receives {_shape(output)}.")
    output.data.copy_(value if output.layout != torch.strided else value.view_as(output))


def _types(tensors: Sequence[Tensor]) -> str:
    return ", ".join(sorted({_dtype(each) for each in tensors}))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


_IN_PLACE: dict[Any, Callable[[Tensor, Tensor], Any]] = {
    ReduceOp.SUM: Tensor.add_,
    ReduceOp.AVG: Tensor.add_,
    ReduceOp.PRODUCT: Tensor.mul_,
    ReduceOp.MIN: lambda a, b: torch.minimum(a, b, out=a),
    ReduceOp.MAX: lambda a, b: torch.maximum(a, b, out=a),
    ReduceOp.BAND: Tensor.bitwise_and_,
    ReduceOp.BOR: Tensor.bitwise_or_,
    ReduceOp.BXOR: Tensor.bitwise_xor_,
}


def _reduced(tensors: list[Tensor], operation: Any) -> Tensor:
    """Return the reduction of the ranks' tensors, in the order of the ranks."""
    step = _IN_PLACE.get(operation)
    if step is None:
        raise NotImplementedError(f"simulated ranks have no reduction {_name_of(operation)!r}.")
    first = tensors[0].detach()
    total = first.clone(memory_format=torch.contiguous_format) if first.layout == torch.strided else first.clone()
    for each in tensors[1:]:
        step(total, each.detach())
    if operation != ReduceOp.AVG:
        return total
    return total.div_(len(tensors), rounding_mode=None if total.is_floating_point() or total.is_complex() else "trunc")
