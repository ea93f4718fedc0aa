"""Functions of tensors within a forward whose layers are divided: torch's ``DTensor`` computes with whole meanings.

A tensor in such a forward is either plain, and the same on all ranks of the group, or a ``DTensor`` that is divided
along one dimension. A result that all ranks have becomes plain. So each function gives what it gives in one process,
whatever the code between two divided layers does; one that cannot be computed in parts gathers its tensors.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.overrides import TorchFunctionMode

from distwrap._internals.torch import version_of
from distwrap._internals.torch_autograd import saving_hooks
from distwrap._internals.torch_sharding import base_of, is_in_pieces
from distwrap._internals.torch_tree import tree_leaves
from distwrap.devices.kinds import generators_kept
from distwrap.errors import DistwrapError, ModelError
from distwrap.group.world import say_once
from distwrap.nesting import rebuilt
from distwrap.seeding import mix
from distwrap.strategies.fsdp.attention import attend

_SEEDS = 2**62
_attention: Any = F.scaled_dot_product_attention
_COPY = "_distwrap_copy_of_view"
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
_SPLITS = ("chunk", "split", "tensor_split")
_VIEWS = (*_SPLITS, "__getitem__", "select", "narrow", "unbind", "diagonal", "view", "reshape", "flatten", "unflatten")
_NUMBERS = ("item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__index__", "__format__")
_RANDOM = (
    *(
        "multi_head_attention_forward",
        "dropout",
        "alpha_dropout",
        "feature_alpha_dropout",
        "feature_dropout",
        "rrelu",
        "gumbel_softmax",
        "bernoulli",
    ),
    *("rand_like", "randn_like", "randint_like", "normal", "poisson", "multinomial", "binomial"),
)
_KEEPS_STATISTICS = ("batch_norm", "instance_norm")  # in tensors that are whole
_NOT_IN_PARTS = (  # torch's DTensor computes something else, or only a forward, as of torch 2.13
    *("prelu", "hardswish", "hardsigmoid", "hardtanh", "relu6", "log_sigmoid", "softshrink", "hardshrink", "sgn"),
    *("copysign", "nextafter", "cov", "group_norm", "native_group_norm", "local_response_norm", "interpolate"),
    *("slice_scatter", "diagonal_scatter", "quantile", "nanquantile", "amin", "amax", "polar", "svd_lowrank"),
    *("binary_cross_entropy", "linear_cross_entropy", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"),
    *("norm", "linalg_norm", "linalg_vector_norm", "prod", "segment_reduce", "_segment_reduce"),
)
_WINDOWS = ("conv", "avg_pool", "max_pool", "adaptive_", "lp_pool", "fractional_")  # beginnings of names
_GATHERS = frozenset((*_NUMBERS, *_RANDOM, *_KEEPS_STATISTICS, *_NOT_IN_PARTS))
_DRAWS = ("normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_", "bernoulli_")
_OF_GRAPHS = ("grad", "backward", "__get__", "__set__", "__delete__")  # which tensors there are, and not their numbers
_KEEPS_TENSOR = ("detach", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad")
_CHANGES_NO_NUMBERS = ("requires_grad_", "share_memory_", "rename_", "detach_")


class TensorMath(TorchFunctionMode):
    """Functions of tensors in a forward of a divided model.

    Args:
        mesh: the mesh of the group.
        where: returns the name of the module that computes.

    Attributes:
        is_compared: whether two results are compared, so that attention drops nothing.
    """

    def __init__(self, mesh: DeviceMesh, where: Callable[[], str]) -> None:
        super().__init__()
        self.mesh, self.is_compared, self._where = mesh, False, where
        self._places: list[object] = []
        self._last: Any = None

    @contextmanager
    def computing(self) -> Iterator[bool]:
        """Compute within the ``with`` in this way; its value is whether the code around it does not."""
        is_outermost = not self._places
        self._places.append(_place())
        try:
            if is_outermost:
                with self:
                    yield True
            else:
                yield False
        finally:
            self._places.pop()
            self._last = None if is_outermost else self._last

    def whole(self, value: Any) -> Any:
        """Return a nesting whose tensors of this mesh are plain ones, with all numbers."""
        return rebuilt(value, lambda leaf, _: self._plain(leaf) if self._is_own(leaf) else leaf)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _OF_GRAPHS or name.startswith("_foreach"):
            return self._outside(func, args, kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        own = [tensor for tensor in given if self._is_own(tensor)]
        if func is _attention and (self.is_compared or any(map(_is_divided, own))):
            return self._attended(*args, **kwargs)
        if func is F.multi_head_attention_forward and _is_by_heads(args, own, is_compared=self.is_compared):
            with self:
                return attend(*args, **kwargs)
        if changes_numbers(func):
            self._refuse_copy(func, args)
        if not own:
            return func(*args, **kwargs)
        if any(map(_is_divided, own)):
            return self._of_divided(func, name, args, kwargs)
        is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in own)
        if len(own) < len(given) or (is_trained and name not in _KEEPS_TENSOR):
            return func(*self.whole(args), **self.whole(kwargs))
        return self._or_whole(func, args, kwargs, args, kwargs)[0]

    def _outside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function as outside of the forward, as a backward, in which modules may compute again."""
        before, self._places = self._places, []
        try:
            return func(*args, **kwargs)
        finally:
            self._places = before

    def _of_divided(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Compute a function of which a tensor is divided."""
        first: Any = next(leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, torch.Tensor))
        if func in _DROPOUTS:
            return self._dropped(func, *args, **kwargs)
        if name in _SPLITS and is_in_pieces(first.placements[0]):
            found = self._split(first, *args[1:], **kwargs)
            if found is not None:
                return found
        is_gathered = name in _GATHERS or name.startswith(_WINDOWS) or name.endswith("_loss")
        if changes_numbers(func) or kwargs.get("out") is not None or (kwargs.get("inplace") and is_gathered):
            if not _is_divided(first):
                return func(*self.whole(args), **self.whole(kwargs))
            if func is torch.Tensor.__setitem__ or name in _DRAWS or is_gathered:
                return self._changed_whole(func, args, kwargs)
        elif is_gathered:
            return func(*self.whole(args), **self.whole(kwargs))
        own_args, own_kwargs = rebuilt([list(args), kwargs], lambda leaf, _: self._divided(leaf))
        result, is_whole = self._or_whole(func, args, kwargs, own_args, own_kwargs)
        if args and result is own_args[0]:
            return first

        def is_gathered_of(leaf: Any) -> bool:
            # Of weights, as those of an embedding, the ranks add results, and gather nothing.
            outputs = (each for each in tree_leaves((args, kwargs)) if not isinstance(each, torch.nn.Parameter))
            return any(_is_divided(each) and leaf.numel() >= each.numel() for each in outputs)

        def plain(leaf: Any, path: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or _is_divided(leaf):
                return leaf
            if is_whole or (leaf.placements[0].is_replicate() and is_gathered_of(leaf)):  # type: ignore[attr-defined]
                self._tell(name)
            leaf = self._plain(leaf) if self._is_own(leaf) else leaf
            if name in _VIEWS:
                setattr(leaf, _COPY, True)
            return leaf

        return rebuilt(result, plain)

    def _or_whole(self, func: Any, args: Any, kwargs: Any, own_args: Any, own_kwargs: Any) -> tuple[Any, bool]:
        """Return a function's result of ``DTensor``s; or of whole ones, and true, where torch has none in parts."""
        try:
            return func(*own_args, **own_kwargs), False
        except (torch.OutOfMemoryError, dist.DistError, DistwrapError):
            raise
        except (RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError):
            # What is wrong with the function itself is raised again. Checkpoints stop with an exception of their own.
            if changes_numbers(func):
                return self._changed_whole(func, args, kwargs), False
            return func(*self.whole(args), **self.whole(kwargs)), True

    def _changed_whole(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Change a divided tensor by way of the whole."""
        first, *others = args
        whole = self._plain(first).clone()
        func(whole, *self.whole(others), **self.whole(kwargs))
        return first.copy_(self._divided(whole))

    def _split(self, tensor: DTensor, sizes: Any, dim: int = 0) -> Any:
        """Return the projections of a layer that is packed, if it is split into these."""
        dim, placement = dim % tensor.dim(), tensor.placements[0]
        pieces = placement.split_factor  # type: ignore[attr-defined]
        width = tensor.shape[dim] // pieces
        if placement.dim != dim or sizes not in (pieces, width, [width] * pieces, (width,) * pieces):  # type: ignore[attr-defined]
            return None
        return tensor.view(*tensor.shape[:dim], pieces, width, *tensor.shape[dim + 1 :]).unbind(dim)

    def _attended(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *more: Any,
        **options: Any,
    ) -> Any:
        """Compute attention with this rank's heads, or sequences."""
        dropout_p = 0.0 if self.is_compared else dropout_p
        given = [query, key, value, *([] if attn_mask is None else [attn_mask])]
        axis = next((each.placements[0].dim - each.dim() for each in given[:3] if _is_divided(each)), 0)
        ways: list[Any] = (
            [self._along(each, axis, is_mask=each is attn_mask) for each in given] if axis <= -3 else [None]
        )
        if any(way is None for way in ways):
            self._tell(_attention.__name__)
            return _attention(*self.whole([query, key, value, attn_mask]), dropout_p, *more, **options)
        own = [way.to_local(grad_placements=way.placements if _is_divided(way) else [Partial()]) for way in ways]
        own += [None] * (4 - len(own))
        if dropout_p == 0.0:
            found = _attention(*own, dropout_p, *more, **options)
        else:
            self._refuse_checkpoint()
            seed = int(torch.randint(_SEEDS, (), device="cpu"))
            with generators_kept(self.mesh.device_type):
                torch.manual_seed(mix("heads", seed, self.mesh.get_local_rank()))
                found = _attention(*own, dropout_p, *more, **options)
        return DTensor.from_local(found, self.mesh, [Shard(found.dim() + axis)], run_check=False)

    def _along(self, tensor: Any, axis: int, *, is_mask: bool) -> Any:
        """Return a tensor divided along an axis from the right, or a mask that all ranks have; else ``None``."""
        tensor = self._divided(tensor)
        if is_mask and (tensor.dim() < -axis or tensor.shape[axis] == 1):
            return tensor if not _is_divided(tensor) else self._divided(self._plain(tensor))
        if tensor.dim() < -axis or tensor.shape[axis] % self.mesh.size():
            return None
        return tensor.redistribute(placements=[Shard(tensor.dim() + axis)])

    def _dropped(self, func: Any, tensor: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        """Drop the numbers that one process would drop: each rank draws for all, and takes its own."""
        if not training or p == 0.0:
            return tensor
        self._refuse_checkpoint()
        with torch.no_grad():
            drawn = func(torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device), p, True)
            own = spread(drawn, self.mesh, tensor.placements[0])
        return tensor.mul_(own) if inplace else tensor * own

    def _tell(self, name: str) -> None:
        """Tell that ranks gather a tensor for a function, and not where it is only compared."""
        if self.is_compared:
            return
        where = self._where()
        cure = (
            " If it is of a joined projection, say 'packed2' or 'packed3' of that in plan=." if name in _VIEWS else ""
        )
        say_once(
            f"gathers in {name} of {where}",
            f"tensor_parallel=: {name}() in {where} needs the whole of a tensor that plan= divides, so that ranks "
            f"gather it in each forward. That is right, and slow.{cure}",
        )

    def _plain(self, tensor: Any) -> Any:
        found = tensor.full_tensor()
        if found.requires_grad and found.grad_fn is not None:
            found.register_hook(_refuse_graph)
        return found

    def _divided(self, leaf: Any) -> Any:
        """Return a tensor as a ``DTensor``, which all ranks have unless it is divided; anything else as it is."""
        if not isinstance(leaf, torch.Tensor) or _is_divided(leaf):
            return leaf
        known = leaf, 0 if leaf.is_inference() else version_of(leaf), torch.is_grad_enabled()
        if self._last is None or self._last[0] is not leaf or self._last[1:3] != known[1:]:
            plain = self._plain(leaf) if self._is_own(leaf) else leaf
            self._last = *known, DTensor.from_local(plain, self.mesh, [Replicate()], run_check=False)
        return self._last[3]

    def _is_own(self, value: Any) -> bool:
        return isinstance(value, DTensor) and value.device_mesh == self.mesh

    def _refuse_copy(self, func: Any, args: Any) -> None:
        first = args[0] if args else None
        base = base_of(first) if isinstance(first, torch.Tensor) else None
        if hasattr(first, _COPY) or hasattr(base, _COPY):
            raise ModelError(
                f"{func.__name__}() changes a part of a tensor that plan= divides over the ranks, and the part is a "
                "copy, so that the change would be lost in the tensor. Compute a new tensor, as part * 2 instead of "
                "part.mul_(2), or torch.where()."
            )

    def _refuse_checkpoint(self) -> None:
        if self._places and self._places[-1] != _place():
            raise ModelError(
                "a divided layer has dropout in a function under torch.utils.checkpoint(), which would drop other "
                "numbers when it is computed again. Checkpoint a module, or use FSDPStrategy(checkpointing=True)."
            )


def spread(tensor: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """Return this rank's part of a tensor that every rank has, without an exchange."""
    alike = DTensor.from_local(tensor.detach(), mesh, [Replicate()], run_check=False)
    return alike.redistribute(placements=[placement])


@cache
def changes_numbers(func: Any) -> bool:
    """Return whether a function changes its first argument, by its name."""
    name = getattr(func, "__name__", "")
    if name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}"):
        return True
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__") and name not in _CHANGES_NO_NUMBERS)


def _is_divided(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and not (
        tensor.placements[0].is_replicate() or tensor.placements[0].is_partial()
    )


def _is_by_heads(args: Any, own: list[Any], *, is_compared: bool) -> bool:
    """Return whether attention has a joined projection that is divided, or is compared with one."""
    is_divided = any(_is_divided(tensor) and is_in_pieces(tensor.placements[0]) for tensor in own)
    return is_divided or (is_compared and args[5] is not None and args[7] is None)


def _place() -> object:
    """Return a value that differs inside of an activation checkpoint."""
    return torch.is_grad_enabled(), saving_hooks()


def _refuse_graph(gradient: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        raise ModelError(
            "a backward with create_graph=True through layers that tensor_parallel= divides: torch's own second "
            "backward of divided tensors loses gradients. Use strategy='ddp' or 'zero1' for a gradient penalty."
        )
