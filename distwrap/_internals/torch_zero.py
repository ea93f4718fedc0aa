"""Private names of torch for optimizers that are divided over ranks.

Every function says which names it relies on, and what happens without them; all were seen in versions 2.6 to 2.15.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

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
