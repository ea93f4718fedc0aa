"""Private names of torch's autograd: running backwards, hooks of tensors.

Every function says which names it relies on, and what happens without them; all were seen in version 2.13.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distwrap._internals.torch import current_backward

_ENGINE = "_engine_run_backward"
_looks: list[Callable[[Sequence[Any], Sequence[Any]], None]] = []
_placed: list[tuple[Callable[..., Any], Callable[..., Any]]] = []  # torch's function, and ours in its place
_changing = Lock()
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
    module = vars(torch.autograd)
    if _ENGINE not in module:
        return lambda: None

    def run(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        inputs = args[3] if len(args) > 3 else ()
        for each in list(_looks) if inputs else ():
            each(outputs, inputs)
        return own(outputs, *args, **kwargs)

    def stop() -> None:
        with _changing:
            if look in _looks:
                _looks.remove(look)
            if not _looks and _placed and module[_ENGINE] is _placed[0][1]:
                module[_ENGINE] = _placed.pop()[0]

    with _changing:
        _looks.append(look)
        own = module[_ENGINE]
        if not _placed:  # once, for all ranks that are threads of one process, whose runs end in any order
            _placed.append((own, run))
            module[_ENGINE] = run
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


class _Sum(torch.autograd.Function):
    """Sum over the ranks, whose gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        dist.all_reduce(values := values.clone(), group=group)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        dist.all_reduce(gradient := gradient.contiguous().clone(), group=ctx.group)
        return gradient, None


def batch_norm_of_all(module: Any, x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Return what a BatchNorm makes of this rank's batch, normalized by the statistics of the batches of all ranks.

    Each rank computes the whole, on any device; torch's SyncBatchNorm knows accelerators alone.

    Args:
        module: one of torch's BatchNorm classes.
        x: this rank's batch, of which the rows may be more or fewer than on other ranks.
        group: of the ranks, by default all.
    """
    if not (module.training and dist.is_initialized()):
        return nn.BatchNorm1d.forward(module, x)
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, torch.tensor([len(x)]), group=group)
    sizes, rank = [int(count) for count in counts], dist.get_rank(group)
    rows = [x if each == rank else x.new_zeros(size, *x.shape[1:]) for each, size in enumerate(sizes)]
    everyones = nn.BatchNorm1d.forward(module, _Sum.apply(torch.cat(rows), group))  # type: ignore[no-untyped-call]
    parts: list[torch.Tensor] = everyones.split(sizes)  # type: ignore[no-untyped-call]
    return parts[rank]
