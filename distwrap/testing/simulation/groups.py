"""torch's store and process groups of simulated ranks, whose threads give up their turn while they wait."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial, partialmethod, reduce
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, ReduceOp, Store  # type: ignore[attr-defined]

from distwrap._internals.torch_simulation import BACKEND
from distwrap.errors import CollectiveError
from distwrap.group.collective_guard import check_collectives_allowed
from distwrap.supervision import stacks
from distwrap.supervision.shared_status import SharedStatus
from distwrap.testing.simulation.scheduler import Scheduler, Words

# Collectives in which gloo goes through the memory from a tensor's first number on, and does not look at its strides.
_AS_IT_LIES = ("all_reduce", "reduce", "broadcast", "scatter")

Rows = list[list[Tensor]]  # for each rank of a group its tensors
# Returns what the ranks receive of all their tensors, given an operation, and the root's number.
Combine = Callable[[Rows, str, Any], list[Tensor]]
# Who receives it: all ranks, or the root; or each rank every n-th tensor, from its number on, or its part of each.
Share = Literal["all", "root", "tensors", "parts"]


@dataclass(eq=False)
class Meeting:
    """One collective of a group, or one message, which ends when all its ranks have come.

    Attributes:
        calls: for each rank the collective, with what must be alike on all ranks, and the line that has called it.
        inputs: the ranks' tensors, which they may not change before they have waited.
        outcome: what the ranks receive, or the error of all ranks; ``None`` until it has ended.
    """

    calls: dict[int, tuple[str, str]] = field(default_factory=dict)
    inputs: dict[int, list[Tensor]] = field(default_factory=dict)
    outcome: list[Tensor] | Exception | None = None

    def result(self) -> list[Tensor]:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome or []


class SimulatedStore(Store):
    """Store in which simulated ranks meet, with all else that they exchange.

    Args:
        scheduler: of the ranks' threads.
        ranks: their number.

    Attributes:
        board: of the ranks, beside the store.
        meetings: that are under way.
    """

    def __init__(self, scheduler: Scheduler, ranks: int) -> None:
        super().__init__()
        self.scheduler, self._table = scheduler, HashStore()
        self.board = SharedStatus(ranks=ranks, texts=True)
        self.meetings = defaultdict[Any, Meeting](Meeting)

    def _call(self, name: str, *args: Any) -> Any:
        if self.scheduler.current() is not None:  # the caller of the simulation reads it too
            self.scheduler.event(f"store.{name}({args[0] if args else ''!r})")
        return getattr(self._table, name)(*args)

    set = partialmethod(_call, "set")
    add = partialmethod(_call, "add")
    append = partialmethod(_call, "append")
    check = partialmethod(_call, "check")
    compare_set = partialmethod(_call, "compare_set")
    deleteKey = partialmethod(_call, "delete_key")  # the names by which torch's own methods call these
    getNumKeys = partialmethod(_call, "num_keys")

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = None if timeout is None else timeout.total_seconds()
        for key in keys:
            is_there, words = partial(self._table.check, [key]), f"the key {key!r} of the store"
            if not self.check([key]) and not self.scheduler.wait(is_there, words, seconds):
                raise dist.DistStoreError(f"wait timeout after {seconds} s, keys: /{key}")

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._table.get(key))

    def clone(self) -> SimulatedStore:
        return self

    def meet(
        self, key: Any, rank: int, tensors: list[Tensor], ranks: int, combine: Callable[[Rows], list[Tensor]]
    ) -> Meeting:
        """Bring a rank's tensors to a meeting, where the last rank that comes combines those of all."""
        made = self.meetings[key]
        made.inputs[rank] = tensors
        if len(made.inputs) == ranks and made.outcome is None:
            del self.meetings[key]
            try:
                with torch.no_grad():
                    made.outcome = combine([made.inputs.pop(each) for each in range(ranks)])
            except (RuntimeError, NotImplementedError) as error:  # on every rank, as a backend refuses it
                made.outcome = error
        return made


