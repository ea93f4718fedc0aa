"""Run a method of the user's model on one rank: some of its blocks here, the others for the sizes of their outputs.

Random numbers are the same on all stages outside of blocks, and different in each block.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.func import functional_call

from distwrap._internals.torch import compiled_module, put_back_calls, replace_calls, version_of
from distwrap._internals.torch_autograd import in_backward
from distwrap._internals.torch_tree import map_tensors, tensors_in
from distwrap.devices.kinds import kind_of
from distwrap.errors import ModelError
from distwrap.seeding import mix, preserved, seed_generators
from distwrap.strategies.pipeline.placement import BlockList
from distwrap.strategies.pipeline.remote import NumbersElsewhereError, RemoteTensor, is_here


class Streams:
    """Random numbers of the passes through a model.

    All stages run the code before and between the blocks, and may use numbers that another stage draws there. So each
    microbatch has seeds of its own, which are the same on all stages: one for each block, and one for the code before
    each block. They follow from the state of torch's generator, which is equal on the ranks of a pipeline. After a pass
    the generators are as before; if any stage has drawn, they then go on by one number on all of them.

    Args:
        device: the device of the model.

    Attributes:
        draws: whether this rank has drawn in the last pass.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._kind = device, kind_of(device)
        self._has_own = self._kind.random_state(device) is not None
        self._number = self._microbatch = self._gap = 0
        self._begins: list[torch.Tensor] = []
        self._outside: dict[tuple[int, int], int] = {}
        self.draws = False

    @contextmanager
    def of_pass(self) -> Iterator[None]:
        """Restore the generators after a pass."""
        self._number, self.draws, self._outside = hash(tuple(_words(torch.get_rng_state()))), False, {}
        states = self._states()
        with preserved():
            try:
                yield
            finally:
                self._restore(states)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Let a run that is no part of the pass draw, and forget it."""
        kept = self._outside, self.draws
        self._outside = {}
        try:
            yield
        finally:
            self._outside, self.draws = kept

    @contextmanager
    def of_microbatch(self, number: int) -> Iterator[None]:
        """Begin a microbatch with seeds of its own, and note whether it draws."""
        self._microbatch = number
        seed_generators(mix("microbatch", self._number, number))
        others = _others()
        self._begin_gap(0)
        try:
            yield
        finally:
            self._end_gap()
            self.draws |= _others() != others

    @contextmanager
    def of_block(self, block: int) -> Iterator[None]:
        """Let a block draw from its own stream of torch's generators."""
        self._end_gap()
        with self.recomputed():
            before = self._states()
            try:
                yield
            finally:
                self.draws |= self._have_moved(before)
        self._begin_gap(block + 1)

    @contextmanager
    def recomputed(self) -> Iterator[None]:
        """Let a block draw as in its forward, before which torch's generators were as they are now."""
        states = self._states()
        self._seed_torch("block", hash(tuple(_words(states[0]))))
        try:
            yield
        finally:
            self._restore(states)

    def outside(self, gaps: int) -> list[float]:
        """Return a number for the draws before each block, in all microbatches, and after the last; 0 for no draw."""
        found = [[value for key, value in self._outside.items() if key[0] == gap] for gap in range(gaps)]
        return [float(sum(values) % 2**50) for values in found]

    def _begin_gap(self, gap: int) -> None:
        self._gap = gap
        self._seed_torch("gap", self._number, self._microbatch, gap)
        self._begins = self._states()

    def _end_gap(self) -> None:
        if self._have_moved(self._begins):
            self.draws = True
            words = [word for state in self._states() for word in _words(state)]
            self._outside[self._gap, self._microbatch] = hash(tuple(words))

    @staticmethod
    def go_on() -> None:
        """Advance torch's generator, so that the next pass draws other numbers."""
        torch.randint(2, (), device="cpu")

    def _states(self) -> list[torch.Tensor]:
        own = self._kind.random_state(self._device) if self._has_own else None
        return [torch.get_rng_state(), *([] if own is None else [own])]

    def _have_moved(self, before: list[torch.Tensor]) -> bool:
        return not all(map(torch.equal, before, self._states()))

    def _restore(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for each in states[1:]:
            self._kind.set_random_state(self._device, each)

    def _seed_torch(self, *parts: int | str) -> None:
        seed = mix(*parts)
        torch.default_generator.manual_seed(seed)
        if self._has_own:
            self._kind.module.manual_seed(seed)


def _words(state: torch.Tensor) -> list[int]:
    return state.cpu().view(torch.int64).tolist()


def _others() -> Any:
    """Return the positions of Python's and numpy's generators."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state()[2:] if numpy is not None else None


Method = Callable[..., Any]
After = Callable[[int, Any], None]
Start = Callable[[Callable[[], Any]], Any]


class StopForward(BaseException):
    """End of this rank's part of a method, which no ``except Exception`` of the user stops."""


class StageRunner:
    """Blocks of a model, whose calls go through a run.

    Args:
        net: the user's model.
        blocks: the blocks of the model.
        streams: the random numbers.

    Attributes:
        is_running: whether a method runs for a stage.
    """

    def __init__(self, net: nn.Module, blocks: BlockList, streams: Streams) -> None:
        self.net, self.blocks, self._streams = net, blocks, streams
        self._run: Callable[..., Any] | None = None
        self._guessed = ""  # the first block whose output is taken for a tensor like its first argument
        self._before = [dict(vars(block)) for block in blocks.blocks]
        for number, block in enumerate(blocks.blocks):
            replace_calls(block, partial(self._called, number))

    @property
    def is_running(self) -> bool:
        return self._run is not None

    def release(self) -> None:
        """Restore the calls of the blocks."""
        for block, own in zip(self.blocks.blocks, self._before, strict=True):
            put_back_calls(block, own)

    def run(self, method: Method, given: Any, own: Collection[int], starts: Mapping[int, Start], after: After) -> Any:
        """Run a method.

        Args:
            method: the method of the user's model.
            given: its arguments.
            own: the indices of the blocks to compute here.
            starts: by index of a block, what gives the output in its place. It gets a function that returns the output
                without numbers.
            after: called with the index and the output of each other block; it may raise `StopForward`.

        Returns:
            The method's result; ``None`` if it was stopped.

        Raises:
            ModelError: the method does not call all blocks in order, or this rank lacks what a block here needs.
        """
        names, count, trains = self.blocks.names, 0, torch.is_grad_enabled()

        def block(number: int, call: Method, args: Any, kwargs: Any) -> Any:
            nonlocal count
            if number != count:
                self._refuse_order(f"{names[number]!r} as its block number {count + 1}")
            count += 1
            if (
                trains
                and not torch.is_grad_enabled()
                and any(map(_is_trained, self.blocks.blocks[number].parameters()))
            ):
                raise ModelError(
                    f"the block {names[number]!r} is called with gradients off, as by checkpoint(use_reentrant=True), "
                    "and a stage cannot pass on its output. Call it with use_reentrant=False, or checkpoint inside "
                    "of the blocks; freeze blocks by requires_grad_(False) in the place of no_grad()."
                )
            with self._streams.of_block(number):
                if number in starts:
                    return starts[number](partial(self._without_numbers, number, args, kwargs))
                if number in own:
                    self.refuse_remote((args, kwargs), f"the block {names[number]!r}")
                    output = call(*args, **kwargs)
                else:
                    output = self._without_numbers(number, args, kwargs)
            after(number, output)
            return output

        self._run, self._guessed = block, ""
        try:
            result = method(*given[0], **given[1])
        except StopForward:
            return None
        finally:
            self._run = None
        if count != len(names):
            self._refuse_order(f"only {count} of its {len(names)} blocks")
        self.refuse_remote(result, "what the method returns")
        return result

    def shapes(self, method: Method, given: Any) -> list[Any]:
        """Return the output of each block without numbers; the method runs until the last one, and changes nothing."""
        outputs: list[Any] = []
        names = self.blocks.names

        def after(number: int, output: Any) -> None:
            outputs.append(map_tensors(lambda tensor: RemoteTensor.like(tensor, names[number]), output))  # no graph
            if len(outputs) == len(names):
                raise StopForward

        given = map_tensors(torch.clone, given)
        before = [(vars(module), dict(vars(module))) for module in self.net.modules()]
        RemoteTensor.finds_shapes = True
        try:
            with self._streams.of_pass():
                self.apart(lambda: self.run(method, given, (), {}, after))
        finally:
            RemoteTensor.finds_shapes = False
            for own, kept in before:
                own.clear()
                own.update(kept)
        return outputs

    def apart(self, run: Callable[[], Any], keep: Collection[str] = ()) -> Any:
        """Run a function with other tensors in the place of the buffers, which so stay as they are, but for `keep`."""
        inside = tuple(f"{name}." for name in self.blocks.names)
        instead = {
            f"net.{name}": RemoteTensor.like(buffer, name) if name.startswith(inside) else buffer.clone()
            for name, buffer in self.net.named_buffers()
            if is_here(buffer) and name not in keep
        }
        return functional_call(_Caller(self.net, run), instead, ())

    def versions(self) -> dict[str, tuple[torch.Tensor, int]]:
        """Return the buffers on this rank, each with a number that tells changes in place."""
        return {name: (each, version_of(each)) for name, each in self.net.named_buffers() if is_here(each)}

    def _called(self, number: int, call: Method) -> Method:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._run is not None:
                return self._run(number, call, args, kwargs)
            if in_backward():
                with self._streams.recomputed():
                    return call(*args, **kwargs)
            raise ModelError(
                f"the block {self.blocks.names[number]!r} is called outside of a forward of the whole model, and under "
                "strategy='pipeline' each rank has only its stage. If a method that returns the loss calls it, name "
                "this method: PipelineStrategy(loss='loss'). Name any other in "
                "wrap_model(model, forward_methods=['encode'])."
            )

        return run

    def _without_numbers(self, number: int, args: Any, kwargs: Any) -> Any:
        """Return a block's remote output; hooks of the block run on its own stage alone."""
        block, name = self.blocks.blocks[number], self.blocks.names[number]

        def hollow(tensor: torch.Tensor) -> torch.Tensor:
            remote = RemoteTensor.like(tensor, name)
            return remote.clone() if remote.requires_grad else remote  # may be changed in place

        args, kwargs = map_tensors(hollow, (args, kwargs))
        RemoteTensor.draws = False  # the block has numbers of its own
        try:
            output = (compiled_module(block) or block).forward(*args, **kwargs)
        except NumbersElsewhereError:  # it looks at its own; its stage compares this with what it computes
            first = tensors_in((args, kwargs))[0]
            trains = first.requires_grad or any(parameter.requires_grad for parameter in block.parameters())
            output = RemoteTensor.like(first, name).detach().requires_grad_(trains and torch.is_grad_enabled())
            self._guessed = self._guessed or name
        except Exception as error:
            if not self._guessed or isinstance(error, ModelError):
                raise
            raise ModelError(
                f"the block {self._guessed!r} reads its own numbers, so that other stages take what it returns for one "
                f"tensor like its first argument, and the block {name!r} cannot go on with that: {error}. Let it "
                "return one such tensor; or compute what it returns beside that without item() or float()."
            ) from error
        finally:
            RemoteTensor.draws = True

        def marked(tensor: torch.Tensor) -> torch.Tensor:
            remote = tensor if isinstance(tensor, RemoteTensor) else RemoteTensor.like(tensor, name)
            remote.source = name
            return remote

        return map_tensors(marked, output)

    def refuse_remote(self, value: Any, what: str) -> None:
        """Refuse a value that depends on another stage's numbers.

        Raises:
            ModelError: it does; the message names what to say.
        """
        for tensor in tensors_in(value):
            if isinstance(tensor, RemoteTensor):
                source = tensor.source
                module = source.rpartition(".")[0] or source
                hint = (
                    "From stage to stage goes only the output of one block, to the next one: let blocks pass on more."
                    if source in self.blocks.names
                    else f"Let every stage hold it: PipelineStrategy(everywhere=[{module!r}]). Without that the first "
                    "stage holds what is registered before the blocks, and the last one what is registered after them. "
                    "If it is what went into a block, as in x = x + block(x), put the addition into the block."
                )
                raise ModelError(f"{what} depends on {source}, whose numbers another stage has. {hint}")

    def _refuse_order(self, seen: str) -> NoReturn:
        names = self.blocks.names
        raise ModelError(
            f"strategy='pipeline' needs a method that calls the blocks {names[0]!r} to {names[-1]!r} each "
            f"once, and in this order, and it called {seen}. If other blocks are meant, name those at which "
            "stages begin: PipelineStrategy(split=[...])."
        )


def _is_trained(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad


class _Caller(nn.Module):
    """Module whose forward calls a function, for ``functional_call``."""

    def __init__(self, net: nn.Module, run: Callable[[], Any]) -> None:
        super().__init__()
        self.net, self._run = net, run

    def forward(self) -> Any:
        return self._run()
