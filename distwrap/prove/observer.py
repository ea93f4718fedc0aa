"""What each rank of a world does in its first steps: losses, samples, gradients, weights, learning rates, numbers."""

from __future__ import annotations

import contextlib
import io
import linecache
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import IterableDataset

from distwrap._internals.torch_prove import watched, without_dropout
from distwrap._internals.torch_tree import map_tensors, tensors_in
from distwrap.group.world import active_world
from distwrap.model.state_dict import strip_module_prefix
from distwrap.model.transparent import unwrap_model
from distwrap.model.wrapped_models import WrappedModels
from distwrap.places import place
from distwrap.strategies.pipeline.remote import RemoteTensor, is_here
from distwrap.supervision import stacks

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?(?![\w.]*\w)")
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_KEPT = 256  # numbers of a tensor
_OF_STAGES = "distwrap.strategies.pipeline"


class Sketch(NamedTuple):
    """What is kept of a tensor: its numbers, or where they are many, sums of some with signs drawn once for all.

    A difference of two sketches is that of the tensors, and has about its norm. Source: the count sketch of Charikar,
    Chen and Farach-Colton, Finding frequent items in data streams, 2002.

    Attributes:
        values: in float64.
        epsilon: of the tensor's own type; 0 for integers.
        shape: its own.
    """

    values: Tensor
    epsilon: float
    shape: torch.Size


