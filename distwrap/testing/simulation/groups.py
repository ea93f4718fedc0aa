"""torch's process groups of simulated ranks: each collective ends where the last of its ranks has come to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from distwrap.errors import CollectiveError
from distwrap.group.collective_guard import check_collectives_allowed
from distwrap.supervision import stacks
from distwrap.testing.simulation.scheduler import Scheduler, Signal, Words

Rows = list[list[Tensor]]  # for each rank of a group its tensors


@dataclass(eq=False)
class Collective:
    """One collective of a group, which ends when all its ranks have called it.

    Attributes:
        signal: told when it has ended.
        calls: for each rank the collective, with what must be alike on all ranks, and the line that has called it.
        inputs: the ranks' tensors, which they may not change before they have waited.
        values: what the ranks' output tensors become.
        error: of all ranks.
    """

    signal: Signal
    calls: dict[int, tuple[str, str]] = field(default_factory=dict)
    inputs: dict[int, list[Tensor]] = field(default_factory=dict)
    values: list[Tensor] | None = None
    error: BaseException | None = None


@dataclass(eq=False)
class Message:
    """Message of a rank.

    Attributes:
        source: number in the group of the rank that has sent it.
        tensors: copies of what was sent.
    """

    source: int
    tensors: list[Tensor]


@dataclass(eq=False)
class Receipt:
    """Receiving of a message: it gets the first one that comes from one of some ranks.

    Attributes:
        sources: numbers of these ranks in the group.
        message: what was received; ``None`` until then.
    """

    sources: Sequence[int]
    message: Message | None = None


class Mailbox:
    """Messages to one rank under one tag: the first that is sent goes to the first who can receive it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.sent, self.awaited, self.changed = list[Message](), list[Receipt](), Signal(scheduler)

    def match(self) -> None:
        """Give messages to those who receive them."""
        for receipt in list(self.awaited):
            receipt.message = next((each for each in self.sent if each.source in receipt.sources), None)
            if receipt.message is not None:
                self.sent.remove(receipt.message)
                self.awaited.remove(receipt)
                self.changed.notify_all()


