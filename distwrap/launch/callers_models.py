"""Models that a rank was given: what it trains of them stays on the rank, which a line says where nothing goes home."""

from typing import Any

from torch import nn

from distwrap.group.world import current_world, say
from distwrap.launch.task import Task
from distwrap.model.checks.optimizers import Optimizers
from distwrap.model.wrapped_models import WrappedModels


def given_models(task: Task) -> list[nn.Module]:
    """Return the models among a call's arguments, and in the attributes of its method's own object.

    With ``retrofit=True`` there are none, since those go home.
    """
    if task.options.retrofit:
        return []
    own = getattr(getattr(task.function, "__self__", None), "__dict__", {})
    return [part for part in (*own.values(), *task.args, *task.kwargs.values()) if isinstance(part, nn.Module)]


def say_what_stays(task: Task, given: list[nn.Module], value: Any) -> None:
    """Print a line if this rank has trained models that it was given, and nothing of them goes home.

    A function that returns something, or has called `save`, is trusted to bring home what it needs.

    Args:
        task: what has run.
        given: what `given_models` returned before it ran.
        value: what it has returned.
    """
    world = current_world()
    if not given or value is not None or world.placement.world_size == 1 or world.counts["saves"]:
        return
    has_wrapped = world.part(WrappedModels).has_wrapped
    names = {type(model).__name__: None for model in given if _trains(model) and has_wrapped(model)}
    if names and world.part(Optimizers).steps:
        what = " and ".join(names)
        say(
            f"{task.name} has trained copies of {what}, and returned nothing: the caller's {what} is as it was before. "
            "@distributed(retrofit=True) brings home what was trained; or return model.state_dict(), or save(model, "
            "path)."
        )


def _trains(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())