class SimulatedWork(dist.Work):
    """Handle of a collective or message: `wait` gives up the rank's turn until it has ended, and writes the outputs.

    Args:
        group: to which it belongs.
        has_ended: returns whether it has.
        take: writes the outputs, and returns them.
        words: what it is.
    """

    def __init__(
        self, group: SimulatedGroup, has_ended: Callable[[], object], take: Callable[[], Any], words: Words
    ) -> None:
        super().__init__()
        self._group, self._has_ended, self._take, self._words = group, has_ended, take, words
        self._result, self.source = None, -1
        group.works[self] = None

    def result(self) -> Any:
        if self._result is None:
            if not self._has_ended():
                self._group.scheduler.wait(self._has_ended, self._words)
            self._result = self._take()
            del self._has_ended, self._take, self._words, self._group.works[self]  # which hold all ranks' tensors
        return self._result

    def wait(self, timeout: Any = None) -> bool:
        return self.result() is not None

    def synchronize(self) -> None:
        self.result()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self.result())
        return future

    def _source_rank(self) -> int:
        return self.source

    def is_completed(self) -> bool:
        if self._result is None:
            self._group.scheduler.sleep(0)
        return (self._result is not None or bool(self._has_ended())) and self.wait()


_ProcessGroup: type[Any] = dist.ProcessGroup  # whose stubs declare other ways to call each method too


def _copied(rows: Rows, how: str = "", root: Any = None) -> list[Tensor]:
    return [each.detach().clone() for row in rows for each in row]


def _of_root(rows: Rows, how: str, root: Any) -> list[Tensor]:
    return _copied([rows[root]])


def _joined(rows: Rows, how: str, root: Any) -> list[Tensor]:
    return [torch.cat([each.detach().reshape(-1) for each in column]) for column in zip(*rows, strict=True)]


def _reduced(rows: Rows, how: str, root: Any) -> list[Tensor]:
    """Return the reductions of the ranks' tensors, in the order of the ranks."""
    name, _, factor = how.partition(" by ")
    if name not in _OPERATIONS:
        raise NotImplementedError(f"simulated ranks have no reduction {how!r}.")
    totals = [reduce(_OPERATIONS[name], column[1:], column[0].detach().clone()) for column in zip(*rows, strict=True)]
    if factor:
        totals = [total * float(factor) for total in totals]
    if name == "avg":
        totals = [total.div(len(rows)).to(total.dtype) for total in totals]
    return totals


_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **dict.fromkeys(("sum", "avg", "premul_sum"), torch.add),
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    **{f"b{name}": getattr(torch, f"bitwise_{name}") for name in ("and", "or", "xor")},
}