Sketches = dict[str, Sketch]


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
        options: numbers among the options of its groups, as learning rates, by name.
        begun: weights before it, by the names of parameters.
        after_backward: gradients after the last backward.
        gradients: the same when the optimizer made its step.
        weights: after it.
        state: sums of its state's tensors, by parameters.
        buffers: of the models, after it, but for running statistics of BatchNorm.
    """

    share: int = 0
    place: str = ""
    backward: str = ""
    losses: list[float] = field(default_factory=list)
    samples: Counter[int] = field(default_factory=Counter)
    draws: bool = False
    options: dict[str, list[float]] = field(default_factory=dict)
    begun: Sketches = field(default_factory=dict)
    after_backward: Sketches = field(default_factory=dict)
    gradients: Sketches = field(default_factory=dict)
    weights: Sketches = field(default_factory=dict)
    state: dict[str, list[float]] = field(default_factory=dict)
    buffers: Sketches = field(default_factory=dict)

    @property
    def changes(self) -> Sketches:
        """What it has changed in the weights."""
        pairs = [(name, each, self.begun.get(name)) for name, each in self.weights.items()]
        return {name: a._replace(values=a.values - b.values) for name, a, b in pairs if b and a.shape == b.shape}


@dataclass
class Seen:
    """What one rank has done.

    Attributes:
        steps: of its optimizers, in order.
        printed: numbers that it has printed, as they stand there, by the line of the user's.
        switched_off: what was not done: dropout on some lines, and approximate exchanges.
        statistics: whether modules normalize by the statistics of a batch.
        evaluations: number of batches that models were given without gradients.
        trained: lengths of the data of loaders over which it has made steps.
        evaluated: the same of those over which it has made none.
        returned: numbers in what its function has returned.
        has_ended: whether it has come to the end of the script.
        comments: to distwrap, on lines of the user's that are named here.
    """

    steps: list[Step] = field(default_factory=list)
    printed: list[tuple[str, list[str]]] = field(default_factory=list)
    switched_off: set[str] = field(default_factory=set)
    statistics: bool = False
    evaluations: int = 0
    trained: set[int] = field(default_factory=set)
    evaluated: set[int] = field(default_factory=set)
    returned: list[float] | None = None
    has_ended: bool = False
    comments: dict[str, str] = field(default_factory=dict)


class _Rank:
    """Observer of one rank."""

    def __init__(self) -> None:
        self.seen, self.next = Seen(), Step()
        self.epochs = Counter[str]()  # at each line that has trained with a loader
        self._roots, self._inner = dict[int, nn.Module](), set[int]()
        self._names = dict[int, tuple[str, Tensor]]()  # of parameters by their ids, which no other one is to get
        self._random: Tensor | None = None  # torch's state after the last step, or before the first forward

    def place(self) -> str:
        """Return the line of the user's that runs now."""
        if (frame := stacks.users_frame()) is None:
            return ""
        file, line = frame.f_code.co_filename, frame.f_lineno
        found = place(file, line)
        if "distwrap:" in (text := linecache.getline(file, line)):
            self.seen.comments[found] = text
        return found

    def call(self, module: nn.Module, given: Any) -> None:
        """Take note of a call of a model: one that is no part of another."""
        if RemoteTensor.finds_shapes or type(module).__module__.startswith(_OF_STAGES):
            return  # which is no call of the user's, or in which the user's model is called
        if id(module) not in self._roots:
            if id(module) in self._inner:
                return
            self._add(module)
        if not (torch.is_grad_enabled() and module.training):
            self.seen.evaluations += not torch.is_grad_enabled()
            return
        if self._random is None:
            self._random = torch.get_rng_state()
        has_weights = next(module.parameters(), None) is not None  # a loss as a module has none
        tensors = [each for each in (tensors_in(given) if has_weights else ()) if each.dim() and not each.requires_grad]
        for row in range(len(tensors[0])) if tensors and all(map(is_here, tensors)) else ():
            own = [each[row].contiguous() for each in tensors if len(each) == len(tensors[0])]
            self.next.samples[zlib.crc32(b"".join(_bytes(each) for each in own))] += 1

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
        self.next.losses += losses
        self.next.backward = self.place()
        parameters = [parameter for root in self._roots.values() for parameter in root.parameters()]
        self.next.after_backward = {
            self._names.get(id(each), ("",))[0]: _sketch(each.grad) for each in parameters if each.grad is not None
        }

    def begin_step(self, optimizer: Optimizer, share: int) -> None:
        step, named = self.next, self._named(optimizer)
        self.seen.steps.append(step)
        self.next = Step(backward=step.backward, after_backward=step.after_backward)  # maybe of two optimizers
        step.share, step.place = share, self.place()
        step.draws = self._random is not None and not torch.equal(self._random, torch.get_rng_state())
        step.begun = {name: _sketch(each) for name, each in named.items()}
        step.gradients = {name: _sketch(each.grad) for name, each in named.items() if each.grad is not None}
        those = step.after_backward.items()
        step.after_backward = {name: each for name, each in those if name in step.gradients}
        for group in optimizer.param_groups:
            for name, value in group.items():
                if name != "params" and (numbers := numbers_in(value)):
                    step.options.setdefault(name, []).extend(numbers)

    def end_step(self, optimizer: Optimizer) -> None:
        step, named, self._random = self.seen.steps[-1], self._named(optimizer), torch.get_rng_state()
        step.weights = {name: _sketch(each) for name, each in named.items()}
        for name, each in named.items():
            state = optimizer.state.get(each, {}).values()
            step.state[name] = [float(_whole(value).double().abs().sum()) for value in state if type(value) is Tensor]
        modules = [module for root in self._roots.values() for module in root.modules()]
        normalizing = [each for each in modules if isinstance(each, _BATCH_NORM) and each.training]
        running = {id(buffer) for module in normalizing for buffer in module.buffers()}
        self.seen.statistics |= bool(normalizing)
        for number, root in enumerate(self._roots.values()):
            those = _named(root, number, root.named_buffers()).items()
            step.buffers |= {name: _sketch(each) for name, each in those if id(each) not in running}

    def _named(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return those of an optimizer's parameters that this rank has, by name; those of other stages it has not."""
        parameters = [each for group in optimizer.param_groups for each in group["params"] if is_here(each)]
        return {
            self._names.setdefault(id(each), (f"parameter {len(self._names)}", each))[0]: each for each in parameters
        }


class Observer:
    """Observer of all ranks of a world.

    Args:
        rank: returns the rank whose turn it is.
        steps: after how many steps a rank has been seen enough.
        epochs: after how many epochs, in the place of steps; 0 for these.
        enough: called on a rank then; it does not return.
        double: whether models get float64 for float32.
    """

    def __init__(
        self, rank: Callable[[], int], enough: Callable[[], None], steps: int, epochs: int, double: bool
    ) -> None:
        self._rank, self._enough, self._double = rank, enough, double
        self._steps, self._epochs = math.inf if epochs else steps, epochs or math.inf
        self._ranks: dict[int, _Rank] = {}

    @property
    def seen(self) -> dict[int, Seen]:
        """What each rank has done."""
        return {number: rank.seen for number, rank in sorted(self._ranks.items())}

    def here(self) -> _Rank:
        """Return what is known of the rank whose turn it is."""
        return self._ranks.setdefault(self._rank(), _Rank())

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Take note of all that the ranks do within a ``with``, and print nothing."""
        register_optimizer_step_pre_hook(lambda optimizer, *_: self.here().begin_step(optimizer, self._share()))
        register_optimizer_step_post_hook(lambda optimizer, *_: self._end_step(optimizer))
        with (
            contextlib.redirect_stdout(_Printed(self)),
            watched(self._begin_forward, lambda losses: self.here().end_backward(losses), self._epoch),
            without_dropout(lambda: self.here().seen.switched_off.add(f"dropout at {self.here().place()}")),
        ):
            yield

    def _begin_forward(self, module: nn.Module, given: Any) -> Any:
        if self._double:
            given = map_tensors(lambda each: each.double() if each.dtype == torch.float32 else each, given)
        self.here().call(module, given)
        return given

    def _epoch(self, data: Any, batches: Iterator[Any]) -> Iterator[Any]:
        rank = self.here()
        line = rank.place()
        if rank.epochs[line] >= self._epochs:
            self._enough()
        before, seen = len(rank.seen.steps), rank.seen
        try:
            for batch in batches:
                yield batch
                if len(seen.steps) > before:
                    seen.trained.add(length(data))
        finally:
            rank.epochs[line] += len(seen.steps) > before
            (seen.trained if len(seen.steps) > before else seen.evaluated).add(length(data))

    def _share(self) -> int:
        world = active_world()
        return self._rank() if world is None else world.layout.rank

    def _end_step(self, optimizer: Optimizer) -> None:
        rank = self.here()
        rank.end_step(optimizer)
        if len(rank.seen.steps) >= self._steps:
            self._enough()


class _Printed(io.TextIOWrapper):
    """Standard output of which the numbers alone are kept."""

    def __init__(self, observer: Observer) -> None:
        super().__init__(open(os.devnull, "wb"))  # noqa: SIM115 - as long as the process
        self._observer = observer

    def write(self, text: str) -> int:
        if numbers := _NUMBER.findall(text):
            rank = self._observer.here()
            rank.seen.printed.append((rank.place(), numbers))
        return len(text)


def numbers_in(value: Any) -> list[float]:
    """Return the numbers in what a function has returned.

    Example:
        >>> numbers_in({"loss": torch.tensor(0.25), "at": [3, "epoch 4"]})
        [0.25, 3.0, 4.0]
    """
    if isinstance(value, str):
        return [float(each) for each in _NUMBER.findall(value)]
    if isinstance(value, (bool, int, float)):
        return [float(value)]
    if hasattr(value, "ravel") and not isinstance(value, Tensor):  # NumPy's
        value = value.ravel()[:100].tolist()
    if isinstance(value, Tensor):
        return [float(each) for each in _whole(value).flatten()[:100].double().tolist()]
    if isinstance(value, dict):
        value = list(value.values())
    return [number for each in value for number in numbers_in(each)] if isinstance(value, (list, tuple)) else []


def length(data: Any) -> int:
    """Return the number of samples; 0 where they cannot be counted."""
    return len(data) if hasattr(data, "__len__") and not isinstance(data, IterableDataset) else 0


def _named(root: nn.Module, number: int, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors of a model that this rank has, by names that no other model has."""
    kind = type(unwrap_model(getattr(root, "module", root))).__name__
    prefix = f"{kind}#{number}." if number else ""
    return {f"{prefix}{name}": each for name, each in strip_module_prefix(dict(tensors)).items() if is_here(each)}


def _bytes(row: Tensor) -> bytes:
    return row.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def _whole(value: Any) -> Tensor:
    """Return a copy of a tensor, put together where it is divided among the ranks; of real numbers."""
    value = value.detach()
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    whole = (whole.to_dense() if whole.layout != torch.strided else whole).to("cpu", copy=True)
    return torch.view_as_real(whole.resolve_conj()) if whole.is_complex() else whole


def _sketch(value: Any) -> Sketch:
    whole = _whole(value)
    values = whole.double().flatten()
    if (count := len(values)) > _KEPT:
        drawn = torch.randint(2, (count,), generator=torch.Generator().manual_seed(0), dtype=torch.int8, device="cpu")
        values = nn.functional.pad(values * (2 * drawn - 1), (0, -count % _KEPT)).view(-1, _KEPT).sum(0)
    return Sketch(values, torch.finfo(whole.dtype).eps if whole.is_floating_point() else 0.0, whole.shape)
