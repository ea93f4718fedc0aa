"""Behaviours of checkpoints: plain keys and full shapes, from any strategy to one process and back."""

from pathlib import Path
from typing import Any

import torch

from distwrap.checkpoint import load, save, wait_for_saves
from distwrap.checkpoint.resume import resume_from, run_state
from distwrap.group.collectives import barrier
from distwrap.group.world import is_rank_zero
from distwrap.model.state_dict import add_module_prefix
from distwrap.model.wrapped_models import bound_strategy
from distwrap.testing.behaviours import goes_on_alone, trained
from distwrap.testing.nets import small
from distwrap.testing.sides import OneProcess, Trial, adamw, compare, epoch, fit
from tests.conformance.base import behaviour


@behaviour()
def state_is_the_plain_one(trial: Trial) -> None:
    """Return the full state of a model with the plain model's keys, shapes and types."""
    plain = small().state_dict()
    state = trial.strategy.state(trial.wrap(small()), everywhere=True)
    assert list(state) == list(plain), f"the state's keys are {list(state)}"
    for name, tensor in state.items():
        assert type(tensor) is torch.Tensor, f"{name} is a {type(tensor).__name__}, and not whole"
    compare(dict(state), dict(plain))


@behaviour()
def state_dict_has_plain_keys(trial: Trial) -> None:
    """Return from the model's own ``state_dict()`` the plain model's keys, without a wrapper's prefix."""
    found = list(trial.wrap(small()).state_dict())
    assert found == list(small().state_dict()), f"state_dict() has the keys {found}"


@behaviour()
def load_plain_keys(trial: Trial) -> None:
    """Load a plain state dict by ``load_state_dict``."""
    model = trial.wrap(small())
    model.load_state_dict(small(seed=6).state_dict())
    compare(trial.weights(model), dict(small(seed=6).state_dict()))


@behaviour()
def load_prefixed_keys(trial: Trial) -> None:
    """Load a state dict whose keys begin with ``module.``, as others' wrappers write them."""
    if trial.world.placement.world_size == 1:
        return  # the model is the user's own
    model = trial.wrap(small())
    model.load_state_dict(add_module_prefix(small(seed=6).state_dict()))
    compare(trial.weights(model), dict(small(seed=6).state_dict()))


@behaviour()
def loaded_from_one_process(trial: Trial) -> None:
    """Load what one process has saved with torch alone, and train on exactly."""
    plain, plains = trained(trial.alone)
    if is_rank_zero():
        torch.save({"model": plain.state_dict(), "optimizer": plains.state_dict()}, trial.folder / "plain.pt")
    barrier()
    model, optimizer = trained(trial, seed=6, epochs=0)
    load(trial.folder / "plain.pt", into={"model": model, "optimizer": optimizer})
    epoch(trial, model, optimizer)
    compare(trial.weights(model), fit(trial.alone, adamw, epochs=2))


def _resumed(trial: Trial, path: Path, **how: Any) -> Any:
    """Return the weights of a run that was saved after an epoch, and went on in a new model that had trained."""
    model, optimizer = trained(trial)
    save({"model": model, "optimizer": optimizer}, path, **how)
    if how.get("background"):
        wait_for_saves()
    model, optimizer = trained(trial, seed=6)
    load(path, into={"model": model, "optimizer": optimizer})
    epoch(trial, model, optimizer)
    return trial.weights(model)


@behaviour()
def resume_exactly(trial: Trial) -> None:
    """Save model and optimizer, load them into others, and train on exactly."""
    compare(_resumed(trial, trial.folder / "state.pt"), fit(trial.alone, adamw, epochs=2))


@behaviour()
def parts_are_whole_again(trial: Trial) -> None:
    """Read a checkpoint in parts as the full state, which one process loads."""
    model, optimizer = trained(trial)
    save({"model": model, "optimizer": optimizer}, trial.folder / "parts", io="sharded")
    goes_on_alone(trial, load(trial.folder / "parts"))


@behaviour()
def resume_from_the_background(trial: Trial) -> None:
    """Save in the background, load, and train on exactly."""
    compare(_resumed(trial, trial.folder / "state.pt", background=True), fit(trial.alone, adamw, epochs=2))


@behaviour()
def optimizer_state_is_the_plain_one(trial: Trial) -> None:
    """Return the full state of an optimizer as one process would have it."""

    def loop(side: OneProcess) -> Any:
        model, optimizer = trained(side)
        if isinstance(side, Trial):
            found = (bound_strategy(optimizer) or side.strategy).state(optimizer, everywhere=True)
        else:
            found = optimizer.state_dict()
        return found["state"], [group["params"] for group in found["param_groups"]], side.weights(model)

    trial.same(loop)


@behaviour()
def state_of_the_run(trial: Trial) -> None:
    """Save `run_state`, a scheduler and the loop's own numbers, and take them up by `resume_from`."""

    def parts(seed: int) -> dict[str, Any]:
        model, optimizer = trained(trial, seed=seed, epochs=0)
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"model": model, "optimizer": optimizer, "rates": rates, "run": run_state()}

    path = trial.folder / "state.pt"
    before = parts(5)
    torch.manual_seed(9)
    epoch(trial, before["model"], before["optimizer"])
    before["rates"].step()
    save({**before, "epoch": 1}, path)
    drawn = torch.rand(3)
    after = parts(6)
    state = resume_from(path, into=after)
    assert state is not None
    assert state["epoch"] == 1
    assert torch.equal(torch.rand(3), drawn), "the random numbers do not go on where they were"
    assert after["rates"].get_last_lr() == before["rates"].get_last_lr()
    compare(trial.weights(after["model"]), trial.weights(before["model"]))
