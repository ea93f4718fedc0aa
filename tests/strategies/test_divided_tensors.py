"""Divided tensors: reads, losses and draws are those of one process; what torch loses or gets wrong is refused.

Each use is made of a divided weight and of a plain one, and compared.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import distwrap as dw
from distwrap import FSDPStrategy, distributed
from distwrap.errors import CollectiveError, ModelError
from distwrap.group.world import current_world
from distwrap.testing import simulate
from tests.plans import TP
from tests.slow import slow
from tests.strategies.divided_uses import DRAWS, FURTHER, INITS, LOSSES, PARTIAL, PARTS, READS

Found = dict[str, str]
SWEEPS = "sweeps some hundred uses of tensors"

# Reads, among 190, that torch refuses: which of a mask's numbers are here, say.
REFUSED = {
    *("alls", "cdist", "msel", "mask", "lst", "isel", "take", "uniq", "nz", "conv", "renorm", "bin", "buck"),
    *("search", "mv", "xs", "pdist", "solve", "mse", "crossent"),
}
STRIDED = {"index", "argd", "argmax", "argmin"}  # which torch refuses of a weight whose joined projections are divided
# Changes that have their effect, as of columns of a tensor that is divided by rows.
HAVE_EFFECT = {
    *("col", "T", "movedim", "flip", "swap", "clone", "times", "foreach2", "take", "masked", "clamp"),
    *("local", "hs", "mT", "sort", "grad"),
}
PLANS = {
    "rows": FSDPStrategy(tensor_parallel=2, plan={"blocks.*.0": "colwise", "blocks.*.1": "rowwise"}),
    "columns": FSDPStrategy(tensor_parallel=2, plan={"blocks.*.0": "rowwise"}),
    "pieces": FSDPStrategy(tensor_parallel=2, plan={"blocks.*.0": "packed2", "blocks.*.1": "rowwise"}),
}


class Chain(nn.Module):
    def __init__(self, rows: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, rows), nn.Linear(rows, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def close(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        own, other = first.detach(), torch.as_tensor(whole(second))
        return own.shape == other.shape and torch.allclose(own, other, rtol=1e-9, atol=1e-9, equal_nan=True)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(close, first, second))
    if isinstance(first, (float, complex)):
        return abs(first - second) <= 1e-9 * max(1, abs(first)) or first != first
    return bool(first == second)


def compared(use: Callable[[Any, Any], Any], plain: Any, divided: Any) -> str:
    """Return "right", "wrong", or the error of a use of divided tensors; nothing where one process raises, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.manual_seed(5)
            wanted = use(*plain), torch.rand(()).item()
        except Exception:  # noqa: BLE001 - whatever it is
            return ""
        try:
            torch.manual_seed(5)
            found = use(*divided), torch.rand(()).item()
        except ModelError:
            return "refused"
        except Exception as error:  # noqa: BLE001 - whatever it is
            return f"raises {type(error).__name__}"
    return "right" if close(wanted, found) else f"wrong: {found} instead of {wanted}"


def _pair(rows: int) -> tuple[Any, Any]:
    return dw.wrap_model(Chain(rows).double()), Chain(rows).double()


def _weights(net: Any) -> list[Any]:
    return [net.blocks[0][0].weight, net.blocks[1][0].weight]


def _reads(rows: int, grad: bool) -> Found:
    model, net = _pair(rows)
    found = {}
    with torch.set_grad_enabled(grad):
        for name, read in READS.items():
            found[name] = compared(lambda w, _, read=read: read(w), _weights(net), _weights(model))
        if not grad:
            for name, part in PARTIAL.items():
                for further, use in FURTHER.items():
                    found[f"{name}, {further}"] = compared(
                        lambda w, v, part=part, use=use: whole(use(part(w), part(v))), _weights(net), _weights(model)
                    )
    return found


def wrong(found: list[Found]) -> list[str]:
    return [f"{name}: {said}" for each in found for name, said in each.items() if said.startswith("wrong")]


