"""Private names of torch's profiler.

Every function says which names it relies on, and what happens without them; all were seen in versions 2.6 to 2.15.
"""

import torch


def profiler_runs() -> bool:
    """Return whether a profiler of torch is running in this thread.

    Relies on ``torch.autograd:_profiler_enabled``.
    Without it: a trace within a profiler's run crashes.
    """
    return bool(getattr(torch.autograd, "_profiler_enabled", lambda: False)())
