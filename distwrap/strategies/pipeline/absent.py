"""Placeholders for tensors of other stages: they have a size, a type and a device, and take no memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from distwrap._internals.torch_subclass import effects_of, wrapper_tensor
from distwrap._internals.torch_tree import map_tensors, tensors_in
from distwrap.errors import ModelError
from distwrap.group.world import current_world
from distwrap.precision import LossScaling

# Operators whose results do not depend on the numbers.
_CREATE = {"empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"}
_CREATE |= {"rand_like", "randint_like", "randn_like"}  # the same on all stages, which start with one seed
# Operators that return plain Python values.
_READ = {"_local_scalar_dense", "equal", "is_nonzero", "item"}


_GRADIENT = "the gradient of "
_CLIP = "Use distwrap.optimizer_step(optimizer, max_norm=...), which takes the norm over all."
_draws: list[str] | None = None


class NumbersElsewhereError(ModelError):
    """The model reads numbers that another stage has.

    Attributes:
        sources: the names of the tensors and blocks from which they were computed.
    """

    def __init__(self, message: str, sources: set[str]) -> None:
        super().__init__(message)
        self.sources = sources


@contextmanager
def noting_draws() -> Iterator[list[str]]:
    """Collect the names of random operators on absent tensors within a ``with``, instead of drawing numbers."""
    global _draws
    before, _draws = _draws, []
    try:
        yield _draws
    finally:
        _draws = before


def draws(operator: Any, args: Sequence[Any]) -> bool:
    """Return whether an operator draws random numbers; attention does so only with dropout."""
    is_attention = "attention" in operator.__name__
    if is_attention and not any(isinstance(each, float) and each > 0 for each in args):
        return False
    return torch.Tag.nondeterministic_seeded in operator.tags


class Absent(torch.Tensor):
    """Tensor of another stage. Results computed from it are absent too, and optimizers skip it.

    Args:
        like: a tensor of the same size and type.
        sources: the same set in all views of one tensor.
        device: its nominal device.

    Attributes:
        sources: the same set in all views of one tensor.
        has_gradient: whether the parameter has a gradient on its stage.
        step: the frame of the last optimizer step that began and has not ended.
        asked: whether that step has read gradients.
    """

    sources: set[str]
    has_gradient = False
    step: ClassVar[FrameType | None] = None
    asked: ClassVar[bool] = False

    @staticmethod
    def __new__(cls, like: torch.Tensor, sources: set[str], device: torch.device | None = None) -> Absent:
        return wrapper_tensor(cls, like, device or like.device)

    def __init__(self, like: torch.Tensor, sources: set[str], device: torch.device | None = None) -> None:
        self.sources = sources

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute only the size and type of a result."""
        kwargs = kwargs or {}
        name = func.__name__.split(".")[0]
        given = tensors_in((args, kwargs))
        absent = [tensor for tensor in given if isinstance(tensor, Absent)]
        if name in _CREATE:
            return func(*map_tensors(_hollow, args), **map_tensors(_hollow, kwargs))
        if name in _READ:
            _refuse_read(absent)
        written, returns_written, returns_views = effects_of(func)
        changed = tensors_in([arg for place, arg in [*enumerate(args), *kwargs.items()] if place in written])
        sources = absent[0].sources if returns_views and not written else set()
        sources.update(*(tensor.sources for tensor in absent))
        for tensor in changed:
            if not isinstance(tensor, Absent):
                _refuse_write(name, tensor, sources)
            tensor.sources.update(sources)
        device = kwargs.get("device") or absent[0].device
        if draws(func, args) and _draws is not None:
            _draws.append(name)
        elif draws(func, args):
            func(*map_tensors(_ones, args), **map_tensors(_ones, kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        try:
            result = func(*map_tensors(_on_meta, args), **map_tensors(_on_meta, kwargs))
        except NotImplementedError:
            _refuse_read(absent)
        if returns_written:
            return changed[0] if len(changed) == 1 else changed
        return map_tensors(lambda tensor: Absent(tensor, sources, torch.device(device)), result)

    @property
    def grad(self) -> Absent | None:
        """Absent gradient of an absent parameter; ``None`` for optimizers, which then skip the parameter.

        torch's clip functions and a user's scaler are refused, since they would see only a part of the gradients.
        """
        frame = inspect.currentframe()
        asker = None if frame is None else frame.f_back
        module = "" if asker is None else str(asker.f_globals.get("__name__"))
        if module == nn.utils.clip_grad.__name__ and not _is_called_in(asker, nn.utils.clip_grad_value_.__name__):
            raise ModelError(
                "torch's clips see the gradients of this stage only: clip_grad_norm_() would clip each stage by a norm "
                f"of its own. {_CLIP}"
            )
        scaler = asker.f_locals.get("self") if asker and module == torch.amp.GradScaler.__module__ else None
        if scaler is not None and scaler is not current_world().part(LossScaling).scaler:
            raise ModelError(
                "a GradScaler of your own sees the gradients of this stage only, and stages would skip different "
                "steps. Run in precision='fp16' with distwrap.backward(loss) and distwrap.optimizer_step(optimizer), "
                "or in bf16, which needs no scaler."
            )
        if asker is not None and asker.f_code.co_name == "zero_grad":
            self.has_gradient = False
        if not self.has_gradient or module.partition(".")[0] in ("torch", "distwrap"):
            return None
        if is_in_step(asker):
            Absent.asked = True
            return None
        return Absent(self, {_GRADIENT + name for name in self.sources})

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None and is_here(value):
            raise ModelError("a parameter of another stage takes no gradient here.")
        self.has_gradient = value is not None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Absent({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()


def is_in_step(frame: FrameType | None) -> bool:
    """Return whether a frame belongs to a running optimizer step; a step may have ended early."""
    while Absent.step is not None and frame is not None:
        if frame is Absent.step:
            return True
        frame = frame.f_back
    return False


def _is_called_in(frame: FrameType | None, name: str) -> bool:
    while frame is not None and frame.f_code.co_name.startswith("<"):  # such as a comprehension
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == name


def refuse_copy() -> NoReturn:
    """Refuse to copy or pickle a model in stages."""
    raise ModelError(
        "under strategy='pipeline' each rank has the parameters of its own stage only, so the model and its "
        "state_dict() cannot be copied or pickled. distwrap.save() takes the model itself, as in "
        "save({'model': model}, path), and writes it whole."
    )


def is_here(tensor: torch.Tensor) -> bool:
    """Return whether this rank has the numbers of a tensor."""
    return type(tensor) is not Absent


def make_absent(net: nn.Module, names: Iterable[str]) -> None:
    """Free parameters and buffers of a model; parameters stay the same objects, as optimizers hold them.

    Raises:
        ModelError: something else refers to one.
    """
    parameters = dict(net.named_parameters(remove_duplicate=False))
    buffers = dict(net.named_buffers(remove_duplicate=False))
    for name in names:
        if name not in parameters:
            hollow_buffer = Absent(buffers[name], {name})
            for other in [each for each, buffer in buffers.items() if buffer is buffers[name]]:
                path, _, last = other.rpartition(".")
                net.get_submodule(path)._buffers[last] = hollow_buffer
        elif is_here(parameter := parameters[name]):
            hollow = nn.Parameter(Absent(parameter.detach(), {name}), parameter.requires_grad)
            try:
                torch.utils.swap_tensors(parameter, hollow)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                raise ModelError(
                    f"the parameter {name!r} cannot be left to another stage, since something on this rank "
                    f"holds it: {error} Call wrap_model() before a forward of the model, and before other code "
                    "keeps a reference to the parameter."
                ) from error


def make_present(net: nn.Module) -> None:
    """Allocate memory for the absent tensors of a model on their nominal devices."""
    for parameter in net.parameters():
        if not is_here(parameter):
            present = nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, present)  # type: ignore[no-untyped-call]
    present_buffers: dict[int, torch.Tensor] = {}
    for name, buffer in list(net.named_buffers(remove_duplicate=False)):
        if not is_here(buffer):
            path, _, last = name.rpartition(".")
            made = present_buffers.setdefault(id(buffer), torch.zeros_like(buffer))
            net.get_submodule(path)._buffers[last] = made


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _ones(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones(tensor.size(), dtype=tensor.dtype, device=tensor.device)


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.size())


def _refuse_read(absent: list[Absent]) -> NoReturn:
    _refuse_gradients(absent[0].sources)
    raise NumbersElsewhereError(
        "the model or the loop reads numbers that another stage has, computed from "
        f"{_named(absent[0].sources)}. Under strategy='pipeline' the code between blocks may depend on sizes, "
        "but not on numbers; a loop finds the numbers of all weights in the file that distwrap.save() has written.",
        absent[0].sources,
    )


def _refuse_write(name: str, tensor: torch.Tensor, sources: set[str]) -> NoReturn:
    _refuse_gradients(sources)
    raise ModelError(
        f"{name}() would write numbers that another stage has, computed from {_named(sources)}, into a tensor "
        f"of shape {tuple(tensor.shape)} on this rank. Compute a new tensor instead; or, as for an average of "
        "the weights, make the tensor after the model's first step, when each stage has its own. Call the "
        "model itself, or a method of it, not one of its parts."
    )


def _refuse_gradients(sources: set[str]) -> None:
    if any(source.startswith(_GRADIENT) for source in sources):
        raise ModelError(
            f"the loop reads numbers that another stage has, computed from {_named(sources)}: each rank would "
            f"take those of its own stage only, as for a norm. {_CLIP}"
        )


def _named(sources: set[str]) -> str:
    named = sorted(sources)
    return ", ".join(named[:3]) + (", …" if len(named) > 3 else "")
