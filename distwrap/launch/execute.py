"""Run the user's function in a world that is ready: seed, retrofit, call. The same under every launcher."""

from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from distwrap import retrofit
from distwrap.comm.consolidation import consolidate
from distwrap.group.world import current_world
from distwrap.launch.task import Call, Task
from distwrap.model.diagnosis import explained
from distwrap.retrofit import Retrofitted
from distwrap.seeding import seed_everything


def execute(task: Task) -> tuple[Any, list[Retrofitted]]:
    """Return the function's value, and what was retrofitted."""
    call, options = task
    if options.seed is not None:
        seed_everything(options.seed)
    try:
        result = _retrofitted(call) if options.retrofit else (call.function(*call.args, **call.kwargs), [])
    except RuntimeError as error:
        raise explained(error)  # noqa: B904 - which knows its cause
    current_world().wait()  # not settle: it may be a call inside another, which goes on
    return result


def _retrofitted(call: Call) -> tuple[Any, list[Retrofitted]]:
    args, kwargs, found = retrofit.wrap(call.args, call.kwargs)
    value = call.function(*args, **kwargs)
    for item in found:
        if isinstance(item.original, nn.Module):
            consolidate(item.wrapped)  # the caller gets one model, not rank 0's of several
    for item in found:
        if isinstance(item.original, DataLoader):
            item.load(item.state())  # where this process is the caller's own, nobody else brings it home
    return value, found
