"""What each rank of a world does in its first steps: losses, samples, gradients, weights, learning rates, numbers."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import IterableDataset

from distwrap import simulated
from distwrap._internals.torch_prove import watched, without_dropout
from distwrap._internals.torch_tree import map_tensors, tensors_in
from distwrap.group.world import active_world
from distwrap.model.batch_norm import CPUSyncBatchNorm
from distwrap.model.state_dict import strip_module_prefix
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import WrappedModels
from distwrap.places import place
from distwrap.strategies.pipeline.remote import RemoteTensor, is_here
from distwrap.supervision import stacks

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?(?![\w.]*\w)")
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_KEPT = 256  # numbers of a tensor
_OF_NUMBERS = (2.5e-7, 2.5e-9)  # their epsilon; in float64 too some are computed in float32
_OF_STAGES = "distwrap.strategies.pipeline"


class Sketch(NamedTuple):
    """What is kept of a tensor: its numbers, or where they are many, sums of some with signs drawn once for all.

    A difference of two sketches is that of the tensors, and has about its norm. Source: the count sketch of Charikar,
    Chen and Farach-Colton, Finding frequent items in data streams, 2002.

    Attributes:
        values: in float64.
        epsilon: of the tensor's own type; 0 for integers.
        shape: its own.
        rounding: by how much it may differ at least, where it was computed from larger numbers.
        digit: one more in the last digit, where it is a number that was printed.
    """

    values: Tensor
    epsilon: float
    shape: torch.Size
    rounding: float = 0.0
    digit: float = 0.0

    @property
    def norm(self) -> float:
        """The norm of the tensor."""
        return float(self.values.norm())


@dataclass
class Step:
    """One step of one optimizer on one rank.

    Attributes:
        share: which share of the data its rank has; ranks that divide a model's layers have one together.
        place: the line of the user's that has made it.
        backward: that of the last backward.
        losses: of the backwards since the last step.
        samples: how often a row was an input of a model that was trained, by a digest.
        draws: whether torch's random numbers were drawn since the last step.
        tensors: by their kinds and names. ``options``: numbers among those of its groups; ``begun``: weights before it;
            ``after_backward``: gradients after the last backward; ``gradients``: the same when the optimizer made its
            step; ``changes``: of the weights; ``state``: sums of the optimizer's; ``buffers``: of the models, after
            it, but for running statistics of BatchNorm. Of no step: numbers that were ``printed``, by the line of the
            user's, and those that its function has ``returned``.
    """

    share: int = 0
    place: str = ""
    backward: str = ""
    losses: list[float] = field(default_factory=list)
    samples: Counter[int] = field(default_factory=Counter)
    draws: bool = False
    tensors: dict[str, dict[str, Sketch]] = field(default_factory=lambda: defaultdict(dict))

    def record(self, kind: str, tensors: Mapping[str, Tensor | None]) -> None:
        """Keep sketches of the tensors of a kind, by name; some may be missing."""
        self.tensors[kind] = {name: _sketch(each) for name, each in tensors.items() if each is not None}


@dataclass
class Seen:
    """What one rank has done.

    Attributes:
        steps: of its optimizers, in order.
        output: numbers that it has printed and returned.
        switched_off: what was not done: dropout on some lines, and approximate exchanges.
        statistics: whether modules normalize by the statistics of a batch.
        evaluations: number of batches that models were given without gradients.
        trains: whether it has made steps over the data of loaders, by their lengths.
    """

    steps: list[Step] = field(default_factory=list)
    output: Step = field(default_factory=Step)
    switched_off: set[str] = field(default_factory=set)
    statistics: bool = False
    evaluations: int = 0
    trains: Counter[int] = field(default_factory=Counter)

    def note_numbers(self, kind: str, place: str, text: str) -> None:
        """Keep the numbers in a text: integers are exact, and others as rounding lets them be."""
        numbers, epsilon = self.output.tensors[kind], _OF_NUMBERS[torch.get_default_dtype() == torch.float64]
        for each in _NUMBER.findall(text):
            digit = 10.0 ** int(Decimal(each).as_tuple().exponent)
            sketch = _sketch(torch.tensor([float(each)], dtype=torch.float64))
            numbers[f"{place}#{len(numbers)}"] = sketch._replace(epsilon=epsilon * (digit != 1.0), digit=digit)


class _Rank:
    """Observer of one rank."""

    def __init__(self, number: int) -> None:
        self.seen, self._next, self._number = Seen(), Step(), number
        self.epochs = Counter[str]()  # at each line that has trained with a loader
        self._roots, self._inner = dict[int, nn.Module](), set[int]()
        self._names = dict[int, tuple[str, Tensor]]()  # of parameters by their ids, which no other one is to get
        self._random: Tensor | None = None  # torch's state after the last step, or before the first forward

    def call(self, module: nn.Module, given: Any) -> None:
        """Take note of a call of a model: one that is no part of another."""
        self.seen.evaluations += not torch.is_grad_enabled()  # also of a part, as model.module
        is_part = id(module) in self._inner and id(module) not in self._roots
        if is_part or RemoteTensor.finds_shapes or type(module).__module__.startswith(_OF_STAGES):
            return  # which is no call of the user's, or in which the user's model is called
        if id(module) not in self._roots:
            self._add(module)
        if not (torch.is_grad_enabled() and module.training):
            return
        if self._random is None:
            self._random = torch.get_rng_state()
        has_weights = next(module.parameters(), None) is not None  # a loss as a module has none
        tensors = [each for each in (tensors_in(given) if has_weights else ()) if each.dim() and not each.requires_grad]
        for row in range(len(tensors[0])) if tensors and all(map(is_here, tensors)) else ():
            own = [each[row].cpu().contiguous().view(-1) for each in tensors if len(each) == len(tensors[0])]
            self._next.samples[zlib.crc32(b"".join(each.view(torch.uint8).numpy().tobytes() for each in own))] += 1

    def _add(self, root: nn.Module) -> None:
        number = len(self._roots)
        for module in root.modules():
            self._inner.add(id(module))
            self._roots.pop(id(module), None)
        self._roots[id(root)] = root
        # A method other than forward may call parts alone: they are named as in the whole.
        world = active_world()
        wrapped = [] if world is None else [unwrap_model(each) for each in world.part(WrappedModels)]
        whole = next((each for each in wrapped if any(module is root for module in each.modules())), root)
        for name, parameter in _named(whole, number, whole.named_parameters(remove_duplicate=False)).items():
            self._names.setdefault(id(parameter), (name, parameter))

    def end_backward(self, losses: list[float]) -> None:
        self._next.losses += losses
        self._next.backward = users_line()
        self._next.record("after_backward", {name: each.grad for name, each in self._names.values()})

    def begin_step(self, optimizer: Optimizer) -> None:
        step, named, world = self._next, self._named(optimizer), active_world()
        self.seen.steps.append(step)
        self._next = Step(backward=step.backward)
        self._next.tensors["after_backward"] = step.tensors["after_backward"]  # it may be of two optimizers
        step.share, step.place = self._number if world is None else world.layout.rank, users_line()
        step.draws = self._random is not None and not torch.equal(self._random, torch.get_rng_state())
        step.record("begun", named)
        step.record("gradients", {name: each.grad for name, each in named.items()})
        options = {
            f"{name} of group {number}": torch.tensor(numbers, dtype=torch.float64)
            for number, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if name != "params" and (numbers := [float(each) for each in _NUMBER.findall(plain(value))])
        }
        step.record("options", options)

    def end_step(self, optimizer: Optimizer) -> None:
        step, named, self._random = self.seen.steps[-1], self._named(optimizer), torch.get_rng_state()
        for name, each in named.items():
            begun, weights = step.tensors["begun"].get(name), _sketch(each)
            if begun and begun.shape == weights.shape:
                rounding = 16 * weights.epsilon * weights.norm  # a change may be too little to be seen in the weight
                changes = weights.values - begun.values
                step.tensors["changes"][name] = weights._replace(values=changes, rounding=rounding)
            for key, value in optimizer.state.get(each, {}).items():
                if type(value) is Tensor:
                    step.tensors["state"][f"{name} ({key})"] = _sketch(value, is_sum=True)
        modules = [module for root in self._roots.values() for module in root.modules()]
        normalizing = [each for each in modules if _is_by_batch(each)]
        running = {id(buffer) for module in normalizing for buffer in module.buffers()}
        self.seen.statistics |= bool(normalizing)
        buffers = [
            _named(root, number, root.named_buffers()).items() for number, root in enumerate(self._roots.values())
        ]
        step.record("buffers", {name: each for those in buffers for name, each in those if id(each) not in running})

    def _named(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return those of an optimizer's parameters that this rank has, by name; those of other stages it has not."""
        parameters = [each for group in optimizer.param_groups for each in group["params"] if is_here(each)]
        return {
            self._names.setdefault(id(each), (f"parameter {len(self._names)}", each))[0]: each for each in parameters
        }


