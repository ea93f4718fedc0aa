"""Run a stage's part of a model's own method; code before and after it is left to other stages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from distwrap._internals.torch import version_of
from distwrap._internals.torch_autograd import in_backward
from distwrap._internals.torch_calls import put_back_calls, replace_calls
from distwrap._internals.torch_tree import map_tensors, tensors_in
from distwrap.errors import ModelError
from distwrap.seeding import GENERATORS, RandomState
from distwrap.strategies.pipeline.absent import Absent, NumbersElsewhereError, is_here, noting_draws
from distwrap.strategies.pipeline.attributes import kept_attributes
from distwrap.strategies.pipeline.blocks import Chain
from distwrap.strategies.pipeline.streams import Streams

Method = Callable[..., Any]
BlockRun = Callable[[int, Method, tuple[Any, ...], dict[str, Any]], Any]


@dataclass
class Survey:
    """Facts about a method, from a run in which all numbers were absent.

    Attributes:
        outputs: the absent output of each block.
        needs: for each stage, names of parameters and buffers outside of blocks that it uses or changes.
        changed: names of the buffers that a run changes.
        result: the result of the method, with absent tensors.
        key: the call and the sizes of its tensors.
        draws: whether code outside of blocks draws random numbers, which must be equal on all stages.
        chance: whether any code draws.
        generators: the generators that are used.
        hidden: by stage, absent tensors that replace present ones.
        writes: whether it changes its argument tensors.
    """

    outputs: list[Any] = field(default_factory=list)
    needs: list[set[str]] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)
    result: Any = None
    key: Any = None
    draws: bool = False
    chance: bool = False
    generators: frozenset[str] = frozenset({"torch"})
    hidden: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    writes: bool = False


class Leave(BaseException):
    """End of a stage's part of a method, which no ``except Exception`` of the user stops."""

    def __init__(self, output: Any) -> None:
        self.output = output


