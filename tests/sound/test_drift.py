"""Ranks that train apart are found, however they came to it and however late; and ranks that do not are left alone."""

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.func import functional_call

import distwrap as dw
from distwrap.environments import Placement
from distwrap.errors import DriftError, ModelError, OptionError
from distwrap.group.world import World, active_world, current_world
from distwrap.model.checks.drift import Drift, ModelWatch
from distwrap.model.checks.in_sync import ComparedTensor, Comparison
from distwrap.supervision.activity import Activity
from distwrap.supervision.channel import Channel
from distwrap.supervision.notifier import Notifier
from distwrap.testing import run_ranks
from tests.slow import few, slow

STEPS = 12
LATE = 5  # the step at which a late fault begins


class Net(nn.Module):
    """Two layers, of which one may stay unused."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(3, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 1, dtype=torch.float64)
        self.extra = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor, skip_extra: bool = False) -> torch.Tensor:
        hidden = self.body(x).tanh()
        return self.head(hidden) + (0 if skip_extra else self.extra(hidden))


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dw.rank())
    return torch.randn(5, 3, dtype=torch.float64, generator=generator)


def loss_of(model: Any, step: int) -> torch.Tensor:
    return (model(batch(step)) - 1).pow(2).mean()


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: Any = range(STEPS)) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


# Programs whose ranks train apart


def gradients_by_hand() -> None:
    """autograd.grad and an update by hand."""
    model = dw.wrap_model(Net())
    for step in range(STEPS):
        gradients = torch.autograd.grad(loss_of(model, step), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.05 * gradient


def gradients_by_hand_through_data() -> None:
    """The same through ``.data``, which leaves no trace on the weights; it is seen while the loop goes on."""
    model = dw.wrap_model(Net())
    for step in range(STEPS):
        gradients = torch.autograd.grad(loss_of(model, step), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.data = parameter.data - 0.05 * gradient
        dw.barrier()
    raise AssertionError("the ranks have trained apart to the end")


def functional_gradients() -> None:
    """func.grad and an update by hand."""
    model = dw.wrap_model(Net())
    net = dw.unwrap_model(model)
    for step in range(STEPS):
        weights = {name: value.detach() for name, value in net.named_parameters()}
        x = batch(step)
        gradients = torch.func.grad(lambda w: (functional_call(net, w, x) - 1).pow(2).mean())(weights)  # noqa: B023
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter -= 0.05 * gradients[name]


def gradients_set_by_hand() -> None:
    """As PCGrad does: gradients of two losses, put together by hand."""
    model = dw.wrap_model(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        output = model(batch(step))
        parameters = list(model.parameters())
        one = torch.autograd.grad(output.pow(2).mean(), parameters, retain_graph=True)
        two = torch.autograd.grad((output - 1).abs().mean(), parameters)
        for parameter, a, b in zip(parameters, one, two, strict=True):
            parameter.grad = a + b
        optimizer.step()


def step_in_a_hook() -> None:
    """The update happens in the backward, before gradients are averaged."""
    model = dw.wrap_model(Net())

    def update(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter -= 0.05 * parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for step in range(STEPS):
        loss_of(model, step).backward()


def line_search() -> None:
    """LBFGS looks for a step length on each rank's own loss."""
    model = dw.wrap_model(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=1, line_search_fn="strong_wolfe")
    for step in range(STEPS):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)  # noqa: B023
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


def plateau_of_own_metric() -> None:
    """ReduceLROnPlateau sees each rank's own metric."""
    model = dw.wrap_model(Net())
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for step in range(STEPS):
        train(model, optimizer, [step])
        scheduler.step(1.0 if dw.rank() == 0 else 1.0 / (step + 1))


def layer_replaced() -> None:
    """A layer is replaced in the bare model, and trained by a new optimizer."""
    model = dw.wrap_model(Net())
    train(model, sgd(model), range(LATE))
    net: Any = dw.unwrap_model(model)
    torch.manual_seed(7)
    net.head = nn.Linear(4, 1, dtype=torch.float64)
    train(model, sgd(model), range(LATE, STEPS))