@pytest.mark.parametrize(
    ("ranks", "strategy", "rows"),
    [
        (2, "fsdp", 6),
        *(slow(*each, why=SWEEPS) for each in ((3, "fsdp", 7), (2, "rows", 6), (2, "columns", 6), (2, "pieces", 8))),
    ],
)
def test_reads_are_of_the_whole_weight(ranks: int, strategy: str, rows: int) -> None:
    """190 kinds of numbers, and what is computed from what ranks add up, also of unequal parts and pieces."""
    found = simulate(_reads, ranks, rows, False, strategy=PLANS.get(strategy, strategy))
    assert wrong(found) == []
    others = {name for name, said in found[0].items() if said not in ("right", "")}
    assert {name for name in others if "," not in name} <= REFUSED | (STRIDED if strategy == "pieces" else set())
    assert not [name for name in others if "," in name and not (strategy == "pieces" and name.startswith("arg,"))]
    assert wrong(simulate(_reads, ranks, rows, True, strategy=PLANS.get(strategy, strategy))) == []


def _losses(rows: int) -> Found:
    model, net = _pair(rows)

    def use(weight: Any, loss: Callable[..., Any]) -> Any:
        weight.grad = None
        value = whole(loss(weight))
        value.backward()
        return value.detach(), whole(weight.grad)

    weights = _weights(net)[0], _weights(model)[0]
    return {
        name: compared(lambda w, loss: use(w, loss), (weights[0], loss), (weights[1], loss))
        for name, loss in LOSSES.items()
    }


def test_losses_of_weights_have_the_gradients_of_one_process() -> None:
    """Norms, distances, entropies; those of which torch computes each part by itself are refused by name."""
    for ranks, rows in ((2, 6), (3, 7)):
        found = simulate(_losses, ranks, rows, strategy="fsdp")
        assert wrong(found) == []
        refused = {name for name, said in found[0].items() if said == "refused"}
        assert refused == {"mse", "mses", "sl1", "huber", "bce", "bcel", "soft"}


def _draws(rows: int) -> Found:
    model, net = _pair(rows)
    found = {}
    for name, draw in {**DRAWS, **INITS}.items():
        model.load_state_dict(Chain(rows).double().state_dict())
        net.load_state_dict(Chain(rows).double().state_dict())

        def use(weight: Any, draw: Callable[..., Any] = draw) -> Any:
            with torch.no_grad():
                drawn = draw(weight)
            return (whole(drawn) if isinstance(drawn, torch.Tensor) else None), whole(weight)

        found[name] = compared(use, _weights(net)[:1], _weights(model)[:1])
    return found


def test_draws_are_those_of_one_process() -> None:
    """Random numbers, dropout and initialisations of divided weights: the same numbers, or an error."""
    for ranks, strategy, rows in ((2, "fsdp", 6), (3, "fsdp", 7), (2, "rows", 6)):
        found = simulate(_draws, ranks, rows, strategy=PLANS.get(strategy, strategy))
        assert wrong(found) == []
        others = {name: said for name, said in found[0].items() if said not in ("right", "")}
        assert {name for name, said in others.items() if said == "refused"} == {"eye", "sparse", "setdata"}
        assert others.keys() <= {
            *("eye", "sparse", "setdata", "poissoncopy", "eyedata", "copyrand", "randperm"),
            *("rrelu", "rrelu_", "dist", "distb"),
        }


def _changes(rows: int) -> Found:
    model, net = _pair(rows)
    found = {}
    for name, change in PARTS.items():
        model.load_state_dict(Chain(rows).double().state_dict())
        net.load_state_dict(Chain(rows).double().state_dict())

        def use(weight: Any, change: Callable[..., Any] = change) -> Any:
            with torch.no_grad():
                change(weight)
            return whole(weight)

        found[name] = compared(use, _weights(net)[:1], _weights(model)[:1])
    return found


@pytest.mark.slow(SWEEPS)
def test_changes_of_parts_have_their_effect_or_are_refused() -> None:
    """Rows, slices, masks, chunks, views, ``out=`` and ``.data = …``; what torch itself refuses stays so."""
    for ranks, strategy, rows in ((2, "fsdp", 6), (3, "fsdp", 7), (2, "rows", 6)):
        found = simulate(_changes, ranks, rows, strategy=PLANS.get(strategy, strategy))
        assert wrong(found) == []
        assert {name for name, said in found[0].items() if said == "right"} >= HAVE_EFFECT
        assert sum(said == "refused" for said in found[0].values()) >= 40


