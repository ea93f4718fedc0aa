"""Tensors of other stages: on the meta device, with a size, a type and a device by name, and without memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import FrameType
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import nn
from torch.optim import Optimizer

from distwrap._internals.torch_tree import map_tensors, tree_leaves
from distwrap.errors import ModelError
from distwrap.group.world import current_world
from distwrap.precision import LossScaling

# Functions whose results do not depend on the numbers.
_CREATE = {"empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "ones_like"}
_CREATE |= {"rand_like", "randint_like", "randn_like", "zeros_like"}  # stages draw the same outside of blocks
_MOVES = {"to", "cpu", "cuda"}
# Functions that draw, which stages do alike outside of blocks.
_DRAWS = {"bernoulli", "bernoulli_", "exponential_", "normal_", "poisson", "random_", "uniform_"}
_DRAWS |= {f"{kind}{name}" for kind in ("", "alpha_", "feature_", "feature_alpha_") for name in ("dropout", "dropout_")}
_DRAWS |= {"dropout1d", "dropout2d", "dropout3d"}
_WRITES = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod"))}


NESTED = (
    "nn.TransformerEncoder makes nested tensors in evaluation, unless it is made with enable_nested_tensor=False, and "
    "these cannot go from stage to stage."
)


class NumbersElsewhereError(ModelError):
    """The model or the loop reads numbers that another stage has."""


class RemoteTensor(torch.Tensor):
    """Tensor of another stage. What is computed from it is remote too, and optimizers skip it.

    Attributes:
        source: the name of a parameter, buffer or block from which it was computed.
        nominal: the device on which its stage has it.
        has_gradient: whether the parameter has a gradient on its stage.
        draws: whether functions that draw random numbers go on with the generators, as with numbers.
        finds_shapes: whether the model runs now to find sizes alone, which is no forward of the user's.
    """

    source = "another stage"
    nominal = torch.device("cpu")
    has_gradient = False
    draws: ClassVar[bool] = True
    finds_shapes: ClassVar[bool] = False

    @staticmethod
    def like(tensor: torch.Tensor, source: str) -> RemoteTensor:
        """Return a remote tensor with the size and type of another, from which no gradient goes on."""
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        remote = made.as_subclass(RemoteTensor)
        remote.source, remote.nominal = source, tensor.device
        remote.requires_grad_(tensor.requires_grad)
        return remote

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute only the size and type of a result."""
        kwargs, name = kwargs or {}, func.__name__
        first = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, RemoteTensor))
        if func == torch.Tensor.device.__get__:
            return first.__dict__.get("nominal", cls.nominal)
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False  # so that load_state_dict() does not warn
        if name in _CREATE:
            return func(*map_tensors(_hollow, args), **map_tensors(_hollow, kwargs))
        is_write = name in _WRITES or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs
        if is_write and not all(isinstance(each, RemoteTensor) for each in _tensors(kwargs.get("out", args[:1]))):
            _refuse_write(name, first)
        if name in ("backward", "grad"):
            if isinstance(args[0], RemoteTensor):
                _refuse_read(first)
            # NamedInputs refuses these inputs.
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if name.startswith("_nested"):
            raise ModelError(NESTED)
        if name in _DRAWS and cls.draws:
            func(*map_tensors(_ones, args), **map_tensors(_ones, kwargs))
        if name in _MOVES:
            args = tuple("meta" if isinstance(each, (str, torch.device)) else each for each in args)
            args = args if name == "to" else args[:1]
            kwargs = {key: "meta" if key == "device" else value for key, value in kwargs.items()}
            func = torch.Tensor.to
            kwargs = kwargs if len(args) > 1 or kwargs else {"device": "meta"}
        args, kwargs = map_tensors(_on_meta, args), map_tensors(_on_meta, kwargs)
        try:
            result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        except (NotImplementedError, RuntimeError, TypeError) as error:
            if isinstance(error, NotImplementedError) or "meta" in str(error):
                _refuse_read(first)
            raise
        for each in _tensors(result):
            if isinstance(each, RemoteTensor) and "nominal" not in vars(each):
                each.source, each.nominal = first.source, first.nominal
        return result

    @property
    def grad(self) -> RemoteTensor | None:
        """Remote gradient for a loop that looks at all gradients; none for optimizers, torch and distwrap.

        So a norm over all gradients is refused, as the clip of torch takes one.
        """
        asker = cast("FrameType", cast("FrameType", inspect.currentframe()).f_back)
        module, by = str(asker.f_globals.get("__name__")), asker.f_locals.get("self")
        if asker.f_code.co_name == "zero_grad":
            self.has_gradient = False
        is_users = module == nn.utils.clip_grad.__name__ or module.partition(".")[0] not in ("torch", "distwrap")
        if isinstance(by, torch.amp.GradScaler):
            is_users = by is not current_world().part(LossScaling).scaler
        if not self.has_gradient or not is_users or isinstance(by, Optimizer):
            return None
        return RemoteTensor.like(self.detach(), f"the gradient of {self.source}")

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.has_gradient = value is not None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RemoteTensor({tuple(self.shape)}, {self.dtype}, of {self.source!r})"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()


