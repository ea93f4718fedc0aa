"""The one table of what torch does silently wrong with a ``DTensor``, of which each rank has a part, and what is done.

Plain torch gives each rank the norm of its part by ``w.norm().item()``, draws equal parts on all ranks, and loses
``w[:3].zero_()`` and ``w.data = value``. Here a read returns the number of the whole tensor, a draw the numbers of one
process, and what would be lost is refused. Nothing is emulated. All were seen in version 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.weak import WeakIdKeyDictionary

from distwrap._internals.torch_sharding import is_in_pieces
from distwrap.nesting import rebuilt

_aten = torch.ops.aten
# Operators that return a Python number.
_READS = (_aten._local_scalar_dense.default,)
# Operators that draw random numbers; those in place come last.
_DRAWS = (
    *(_aten.rand_like.default, _aten.randn_like.default, _aten.randint_like.default, _aten.randint_like.low_dtype),
    *(_aten.bernoulli.default, _aten.bernoulli.p, _aten.native_dropout.default, _aten.rrelu_with_noise.default),
    *(_aten.normal.Tensor_float, _aten.normal.float_Tensor, _aten.normal.Tensor_Tensor, _aten.poisson.default),
    *(_aten.binomial.default, _aten._standard_gamma.default, _aten.multinomial.default),
    *(_aten.bernoulli_.float, _aten.bernoulli_.Tensor, _aten.normal_.default, _aten.uniform_.default),
    *(_aten.random_.default, _aten.random_.to, getattr(_aten.random_, "from"), _aten.exponential_.default),
    *(_aten.log_normal_.default, _aten.cauchy_.default, _aten.geometric_.default),
)
_SAME_NUMBERS = {"data.__get__", "detach"}  # of which torch does not note that they are views
# Methods whose names end like those that change a tensor.
_CHANGE_NOTHING = {"requires_grad_", "rename_", "share_memory_", "detach_", "retain_grad_"}
# Attributes that are read all the time, as by optimizers.
_ATTRIBUTES = {
    f"{name}.__get__" for name in ("grad", "shape", "dtype", "device", "requires_grad", "is_leaf", "grad_fn")
}
# Views of which torch makes none of unequal parts, or wrong ones: they are taken of the whole, to be read.
_VIEWS_OF_WHOLE = {"view", "reshape", "flatten", "ravel", "unflatten", "unbind", "__iter__"}
# Functions of which torch gives parts of a tensor wrong numbers or gradients, and what to write.
_WRONG_OF_PARTS = {
    "mse_loss": "(a - b).square().mean()",
    "smooth_l1_loss": "it with operators of tensors",
    "__dlpack__": "it of tensor.full_tensor()",
    "huber_loss": "it with operators of tensors",
    "soft_margin_loss": "torch.log1p((-a * b).exp()).mean()",
    **dict.fromkeys(
        ("index_add_", "index_copy_", "scatter_add_", "index_add", "index_copy", "scatter_add"),
        "it within 'with distwrap.gathered_weights(model):', where weights are whole",
    ),
    "binary_cross_entropy": "it with operators of tensors",
    "binary_cross_entropy_with_logits": "it with operators of tensors",
}
_CUMULATIVE = {"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "cumsum_", "cumprod_"}
_BY_NUMBER = {"maximum", "minimum", "add", "sub", "mul", "div", "lerp", "sqrt", "addcmul", "addcdiv"}
_LOST = (
    "would change nothing. Change whole weights on every rank: 'with distwrap.gathered_weights(model), torch.no_grad():"
    " …', in which they are plain tensors; or all of a parameter in place, as by parameter.copy_(…), mul_(…) or "
    "masked_fill_(…)."
)

_copies: MutableMapping[torch.Tensor, bool] = WeakIdKeyDictionary()  # parts that share no numbers with their tensor


class DividedTensorRules:
    """Rules for ``DTensor`` from the first run on that needs them until the end of the last one.

    Relies on ``torch.distributed.tensor:DTensor._op_dispatcher._custom_op_handlers``,
    ``torch.distributed.tensor:DTensor._op_dispatcher._random_ops``, ``torch:Tensor._base`` and
    ``torch.distributed.tensor:getattr(DTensor, "__annotations__")["_local_tensor"]``.
    Without it: each rank reads the numbers of its part, and changes of some rows are lost.

    Args:
        meet: waits for the other ranks, before all of them put a tensor together to read a number; with
            ``always=False`` only where that was not foreseen.
        refuse: raises an error about a use of a divided tensor, and why it would be wrong.
        divided_like: returns the part of a whole tensor that this rank has of a pattern.
        on_cpu: whether ranks are on the CPU, where torch lets all of them draw the same parts.
    """

    def __init__(
        self,
        meet: Callable[..., object],
        refuse: Callable[[str, str], NoReturn],
        divided_like: Callable[[DTensor, torch.Tensor], torch.Tensor],
        *,
        on_cpu: bool,
    ) -> None:
        self._meet, self._refuse, self._divided_like = meet, refuse, divided_like
        dispatcher: Any = getattr(DTensor, "_op_dispatcher", None)
        self._handlers = getattr(dispatcher, "_custom_op_handlers", {})
        left_to_torch: set[Any] = set() if on_cpu else getattr(dispatcher, "_random_ops", set())
        rules = {**dict.fromkeys(_READS, self._read), **dict.fromkeys(_DRAWS, self._draw)}
        self._added = {each: rule for each, rule in rules.items() if each not in {*self._handlers, *left_to_torch}}
        self._handlers.update(self._added)
        self._before = vars(DTensor).get("__torch_function__")
        DTensor.__torch_function__ = classmethod(lambda kind, *given: self._called(*given))  # type: ignore[method-assign, assignment]

    def end(self) -> None:
        """Leave ``DTensor`` as it was."""
        for operator in self._added:
            self._handlers.pop(operator, None)
        DTensor.__torch_function__ = self._before  # type: ignore[method-assign, assignment]

    def _called(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch that was given divided tensors."""
        kwargs, (name, changes) = kwargs or {}, _known(function)
        tensor = args[0] if args else next(iter(kwargs.values()), None)
        dim = kwargs.get("dim", next(iter(args[1:2]), None)) if name in _CUMULATIVE else None
        if isinstance(dim, int) and dim < 0 and isinstance(tensor, DTensor):  # by which torch finds no divided one
            by_name = {name: dim + tensor.dim() for name in kwargs if name == "dim"}
            args, kwargs = (tensor, *([] if by_name else [dim + tensor.dim()]), *args[2:]), {**kwargs, **by_name}
        with torch._C.DisableTorchFunctionSubclass():
            if name in _ATTRIBUTES or torch.compiler.is_compiling():
                return function(*args, **kwargs)
            self._check(name, changes or kwargs.get("inplace") is True, args, kwargs)
            if isinstance(tensor, DTensor) and args:
                if name == "tolist":
                    return function(self._whole_read(tensor), *args[1:])
                if name == "__format__" and not tensor.dim():
                    return format(tensor.item(), *args[1:])
                if name in _VIEWS_OF_WHOLE and not (torch.is_grad_enabled() and tensor.requires_grad):
                    args = _replicated(tensor, name), *args[1:]
            is_view = name in _SAME_NUMBERS or (bool(args) and args[0] is not tensor)
            if torch.is_inference_mode_enabled() and isinstance(tensor, DTensor):
                is_view = is_view or _is_view_of_plain(function, tensor, args[1:], kwargs)
            result = function(*args, **kwargs)
            if isinstance(result, DTensor) and result is not tensor:
                result = self._reduced(result)
            for part in _leaves(result) if result is not tensor else ():
                if isinstance(part, DTensor) and isinstance(tensor, DTensor):
                    _note_copy(part, tensor, is_view=is_view)
        return result

    def _check(self, name: str, changes: bool, args: Any, kwargs: dict[str, Any]) -> None:
        """Refuse a change that would have no effect on the whole tensor, and a function that torch computes wrongly."""
        given = (*args, *kwargs.values())
        if changes and any(each in _copies for each in _leaves(given[0])):
            self._refuse(f"{name}() of a part", _LOST)
        if name in ("data.__set__", "__setitem__") and _is_part(given[0]):
            self._refuse("parameter.data = …" if name == "data.__set__" else "tensor[…] = …", _LOST)
        if (
            "out" in kwargs
            and any(map(_is_part, _leaves(kwargs["out"])))
            and not _fills_parts(name, args, kwargs["out"])
        ):
            self._refuse(f"{name}(out=…)", _LOST)
        if name in _WRONG_OF_PARTS and any(map(_is_part, given)):
            self._refuse(f"{name}()", f"would be computed of each part by itself. Write {_WRONG_OF_PARTS[name]}.")

    def _reduced(self, tensor: DTensor) -> DTensor:
        """Return a tensor without parts of a norm, a maximum or a flag, which torch would add up in what follows."""
        flags = tensor.dtype == torch.bool
        partial = [
            each.is_partial() and (flags or type(each) is not Partial or each.reduce_op != "sum")
            for each in tensor.placements
        ]
        if not any(partial):
            return tensor
        self._meet(always=False)
        pairs = zip(partial, tensor.placements, strict=True)
        return tensor.redistribute(placements=[Replicate() if is_partial else each for is_partial, each in pairs])

    def _read(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return operator(self._whole_read(args[0]), **kwargs)

    def _whole_read(self, tensor: DTensor) -> torch.Tensor:
        if _is_divided(tensor):
            self._meet()
        return _whole(tensor)  # type: ignore[no-any-return]

    def _draw(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draw all numbers on every rank, and return or fill in this rank's own."""
        pattern, in_place = next(leaf for leaf in args if isinstance(leaf, DTensor)), operator._schema.is_mutable
        if in_place and not operator._schema.name.endswith("_"):
            raise NotImplementedError(f"{operator} of a divided tensor, which draws into one of its arguments")
        if "_like" in operator._schema.name or in_place:  # which use the size and strides of the first one only
            args = _in_memory_order(pattern), *args[1:]
        results = operator(*map(_whole, args), **{name: _whole(value) for name, value in kwargs.items()})
        if in_place:
            pattern.to_local().copy_(self._divided_like(pattern, results).to_local())  # type: ignore[attr-defined]
            return pattern
        return rebuilt(results, lambda leaf, _: self._divided_like(pattern, leaf))


@lru_cache(4096)
def _known(function: Any) -> tuple[str, bool]:
    """Return the name of a function of torch, and whether it changes its first argument."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):
        return f"{getattr(function.__self__, '__name__', '')}.{name}", False
    by_operator = name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}")
    return name, by_operator or (name.endswith("_") and not name.endswith("__") and name not in _CHANGE_NOTHING)


def _whole(leaf: Any) -> Any:
    """Return a divided tensor with all of its numbers, and anything else as it is."""
    if not isinstance(leaf, DTensor):
        return leaf
    with torch.no_grad():
        return _in_memory_order(leaf).copy_(leaf.full_tensor())


def _in_memory_order(tensor: DTensor) -> torch.Tensor:
    """Return an empty tensor with the strides that a tensor has in one process, in whose order numbers are drawn."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _is_divided(tensor: DTensor) -> bool:
    return not all(placement.is_replicate() for placement in tensor.placements)


def _is_part(value: Any) -> bool:
    return isinstance(value, DTensor) and (_is_divided(value) or value in _copies)


def _fills_parts(name: str, args: Any, out: Any) -> bool:
    """Return whether a function computes each number of a divided tensor by those at its place, as AMSGrad does."""
    alike = [isinstance(each, DTensor) and each.placements == out.placements for each in args]
    return name in _BY_NUMBER and isinstance(out, DTensor) and out not in _copies and all(alike)


def _replicated(tensor: DTensor, view: str) -> DTensor:
    """Return a tensor as a whole on every rank if torch cannot take this view of the parts that ranks have."""
    pairs = list(zip(tensor.placements, tensor.device_mesh.shape, strict=True))
    uneven = any(
        is_in_pieces(each) or (isinstance(each, Shard) and tensor.shape[each.dim] % ranks) for each, ranks in pairs
    )
    if not uneven and view not in ("unbind", "__iter__"):
        return tensor
    own: Any = tensor.detach()
    return own.redistribute(placements=[Replicate()] * len(pairs))  # type: ignore[no-any-return]


def _is_view_of_plain(function: Any, tensor: DTensor, args: Any, kwargs: Any) -> bool:
    """Return whether a plain tensor would give a view; in inference mode torch does not note which are."""
    with suppress(Exception), torch.inference_mode(False):
        results = function(_in_memory_order(tensor).to("meta"), *args, **kwargs)
        return any(each._base is not None for each in _leaves(results))
    return False


def _leaves(result: Any) -> Iterator[Any]:
    for each in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(each, torch.Tensor):
            yield each


def _shares_numbers(part: DTensor, tensor: DTensor) -> bool:
    own, its = part.to_local(), tensor.to_local()
    if type(own) is not torch.Tensor or type(its) is not torch.Tensor:  # the result of an exchange that is under way
        return False
    return own.untyped_storage().data_ptr() == its.untyped_storage().data_ptr()


def _note_copy(part: DTensor, tensor: DTensor, *, is_view: bool) -> None:
    """Note a part that is a view in one process, so that a change of it is meant for the tensor, and a copy here."""
    if (is_view or part._base is not None) and (tensor in _copies or not _shares_numbers(part, tensor)):
        _copies[part] = True