class Observer:
    """Observer of all ranks of a world, or of one that is a process; a subclass says what is done after enough steps.

    Args:
        number: of the rank that this process is; 0 where it simulates all of them.
        steps: after how many steps a rank has been seen enough.
        epochs: after how many epochs, in the place of steps; 0 for these.
        double: whether models get float64 for float32.
    """

    def __init__(self, number: int, steps: int, epochs: int, *, double: bool) -> None:
        self.number, self._double, self.ranks = number, double, dict[int, _Rank]()
        self._steps, self._epochs = math.inf if epochs else steps, epochs or math.inf

    def enough(self) -> None:
        """Stop the rank whose turn it is."""
        raise NotImplementedError

    def rank(self) -> int:
        """Return the rank whose turn it is."""
        running: Any = simulated.running
        return self.number if running is None else int(running.rank())

    def here(self) -> _Rank:
        """Return what is known of the rank whose turn it is."""
        if (number := self.rank()) not in self.ranks:
            self.ranks[number] = _Rank(number)
        return self.ranks[number]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Take note of all that the ranks do within a ``with``, and print nothing."""
        register_optimizer_step_pre_hook(lambda optimizer, *_: self.here().begin_step(optimizer))
        register_optimizer_step_post_hook(lambda optimizer, *_: self._end_step(optimizer))
        with (
            contextlib.redirect_stdout(_Printed(self)),
            watched(self._begin_forward, lambda losses: self.here().end_backward(losses), self._epoch),
            without_dropout(lambda: self.here().seen.switched_off.add(f"dropout at {users_line(in_short=True)}")),
        ):
            yield

    def _begin_forward(self, module: nn.Module, given: Any) -> Any:
        if self._double:
            given = map_tensors(lambda each: each.double() if each.dtype == torch.float32 else each, given)
        self.here().call(module, given)
        return given

    def _epoch(self, data: Any, batches: Iterator[Any]) -> Iterator[Any]:
        rank = self.here()
        line, before, seen = users_line(), len(rank.seen.steps), rank.seen
        if rank.epochs[line] >= self._epochs:
            self.enough()
        try:
            for batch in batches:
                yield batch
                seen.trains[length(data)] |= len(seen.steps) > before
        finally:
            seen.trains[length(data)] |= len(seen.steps) > before
            rank.epochs[line] += len(seen.steps) > before

    def _end_step(self, optimizer: Optimizer) -> None:
        rank = self.here()
        rank.end_step(optimizer)
        if len(rank.seen.steps) >= self._steps:
            self.enough()


class _Printed(io.TextIOWrapper):
    """Standard output of which the numbers alone are kept."""

    def __init__(self, observer: Observer) -> None:
        super().__init__(open(os.devnull, "wb"))  # noqa: SIM115 - as long as the process
        self._observer = observer

    def write(self, text: str) -> int:
        rank = self._observer.here()
        rank.seen.note_numbers("printed", users_line(), text)
        return len(text)


def plain(value: Any) -> str:
    """Return a nesting of values in words, with the first numbers of tensors and arrays.

    Example:
        >>> plain({"loss": torch.tensor(0.25), "at": [3, "epoch 4"]})
        "{'loss': [0.25], 'at': [3, 'epoch 4']}"
    """

    def numbers(array: Any) -> Any:
        return (_whole(array).flatten() if isinstance(array, Tensor) else array.ravel())[:100].tolist()

    return repr(map_tensors(numbers, value, also=lambda each: hasattr(each, "ravel")))


def users_line(*, in_short: bool = False) -> str:
    """Return the line of the user's that runs now: its file and number."""
    if (frame := stacks.users_frame()) is None:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    return place(file, line) if in_short else f"{file}:{line}"


