"""``strategy="fsdp"``: what loops do with a divided model beside calling it: right, or refused by name."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import distributed
from distwrap.errors import CollectiveError, ModelError
from distwrap.group.world import current_world


class Held:
    """Object of a user's own, as a forward may return one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Block(nn.Module):
    def __init__(self, *, in_object: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.in_object = nn.Linear(5, 5), nn.Linear(5, 5), in_object

    def forward(self, given: Any) -> Any:
        x = given.tensor if isinstance(given, Held) else given
        x = x + self.last(self.first(x).tanh())
        return Held(x) if self.in_object else x


class Net(nn.Module):
    """Net that gives its result in one of several ways, with blocks that may be frozen."""

    def __init__(self, kind: str = "", *, blocks: int = 2, frozen: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.kind = kind
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.blocks = nn.ModuleList(Block(in_object=kind == "blocks' objects") for _ in range(blocks))
        self.blocks.requires_grad_(not frozen)
        self.first.requires_grad_(not frozen)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = self.last(x.tensor if isinstance(x, Held) else x)
        if self.kind == "attribute":
            self.result = x
            return None
        return {"object": Held(x), "view": x.view(-1, 5)}.get(self.kind, x)

    def as_object(self, x: torch.Tensor) -> Held:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return Held(self.last(x))


Rows = Callable[[torch.Tensor], torch.Tensor]


def inputs() -> torch.Tensor:
    return torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def share(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(dw.world_size())[dw.rank()]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)


def step(model: Any, optimizer: torch.optim.Optimizer, rows: Rows = share) -> None:
    model(rows(inputs())).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def distance(model: nn.Module, net: nn.Module) -> float:
    state = current_world().strategy.state(model, everywhere=True)
    return max(float((state[name] - value).abs().max()) for name, value in net.state_dict().items())


def _backwards() -> dict[str, float]:
    """Return how far training is from one process, for each way in which a forward gives its result."""
    found = {}
    for kind in ("object", "attribute", "view", "blocks' objects", "method"):
        for blocks, frozen in ((0, False), (2, False), (2, True)):
            model, net = (Net(kind, blocks=blocks, frozen=frozen).double() for _ in range(2))
            model = dw.wrap_model(model)
            for trained, rows in ((model, share), (net, whole)):
                optimizer = sgd(trained)
                for _ in range(3):
                    x = rows(inputs())
                    output = trained.as_object(x) if kind == "method" else trained(x)
                    output = trained.result if kind == "attribute" else output
                    output = output.tensor if isinstance(output, Held) else output
                    if kind == "view":
                        output += 1
                    output.square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            found[f"{kind}, {blocks} blocks, frozen: {frozen}"] = distance(model, net)
    return found


def _between_forwards() -> dict[str, float]:
    """Return how far a model is from one process that is changed while FSDP would hold on to a part of it."""
    found = {}
    for how in ("weights averaged", "into frozen ones", "evaluated before the step", "evaluated with gradients"):
        results = []
        for rows in (share, whole):
            own = dw.wrap_model if rows is share else whole
            model, average = own(Net().double()), own(Net(seed=1).double())  # type: ignore[arg-type]
            average.requires_grad_(how != "into frozen ones")
            optimizer, means = sgd(model), list(average.parameters())
            for _ in range(3):
                x = rows(inputs())
                with torch.set_grad_enabled(how in ("evaluated with gradients", "into frozen ones")):
                    target = average(x)
                (model(x) - target.detach()).square().mean().backward()
                if how.startswith("evaluated"):
                    with torch.set_grad_enabled(how == "evaluated with gradients"):
                        model(x)
                optimizer.step()
                optimizer.zero_grad()
                if not how.startswith("evaluated"):
                    with torch.no_grad():
                        for mean, new in zip(means, model.parameters(), strict=True):
                            mean.lerp_(new, 0.5)
            results.append((model, average))
        (model, average), (net, plain) = results
        found[how] = max(distance(model, net), distance(average, plain))
    return found


def _past_the_forward() -> None:
    """A loss that FSDP cannot see is an error at the step."""
    net = Net(blocks=0).double()
    hidden: list[torch.Tensor] = []
    net.last.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    net.register_forward_hook(lambda module, inputs, output: output.detach())
    model = dw.wrap_model(net)
    optimizer = sgd(model)
    model(share(inputs()))
    hidden[0].square().mean().backward()
    with pytest.raises(ModelError, match=r"not averaged .* first.weight"):
        optimizer.step()


def _everything() -> dict[str, float]:
    _past_the_forward()
    return {**_backwards(), **_between_forwards()}


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_every_backward_is_exchanged() -> None:
    """Objects, attributes, views, methods, and changes between forwards: the numbers are those of one process."""
    for found in distributed(nprocs=2, strategy="fsdp", launcher="forkserver", returns="all")(_everything)():
        assert max(found.values()) < 1e-9, found
        assert len(found) == 19


def _lists_from_before() -> None:
    """An optimizer made before goes on; whatever else is done with the parameters from before is an error."""
    net = Net().double()
    held, optimizer = list(net.parameters()), sgd(net)
    model = dw.wrap_model(net)
    step(model, optimizer)
    for use in (
        lambda: sum(each.numel() for each in held),
        lambda: nn.utils.clip_grad_norm_(held, 1.0),
        lambda: nn.utils.parameters_to_vector(held),
        lambda: [each.detach().clone() for each in held],
        lambda: held[0].data,
        lambda: torch.optim.SGD(held, lr=0.1),
        lambda: torch.save(held, io.BytesIO()),
        lambda: setattr(model.last, "weight", held[0]),
    ):
        with pytest.raises(ModelError, match="replaced this parameter"):
            use()
    assert "Replaced" in repr(copy.deepcopy(held))
    plain = Net().double()
    step(plain, sgd(plain), whole)
    assert distance(model, plain) < 1e-9


def _saved_by_torch() -> None:
    model = dw.wrap_model(Net().double())
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    for state in (model.state_dict(), optimizer.state_dict(), list(model.parameters())):
        for save in (lambda given: torch.save(given, io.BytesIO()), pickle.dumps):
            with pytest.raises(ModelError, match="in place of the whole"):
                save({"state": state})
    best = copy.deepcopy(model.state_dict())
    step(model, optimizer)
    model.load_state_dict(best)
    torch.save({name: value.full_tensor() for name, value in best.items()}, io.BytesIO())


def _data_is_set(model: Any, rows: Rows, start: dict[str, torch.Tensor]) -> None:
    """Train by sharpness-aware minimisation, which moves weights and puts them back."""
    optimizer = sgd(model)
    for _ in range(3):
        model(rows(inputs())).square().mean().backward()
        before = {each: each.data.clone() for each in model.parameters()}
        for each in model.parameters():
            each.data.copy_(each.data + 0.5 * each.grad)
        optimizer.zero_grad()
        model(rows(inputs())).square().mean().backward()
        for each in model.parameters():
            each.data.copy_(before[each])
        optimizer.step()
        optimizer.zero_grad()
        for name, each in model.named_parameters():
            each.data.mul_(0.99)
            if name == "first.weight":
                with dw.gathered_weights(model):
                    model.first.weight.data = 0.5 * start[name]  # whole numbers, which each rank has


def _exchanged_for_averages(model: Any, rows: Rows) -> None:
    """Evaluate with averaged weights in the place of the trained ones, as classes of such averages do."""
    optimizer, average = sgd(model), {name: each.data.clone() for name, each in model.named_parameters()}
    for _ in range(3):
        step(model, optimizer, rows)
        for name, each in model.named_parameters():
            average[name] = (0.5 * each.data + 0.5 * average[name]).clone()
        trained = {}
        for name, each in model.named_parameters():
            trained[name] = each.data.clone()
            each.data.copy_(average[name])
        with torch.no_grad():
            model(rows(inputs()))
        for name, each in model.named_parameters():
            each.data.copy_(trained[name])


def _clipped_by_numbers(model: Any, rows: Rows) -> None:
    """Clip by a norm that Python adds up, and decay by what is counted of each weight."""
    optimizer = sgd(model)
    for _ in range(3):
        model(rows(inputs())).square().mean().backward()
        total = sum(each.grad.norm().item() ** 2 for each in model.parameters()) ** 0.5
        for each in model.parameters():
            each.grad.mul_(0.05 / total)
            if bool((each > 0.4).any()):
                each.data.mul_(1 - 0.01 * int((each > 0).sum()) - 0.1 * float(each.detach().mean()))
        optimizer.step()
        optimizer.zero_grad()


class Changing(nn.Module):
    """A net whose forward changes a weight in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.blocks, self.last = how, nn.ModuleList(Block() for _ in range(2)), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.last.weight
        if self.how == "data":
            weight.data = weight.data * 0.5
        elif self.how == "in place":
            weight.data.mul_(0.5)
        elif self.how == "of a block":
            with torch.no_grad():
                self.blocks[0].last.weight.mul_(0.5)  # is not gathered, so that it is the shard that changes
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


def _changed_in_forward() -> None:
    for how, said in (("data", r"changed the numbers of last.weight"), ("in place", r"changed the numbers of last")):
        with pytest.raises(ModelError, match=said):
            dw.wrap_model(Changing(how))(share(inputs()).float())
    for table in (nn.Embedding(4, 5, max_norm=1.0), nn.EmbeddingBag(4, 5, max_norm=1.0)):
        with pytest.raises(ModelError, match=r"'0' has max_norm=1"):
            dw.wrap_model(nn.Sequential(table, nn.Linear(5, 5)))
    model, net = dw.wrap_model(Changing("of a block").double()), Changing("of a block").double()
    net.load_state_dict(current_world().strategy.state(model, everywhere=True))
    step(model, sgd(model))
    step(net, sgd(net), whole)
    assert distance(model, net) < 1e-9


def _refused() -> None:
    model = dw.wrap_model(Net().double())
    weights = {name: torch.zeros_like(value) for name, value in Net().double().state_dict().items()}
    optimizer = sgd(model)
    with pytest.raises(ModelError, match=r"parameter.data = … of a divided tensor"):
        model.last.weight.data = torch.ones(5, 5).double()
    for called in (model, dw.unwrap_model(model)):
        with pytest.raises(ModelError, match="functional_call"):
            torch.func.functional_call(called, weights, (share(inputs()),))
        step(model, optimizer)
    seen: list[str] = []
    for parameter in (model.last.weight, model.blocks[0].last.weight):
        with pytest.raises(ModelError, match=r"register_post_accumulate_grad_hook"):
            parameter.register_hook(lambda grad: grad)
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append("called"))
    step(model, optimizer)
    assert len(seen) == 2


def _changed_modules() -> None:
    """A weight in the place of a divided one, and one that was added, are refused."""
    for normed, steps in ((False, 0), (False, 1), (True, 0)):
        model = dw.wrap_model(Net().double())
        for _ in range(steps):
            step(model, sgd(model))
        if normed:
            nn.utils.parametrizations.weight_norm(model.blocks[0].last)
        else:
            model.last.weight = nn.Parameter(torch.ones(5, 5).double())
        with pytest.raises(ModelError, match="no longer the parameter"):
            model(share(inputs()))
    model = dw.wrap_model(Net().double())
    model.last = nn.Linear(5, 5).double()
    optimizer = sgd(model)
    with pytest.raises(ModelError, match=r"'last.weight' was added"):
        step(model, optimizer)


def _windows_left(model: Any, rows: Rows) -> None:
    """Leave windows in their midst, or skip their end, and take the gradients away, or let them be part of a step."""
    optimizer = sgd(model)
    for taken_away_by in (optimizer, model, optimizer, None):
        for piece, window in dw.accumulate([rows(inputs())] * 4, 2, model):
            if window.last:
                break
            model(piece).square().mean().backward()
        if taken_away_by is not None:
            taken_away_by.zero_grad()
        step(model, optimizer, rows)


def _compiled_windows(model: Any, rows: Rows) -> None:
    compiled, optimizer = torch.compile(model, backend="eager"), sgd(model)
    for piece, window in dw.accumulate([rows(inputs())] * 4, 2, compiled):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of dynamo's own, which looks at .grad of what is gathered
            compiled(piece).square().mean().backward()
        if window.last:
            optimizer.step()
            optimizer.zero_grad()


def _a_step_after_a_window_was_left() -> None:
    model = dw.wrap_model(Net().double())
    optimizer = sgd(model)
    for _, _ in dw.accumulate([1, 2], 2, model):
        model(share(inputs())).square().mean().backward()
        with pytest.raises(ModelError, match="step after micro-batch 1"):
            optimizer.step()
        break
    with pytest.raises(ModelError, match="middle of a window"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


def _other_uses() -> dict[str, float]:
    _lists_from_before()
    _saved_by_torch()
    _changed_in_forward()
    _refused()
    _a_step_after_a_window_was_left()
    found = {}
    _changed_modules()
    for use in (_data_is_set, _exchanged_for_averages, _clipped_by_numbers, _windows_left, _compiled_windows):
        model, net = dw.wrap_model(Net().double()), Net().double()
        given = (dict(Net().double().named_parameters()),) if use is _data_is_set else ()
        use(model, share, *given)
        use(net, whole, *given)
        found[use.__name__] = distance(model, net)
    return found


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_other_uses_are_right_or_refused() -> None:
    """Lists of parameters, torch.save, parameter.data, changes in a forward, hooks, windows that are left."""
    for found in distributed(nprocs=2, strategy="fsdp", launcher="forkserver", returns="all")(_other_uses)():
        assert max(found.values()) < 1e-9, found
        assert len(found) == 5


@distributed(nprocs=2, strategy="fsdp")
def _number_on_one_rank() -> None:
    model = dw.wrap_model(Net())
    if dw.rank() == 0:
        model.last.weight.norm().item()
    model(share(inputs()).float())


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_a_number_of_divided_tensors_on_one_rank_is_an_error() -> None:
    """It is added up by all ranks; one alone would wait, or get what another exchange sends."""
    with pytest.raises(
        CollectiveError, match=r"rank 0 takes a number of div.* rank 1 (is|runs)|rank 1 runs .* rank 0 (is|takes)"
    ):
        _number_on_one_rank()


@distributed(nprocs=2, strategy="fsdp")
def _mixed() -> None:
    model, average = dw.wrap_model(Net()), Net()
    for mean, new in zip(average.parameters(), model.parameters(), strict=True):
        mean.detach().lerp_(new, 0.1)


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_divided_and_whole_tensors_in_one_operation_are_explained() -> None:
    """torch's words about mixed tensors come with what to do."""
    with pytest.raises(ModelError, match="whole tensor"):
        _mixed()