def _methods() -> Iterator[str]:
    """Yield the names of all methods that change a tensor in place."""
    for name in dir(torch.Tensor):
        by_operator = name.startswith("__i") and name.endswith("__") and hasattr(torch.Tensor, f"__{name[3:]}")
        if by_operator or (name.endswith("_") and not name.startswith("_")):
            yield name


_NO_CHANGE_OF_NUMBERS = {
    *("requires_grad_", "retain_grad_", "rename_", "share_memory_", "is_shared_", "detach_"),
    *("resize_", "resize_as_", "set_", "apply_", "map_", "map2_"),
}


def _in_place(rows: int) -> Found:
    model, net = _pair(rows)
    found = {}
    for name in set(_methods()) - _NO_CHANGE_OF_NUMBERS:
        for number in range(13):

            def use(weight: Any, name: str = name, number: int = number) -> Any:
                own = weight.detach().clone()
                arguments: Any = (
                    *((), (0.5,), (own.clone(),), (0.2, 0.7), (own.clone(), own.clone()), (0,), (0, 1), (2.0, 0, 1.0)),
                    *((own > 0, 0.5), (0, torch.tensor([1, 3]), 0.5), (3,), (own > 0,)),
                    (0, torch.zeros(2, 4, dtype=torch.int64), 0.5),
                )
                getattr(own, name)(*arguments[number])
                return whole(own)

            found[f"{name} {number}"] = compared(use, _weights(net)[:1], _weights(model)[:1])
    return found


@pytest.mark.slow(SWEEPS)
def test_methods_in_place_do_what_they_do_in_one_process() -> None:
    """All of torch's, with several arguments."""
    for ranks, rows in ((2, 6), (3, 7)):
        found = simulate(_in_place, ranks, rows, strategy="fsdp")
        assert wrong(found) == []
        assert sum(said == "right" for said in found[0].values()) > 200


def _gathered(rows: int) -> tuple[float, list[str]]:
    """Change parts of whole weights and gradients while training."""
    model, net = _pair(rows)
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    divides_data = current_world().layout.size == 2
    for trained, own in ((net, x), (model, x.chunk(2)[dw.rank()] if divides_data else x)):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            trained(own).square().mean().backward()
            with dw.gathered_weights(trained), torch.no_grad():
                torch.manual_seed(step)
                first, last = trained.blocks
                nn.init.orthogonal_(first[0].weight)
                nn.init.eye_(first[1].weight)
                last[1].weight[:3].zero_()
                last[1].bias.data[1:] = 0.5
                last[0].weight.grad[2:] = 0
                nn.init.sparse_(last[0].weight, 0.5)
                first[0].bias.grad = None
            with dw.gathered_weights(trained.blocks[1]):
                seen = trained.blocks[1][1].weight.flatten()[:9].tolist()
            assert len(seen) == 9
            optimizer.step()
            optimizer.zero_grad()
    state = current_world().strategy.state(model, everywhere=True)
    far = max(float((state[name] - value).abs().max()) for name, value in net.state_dict().items())
    said = []

    def odd() -> None:
        if dw.rank() == 0:
            model.blocks[0][0].weight.zero_()

    with dw.gathered_weights(model.blocks[0]), torch.no_grad():
        try:
            far = max(far, float((model(x) - net(x)).abs().max()))
        except (ModelError, RuntimeError) as error:
            said.append(str(error))
    with pytest.raises(ModelError, match=r"load_state_dict\(\) within gathered_weights"), dw.gathered_weights(model):
        model.load_state_dict(state)
    with pytest.raises(ModelError) as caught, dw.gathered_weights(model.blocks[0]), torch.no_grad():
        odd()
    said.append(str(caught.value))
    assert isinstance(model.blocks[0][0].weight, DTensor)
    return far, said


