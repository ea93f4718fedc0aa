"""What each rank of a world does in its first steps: losses, samples, gradients, weights, learning rates, numbers."""

from __future__ import annotations

import hashlib
import linecache
import math
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from distwrap._internals.torch_prove import hooked_backward, hooked_epochs, hooked_forward, without_dropout
from distwrap._internals.torch_tree import map_tensors, tensors_in
from distwrap.model.state_dict import strip_module_prefix
from distwrap.model.transparent import unwrap_model
from distwrap.places import place
from distwrap.supervision import stacks

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?(?![\w.]*\w)")
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass
class Step:
    """One step of one optimizer on one rank.

    Attributes:
        place: the line of the user's that has made it.
        backward: that of the last backward.
        losses: of the backwards since the last step.
        samples: how often a row was an input of a model that was trained, by a digest.
        after_backward: gradients, by the names of parameters, after the last backward.
        gradients: the same when the optimizer made its step.
        begun: weights before it.
        weights: after it.
        options: numbers among the options of its groups, as learning rates, by name.
        state: sums of its state's tensors, by parameters.
        buffers: of the models, after it, but for running statistics of BatchNorm.
        draws: whether torch's random numbers were drawn since the last step.
    """

    place: str
    backward: str = ""
    losses: list[float] = field(default_factory=list)
    samples: Counter[int] = field(default_factory=Counter)
    after_backward: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    begun: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    options: dict[str, list[float]] = field(default_factory=dict)
    state: dict[str, list[float]] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    draws: bool = False


@dataclass
class Seen:
    """What one rank has done.

    Attributes:
        steps: of its optimizers, in order.
        printed: numbers that it has printed, by the line of the user's.
        switched_off: what was not done: dropout on some lines, and approximate exchanges.
        statistics: how many modules have normalized by the statistics of a batch.
        evaluations: number of batches that models were given without gradients.
        returned: numbers in what its function has returned.
        has_ended: whether it has come to the end of the script.
        comments: to distwrap, on lines of the user's that are named here.
    """

    steps: list[Step] = field(default_factory=list)
    printed: list[tuple[str, list[float]]] = field(default_factory=list)
    switched_off: set[str] = field(default_factory=set)
    statistics: int = 0
    evaluations: int = 0
    returned: list[float] | None = None
    has_ended: bool = False
    comments: dict[str, str] = field(default_factory=dict)