class Relay:
    """Blocks of a model, with hooks around their calls.

    Args:
        net: the user's model.
        chain: the blocks of the model.
        streams: the random numbers.

    Attributes:
        is_running: whether a method runs for a stage.
    """

    def __init__(self, net: nn.Module, chain: Chain, streams: Streams) -> None:
        self.net, self.chain, self._streams = net, chain, streams
        self._run: BlockRun | None = None
        self._before = [dict(vars(block)) for block in chain.blocks]
        for number, block in enumerate(chain.blocks):
            replace_calls(block, partial(self._seen, number))

    @property
    def is_running(self) -> bool:
        return self._run is not None

    def release(self) -> None:
        """Remove the hooks from the blocks."""
        for block, own in zip(self.chain.blocks, self._before, strict=True):
            put_back_calls(block, own)

    def survey(self, method: Method, args: Any, kwargs: Any) -> Survey:
        """Run a method without any numbers, and return facts about it; no communication.

        Raises:
            ModelError: the method does not call all blocks in order; or a stage needs a result of another one, other
                than the output of the block before it.
        """
        survey, names = Survey(needs=[set() for _ in self.chain.ends]), self.chain.names
        fresh = map_tensors(torch.clone, (args, kwargs))
        copies = tensors_in(fresh)
        used: list[tuple[int, Any]] = []
        buffers, has_gradients = _Buffers(self.net), torch.is_grad_enabled()

        def note_changes(number: int) -> None:
            changed = buffers.changed()
            survey.changed.update(changed)
            survey.needs[self._stage_of(min(number, len(names) - 1))].update(
                name for name in changed if self.chain.stage_of(name) is None
            )

        def block(number: int, forward: Method, args: Any, kwargs: Any) -> Any:
            used.append((number, (args, kwargs)))
            if has_gradients and not torch.is_grad_enabled() and _is_in_checkpoint():
                raise ModelError(
                    f"the block {names[number]!r} is called by torch.utils.checkpoint(use_reentrant=True), "
                    "from which a stage cannot pass on its output with its gradients. Call it with "
                    "use_reentrant=False, or checkpoint inside of the blocks."
                )
            note_changes(number)
            with self._streams.kept(), noting_draws() as noted:
                begins = self._streams.states()
                try:
                    output = forward(*args, **kwargs)
                except NumbersElsewhereError:  # its stage has them, and compares its output
                    output, survey.chance = _like_first(self.chain.blocks[number], args, kwargs), True
                    survey.changed.update(self._buffers_in(number))  # perhaps
                output = map_tensors(lambda tensor: _absent(tensor, names[number]), output)
                survey.chance |= bool(noted) or self._streams.have_moved(begins)
            note_changes(number)
            self._check_order(number, len(survey.outputs))
            survey.outputs.append(output)
            return output

        def run(*args: Any, **kwargs: Any) -> Any:
            buffers.changed()  # absent buffers have replaced the others
            try:
                result = method(*args, **kwargs)
            except NumbersElsewhereError as error:
                if not has_gradients or len(survey.outputs) < len(names):
                    raise
                result = _some_loss(survey.outputs[-1], error.sources)  # a guess, which the last stage checks
                survey.changed.update(self._buffers_in(None))
            note_changes(len(names))
            return result

        named = [*self.net.named_parameters(), *self.net.named_buffers()]
        absent = {f"net.{name}": _absent(tensor, name) for name, tensor in named}
        caller = _Caller(self.net)
        before, others = self._streams.states(), RandomState.capture()
        with kept_attributes(self.net) as numbers:
            survey.result = self._while(block, lambda: functional_call(caller, absent, (run, *fresh)))
            if counters := numbers.changed():
                seen, survey.outputs = (list(used), survey.outputs), []
                again = map_tensors(torch.clone, (args, kwargs))
                self._while(block, lambda: functional_call(caller, absent, (run, *again)))
                (used, survey.outputs), counters = seen, counters & numbers.changed()  # except values that stay
        if counters:
            raise ModelError(
                f"the forward changes {min(counters)!r}, a number that is an attribute of a module. A stage "
                "runs only a part of the forward, once for each microbatch, so this number would differ "
                "between ranks. Keep it in the loop, and pass it as an argument; or make it a buffer, by "
                "register_buffer()."
            )
        survey.writes = any(version_of(tensor) for tensor in copies)
        survey.draws = self._streams.have_moved(before)
        if others.draws_but_for_torch(RandomState.capture()):
            survey.generators, survey.draws = GENERATORS, True
        survey.chance |= survey.draws
        if len(survey.outputs) != len(names):
            self._refuse_order(f"only {len(survey.outputs)} of its {len(names)} blocks")
        for number, inputs in [*used, (len(names), survey.result)]:
            stage = self._stage_of(min(number, len(names) - 1))
            sources: set[str] = set().union(*(t.sources for t in tensors_in(inputs) if isinstance(t, Absent)))
            for source in sources - {names[number - 1] if number else ""}:
                if source in names and self._stage_of(names.index(source)) != stage:
                    what = f"the block {names[number]!r}" if number < len(names) else "what comes after the last block"
                    raise ModelError(
                        f"{what} in stage {stage} takes the output of {source!r}, which is in stage "
                        f"{self._stage_of(names.index(source))}. Only the output of one block goes from stage "
                        "to stage, to the next block: let the blocks pass on what is needed, or choose other "
                        "stages (split=)."
                    )
                if source not in names:
                    survey.needs[stage].add(source)
        for name, _ in self.net.named_buffers():  # a count of batches stays with its module's statistics
            path = name.rpartition(".")[0]
            for needs in survey.needs if path else ():
                if any(needed.rpartition(".")[0] == path for needed in needs):
                    needs.add(name)
        return survey

    def run(self, survey: Survey, stage: int, received: list[torch.Tensor], method: Method, given: Any) -> Any:
        """Run a stage's part of a method.

        Args:
            survey: the survey of the method with such arguments.
            stage: the stage to run.
            received: the tensors that the previous stage has computed.
            method: the method of the user's model.
            given: its arguments.

        Returns:
            The output of the stage's last block, or in the last stage the method's result.
        """
        begin, end = self.chain.ends[stage - 1] if stage else 0, self.chain.ends[stage]
        count = 0

        def block(number: int, forward: Method, args: Any, kwargs: Any) -> Any:
            nonlocal count
            self._check_order(number, count)
            count += 1
            if number < begin:
                self._streams.pass_block()
                return (
                    _refilled(survey.outputs[number], iter(received)) if number == begin - 1 else survey.outputs[number]
                )
            self._refuse_absent((args, kwargs), f"the block {self.chain.names[number]!r}", stage)
            with self._streams.of_block():
                output = forward(*args, **kwargs)
            if number == end - 1 and end < len(self.chain.names):
                raise Leave(output)
            return output

        # Each run has its own containers, from which a method may remove items.
        args, kwargs = map_tensors(torch.clone if survey.writes else torch.detach, given)
        hidden = self._hidden(survey, stage)
        try:
            if hidden:
                result = self._while(block, lambda: functional_call(_Caller(self.net), hidden, (method, args, kwargs)))
            else:
                result = self._while(block, lambda: method(*args, **kwargs))
        except Leave as leave:
            return leave.output
        self._refuse_absent(result, "what the method returns", stage)
        return result

    def _buffers_in(self, number: int | None) -> set[str]:
        """Return the names of the buffers in a block, or outside of all blocks."""
        names = [name for name, _ in self.net.named_buffers()]
        if number is None:
            return {name for name in names if self.chain.stage_of(name) is None}
        return {name for name in names if name.startswith(f"{self.chain.names[number]}.")}

    def _hidden(self, survey: Survey, stage: int) -> dict[str, torch.Tensor]:
        """Return absent tensors for tensors that are here only for another stage of this rank."""
        if stage not in survey.hidden:
            others = set().union(*survey.needs) - survey.needs[stage]
            named = [*self.net.named_parameters(), *self.net.named_buffers()]
            survey.hidden[stage] = {
                f"net.{name}": _absent(tensor, name) for name, tensor in named if name in others and is_here(tensor)
            }
        return survey.hidden[stage]

    def _while(self, block: BlockRun, run: Callable[[], Any]) -> Any:
        self._run = block
        try:
            return run()
        finally:
            self._run = None

    def _seen(self, number: int, forward: Method) -> Method:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._run is not None:
                return self._run(number, forward, args, kwargs)
            with self._streams.of_block(recomputed=True) if in_backward() else nullcontext():
                return forward(*args, **kwargs)

        return call

    def _stage_of(self, number: int) -> int:
        return next(stage for stage, end in enumerate(self.chain.ends) if number < end)

    def _check_order(self, number: int, expected: int) -> None:
        if number != expected:
            self._refuse_order(f"{self.chain.names[number]!r} as its block number {expected + 1}")

    def _refuse_order(self, seen: str) -> NoReturn:
        names = self.chain.names
        raise ModelError(
            f"strategy='pipeline' needs a method that calls the blocks {names[0]!r} to {names[-1]!r} each "
            f"once, and in this order, and it called {seen}. If other blocks are meant, name those at which "
            "stages begin: PipelineStrategy(split=[...])."
        )

    def _refuse_absent(self, value: Any, what: str, stage: int) -> None:
        for tensor in tensors_in(value):
            if isinstance(tensor, Absent):
                raise ModelError(
                    f"{what} in stage {stage} depends on {', '.join(sorted(tensor.sources)[:3])}, whose "
                    "numbers are in another stage. Only the output of one block goes from stage to stage, to "
                    "the next block."
                )