def test_gathered_weights_are_changed_as_in_one_process() -> None:
    """Rows, masks, gradients, initialisations; changes of one rank alone are refused, and forwards under fsdp."""
    for ranks, strategy, rows in ((2, "fsdp", 7), (2, "rows", 6)):
        for far, (*forward, odd) in simulate(_gathered, ranks, rows, strategy=PLANS.get(strategy, strategy)):
            assert far < 1e-9
            assert "has changed weights within gathered_weights() otherwise than rank" in odd
            assert bool(forward) == (strategy == "fsdp")
            assert all("no longer the parameter" in words for words in forward)


def _left() -> list[bool]:
    from torch.distributed.tensor import DTensor

    before = [dict(DTensor._op_dispatcher._custom_op_handlers), vars(DTensor).get("__torch_function__")]  # type: ignore[attr-defined]
    simulate(_losses, 2, 6, strategy="fsdp")
    after = [dict(DTensor._op_dispatcher._custom_op_handlers), vars(DTensor).get("__torch_function__")]  # type: ignore[attr-defined]
    return [first == second for first, second in zip(before, after, strict=True)]


def test_nothing_is_left_of_the_rules_after_a_run() -> None:
    """torch's class is as it was."""
    assert all(_left())


def _amsgrad(foreach: bool) -> float:
    model, net = _pair(6)
    for trained in (net, model):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1, amsgrad=True, foreach=foreach)
        for step in range(3):
            trained(torch.full((2, 4), 1.0 - step, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    state = current_world().strategy.state(model, everywhere=True)
    return max(float((state[name] - value).abs().max()) for name, value in net.state_dict().items())


@pytest.mark.parametrize("foreach", [True, False])
def test_the_larger_one_of_each_number(foreach: bool) -> None:
    """AMSGrad writes maxima into its own divided state."""
    assert max(simulate(_amsgrad, 2, foreach, strategy="fsdp")) < 1e-9


def _along_a_divided_dimension() -> tuple[list[Any], list[str]]:
    weight, said = dw.wrap_model(nn.Linear(2, 4)).weight, []
    first = torch.tensor([1])
    with torch.no_grad():
        weight.fill_(1.0)
        sums = [weight.cumsum(-2), torch.cumsum(weight, dim=-2), weight.cumprod(dim=-2) * 2]
        for use in (
            lambda: weight.index_add_(0, first, weight[:1].detach()),
            lambda: weight.index_copy_(0, first, weight[:1].detach()),
            lambda: weight.scatter_add_(0, torch.zeros_like(weight, dtype=torch.long), weight.clone()),
        ):
            with pytest.raises(ModelError) as caught:
                use()
            said.append(str(caught.value))
    return [whole(each)[:, 0].tolist() for each in sums], said


def test_rows_that_other_ranks_have() -> None:
    """Sums along a divided dimension by its negative number are whole ones; rows added by their numbers are refused."""
    for sums, said in simulate(_along_a_divided_dimension, 2, strategy="fsdp"):
        assert sums == [[1.0, 2.0, 3.0, 4.0]] * 2 + [[2.0] * 4]
        assert all("gathered_weights(model)" in words for words in said)


def _reads_alone() -> None:
    model = dw.wrap_model(nn.Linear(2, 4))
    for step in range(3):
        model(torch.ones(2, 2)).sum().backward()
        if step == 1 and dw.rank() == 0:
            model.weight.norm()


def test_a_norm_on_one_rank_alone() -> None:
    """It exchanges, and is an error with its cause before it waits for the others."""
    with pytest.raises(CollectiveError, match="rank 0 takes a number of divided tensors"):
        simulate(_reads_alone, 2, strategy="fsdp")


def _real() -> tuple[float, float, list[str]]:
    model = dw.wrap_model(Chain(7).double())
    weight, said = model.blocks[0][0].weight, []
    for use in (lambda: weight.detach()[:3].zero_(), lambda: torch.save(weight, io.BytesIO())):
        with pytest.raises(ModelError) as caught:
            use()
        said.append(str(caught.value))
    torch.manual_seed(1)
    nn.init.orthogonal_(weight)
    return weight.norm(dim=0).sum().item(), torch.nn.functional.dropout(weight.detach(), 0.5).sum().item(), said


@pytest.mark.slow("starts ranks")
def test_real_ranks_do_the_same() -> None:
    """A sum of norms, a draw, and what is refused."""
    weight = Chain(7).double().blocks[0][0].weight  # type: ignore[index]
    torch.manual_seed(1)
    nn.init.orthogonal_(weight)
    norms, dropped = weight.norm(dim=0).sum().item(), torch.nn.functional.dropout(weight.detach(), 0.5).sum().item()
    for found in distributed(nprocs=2, strategy="fsdp", returns="all")(_real)():
        assert found[:2] == pytest.approx((norms, dropped), abs=1e-9)
        assert "gathered_weights(model)" in found[2][0]
        assert "in place of the whole" in found[2][1]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, 6, padding_idx=0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class EachByItself(torch.optim.Optimizer):
    """An optimizer that moves one parameter after the other."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, group["lr"])

    def move(self, parameter: Any, lr: float) -> None:
        raise NotImplementedError


class Langevin(EachByItself):
    """An optimizer that adds noise."""

    def move(self, parameter: Any, lr: float) -> None:
        parameter.add_(parameter.grad, alpha=-lr).add_(torch.randn_like(parameter), alpha=0.01)


class RowWise(EachByItself):
    """An optimizer that keeps a mean of each row, and a sum of all numbers."""

    def move(self, parameter: Any, lr: float) -> None:
        state, square = self.state[parameter], parameter.grad.square()
        mean = square.mean(-1, keepdim=True)
        state["rows"] = 0.9 * state.get("rows", 0) + 0.1 * mean
        state["all"] = square.sum()
        parameter.sub_(parameter.grad / (state["rows"].sqrt() + 0.1), alpha=lr)


def steps(net: Any, optimizer: torch.optim.Optimizer, times: int) -> None:
    tokens = torch.arange(8)
    for _ in range(times):
        nn.functional.cross_entropy(net(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def noisy() -> float:
    model, net = dw.wrap_model(Net().double()), Net().double()
    for one in (model, net):
        torch.manual_seed(5)
        steps(one, Langevin(one.parameters(), 0.05), 3)
    state = current_world().strategy.state(model, everywhere=True)
    return max(float((state[name] - value).abs().max()) for name, value in net.state_dict().items())


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_an_optimizer_that_draws() -> None:
    """Under fsdp and tp it draws the numbers of one process; where ranks step some of the parameters, it is refused."""
    for strategy in ("fsdp", TP):
        assert max(distributed(nprocs=2, strategy=strategy, returns="all")(noisy)()) < 1e-9
    for strategy in ("zero1", "pipeline"):
        with pytest.raises(ModelError, match="draws random"):
            distributed(nprocs=2, strategy=strategy)(noisy)()


def row_wise(path: str) -> float:
    model = dw.wrap_model(Net().double())
    optimizer = RowWise(model.parameters(), 0.01)
    steps(model, optimizer, 2)
    dw.save({"model": model, "optimizer": optimizer}, path)
    dw.save({"model": model, "optimizer": optimizer}, f"{path}.parts", io="sharded")
    net = Net().double()
    steps(net, RowWise(net.parameters(), 0.01), 3)
    found = []
    for name in (path, f"{path}.parts"):
        again = dw.wrap_model(Net().double())
        its = RowWise(again.parameters(), 0.01)
        dw.load(name, into={"model": again, "optimizer": its})
        steps(again, its, 1)
        state = current_world().strategy.state(again, everywhere=True)
        found.append(max(float((state[key] - value).abs().max()) for key, value in net.state_dict().items()))
    return max(found)


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_a_state_of_other_sizes_is_saved_and_loaded(tmp_path: Any) -> None:
    """A mean of each row and a sum of all numbers, of which ranks have parts that are not added up."""
    for name, strategy in (("fsdp", "fsdp"), ("tp", TP)):
        path = str(tmp_path / f"{name}.pt")
        assert max(distributed(nprocs=2, strategy=strategy, returns="all")(row_wise)(path)) < 1e-9
