"""The ranks that are there, by torchft's manager: steps that all of them take or none, and collectives among them.

A step begins with a quorum: the lighthouse says who is there, those that are make a group, and who is behind takes the
state of who is ahead. It ends with a commit, or without one where an exchange failed, as when a rank dies in it.
Source: https://docs.pytorch.org/torchft/manager.html
"""

from __future__ import annotations

import copy
import logging
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.optim.lr_scheduler import LRScheduler
from torchft.manager import Manager

from distwrap.errors import ArrivalError, CollectiveError, DistwrapError, ModelError
from distwrap.group.members import Members
from distwrap.group.signing import sign, verify
from distwrap.group.tensors_apart import bytes_of
from distwrap.group.world import Layout, World, say
from distwrap.live_objects import instances
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import parameters_of
from distwrap.network import stores
from distwrap.network.waiting import wait_until
from distwrap.strategies.torchft.course import Course, Place
from distwrap.strategies.torchft.group import MemberGroup
from distwrap.strategies.torchft.transport import GroupTransport
from distwrap.wording import first_line, named_ranks

R = TypeVar("R")
Element = TypeVar("Element")

ARRIVAL_SECONDS = 120.0  # for all ranks to come at the start
_FIRST_QUORUM_SECONDS = 20.0  # for all of them to be in the first group
_RETURN_SECONDS = 86400.0  # for the others to come to a place where a rank can come in: a long evaluation
_ATTEMPTS = 5  # at a group, in each of which another member may be lost