def length(data: Any) -> int:
    """Return the number of samples; 0 where they cannot be counted."""
    return len(data) if hasattr(data, "__len__") and not isinstance(data, IterableDataset) else 0


def _named(root: nn.Module, number: int, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors of a model that this rank has, by names that no other model has."""
    kind = type(unwrap_model(getattr(root, "module", root))).__name__
    prefix = f"{kind}#{number}." if number else ""
    return {f"{prefix}{name}": each for name, each in strip_module_prefix(dict(tensors)).items() if is_here(each)}


def _whole(value: Any) -> Tensor:
    """Return a copy of a tensor, put together where it is divided among the ranks; of real numbers."""
    value = value.detach()
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    whole = (whole.to_dense() if whole.layout != torch.strided else whole).to("cpu", copy=True)
    return torch.view_as_real(whole.resolve_conj()) if whole.is_complex() else whole


def _sketch(value: Any, *, is_sum: bool = False) -> Sketch:
    """Return a sketch of a tensor, or of the sum of its numbers' sizes."""
    whole = _whole(value)
    values = whole.double().flatten()
    if is_sum:
        values = values.abs().sum(0, keepdim=True)
    elif (count := len(values)) > _KEPT:
        drawn = torch.randint(2, (count,), generator=torch.Generator().manual_seed(0), dtype=torch.int8, device="cpu")
        values = nn.functional.pad(values * (2 * drawn - 1), (0, -count % _KEPT)).view(-1, _KEPT).sum(0)
    return Sketch(values, torch.finfo(whole.dtype).eps if whole.is_floating_point() else 0.0, whole.shape)


def _is_by_batch(module: nn.Module) -> bool:
    """Return whether a module normalizes by the statistics of this rank's batch."""
    return isinstance(module, _BATCH_NORMS) and module.training and not isinstance(module, CPUSyncBatchNorm)