class SimulatedGroup(_ProcessGroup):  # type: ignore[misc]
    """Process group of a simulated rank.

    Args:
        store: of the simulation.
        rank: this rank's number in the group.
        ranks: the group's, in the world.
        key: the group, the same on all its ranks, and on no other group of the simulation.

    Attributes:
        works: handles of what is under way: torch 2.6 keeps the native part of one alone, which waits forever.
    """

    group_name = group_desc = ""

    def __init__(self, store: SimulatedStore, rank: int, ranks: Sequence[int], key: Any) -> None:
        super().__init__(rank, len(ranks))
        self._store, self._rank, self._ranks, self._key, self._begun = store, rank, ranks, key, 0
        self._messages: Counter[Any] = Counter()
        self.scheduler, self.works = store.scheduler, dict[SimulatedWork, None]()

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: Any) -> SimulatedGroup:
        return self

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _get_sequence_number_for_group(self) -> int:
        return self._begun

    def shutdown(self, *_: Any) -> None: ...

    abort = set_timeout = _start_coalescing = shutdown
    _device_types = property(lambda self: [torch.device("cpu")])

    def _end_coalescing(self, device: Any) -> SimulatedWork:
        works = list(self.works)
        return SimulatedWork(self, lambda: True, lambda: [one for each in works for one in each.result()], "")

    # Collectives

    def _begin(
        self, name: str, combine: Combine, share: Share, outputs: Any, inputs: Any, opts: Any = None
    ) -> SimulatedWork:
        """Take part in the group's next collective.

        Args:
            name: its name.
            combine: returns what the ranks receive.
            share: who receives it.
            outputs: tensor, or lists of tensors, to write to.
            inputs: this rank's.
            opts: torch's options: an operation, or a root.
        """
        store, rank, ranks, size = self._store, self._rank, self._ranks, len(self._ranks)
        taken, given, root, how = _flat(outputs), _flat(inputs), getattr(opts, "rootRank", None), _operation(opts)
        # In a scatter only the root has inputs, and in an all-to-all their sizes may differ.
        shapes = list(map(_shape, taken if name == "scatter" else given))
        words = sorted(set(map(_dtype, given))) if name == "all_to_all" else shapes
        words += [how] * (combine is _reduced)
        words += [f"{'to' if share == 'root' else 'from'} rank {root}"] * (root is not None)
        what = f"{name}({', '.join(words)})"
        if size > 1 and name in _AS_IT_LIES and not all(map(_is_dense, taken)):
            raise CollectiveError(
                f"rank {ranks[rank]} calls {what} with a view that leaves out numbers between its own: gloo would take "
                "these for the view's without a word. Give it a .contiguous() copy, and copy the result back."
            )
        if size > 1:  # whose operators torch's dispatcher never sees
            check_collectives_allowed(f"torch.distributed's {name}()")
        self.scheduler.event(what)
        key, self._begun = (self._key, self._begun), self._begun + 1
        calls = store.meetings[key].calls
        calls[rank] = what, stacks.locate(stacks.of_frame(stacks.users_frame()))[1]
        if next(iter(calls.values()))[0] != what:
            lines = [f"rank {ranks[each]}: {call} at {place}" for each, (call, place) in sorted(calls.items())]
            store.meetings[key].outcome = CollectiveError(
                "the ranks are in different collectives:\n" + "\n".join(lines) + "\nEvery rank must call the same "
                "collectives in the same order, with tensors of the same shapes and types."
            )
        made = store.meet(key, rank, given, size, lambda rows: combine(rows, how, root))

        def awaited() -> str:
            missing = [ranks[each] for each in range(size) if each not in calls]
            return f"{what}, to which rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:8]))} did not come"

        def take() -> Any:
            values = made.result()[rank::size] if share == "tensors" else made.result()
            if share == "parts":
                values = [each.reshape(size, -1)[rank] for each in values]
            if share != "root" or rank == root:
                _write(taken, values)
            return [outputs] if isinstance(outputs, Tensor) else outputs

        return SimulatedWork(self, lambda: made.outcome is not None, take, awaited)

    def _in_place(self, name: str, combine: Combine, share: Share, tensors: Any, opts: Any = None) -> SimulatedWork:
        return self._begin(name, combine, share, tensors, tensors, opts)

    def barrier(self, opts: Any = None) -> SimulatedWork:
        return self._begin("barrier", _copied, "all", [], [])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self._begin("monitored_barrier", _copied, "all", [], []).wait()

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        if not len(outputs) == len(inputs) == len(self._ranks):
            raise ValueError(f"all_to_all of {len(self._ranks)} ranks got {len(inputs)} and {len(outputs)} tensors.")
        return self._begin("all_to_all", _copied, "tensors", outputs, inputs)

    def alltoall_base(self, output: Tensor, value: Tensor, output_sizes: Any, input_sizes: Any, _: Any = None) -> Any:
        def parts(tensor: Tensor, sizes: Any) -> list[Tensor]:
            each = list(sizes) or [len(tensor) // len(self._ranks)] * len(self._ranks)
            return list(torch.split(tensor.detach(), each))

        return self.alltoall(parts(output, output_sizes), parts(value, input_sizes))

    allreduce = partialmethod(_in_place, "all_reduce", _reduced, "all")
    reduce = partialmethod(_in_place, "reduce", _reduced, "root")
    broadcast = partialmethod(_in_place, "broadcast", _of_root, "all")
    allgather = partialmethod(_begin, "all_gather", _copied, "all")
    gather = partialmethod(_begin, "gather", _copied, "root")
    scatter = partialmethod(_begin, "scatter", _of_root, "tensors")
    reduce_scatter = partialmethod(_begin, "reduce_scatter", _reduced, "tensors")
    _allgather_base = partialmethod(_begin, "all_gather_into_tensor", _joined, "all")
    _reduce_scatter_base = partialmethod(_begin, "reduce_scatter_tensor", _reduced, "parts")
    # The names that some versions of torch, and coalescing, have for the same.
    allreduce_coalesced, allgather_coalesced, all_to_all_single = allreduce, allgather, alltoall_base
    allgather_into_tensor_coalesced = all_gather_single = all_gather_single_coalesced = _allgather_base
    reduce_scatter_tensor_coalesced = reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = _reduce_scatter_base

    # Messages: each is a meeting of two, of which the sender is the first. A backend keeps no message for a rank that
    # does not wait for it.

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> SimulatedWork:
        return self._exchange(f"send({', '.join([*map(_shape, tensors), f'to rank {to}'])})", tensors, 0, to, tag)

    def recv(self, tensors: list[Tensor], by: int, tag: int = 0) -> SimulatedWork:
        return self._exchange(f"recv({', '.join([*map(_shape, tensors), f'from rank {by}'])})", tensors, 1, by, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> SimulatedWork:
        def senders() -> list[int]:
            return [by for by in range(len(self._ranks)) if self._key_of(1, by, tag) in self._store.meetings]

        def take() -> list[Tensor]:
            work.source = senders()[0]
            self.recv(tensors, work.source, tag).wait()
            return tensors

        words = f"recv({', '.join([*map(_shape, tensors), 'from any rank'])})"
        work = SimulatedWork(self, senders, take, words)
        return work

    def _key_of(self, side: int, other: int, tag: int) -> Any:
        pair = (self._rank, other) if side == 0 else (other, self._rank)
        return self._key, *pair, tag, self._messages[side, other, tag]

    def _exchange(self, what: str, tensors: list[Tensor], side: int, other: int, tag: int) -> SimulatedWork:
        self.scheduler.event(what)
        key = self._key_of(side, other, tag)
        self._messages[side, other, tag] += 1
        made = self._store.meet(key, side, tensors, 2, lambda rows: _copied(rows[:1]))

        def take() -> list[Tensor]:
            if side == 1:
                _write(tensors, made.result())
            return tensors

        work = SimulatedWork(self, lambda: made.outcome is not None, take, what)
        work.source = other
        return work


def _write(outputs: list[Tensor], values: list[Tensor]) -> None:
    """Write what a rank has received, as a backend does, of which autograd knows nothing."""
    for output, value in zip(outputs, values, strict=True):
        if output.shape.numel() != value.shape.numel() or output.dtype != value.dtype:
            raise CollectiveError(f"rank {dist.get_rank()} was sent {_shape(value)}, and receives {_shape(output)}.")
        if output.layout == torch.strided:
            output.data.copy_(value.reshape(output.shape))
        else:
            with torch.no_grad():  # `data` of a sparse tensor has indices and values of its own
                output.copy_(value)


def _flat(tensors: Any) -> list[Tensor]:
    """Return the tensors of one, or of lists of them."""
    return [tensors] if isinstance(tensors, Tensor) else [one for each in tensors for one in _flat(each)]


def _shape(tensor: Tensor) -> str:
    # A backend sends memory as it lies: ranks whose tensors lie otherwise would exchange other numbers.
    lies = "" if tensor.layout != torch.strided or tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    return f"{_dtype(tensor)}{list(tensor.shape)}{lies}"


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout != torch.strided or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _operation(opts: Any) -> str:
    how: Any = getattr(opts, "reduceOp", ReduceOp.SUM)
    name = str(getattr(how, "op", how)).rpartition(".")[2].lower()
    return f"{name} by {how.__getstate__()[1]}" if name == "premul_sum" else name
