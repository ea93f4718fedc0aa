"""Runs of a model's own method from one block to another: what comes before and after is left to other stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.func import functional_call

from distwrap._internals.torch import current_backward
from distwrap._internals.torch_tree import map_tensors, tensors_in
from distwrap.errors import ModelError
from distwrap.seeding import GENERATORS, RandomState
from distwrap.strategies.pipeline.absent import Absent, is_here, noting_draws
from distwrap.strategies.pipeline.blocks import Chain
from distwrap.strategies.pipeline.streams import Streams

Method = Callable[..., Any]
BlockRun = Callable[[int, Method, tuple[Any, ...], dict[str, Any]], Any]


@dataclass
class Survey:
    """Knowledge of a method's run, from one in which all numbers were absent.

    Attributes:
        outputs: of each block, absent.
        needs: names of the parameters and buffers of no block of which each stage computes.
        result: of the method, with absent tensors.
        key: of the method and the sizes.
        draws: whether what is outside of the blocks draws random numbers, which all stages must have.
        chance: whether anything draws.
        generators: which are drawn from.
        hidden: absent tensors for a stage, in the place of others that are here.
    """

    outputs: list[Any] = field(default_factory=list)
    needs: list[set[str]] = field(default_factory=list)
    result: Any = None
    key: Any = None
    draws: bool = False
    chance: bool = False
    generators: frozenset[str] = frozenset({"torch"})
    hidden: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)


class Leave(BaseException):
    """End of a stage's part of a method; no ``except Exception`` of the user's stops it."""

    def __init__(self, output: Any) -> None:
        self.output = output


class Relay:
    """The blocks of a model, whose calls it sees.

    Args:
        net: the user's model.
        chain: its blocks.
        streams: the random numbers.

    Attributes:
        is_running: whether a method is being run for a stage.
    """

    def __init__(self, net: nn.Module, chain: Chain, streams: Streams) -> None:
        self.net, self.chain, self._streams = net, chain, streams
        self._run: BlockRun | None = None
        for number, block in enumerate(chain.blocks):
            block.forward = self._seen(number, block.forward)

    @property
    def is_running(self) -> bool:
        return self._run is not None

    def release(self) -> None:
        """Let the blocks run as they are from now on."""
        for block in self.chain.blocks:
            vars(block).pop("forward", None)

    def survey(self, method: Method, args: Any, kwargs: Any) -> Survey:
        """Run a method without any numbers: on a few sizes, with no communication.

        Raises:
            ModelError: the method calls the blocks in another order, or not all of them; or a stage would need what
                another one has computed, other than the output of the block before it.
        """
        survey, names = Survey(), self.chain.names
        used: list[tuple[int, Any]] = []

        def block(number: int, forward: Method, args: Any, kwargs: Any) -> Any:
            used.append((number, (args, kwargs)))
            with self._streams.kept(), noting_draws() as noted:
                begins = self._streams.states()
                output = map_tensors(lambda tensor: _fresh(tensor, names[number]), forward(*args, **kwargs))
                survey.chance |= bool(noted) or self._streams.have_moved(begins)
            self._check_order(number, len(survey.outputs))
            survey.outputs.append(output)
            return output

        named = [*self.net.named_parameters(), *self.net.named_buffers()]
        absent = {f"net.{name}": _absent(tensor, name) for name, tensor in named}
        caller = _Caller(self.net)
        before, others = self._streams.states(), RandomState.capture()
        survey.result = self._while(block, lambda: functional_call(caller, absent, (method, args, kwargs)))
        survey.draws = self._streams.have_moved(before)
        if others.draws_but_for_torch(RandomState.capture()):
            survey.generators, survey.draws = GENERATORS, True
        survey.chance |= survey.draws
        if len(survey.outputs) != len(names):
            self._refuse_order(f"only {len(survey.outputs)} of its {len(names)} blocks")
        survey.needs = [set() for _ in self.chain.ends]
        for number, inputs in [*used, (len(names), survey.result)]:
            stage = self._stage_of(min(number, len(names) - 1))
            sources: set[str] = set().union(*(t.sources for t in tensors_in(inputs) if isinstance(t, Absent)))
            for source in sources - {names[number - 1] if number else ""}:
                if source in names and self._stage_of(names.index(source)) != stage:
                    what = f"the block {names[number]!r}" if number < len(names) else "what comes after the last block"
                    raise ModelError(
                        f"{what} in stage {stage} takes the output of {source!r}, which is in stage "
                        f"{self._stage_of(names.index(source))}. From stage to stage goes the output of one block, to "
                        f"the next: let the blocks hand on what is needed, or choose the stages otherwise (split=)."
                    )
                if source not in names:
                    survey.needs[stage].add(source)
        for name, _ in self.net.named_buffers():  # a count of batches goes where its module's statistics do
            path = name.rpartition(".")[0]
            for needs in survey.needs if path else ():
                if any(needed.rpartition(".")[0] == path for needed in needs):
                    needs.add(name)
        return survey

    def run(self, survey: Survey, stage: int, received: list[torch.Tensor], method: Method, given: Any) -> Any:
        """Run a stage's part of a method.

        Args:
            survey: of the method with such arguments.
            stage: which part.
            received: the tensors that the stage before has computed.
            method: of the user's model.
            given: its arguments.

        Returns:
            The output of the stage's last block, or what the method returns where that is the last of all.
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

        args, kwargs = given
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

    def _hidden(self, survey: Survey, stage: int) -> dict[str, torch.Tensor]:
        """Return absent tensors for what is here for another stage of this rank, and would be used in vain."""
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
            is_recomputed = current_backward() not in (None, -1)
            with self._streams.of_block(recomputed=True) if is_recomputed else nullcontext():
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
            f"strategy='pipeline' needs a method that calls the blocks {names[0]!r} to {names[-1]!r} each once, and "
            f"in this order, and it called {seen}. Name the blocks at which stages begin, if others are meant: "
            f"PipelineStrategy(split=[...])."
        )

    def _refuse_absent(self, value: Any, what: str, stage: int) -> None:
        for tensor in tensors_in(value):
            if isinstance(tensor, Absent):
                raise ModelError(
                    f"{what} in stage {stage} depends on {', '.join(sorted(tensor.sources)[:3])}, whose numbers are in "
                    f"another stage. From stage to stage goes the output of one block, to the next."
                )


class _Caller(nn.Module):
    """Module whose forward calls any method of another one, for ``functional_call``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, method: Method, args: Any, kwargs: Any) -> Any:
        return method(*args, **kwargs)


def _absent(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return Absent(tensor.detach(), {name}).requires_grad_(tensor.requires_grad)


def _fresh(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return an absent tensor for a block's output, which is the beginning of a graph."""
    return Absent(tensor.detach(), {name}).requires_grad_(tensor.requires_grad)


def _refilled(output: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return a block's output with what was received; copies, since blocks may change their inputs in place."""
    return map_tensors(lambda _: next(tensors).clone(), output)