def refuse_copy() -> NoReturn:
    """Refuse to copy or pickle a model in stages."""
    raise ModelError(
        "under strategy='pipeline' each rank has the parameters of its own stage only, so the model and its "
        "state_dict() cannot be copied or pickled. distwrap.save() takes the model itself, as in "
        "save({'model': model}, path), and writes it whole."
    )


def is_here(tensor: torch.Tensor) -> bool:
    """Return whether this rank has the numbers of a tensor."""
    return type(tensor) is not RemoteTensor


def named_tensors(net: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers of a model, by each of their names."""
    return [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]


def make_remote(net: nn.Module, names: Iterable[str]) -> None:
    """Free parameters and buffers of a model; parameters stay the same objects, as optimizers hold them.

    Raises:
        ModelError: something else refers to one.
    """
    tensors, buffers = dict(named_tensors(net)), dict(net.named_buffers(remove_duplicate=False))
    for name in names:
        tensor = tensors[name]
        if name in buffers:
            set_buffer(net, name, RemoteTensor.like(tensor, name) if is_here(tensor) else tensor)
            continue
        if not is_here(tensor):  # by another of its names
            continue
        hollow = nn.Parameter(RemoteTensor.like(tensor.detach(), name), tensor.requires_grad)
        vars(hollow).update({key: value for key, value in vars(tensor).items() if key not in vars(hollow)})
        tensor.grad = None
        try:
            torch.utils.swap_tensors(tensor, hollow)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise ModelError(
                f"the parameter {name!r} cannot be left to another stage, since something on this rank "
                f"holds it: {error} Call wrap_model() before a forward of the model, and before other code "
                "keeps a reference to the parameter."
            ) from error


def make_present(net: nn.Module) -> None:
    """Allocate memory for the remote tensors of a model on their devices."""
    made: dict[int, torch.Tensor] = {}
    for name, tensor in named_tensors(net):
        if not is_here(tensor) and isinstance(tensor, nn.Parameter):
            present = nn.Parameter(torch.empty_like(tensor), tensor.requires_grad)
            torch.utils.swap_tensors(tensor, present)  # type: ignore[no-untyped-call]
        elif not is_here(tensor):
            set_buffer(net, name, made.setdefault(id(tensor), torch.zeros_like(tensor)))


def set_buffer(net: nn.Module, name: str, buffer: torch.Tensor) -> None:
    """Put another tensor in the place of a buffer."""
    path, _, last = name.rpartition(".")
    net.get_submodule(path)._buffers[last] = buffer


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = value if isinstance(value, (tuple, list)) else tree_leaves(value)
    return [each for leaf in leaves for each in tree_leaves(leaf) if isinstance(each, torch.Tensor)]


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, RemoteTensor) else tensor.to("meta")


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor if is_here(tensor) else torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.size())
    )


def _ones(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones(tensor.size(), dtype=tensor.dtype, device=tensor.device)


def _refuse_read(remote: RemoteTensor) -> NoReturn:
    raise NumbersElsewhereError(
        f"the model or the loop reads numbers that another stage has, computed from {remote.source}. Under "
        "strategy='pipeline' code that does not run inside of a block may depend on sizes, but not on numbers. "
        "A norm over all gradients is optimizer_step(optimizer, max_norm=...); the numbers of all weights are in the "
        "file that distwrap.save() has written."
    )


def _refuse_write(name: str, remote: RemoteTensor) -> NoReturn:
    raise ModelError(
        f"{name}() would write numbers that another stage has, computed from {remote.source}, into a tensor "
        "on this rank. In the model, compute a new tensor instead. To clip by a norm over all gradients, use "
        "distwrap.optimizer_step(optimizer, max_norm=...), which takes it over all stages; in the place of a "
        "GradScaler of your own, precision='fp16' with distwrap.backward(loss)."
    )