def adapter_added() -> None:
    """A parameter is added to the bare model, and its optimizer is told by add_param_group."""
    model = dw.wrap_model(Net())
    optimizer = sgd(model)
    train(model, optimizer, range(LATE))
    net: Any = dw.unwrap_model(model)
    torch.manual_seed(7)
    net.body = nn.Sequential(net.body, nn.Linear(4, 4, dtype=torch.float64))
    optimizer.add_param_group({"params": net.body[1].parameters()})
    train(model, optimizer, range(LATE, STEPS))


def unfrozen_later() -> None:
    """A layer that was frozen at wrap_model learns later."""
    net = Net()
    net.head.requires_grad_(False)
    model = dw.wrap_model(net)
    optimizer = torch.optim.SGD([*net.body.parameters(), *net.extra.parameters()], lr=0.05)
    train(model, optimizer, range(LATE))
    net.head.requires_grad_(True)
    optimizer.add_param_group({"params": net.head.parameters()})
    train(model, optimizer, range(LATE, STEPS))


def frozen_whole() -> None:
    """A model that was frozen whole at wrap_model learns later."""
    net = Net().requires_grad_(False)
    model = dw.wrap_model(net)
    net.requires_grad_(True)
    train(model, sgd(model))


def step_left_out() -> None:
    """One rank leaves a step out, as after a NaN of its own."""
    model = dw.wrap_model(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if not (step == LATE and dw.rank() == 1):
            optimizer.step()


def last_step_left_out() -> None:
    """One rank leaves the last step out."""
    model = dw.wrap_model(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if not (step == STEPS - 1 and dw.rank() == 1):
            optimizer.step()


def weights_loaded() -> None:
    """One rank loads weights while all train."""
    model = dw.wrap_model(Net())
    optimizer = sgd(model)
    train(model, optimizer, range(LATE))
    if dw.rank() == 1:
        model.load_state_dict(Net(3).state_dict())
    train(model, optimizer, range(LATE, STEPS))


def unused_in_the_last_step() -> None:
    """DDP says that parameters got no gradient in the next forward, and here there is none."""
    model = dw.wrap_model(Net())
    optimizer = sgd(model)
    train(model, optimizer, range(LATE))
    optimizer.zero_grad()
    model(batch(LATE), skip_extra=True).pow(2).mean().backward()
    optimizer.step()


def step_in_a_window() -> None:
    """A plain step in the middle of accumulate, on gradients of each rank's own."""
    model = dw.wrap_model(Net())
    optimizer = sgd(model)
    for step, window in dw.accumulate(range(STEPS), 4, model):
        (loss_of(model, step) / window.size).backward()
        optimizer.step()
        optimizer.zero_grad()


def step_after_no_sync() -> None:
    """A step on the gradients of no_sync."""
    model: Any = dw.wrap_model(Net())
    optimizer = sgd(model)
    train(model, optimizer, range(LATE))
    with model.no_sync():
        train(model, optimizer, [LATE])
    train(model, optimizer, range(LATE + 1, STEPS))


def late_outsider() -> None:
    """A parameter outside of the model is in the optimizer from the beginning, and learns later."""
    model = dw.wrap_model(Net())
    temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        output = model(batch(step))
        ((output * temperature if step >= LATE else output) - 1).pow(2).mean().backward()
        optimizer.step()


def noise_after_uneven_batches() -> None:
    """Noise on gradients, when the ranks' generators have drawn different amounts."""
    model = dw.wrap_model(Net())
    optimizer = sgd(model)
    torch.manual_seed(0)
    for step in range(STEPS):
        torch.randn(1 + (dw.rank() if step == LATE else 0))
        optimizer.zero_grad()
        loss_of(model, step).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad += 1e-6 * torch.randn_like(parameter)
        optimizer.step()


def part_past_the_wrapper() -> None:
    """A part of the model is called past its wrapper, after the wrapper's own backward."""
    net = Net()
    model = dw.wrap_model(net)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step >= LATE:
            net.extra(batch(step) @ torch.ones(3, 4, dtype=torch.float64)).pow(2).mean().backward()
        optimizer.step()


def bare_model_trained() -> None:
    """Weights drift also where the bare model is trained all along."""
    net = Net()
    dw.wrap_model(net)
    train(net, sgd(net))


def unwrapped_partner() -> None:
    """Of two models, each with an optimizer, one was never wrapped."""
    one, two = dw.wrap_model(Net(1)), Net(2)
    optimizers = sgd(one), sgd(two)
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (loss_of(one, step) - loss_of(two, step)).pow(2).backward()
        for optimizer in optimizers:
            optimizer.step()


def models_gone_since() -> None:
    """The weights differ of a model that is gone, and many others came after it."""
    last_step_left_out()
    for _ in range(20):
        train(dw.wrap_model(net := Net()), sgd(net), range(2))


# Each program, the error that ends it, and a word of what it says.
WRONG: dict[Callable[[], None], tuple[type[ModelError], str]] = {
    gradients_by_hand: (DriftError, "by hand"),
    gradients_by_hand_through_data: (DriftError, "updates by hand"),
    functional_gradients: (DriftError, "at the end"),
    gradients_set_by_hand: (DriftError, "by hand"),
    step_in_a_hook: (DriftError, "after 1 averages"),
    line_search: (DriftError, "same weights"),
    plateau_of_own_metric: (DriftError, "the learning rate of SGD"),
    layer_replaced: (ModelError, "'head.weight' was added"),
    adapter_added: (ModelError, "'body.1.weight' was added"),
    unfrozen_later: (ModelError, "was frozen"),
    frozen_whole: (ModelError, "was frozen"),
    step_left_out: (DriftError, "after 8 averages"),
    last_step_left_out: (DriftError, "at the end"),
    weights_loaded: (DriftError, "after 8 averages"),
    unused_in_the_last_step: (DriftError, "at the end"),
    step_in_a_window: (ModelError, "micro-batch 1 of 4"),
    step_after_no_sync: (DriftError, "after 8 averages"),
    late_outsider: (DriftError, "tensor 6 of SGD"),
    noise_after_uneven_batches: (DriftError, "after 8 averages"),
    part_past_the_wrapper: (ModelError, "are not averaged"),
    bare_model_trained: (ModelError, "has not wrapped"),
    unwrapped_partner: (ModelError, "has not wrapped"),
    models_gone_since: (DriftError, "at the end"),
}


@pytest.mark.parametrize("program", few(WRONG, 8), ids=lambda program: program.__name__)
def test_ranks_that_train_apart_are_found(program: Callable[[], None]) -> None:
    """The run ends with the error of what has gone wrong."""
    error, word = WRONG[program]
    with pytest.raises(error, match=word) as raised:
        run_ranks(program, 2)
    assert type(raised.value) is error


# Programs that are in order


def noise_of_each_rank() -> None:
    """As an attack trains it, beside the model, in an optimizer that is said to be the rank's own."""
    model = dw.wrap_model(Net())
    train(model, sgd(model))
    noise = torch.zeros(5, 3, dtype=torch.float64, requires_grad=True)
    attack = dw.wrap_optimizer(torch.optim.SGD([noise], lr=0.1 * (1 + dw.rank())), apart=True)
    victim = copy.deepcopy(dw.unwrap_model(model)).requires_grad_(False)
    for _ in range(STEPS):
        attack.zero_grad()
        (-victim(batch(0) + noise).pow(2).mean()).backward()
        attack.step()
    with pytest.raises(OptionError, match="wrapped model"):
        dw.wrap_optimizer(sgd(model), apart=True)


def rewrapped_and_dropped() -> None:
    net = Net()
    model = dw.wrap_model(net)
    dw.wrap_model(net)
    train(model, sgd(model))
    dw.assert_in_sync(model)


def models_of_one_class(count: int) -> None:
    models = [dw.wrap_model(Net(seed)) for seed in range(count)]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(loss_of(model, step) for model in models).backward()  # type: ignore[union-attr]
        optimizer.step()


def two_models() -> None:
    models_of_one_class(2)


def four_models() -> None:
    models_of_one_class(4)


def own_buffers() -> None:
    net = Net()
    net.register_buffer("seen", torch.zeros(1))
    model = dw.wrap_model(net)
    optimizer = sgd(model)
    for step in range(STEPS):
        net.seen += dw.rank() + 1
        train(model, optimizer, [step])


def rank_zero_evaluates() -> None:
    model = dw.wrap_model(Net())
    optimizer = sgd(model)
    best = copy.deepcopy(model.state_dict())
    for step in range(STEPS):
        train(model, optimizer, [step])
        if dw.rank() == 0:
            loss_of(model, step)  # with gradients on
            model.eval()
            with torch.no_grad():
                loss_of(model, step)
            model.train()
    if dw.rank() == 0:
        model.load_state_dict(best)
        model.eval()


def uneven_by_join() -> None:
    model: Any = dw.wrap_model(Net())
    optimizer = sgd(model)
    for _ in range(3):
        with Join([model]):
            train(model, optimizer, range(3 + 2 * dw.rank()))


def accumulated() -> None:
    model = dw.wrap_model(Net())
    optimizer = sgd(model)
    for step, window in dw.accumulate(range(STEPS), 5, model):
        (loss_of(model, step) / window.size).backward()
        if window.last:
            optimizer.step()
            optimizer.zero_grad()


def adversaries() -> None:
    one, two = dw.wrap_model(Net(1)), dw.wrap_model(Net(2))
    optimizers = sgd(one), sgd(two)
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
            (loss_of(one, step) - loss_of(two, step)).pow(2).backward()
            optimizer.step()


def probe_on_rank_zero() -> None:
    model = dw.wrap_model(Net())
    optimizer = sgd(model)
    probe = nn.Linear(3, 1, dtype=torch.float64)
    for step in range(STEPS):
        train(model, optimizer, [step])
        if dw.rank() == 0:
            train(probe, sgd(probe), [step])


def closure_of_a_twin() -> None:
    teacher = Net(5)
    model = dw.wrap_model(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        (model(batch(step)) - teacher(batch(step))).pow(2).mean().backward()
        optimizer.step()


def tasks_of_their_own() -> None:
    """As MAML does: each rank adapts to its own tasks, and calls the model with the adapted weights."""
    model = dw.wrap_model(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        weights: dict[str, torch.Tensor] = dict(model.named_parameters())
        loss = (functional_call(model, weights, batch(step)) - 1).pow(2).mean()
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        adapted = {name: value - 0.1 * grad for (name, value), grad in zip(weights.items(), gradients, strict=True)}
        optimizer.zero_grad()
        (functional_call(model, adapted, batch(step)) - 2).pow(2).mean().backward()
        optimizer.step()


def teacher_through_data() -> None:
    """A wrapped teacher is moved through ``.data``, and rank 0 also runs it to look at it."""
    model, teacher = dw.wrap_model(Net()), dw.wrap_model(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        (model(batch(step)) - teacher(batch(step)).detach()).pow(2).mean().backward()
        optimizer.step()
        for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
            old.data = 0.5 * old.data + 0.5 * (new.data + 0.1)
        if dw.rank() == 0:
            teacher(batch(step))
            teacher(batch(step))


RIGHT: list[Any] = [
    rewrapped_and_dropped,
    two_models,
    four_models,
    own_buffers,
    rank_zero_evaluates,
    uneven_by_join,
    accumulated,
    adversaries,
    slow(probe_on_rank_zero, why="rank 0 waits up to ten seconds for the others' first step, once"),
    closure_of_a_twin,
    tasks_of_their_own,
    teacher_through_data,
    noise_of_each_rank,
]


@pytest.mark.parametrize("program", few(RIGHT, 4), ids=lambda program: program.__name__)
def test_ranks_in_step_are_left_alone(program: Callable[[], None]) -> None:
    """No alarm."""
    run_ranks(program, 2)


def seen_after(pause: str, folder: Path) -> tuple[int, str]:
    """Train on, with other weights from some step on, and return how many steps later it is seen."""
    model = dw.wrap_model(Net())
    optimizer = sgd(model)
    train(model, optimizer, range(20))
    if dw.rank() == 1:
        next(model.parameters()).data.mul_(2)
    train(model, optimizer, [20])
    if pause == "eval":
        model.eval()
        model.train()
    elif pause == "save":
        dw.save(model, folder / "last.pt")
    for step in range(1, 9):
        dw.barrier()
        try:
            train(model, optimizer, [20 + step])
        except ModelError as error:
            return step, str(error)
    return 0, ""


@pytest.mark.parametrize("pause", ["eval", "save"])
def test_weights_are_compared_where_training_pauses(pause: str, tmp_path: Path) -> None:
    """After eval() and at a checkpoint the next step tells, and not the next one of those at which it is due."""
    with pytest.raises(ModelError, match="after 20 averages"):
        run_ranks(seen, 2, pause, tmp_path)


def seen(pause: str, folder: Path) -> None:
    """Raise what the next step tells."""
    step, text = seen_after(pause, folder)
    assert step == 1
    raise ModelError(text)


def compared_late() -> None:
    """Rank 0 forgets what it had while rank 1 asks for it."""
    world = current_world()
    channel: Any = world.channel
    comparison = Comparison(world, "late", [0, 1], lambda *parts: " ".join(map(str, parts)))
    comparison.publish("first", [ComparedTensor("weight", "", float(dw.rank()))])
    dw.barrier()
    if dw.rank() == 0:
        dw.barrier()
        for number in range(8):
            comparison.publish(str(number), [])
        dw.barrier()
    else:
        ask = channel.work.ask

        def late(*args: Any) -> Any:
            dw.barrier()  # the digest has been read
            dw.barrier()  # and rank 0 has gone on
            return ask(*args)

        channel.work.ask = late
        comparison.advance()
    dw.barrier()


def test_a_difference_counts_though_the_other_rank_has_gone_on() -> None:
    """It cannot be said any more in which tensor, but it is no agreement."""
    with pytest.raises(ModelError, match="ranks 0 and 1 differ"):
        run_ranks(compared_late, 2)


def test_models_that_are_gone_are_forgotten() -> None:
    """Where models come one after another, each rank watches the present one, and its channel serves one name."""
    placement, served = Placement(world_size=2), []
    notifier = Notifier(dist.HashStore(), placement)
    channel = Channel(notifier, placement, Activity(None), supervised=True, timeout=10, secret=b"")
    channel.work.serve = lambda name, make: served.append(name)  # type: ignore[method-assign]
    drift = World(placement, torch.device("cpu"), channel=channel).part(Drift)
    watches = weakref.WeakSet[ModelWatch]()
    for _ in range(50):
        model = nn.Linear(1, 1)
        watch = drift.watch(model, [0, 1])
        assert watch is not None
        watches.add(watch)
        for _ in range(3):
            watch.average()
    del watch
    gc.collect()
    assert len(drift.watches) == 1
    assert len(watches) < 10
    assert served == ["alike/0"]
    notifier.close()
    assert drift.averages == 150


def test_the_end_of_a_group_tells_too() -> None:
    """Where the process group ends within the function, that is the end; the rank that finds out has no group left."""

    def on_rank() -> tuple[bool, bool]:
        found = False
        try:
            last_step_left_out()
            dw.teardown_process_group()
        except ModelError as error:
            found = "at the end the ranks do not hold the same weights of Net" in str(error)
        return found, active_world() is None

    told = run_ranks(on_rank, 2)
    assert any(found for found, _ in told)
    assert all(left for _, left in told)