class _Rank:
    """Observer of one rank.

    Args:
        kept: tensors of this world, by what they hold: most of them are alike on all ranks.
    """

    def __init__(self, kept: dict[bytes, Tensor]) -> None:
        self.seen, self._kept = Seen(), kept
        self.epochs = Counter[str]()  # at each line that has trained with a loader
        self.roots: dict[int, nn.Module] = {}
        self.inner, self.normalizing = set[int](), dict[int, nn.Module]()
        self.names: dict[int, str] = {}
        self.backward, self.losses, self.samples = "", list[float](), Counter[int]()
        self.after_backward: dict[str, Tensor] = {}
        self.random: Tensor | None = None  # torch's state after the last step, or before the first forward

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
        if isinstance(module, _BATCH_NORM) and module.training:
            self.normalizing[id(module)] = module
            self.seen.statistics = len(self.normalizing)
        if id(module) not in self.roots:
            if id(module) in self.inner:
                return
            self._add(module)
        if not (torch.is_grad_enabled() and module.training):
            self.seen.evaluations += not torch.is_grad_enabled()
            return
        if self.random is None:
            self.random = torch.get_rng_state()
        has_weights = next(module.parameters(), None) is not None  # a loss as a module has none
        tensors = [each for each in (tensors_in(given) if has_weights else ()) if each.dim() and not each.requires_grad]
        for row in range(len(tensors[0])) if tensors else ():
            own = [each[row].contiguous() for each in tensors if len(each) == len(tensors[0])]
            self.samples[zlib.crc32(b"".join(_bytes(each) for each in own))] += 1

    def _add(self, root: nn.Module) -> None:
        number = len(self.roots)
        for module in root.modules():
            self.inner.add(id(module))
            self.roots.pop(id(module), None)
        self.roots[id(root)] = root
        kind = type(unwrap_model(getattr(root, "module", root))).__name__
        for plain, parameter in strip_module_prefix(dict(root.named_parameters(remove_duplicate=False))).items():
            self.names.setdefault(id(parameter), f"{kind}#{number}.{plain}" if number else plain)

    def end_backward(self, losses: list[float]) -> None:
        self.losses += losses
        self.backward = self.place()
        self.after_backward = {
            name: self._copy(parameter.grad)
            for root in self.roots.values()
            for parameter in root.parameters()
            if parameter.grad is not None and (name := self.names.get(id(parameter), ""))
        }

    def begin_step(self, optimizer: Optimizer) -> None:
        step = Step(self.place(), self.backward, self.losses, self.samples)
        step.draws = self.random is not None and not torch.equal(self.random, torch.get_rng_state())
        named = list(self._named(optimizer))
        step.begun = {name: self._copy(each) for name, each in named}
        step.gradients = {name: self._copy(each.grad) for name, each in named if each.grad is not None}
        step.after_backward = {
            name: self.after_backward[name] for name in step.gradients if name in self.after_backward
        }
        for group in optimizer.param_groups:
            for name, value in group.items():
                if name != "params" and (numbers := numbers_in(value)):
                    step.options.setdefault(name, []).extend(numbers)
        self.losses, self.samples = [], Counter()
        self.seen.steps.append(step)

    def end_step(self, optimizer: Optimizer) -> None:
        step, self.random = self.seen.steps[-1], torch.get_rng_state()
        step.weights = {name: self._copy(each) for name, each in self._named(optimizer)}
        for name, each in self._named(optimizer):
            state = optimizer.state.get(each, {})
            step.state[name] = [float(value.double().abs().sum()) for value in state.values() if type(value) is Tensor]
        running = {id(buffer) for module in self.normalizing.values() for buffer in module.buffers()}
        step.buffers = {
            name: self._copy(buffer)
            for root in self.roots.values()
            for name, buffer in strip_module_prefix(dict(root.named_buffers())).items()
            if id(buffer) not in running
        }

    def _copy(self, value: Any) -> Tensor:
        """Return a copy of a tensor, which all that hold the same share."""
        whole = _whole(value)
        what = f"{whole.dtype} {whole.shape}".encode() + _bytes(whole.contiguous())
        return self._kept.setdefault(hashlib.blake2b(what).digest(), whole)

    def _named(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield self.names.setdefault(id(parameter), f"parameter {len(self.names)}"), parameter


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
        self, rank: Callable[[], int], enough: Callable[[], None], *, steps: int, epochs: int, double: bool
    ) -> None:
        self._rank, self._enough, self._double = rank, enough, double
        self._steps, self._epochs = math.inf if epochs else steps, epochs or math.inf
        self.ranks: dict[int, _Rank] = {}
        self._kept: dict[bytes, Tensor] = {}

    @property
    def seen(self) -> dict[int, Seen]:
        """What each rank has done."""
        return {number: rank.seen for number, rank in sorted(self.ranks.items())}

    def here(self) -> _Rank:
        """Return what is known of the rank whose turn it is."""
        return self.ranks.setdefault(self._rank(), _Rank(self._kept))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take note of all that the ranks do within a ``with``."""
        handles = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: self.here().begin_step(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._end_step(optimizer)),
        ]
        out, sys.stdout = sys.stdout, _Printing(sys.stdout, self)
        try:
            with (
                hooked_forward(self._begin_forward),
                hooked_backward(lambda losses: self.here().end_backward(losses)),
                hooked_epochs(self._epoch),
                without_dropout(lambda: self.here().seen.switched_off.add(f"dropout at {self.here().place()}")),
            ):
                yield
        finally:
            sys.stdout = out
            for handle in handles:
                handle.remove()

    def _begin_forward(self, module: nn.Module, given: Any) -> Any:
        if self._double:
            given = map_tensors(lambda each: each.double() if each.dtype == torch.float32 else each, given)
        self.here().call(module, given)
        return given

    def _epoch(self, batches: Iterator[Any]) -> Iterator[Any]:
        rank = self.here()
        line = rank.place()
        if rank.epochs[line] >= self._epochs:
            self._enough()
        before = len(rank.seen.steps)
        try:
            yield from batches
        finally:
            rank.epochs[line] += len(rank.seen.steps) > before

    def _end_step(self, optimizer: Optimizer) -> None:
        rank = self.here()
        rank.end_step(optimizer)
        if len(rank.seen.steps) >= self._steps:
            self._enough()


class _Printing:
    """Standard output that also takes note of the numbers."""

    def __init__(self, out: TextIO, observer: Observer) -> None:
        self._out, self._observer = out, observer

    def write(self, text: str) -> int:
        if numbers := numbers_in(text):
            rank = self._observer.here()
            rank.seen.printed.append((rank.place(), numbers))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


def numbers_in(value: Any) -> list[float]:
    """Return the numbers in a text, or in what a function has returned.

    Example:
        >>> numbers_in("epoch 3: loss 0.25, 1e-3 of resnet50")
        [3.0, 0.25, 0.001]
    """
    if isinstance(value, str):
        return [float(each) for each in _NUMBER.findall(value)]
    if isinstance(value, (bool, int, float)):
        return [float(value)]
    if isinstance(value, Tensor):
        return [float(each) for each in _whole(value).flatten()[:100].double().tolist()]
    if isinstance(value, dict):
        return [number for each in value.values() for number in numbers_in(each)]
    return [number for each in value for number in numbers_in(each)] if isinstance(value, (list, tuple)) else []


def _bytes(row: Tensor) -> bytes:
    return row.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def _whole(value: Any) -> Tensor:
    """Return a copy of a tensor, put together where it is divided among the ranks."""
    value = value.detach()
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return (whole.to_dense() if whole.layout != torch.strided else whole).to("cpu", copy=True)