class _Buffers:
    """Buffers of a model, with detection of changes."""

    def __init__(self, net: nn.Module) -> None:
        self._places = [
            (f"{path}.{last}" if path else last, module, last)
            for path, module in net.named_modules()
            for last, _ in module.named_buffers(recurse=False)
        ]
        self._seen: list[tuple[torch.Tensor | None, int]] = []

    def changed(self) -> set[str]:
        """Return the names of buffers that have changed, or were replaced, since the last call."""
        before = self._seen
        now = [getattr(module, last, None) for _, module, last in self._places]
        self._seen = [(buffer, 0 if buffer is None else version_of(buffer)) for buffer in now]
        pairs = zip(self._places, before, self._seen, strict=False)
        return {place[0] for place, old, new in pairs if old[0] is not new[0] or old[1] != new[1]}


class _Caller(nn.Module):
    """Module whose forward calls any method of another one, for ``functional_call``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, method: Method, args: Any, kwargs: Any) -> Any:
        return method(*args, **kwargs)


def _like_first(block: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return a tensor like the block's first input, as blocks of most models do."""
    first = tensors_in((args, kwargs))[0]
    trains = first.requires_grad or any(parameter.requires_grad for parameter in block.parameters())
    return first.detach().requires_grad_(trains and torch.is_grad_enabled())


def _some_loss(output: Any, sources: set[str]) -> torch.Tensor:
    dtype = torch.promote_types(tensors_in(output)[0].dtype, torch.float32)
    return Absent(torch.zeros((), dtype=dtype), set(sources)).requires_grad_()


def _is_in_checkpoint() -> bool:
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != checkpoint.__module__:
        frame = frame.f_back
    return frame is not None


def _absent(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return an absent leaf tensor for a parameter, a buffer or a block's output."""
    return Absent(tensor.detach(), {name}).requires_grad_(tensor.requires_grad)


def _refilled(output: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return a block's output with copies of the received tensors, as blocks may change inputs in place."""
    return map_tensors(lambda _: next(tensors).clone(), output)
