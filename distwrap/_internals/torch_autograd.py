"""Private names of torch's autograd: running backwards, hooks of tensors, saved values of a loss, random operators.

Every function says which names it relies on, and what happens without them; all were seen in version 2.13.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from distwrap._internals.torch import current_backward
from distwrap._internals.torch_tree import map_tensors

Number = float | torch.Tensor
# Operators that neither scale a loss nor add to it.
_KEEPS = ("Alias", "Clone", "Neg", "Reshape", "Squeeze", "ToCopy", "UnsafeView", "Unsqueeze", "View")
_MEAN = 1  # torch's number of this reduction
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def in_backward() -> bool:
    """Return whether this thread runs a backward.

    Relies on ``torch._C:_current_graph_task_id``.
    Without it: the answer is always no.
    """
    return current_backward() not in (None, -1)


@contextmanager
def without_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Disable the hooks of tensors within a ``with``.

    Relies on ``torch:Tensor._backward_hooks``, ``torch:Tensor._post_accumulate_grad_hooks``.
    Without it: under strategy="pipeline" hooks of parameters see the gradients of each microbatch.
    """
    held = [getattr(tensor, name, None) for tensor in tensors for name in _HOOKS]
    taken = [(hooks, dict(hooks)) for hooks in held if hooks]
    for hooks, _ in taken:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in taken:
            hooks.update(kept)


@contextmanager
def hooks_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Keep the hooks of tensors whose contents are swapped within a ``with``.

    ``torch.utils.swap_tensors`` leaves hooks in the Python object, and autograd does not know of them in the new
    contents.

    Relies on ``torch:Tensor._backward_hooks``, ``torch:Tensor._post_accumulate_grad_hooks``.
    Without it: neither earlier hooks of parameters nor later hooks of unpickled parameters are called.
    """
    kept = [(tensor, name, getattr(tensor, name, None)) for tensor in tensors for name in _HOOKS]
    for tensor, name, _ in kept:
        setattr(tensor, name, None)
    try:
        yield
    finally:
        for tensor, name, hooks in kept:
            if hooks:
                setattr(tensor, name, hooks)


def hooked(tensor: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a tensor after the tensor's hooks.

    Relies on ``torch:Tensor._backward_hooks``.
    Without it: as for without_hooks.
    """
    for hook in list((getattr(tensor, _HOOKS[0], None) or {}).values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def call_after_accumulation(tensor: torch.Tensor) -> None:
    """Call the hooks of a tensor whose gradient has been accumulated.

    Relies on ``torch:Tensor._post_accumulate_grad_hooks``.
    Without it: as for without_hooks.
    """
    for hook in list((getattr(tensor, _HOOKS[1], None) or {}).values()):
        hook(tensor)


def look_at_backwards(look: Callable[[Sequence[Any], Sequence[Any]], None]) -> Callable[[], None]:
    """Call a function with the outputs and inputs of each backward that names inputs, before it runs.

    Relies on ``torch.autograd:_engine_run_backward``, whose fifth argument is the inputs.
    Without it: ``backward(inputs=…)`` silently gives no gradients of divided parameters.

    Returns:
        A function that ends this.
    """
    name, module = "_engine_run_backward", vars(torch.autograd)
    own = module.get(name)
    if own is None:
        return lambda: None

    def run(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        inputs = args[3] if len(args) > 3 else ()
        if inputs:
            look(outputs, inputs)
        return own(outputs, *args, **kwargs)

    def stop() -> None:
        if module.get(name) is run:
            module[name] = own

    module[name] = run
    return stop


def nodes_of(outputs: Sequence[Any]) -> Iterator[Any]:
    """Yield each node in the graph of some tensors once.

    Relies on ``torch:ones(1, requires_grad=True).sum().grad_fn.next_functions``.
    Without it: ``backward(inputs=…)`` of divided parameters fails.
    """
    left = [node for output in outputs if (node := getattr(output, "grad_fn", getattr(output, "node", None)))]
    seen = set(left)
    while left:
        node = left.pop()
        yield node
        new = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= new
        left += new


def saving_hooks() -> Any:
    """Return torch's current hooks for tensors that are saved for the backward, or ``None``.

    Relies on ``torch._C._autograd:_top_saved_tensors_default_hooks`` (since torch 2.7).
    Without it: activation checkpointing in a pipeline's block may recompute with other dropout.
    """
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if hooks is None else hooks(True)


def divisors(loss: torch.Tensor) -> list[Number]:
    """Return the divisor of each term of a loss, such as a count of words, from autograd's saved values.

    Relies on ``torch:ones(1, requires_grad=True).div(2).grad_fn._saved_other``,
    ``torch:ones(1, requires_grad=True).mean().grad_fn._saved_self_sym_numel``,
    ``torch:nn.MSELoss()(torch.ones(1, requires_grad=True), torch.ones(1)).grad_fn._saved_reduction``,
    ``torch:nn.MSELoss()(torch.ones(1, requires_grad=True), torch.ones(1)).grad_fn._saved_self``,
    ``torch:nn.NLLLoss()(torch.ones(1, 1, requires_grad=True), torch.zeros(1).long()).grad_fn._saved_total_weight``.
    Without it: a loss with different counts in microbatches is noticed only at batch 1, 2, 4, 8, ….
    """
    return list(_terms(loss.grad_fn, 1.0)) or [1.0]


def _terms(node: Any, divisor: Number) -> Iterator[Number]:
    kind = type(node).__name__.partition("Backward")[0]
    inputs = [each for each, _ in getattr(node, "next_functions", ()) if each is not None]
    if kind in ("Add", "Sub"):
        for each in inputs:
            yield from _terms(each, divisor)
    elif kind in _KEEPS and inputs:
        yield from _terms(inputs[0], divisor)
    elif kind in ("Div", "Mul") and len(inputs) == 1:
        saved = [getattr(node, name, None) for name in ("_saved_other", "_saved_self")]
        number = next((each for each in saved if each is not None), 1.0)
        if isinstance(number, torch.Tensor) and number.device.type == "cpu":
            number = float(number)
        if kind == "Div":
            yield from _terms(inputs[0], divisor * number)
        elif isinstance(number, torch.Tensor):
            yield from _terms(inputs[0], divisor * number.reciprocal())
        elif number:  # a zero term adds nothing
            yield from _terms(inputs[0], divisor / number)
    elif getattr(node, "_saved_reduction", 0) == _MEAN:
        counted = getattr(node, "_saved_total_weight", None)
        yield divisor * (node._saved_self.numel() if counted is None else counted)
    else:
        yield divisor * getattr(node, "_saved_self_sym_numel", 1)


def without_chance() -> AbstractContextManager[object]:
    """Replace the results of random operators within a ``with`` by constants.

    Relies on ``torch.utils._python_dispatch:TorchDispatchMode``.
    Without it: a loss with random numbers seems to be neither the mean nor the sum over a batch.
    """
    mode = _mode()
    if mode is None:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    both = ExitStack()
    both.enter_context(sdpa_kernel(SDPBackend.MATH))  # its dropout is a separate operator
    both.enter_context(mode())
    return both


@cache
def _mode() -> Any:
    try:
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError:
        return None

    class WithoutChance(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if torch.Tag.nondeterministic_seeded not in func.tags:
                return result
            if func.__name__.startswith("native_dropout"):
                return args[0].clone(), torch.ones_like(result[1])
            return map_tensors(lambda tensor: tensor.fill_(float(tensor.is_floating_point())), result)

    return WithoutChance
