"""Private names of torch for optimizers and gradients that are divided over ranks.

Every function says which names it relies on, and what happens without them; all were seen in versions 2.6 to 2.15.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from distwrap.versions import KEEPS_COUNTS_OF_MANY


def unchanged_versions(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
    """Return a context that restores the version counters of tensors at its end.

    Relies on ``torch.autograd:_unsafe_preserve_version_counter``.
    Without it: ranks with different version counters are not compared when training pauses or ends.
    """
    keep: Any = getattr(torch.autograd, "_unsafe_preserve_version_counter", None)
    if keep is None or not tensors:
        return nullcontext()
    if KEEPS_COUNTS_OF_MANY:
        return keep(tuple(tensors))  # type: ignore[no-any-return]
    each = ExitStack()
    for tensor in tensors:
        each.enter_context(keep(tensor))
    return each


@contextmanager
def without_step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Disable all step hooks, of an optimizer and global ones, within a ``with``.

    Relies on ``torch.optim.optimizer:_global_optimizer_pre_hooks``,
    ``torch.optim.optimizer:_global_optimizer_post_hooks``,
    ``torch:optim.SGD([zeros(1)])._optimizer_step_pre_hooks``,
    ``torch:optim.SGD([zeros(1)])._optimizer_step_post_hooks``.
    Without it: hooks see the trial steps of an optimizer.
    """
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    everyones = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    tables = [(vars(optimizer), name) for name in names] + [(vars(torch_optimizer), name) for name in everyones]
    tables = [(table, name) for table, name in tables if name in table]
    kept = [table[name] for table, name in tables]
    for table, name in tables:  # replaced, and not emptied: one of these hooks may be running
        table[name] = OrderedDict()
    try:
        yield
    finally:
        for (table, name), hooks in zip(tables, kept, strict=True):
            table[name] = hooks