class Exchanges:
    """Collectives and messages of a simulation that are under way."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.collectives: dict[Any, Collective] = {}
        self.mail: defaultdict[Any, Mailbox] = defaultdict(lambda: Mailbox(scheduler))
        self.works = set[SimulatedWork]()  # torch 2.6 keeps the native part of one alone, which waits forever


class SimulatedWork(dist.Work):
    """Handle of a collective or message: `wait` gives up the rank's turn until it has ended, and writes the outputs.

    Args:
        exchanges: of the simulation.
        signal: told when it may have ended.
        words: what it is.
        has_ended: returns whether it has.
        take: writes the outputs, and returns them.
    """

    def __init__(
        self,
        exchanges: Exchanges,
        signal: Signal,
        words: Words,
        has_ended: Callable[[], bool],
        take: Callable[[], list[Tensor]],
    ) -> None:
        super().__init__()
        self._exchanges, self._signal, self._words = exchanges, signal, words
        self._has_ended, self._take = has_ended, take
        exchanges.works.add(self)
        self._result: list[Tensor] | None = None
        self.source = -1

    def result(self) -> list[Tensor]:
        while self._result is None:
            if self._has_ended():
                self._result = self._take()
                self._take, self._has_ended, self._words = list, lambda: True, ""  # which hold all ranks' tensors
                self._exchanges.works.discard(self)
            else:
                self._signal.wait(words=self._words)
        return self._result

    def wait(self, timeout: Any = None) -> bool:
        return self.result() is not None

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self.result())
        return future

    def _source_rank(self) -> int:
        return self.source

    def is_completed(self) -> bool:
        if self._result is None:
            self._signal.scheduler.sleep(0)
        return (self._result is not None or self._has_ended()) and self.wait()


_ProcessGroup: type[Any] = dist.ProcessGroup  # whose stubs declare other ways to call each method too


class SimulatedGroup(_ProcessGroup):  # type: ignore[misc]
    """Process group of a simulated rank.

    Args:
        exchanges: of the simulation.
        rank: this rank's number in the group.
        size: number of ranks in it.
        key: the group, the same on all its ranks, and on no other group of the simulation.
    """

    def __init__(self, exchanges: Exchanges, rank: int, size: int, key: Any) -> None:
        super().__init__(rank, size)
        self._exchanges, self._rank, self._size, self._key, self._begun = exchanges, rank, size, key, 0
        self._name = self._description = ""
        self._ranks: list[int] = []  # in the world, which torch knows once the group is made
        self._together: list[SimulatedWork] | None = None  # begun since `_start_coalescing`

    def getBackendName(self) -> str:
        return "simulated"

    def _get_backend(self, device: Any) -> SimulatedGroup:
        return self

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, text: str) -> None:
        self._description = text

    def _get_sequence_number_for_group(self) -> int:
        return self._begun

    def shutdown(self, *_: Any) -> None: ...

    abort = set_timeout = shutdown
    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: self._description)
    _device_types = property(lambda self: [torch.device("cpu")])

    def _start_coalescing(self, device: Any) -> None:
        self._together = []

    def _end_coalescing(self, device: Any) -> SimulatedWork:
        works, self._together = self._together or [], None
        signal = Signal(self._exchanges.scheduler)
        results = lambda: [each for work in works for each in work.result()]  # noqa: E731
        return SimulatedWork(self._exchanges, signal, "", lambda: True, results)

    # Collectives

    def _begin(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] | None,
        combine: Callable[[Rows], list[Tensor]],
        *words: str,
        alike: Sequence[Tensor] | None = None,
        scatters: bool = False,
        result: Any = None,
    ) -> SimulatedWork:
        """Take part in the group's next collective.

        Args:
            name: its name.
            inputs: this rank's.
            outputs: tensors to write to; ``None`` where this rank receives nothing.
            combine: returns what the outputs become, given the ranks' inputs.
            *words: what else must be alike on all ranks.
            alike: tensors of which shapes and types must be; by default the inputs.
            scatters: whether each rank's outputs become every n-th value, from its number on.
            result: what a future of it holds; by default the outputs.
        """
        exchanges, rank, size = self._exchanges, self._rank, self._size
        what = _call(name, inputs if alike is None else alike, *words)
        if size > 1:  # whose operators torch's dispatcher never sees
            check_collectives_allowed(f"torch.distributed's {name}()")
        exchanges.scheduler.event(what)
        ranks = self._ranks = self._ranks or dist.get_process_group_ranks(self)
        key, self._begun = (self._key, self._begun), self._begun + 1
        made = exchanges.collectives.setdefault(key, Collective(Signal(exchanges.scheduler)))
        made.calls[rank] = what, stacks.locate(stacks.of_frame(stacks.users_frame()))[1]
        made.inputs[rank] = list(inputs)
        if next(iter(made.calls.values()))[0] != what:
            lines = [f"rank {ranks[each]}: {call} at {place}" for each, (call, place) in sorted(made.calls.items())]
            made.error = made.error or CollectiveError(
                "the ranks are in different collectives:\n" + "\n".join(lines) + "\nEvery rank must call the same "
                "collectives in the same order, with tensors of the same shapes and types."
            )
            made.signal.notify_all()
        elif len(made.calls) == size:
            del exchanges.collectives[key]
            try:
                with torch.no_grad():
                    made.values = combine([made.inputs.pop(each) for each in range(size)])
            except (RuntimeError, NotImplementedError) as error:  # on every rank, as a backend refuses it
                made.error = error
            made.signal.notify_all()

        def awaited() -> str:
            missing = [ranks[each] for each in range(size) if each not in made.calls]
            return f"{what}, to which rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:8]))} did not come"

        def take() -> Any:
            if made.values is None:
                assert made.error is not None
                raise made.error
            values = made.values[rank::size] if scatters else made.values
            for output, value in () if outputs is None else zip(outputs, values, strict=True):
                _write(output, value)
            return list(outputs or ()) if result is None else result

        has_ended = lambda: made.values is not None or made.error is not None  # noqa: E731
        work = SimulatedWork(exchanges, made.signal, awaited, has_ended, take)
        if self._together is not None:
            self._together.append(work)
        return work

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        how = _operation(opts)
        return self._begin("all_reduce", tensors, tensors, partial(_reduced, how), how)

    def reduce(self, tensors: list[Tensor], opts: Any) -> SimulatedWork:
        how, root = _operation(opts), opts.rootRank
        outputs = tensors if self._rank == root else None
        return self._begin("reduce", tensors, outputs, partial(_reduced, how), how, f"to rank {root}", result=tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> SimulatedWork:
        root = opts.rootRank
        outputs = tensors if self._rank != root else None
        of_root = partial(_copies, root=root)
        return self._begin("broadcast", tensors, outputs, of_root, f"from rank {root}", result=tensors)

    def barrier(self, opts: Any = None) -> SimulatedWork:
        return self._begin("barrier", [], [], _copies)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        return self._begin("all_gather", inputs, [each for row in outputs for each in row], _copies, result=outputs)

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._begin("all_gather_into_tensor", inputs, outputs, _joined)

    def _allgather_base(self, output: Tensor, value: Tensor, opts: Any = None) -> Any:
        return self.allgather_into_tensor_coalesced([output], [value])

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> SimulatedWork:
        own = outputs[0] if self._rank == opts.rootRank else None
        return self._begin("gather", inputs, own, _copies, f"to rank {opts.rootRank}", result=outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> SimulatedWork:
        root = opts.rootRank
        own, of_root = inputs[0] if self._rank == root else [], partial(_copies, root=root)
        return self._begin("scatter", own, outputs, of_root, f"from rank {root}", alike=outputs, scatters=True)

    def _scatter_sums(
        self, name: str, outputs: list[Tensor], parts: list[Tensor], alike: list[Tensor], opts: Any
    ) -> SimulatedWork:
        """Give each rank sums of its parts, which stand together, one for each rank."""
        how = _operation(opts)
        return self._begin(name, parts, outputs, partial(_reduced, how), how, alike=alike, scatters=True)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> SimulatedWork:
        return self._scatter_sums("reduce_scatter", outputs, inputs[0], inputs[0], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        parts = [part for each in inputs for part in each.detach().reshape(self._size, -1)]
        return self._scatter_sums("reduce_scatter_tensor", outputs, parts, inputs, opts)

    def _reduce_scatter_base(self, output: Tensor, value: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_tensor_coalesced([output], [value], opts)

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, result: Any = None
    ) -> SimulatedWork:
        if not len(outputs) == len(inputs) == self._size:
            raise ValueError(f"all_to_all of {self._size} ranks got {len(inputs)} and {len(outputs)} tensors.")
        types = sorted({_dtype(each) for each in inputs})
        return self._begin("all_to_all", inputs, outputs, _copies, *types, alike=[], scatters=True, result=result)

    def alltoall_base(self, output: Tensor, value: Tensor, output_sizes: Any, input_sizes: Any, _: Any = None) -> Any:
        def parts(tensor: Tensor, sizes: Any) -> list[Tensor]:
            each = list(sizes) or [tensor.shape[0] // self._size] * self._size
            return list(torch.split(tensor.detach(), each))

        return self.alltoall(parts(output, output_sizes), parts(value, input_sizes), result=[output])

    # The names that some versions of torch, and coalescing, have for the same.
    allreduce_coalesced, allgather_coalesced, all_to_all_single = allreduce, allgather, alltoall_base
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced

    # Messages

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> SimulatedWork:
        exchanges, what = self._exchanges, _call("send", tensors, f"to rank {to}")
        exchanges.scheduler.event(what)
        box, message = exchanges.mail[self._key, to, tag], Message(self._rank, _copies([tensors]))
        box.sent.append(message)
        box.match()
        # A backend keeps no message for a rank that does not wait for it.
        return SimulatedWork(exchanges, box.changed, what, lambda: message not in box.sent, lambda: tensors)

    def recv(self, tensors: list[Tensor], by: int, tag: int = 0) -> SimulatedWork:
        return self._receive(tensors, [by], tag, f"from rank {by}")

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> SimulatedWork:
        return self._receive(tensors, range(self._size), tag, "from any rank")

    def _receive(self, tensors: list[Tensor], sources: Sequence[int], tag: int, words: str) -> SimulatedWork:
        exchanges, what, receipt = self._exchanges, _call("recv", tensors, words), Receipt(sources)
        exchanges.scheduler.event(what)
        box = exchanges.mail[self._key, self._rank, tag]
        box.awaited.append(receipt)
        box.match()

        def take() -> list[Tensor]:
            assert receipt.message is not None
            for tensor, value in zip(tensors, receipt.message.tensors, strict=True):
                _write(tensor, value)
            work.source = receipt.message.source
            return tensors

        work = SimulatedWork(exchanges, box.changed, what, lambda: receipt.message is not None, take)
        return work


def _write(output: Tensor, value: Tensor) -> None:
    """Write what a rank has received, as a backend does, of which autograd knows nothing."""
    if output.shape.numel() != value.shape.numel() or output.dtype != value.dtype:
        raise CollectiveError(f"rank {dist.get_rank()} was sent {_shape(value)}, and receives {_shape(output)}.")
    output.data.copy_(value if output.layout != torch.strided else value.view_as(output))


def _copies(rows: Rows, root: int | None = None) -> list[Tensor]:
    return [each.detach().clone() for row in (rows if root is None else [rows[root]]) for each in row]


def _joined(rows: Rows) -> list[Tensor]:
    return [torch.cat([each.detach().reshape(-1) for each in column]) for column in zip(*rows, strict=True)]


def _call(name: str, tensors: Sequence[Tensor], *words: str) -> str:
    return f"{name}({', '.join([*map(_shape, tensors), *words])})"


def _shape(tensor: Tensor) -> str:
    # A backend sends memory as it lies: ranks whose tensors lie otherwise would exchange other numbers.
    lies = "" if tensor.layout != torch.strided or tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    return f"{_dtype(tensor)}{list(tensor.shape)}{lies}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _operation(opts: Any) -> str:
    how: Any = getattr(opts, "reduceOp", ReduceOp.SUM)
    name = str(getattr(how, "op", how)).rpartition(".")[2].lower()
    return f"{name} by {how.__getstate__()[1]}" if name == "premul_sum" else name


_IN_PLACE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    **dict.fromkeys(("sum", "avg", "premul_sum"), Tensor.add_),
    "product": Tensor.mul_,
    "min": lambda a, b: torch.minimum(a, b, out=a),
    "max": lambda a, b: torch.maximum(a, b, out=a),
    "band": Tensor.bitwise_and_,
    "bor": Tensor.bitwise_or_,
    "bxor": Tensor.bitwise_xor_,
}


def _reduced(how: str, rows: Rows) -> list[Tensor]:
    """Return the reductions of the ranks' tensors, in the order of the ranks."""
    name, _, factor = how.partition(" by ")
    if name not in _IN_PLACE:
        raise NotImplementedError(f"simulated ranks have no reduction {how!r}.")
    totals = []
    for first, *others in zip(*rows, strict=True):
        total = first.detach().clone()
        if total.layout == torch.strided:
            total = total.contiguous()
        for each in others:
            _IN_PLACE[name](total, each.detach())
        if factor:
            total.mul_(float(factor))
        if name == "avg":
            is_real = total.is_floating_point() or total.is_complex()
            total.div_(len(rows), rounding_mode=None if is_real else "trunc")
        totals.append(total)
    return totals