class TorchFTMembers(Members):
    """The members of a run under ``strategy="torchft"``.

    Args:
        world: of the run.
        lighthouse: torchft's, which knows who is there.
        store: of the launch, in which ranks tell their launcher how far they are.
        fewest: number of members without which no step is taken.
    """

    def __init__(self, world: World, lighthouse: str, store: Store, fewest: int) -> None:
        place = world.placement
        self._world, self._lighthouse, self._store, self._fewest = world, lighthouse, store, fewest
        self.number, self._count = place.rank, place.world_size
        self._seconds = world.options.timeout
        self._host = socket.gethostname()
        self._manager: Manager | None = None
        self._group: MemberGroup | None = None
        self._members: list[int] = []
        self._arrangement = 0
        self._course = Course()
        self._models: list[torch.nn.Module] = []
        self._loaders: list[ref[Any]] = []
        self._objects: tuple[Any, ...] = ()
        self._operations, self._last = 0, None  # collectives so far, and the result of the last one
        self._is_open = self._is_fresh = self._is_busy = False
        self._is_away = False  # come back, and not among the others yet
        self._takes_over = False  # all of the others' state, when it comes
        self._has_committed = False
        self._loads = 0  # of others' states
        self._verdict = True
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        for name in ("torchft.manager", "torchft_quorums", "torchft_commits", "torchft_errors"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what they say of each step goes to nobody

    # Who is there

    @property
    def arrangement(self) -> int:
        return self._arrangement

    @property
    def is_away(self) -> bool:
        """Whether this rank has come back, and is not among the others yet."""
        return self._is_away

    def arrive(self) -> None:
        """Come to the others: at the start of the run at once, later not before the loop.

        Raises:
            ArrivalError: not all ranks came.
        """
        if self._store.check(["begun"]):
            self._is_away = True
            place = self._world.placement
            self._world.placement = replace(place, rank=place.world_size - 1)  # nobody's: it prints nothing, saves nothing
            return
        self._store.set(f"arrived/{self.number}", "")
        keys = [f"arrived/{rank}" for rank in range(self._count)]
        limit = min(self._seconds, ARRIVAL_SECONDS)
        if not wait_until(lambda: self._store.check(keys), limit):
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise ArrivalError(
                f"rank {self.number} on {self._host} waited {limit:g} s: {named_ranks(missing)} of {self._count} "
                f"did not come. Look at what the missing ones printed."
            )
        manager = self._make_manager()
        # One ahead of who comes back, also before the first step: the state is here.
        manager.load_state_dict({"step": 1, "batches_committed": 0})
        deadline = time.monotonic() + _FIRST_QUORUM_SECONDS
        while True:
            self._quorum(admit=True)
            if len(self._members) == self._count or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        self._store.set(f"there/{os.getpid()}", "")
        self._store.set("begun", "")

    def _make_manager(self) -> Manager:
        self._group = MemberGroup(self.number, self._seconds, self._rearranged)
        seconds = timedelta(seconds=self._seconds)
        own, port = stores.serve("127.0.0.1", [0], "replica", self._seconds)
        self._own_store = own
        self._manager = manager = Manager(
            pg=self._group,
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=self._fewest,
            use_async_quorum=False,
            init_sync=False,
            timeout=seconds,
            quorum_timeout=timedelta(seconds=_RETURN_SECONDS),
            connect_timeout=timedelta(seconds=min(60.0, self._seconds)),
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=port,
            lighthouse_addr=self._lighthouse,
            replica_id=f"{self.number:06d}",
            hostname="127.0.0.1",
            checkpoint_transport=GroupTransport(self._world.secret or b""),
        )
        return manager

    def _rearranged(self, members: list[int]) -> None:
        """Take this rank's place among new members; torchft's own thread calls it."""
        rank = members.index(self.number)
        place = self._world.placement
        self._world.placement = replace(
            place, rank=rank, world_size=len(members), local_rank=rank, local_world_size=len(members)
        )
        self._world.layout = Layout(rank, len(members))
        before, self._members = self._members, members
        self._arrangement += 1
        lost, new = sorted(set(before) - set(members)), sorted(set(members) - set(before))
        if before and rank == 0 and (lost or new):
            changes = [f"{named_ranks(lost)} gone"] if lost else []
            changes += [f"{named_ranks(new)} back"] if new else []
            say(f"{', '.join(changes)}: {len(members)} of {self._count} ranks at step {self._step}")

    @property
    def _step(self) -> int:
        return 0 if self._manager is None else int(self._manager.current_step()) - 1

    def _quorum(self, *, admit: bool) -> tuple[bool, Any]:
        """Find who is there; return whether a member was behind by a collective, and this one's result of it if it was.

        Raises:
            CollectiveError: no group came about.
        """
        assert self._manager is not None
        for _ in range(_ATTEMPTS):
            before = self._arrangement
            self._manager.start_quorum(shrink_only=not admit)
            error = self._manager.errored()
            if error is None:
                if self._arrangement == before:
                    return False, _NOTHING
                with self._busy():
                    try:
                        return self._reconciled()
                    except (RuntimeError, CollectiveError) as lost:
                        if isinstance(lost, DistwrapError):
                            raise
                        error = lost
            self._fail(error)
        raise CollectiveError(
            f"rank {self.number} on {self._host}: no group of the ranks came about in {_ATTEMPTS} attempts, the last "
            f"of which failed: {first_line(error)}"
        )

    def _fail(self, error: Exception) -> None:
        """Leave a group in which an exchange failed: the others hear of it, and the next quorum makes a new one."""
        assert self._manager is not None
        self._manager.report_error(error)
        self._manager.should_commit()
        self._leave_group()

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.abort()

    def _reconciled(self) -> tuple[bool, Any]:
        """Let all members of a new group be at the same collective; see `_quorum`."""
        secret = self._world.secret or b""
        mine = sign((self._operations, self._fingerprint()), secret)
        everyone: list[Any] = [None] * len(self._members)
        dist.all_gather_object(everyone, mine)
        known = [verify(message, secret, rank) for rank, message in enumerate(everyone)]
        most = max(operations for operations, _ in known)
        ahead = [rank for rank, (operations, _) in enumerate(known) if operations == most]
        if any(operations < most - 1 for operations, _ in known):
            raise ModelError(
                f"the ranks have made {[operations for operations, _ in known]} collectives, so they are at different "
                f"places of the program. Every rank must call the same collectives."
            )
        behind = len(ahead) < len(known)
        value = None
        if behind:
            holder = [sign(self._last, secret) if self._operations == most else b""]
            dist.broadcast_object_list(holder, src=ahead[0])
            value = verify(holder[0], secret, ahead[0])
        mark = known[0][1]
        apart = [self._members[rank] for rank, (_, each) in enumerate(known) if each != mark]
        if apart:
            raise ModelError(
                f"the weights of {named_ranks(apart)} are not those of rank {self._members[0]} at step {self._step}: "
                f"they were changed by more than the steps of wrapped optimizers."
            )
        mine_is_behind = self._operations < most
        if mine_is_behind:
            self._operations, self._last = most, value
        return behind, value if mine_is_behind else _NOTHING

    def _fingerprint(self) -> int:
        found = 0
        for model in self._models:
            for tensor in model.parameters():
                found = zlib.crc32(bytes_of(tensor.detach().cpu()), found)
        return found

    # Steps

    def begin_step(self, *, admit: bool) -> None:
        if self._is_open or self._is_busy or self._course.is_replaying:
            return
        if not self._course.place.loop or self._course.is_over:
            raise ModelError(
                "max_lost= needs to know where a rank that comes back goes on: write the loop of the training as "
                "`for epoch in distwrap.resumable(range(epochs)):`, with the steps inside of it."
            )
        if self._is_fresh:
            self._is_fresh = False
        else:
            self._meet(admit=admit)
        self._is_open = True

    def _meet(self, *, admit: bool) -> None:
        """Meet the others at the same place."""
        while True:
            behind, _ = self._quorum(admit=admit)
            if not behind:
                return

    def begin_exchange(self) -> None:
        """Begin a step at the end of its backward, where no loader has begun it."""
        assert self._manager is not None
        before = self._loads
        self.begin_step(admit=False)
        if self._loads != before:
            self._manager.report_error(RuntimeError("the gradients are of other weights"))

    def average(self, flat: torch.Tensor) -> None:
        """Replace numbers by their mean over the members; where that fails, the step is not committed."""
        assert self._manager is not None
        self._manager.allreduce(flat).wait()

    def commit(self) -> bool:
        """End a step; return whether its change of the weights is to be made, on whatever rank."""
        if not self._is_open:
            return self._verdict  # of the same step, by another optimizer
        assert self._manager is not None
        self._is_open = False
        failed = self._manager.errored()
        self._verdict = bool(self._manager.should_commit())
        if failed is not None:
            self._leave_group()
        if self._verdict and not self._has_committed:
            self._has_committed = True
            self._store.set(f"committed/{os.getpid()}", "")
        return self._verdict

    # Collectives

    def collective(self, what: str, call: Callable[[], R]) -> R:
        if self._is_busy:
            return call()
        if self._is_away:
            return self._of_start(what)
        if self._course.is_replaying:
            result: R = self._course.replayed(what)
            return result
        self._is_fresh = False
        while True:
            try:
                with self._busy():
                    result = call()
                break
            except RuntimeError as error:
                if isinstance(error, DistwrapError):
                    raise
                before = set(self._members)
                value = self._after_loss(error)
                gone = before - set(self._members)
                if gone and what not in ("barrier", "agree", _END):
                    say(f"{what}() goes on without {named_ranks(gone)}, and what would have come from there")
                if value is not _NOTHING:
                    return self._noted(value, counted=True)
        return self._noted(result)

    def _after_loss(self, error: Exception) -> Any:
        """Make a group of those that are left; return the result of the collective where they have it already."""
        self._fail(error)
        _, value = self._quorum(admit=False)
        if self._is_open and self._manager is not None:
            self._manager.report_error(RuntimeError(f"a rank was lost in this step ({error})"))
        return value

    def _noted(self, result: Any, *, counted: bool = False) -> Any:
        if not counted:
            self._operations += 1
            self._last = _copied(result)
        self._course.note(self._last)
        if not self._course.place.loop and self._world.placement.rank == 0:
            message = sign(self._last, self._world.secret or b"")
            self._store.set(f"start/{self._operations}", message.hex())
        return result

    def _of_start(self, what: str) -> Any:
        """Return what a collective before the loop gave the others."""
        self._operations += 1
        key = f"start/{self._operations}"
        if not self._store.check([key]):
            raise ModelError(
                f"rank {self.number} has come back, and called {what}() before the loop, where the others did not: "
                f"what is before the loop must be the same each time the function begins."
            )
        return verify(bytes.fromhex(self._store.get(key).decode()), self._world.secret or b"", 0)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        before, self._is_busy = self._is_busy, True
        try:
            yield
        finally:
            self._is_busy = before

    # The loop

    def loop(self, elements: Iterable[Element], objects: tuple[Any, ...]) -> Iterator[Element]:
        if objects:
            self._objects = objects
        if self._is_away:
            self._come_back()
        first = self._course.begin_loop()
        if first is None:
            return
        for number, element in enumerate(elements):
            if number < first:
                continue
            replays = self._course.is_replaying
            self._course.begin_element(number)
            if not replays:
                self._is_open = False  # a step that the loop has left
                self._meet(admit=True)
                self._is_fresh = True
            yield element
        self._course.end_loop()

    def _come_back(self) -> None:
        """Wait until the others let this rank in, and take over their state."""
        self._make_manager()
        self._is_away = False
        self._takes_over = True
        while self._takes_over:
            self._meet(admit=True)
            time.sleep(0.1 * self._takes_over)  # alone: who has the state is not here yet
        self._store.set(f"there/{os.getpid()}", "")

    # Loaders

    def add_loader(self, loader: Any) -> int:
        self._loaders.append(ref(loader))
        return self._course.add_loader()

    def begin_pass(self, number: int) -> bool:
        return self._course.begin_pass(number)

    def end_pass(self, number: int) -> None:
        self._course.end_pass(number)

    def begin_batch(self, number: int) -> None:
        """Begin a step, if none is under way, before a loader gives a batch."""
        place = self._course.place
        before, place.at = place.at, number
        try:
            self.begin_step(admit=self._course.is_outermost(number))
        finally:
            place.at = before

    # Models and optimizers

    def add_model(self, model: torch.nn.Module) -> None:
        """Take note of a model that all ranks train."""
        self._models.append(unwrap_model(model))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Let an optimizer of our models step where the step is committed; without gradients it changes nothing."""
        held = parameters_of(optimizer)
        if not any(id(each) in held for model in self._models for each in model.parameters()):
            return
        if args[1:] or kwargs.get("closure") is not None:
            raise ModelError(
                f"{type(optimizer).__name__}.step(closure) does not go with max_lost=: its closure would average "
                f"gradients within the step."
            )
        if not self.commit():
            for parameter in held.values():
                parameter.grad = None

    # State

    def _state(self) -> dict[str, Any]:
        place = self._course.place
        return {
            **{
                name: {key: thing.state_dict() for key, thing in things.items()}
                for name, things in self._stateful().items()
            },
            "loaders": [None if (loader := each()) is None else loader.state_dict() for each in self._loaders],
            "place": replace(place, passes=list(place.passes)),
            "log": list(self._course.log),
            "operations": self._operations,
        }

    def _load(self, state: dict[str, Any]) -> None:
        """Take over the state of a member that is ahead."""
        self._loads += 1
        place: Place = state["place"]
        if not self._takes_over and place != self._course.place:
            raise _Behind(self.number)
        for name, mine in self._stateful().items():
            theirs = state[name]
            if mine.keys() != theirs.keys():
                raise ModelError(
                    f"rank {self.number} has come back with the {name} {sorted(mine)}, and the others have "
                    f"{sorted(theirs)}: what is before the loop must be the same each time the function begins."
                )
            for key, thing in mine.items():
                thing.load_state_dict(theirs[key])
        for each, its_state in zip(self._loaders, state["loaders"], strict=True):
            loader = each()
            if loader is not None and its_state is not None:
                loader.load_state_dict(its_state)
        if self._takes_over:
            self._course.take_over(place, state["log"])
            self._operations, self._takes_over = state["operations"], False
            self._is_open, self._is_fresh = place.at is not None, place.at is None

    def _stateful(self) -> dict[str, dict[str, Any]]:
        """Return what has a state that ranks take over, by kinds and by names that are the same on all ranks."""
        models = {f"{type(model).__name__} {number}": model for number, model in enumerate(self._models, 1)}
        names = {id(p): f"{of}'s {name}" for of, model in models.items() for name, p in model.named_parameters()}
        given = {id(thing) for thing in self._objects}
        optimizers: dict[str, Any] = {}
        schedulers: dict[str, Any] = {}
        for optimizer in instances(Optimizer):
            first = next((names[key] for key in parameters_of(optimizer) if key in names), None)
            if first is not None and id(optimizer) not in given:
                _add(optimizers, f"{type(optimizer).__name__} of {first}", optimizer)
        known = {id(optimizer): name for name, optimizer in optimizers.items()}
        for scheduler in instances(LRScheduler):
            of = known.get(id(getattr(scheduler, "optimizer", None)))
            if of is not None and id(scheduler) not in given:
                _add(schedulers, f"{type(scheduler).__name__} of {of}", scheduler)
        objects = {f"{type(thing).__name__} {number}": thing for number, thing in enumerate(self._objects, 1)}
        return {"models": models, "optimizers": optimizers, "schedulers": schedulers, "objects": objects}

    # The end

    def settle(self) -> None:
        """Wait until all members are done with their last exchange."""
        if not self._is_away and self._manager is not None:
            self.collective(_END, dist.barrier)

    def close(self) -> None:
        """Leave."""
        self._hook.remove()
        self._leave_group()
        if self._manager is not None:
            self._manager.shutdown(wait=False)
            self._manager = None


_NOTHING = object()
_END = "the end"


class _Behind(DistwrapError):
    """A rank that the others have left behind, in another element or pass; its launcher starts it again."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} was taken for lost while it was slow, and the others went on without it")


def _add(found: dict[str, Any], name: str, thing: Any) -> None:
    if name in found:
        raise ModelError(
            f"max_lost=: there are two objects {name}, which a rank that comes back could not tell apart. Hand both to "
            f"resumable(range(epochs), first, second)."
        )
    found[name] = thing


def _copied(result: Any) -> Any:
    """Return a copy that the loop cannot change; of tensors without their gradients."""
    from torch.utils._pytree import tree_map

    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf), result)
