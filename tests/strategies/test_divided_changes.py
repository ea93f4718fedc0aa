"""Changes of parts of divided weights, gradients and states, and numbers drawn like them, are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import FSDPStrategy, distributed
from distwrap.errors import ModelError
from distwrap.group.world import current_world
from tests.plans import TP, TWO_BY_TWO
from tests.slow import nightly


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


def rows(w: torch.Tensor, net: Any) -> None:
    w[:3].zero_()


def row_of_data(w: torch.Tensor, net: Any) -> None:
    w.data[1].fill_(0.5)
    w[3:5].data.mul_(3.0)


def middle_of_a_bias(w: torch.Tensor, net: Any) -> None:
    net.blocks[1].up.bias.data[3:7].fill_(1.0)


def packed(w: torch.Tensor, net: Any) -> None:
    for index in range(2):
        nn.init.xavier_uniform_(w[index * 5 : (index + 1) * 5])


def chunks(w: torch.Tensor, net: Any) -> None:
    for chunk in w.data.chunk(4):
        chunk.normal_()
    first, *_ = w.split([3, 7])
    first += 1.0


def of_a_part(w: torch.Tensor, net: Any) -> None:
    w[2:8][1:3].copy_(w[:2] * 2)
    w.data.view(-1)[5:33].mul_(2.0)
    w.T[2].add_(1.0)


def items(w: torch.Tensor, net: Any) -> None:
    w.data[3] = 0.25
    w.data[:, 2] = 0.5
    w[w.abs() < 0.3] = 0
    w.data[2:5] = torch.ones(3, 6, dtype=w.dtype)
    w[:2] += 1


def copies_stay_copies(w: torch.Tensor, net: Any) -> None:
    (w[:3] * 1.0).zero_()
    w[:3].clone().zero_()
    w.T.reshape(-1)[:9].zero_()


def as_hugging_face(w: torch.Tensor, net: Any) -> None:
    net.table.weight.data.normal_(0, 0.02)
    net.table.weight.data[net.table.padding_idx].zero_()
    nn.init.trunc_normal_(w, std=0.02)
    nn.init.normal_(net.table.weight)
    net.table.reset_parameters()


def drawn(w: torch.Tensor, net: Any) -> None:
    w.add_(torch.randn_like(w))
    w.mul_(torch.rand_like(w))
    w.mul_(torch.bernoulli(torch.full_like(w, 0.5)))
    w.add_(torch.rand(()).item())  # what is drawn next


CHANGES: list[Callable[[torch.Tensor, Any], None]] = [
    rows,
    row_of_data,
    middle_of_a_bias,
    packed,
    chunks,
    of_a_part,
    items,
    copies_stay_copies,
    as_hugging_face,
    drawn,
]


def trained(net: Any) -> Any:
    """Change weights, gradients and the optimizer's state, and go on."""
    torch.manual_seed(3)
    for change in CHANGES:
        with torch.no_grad():
            change(net.blocks[0].up.weight, net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    tokens = torch.arange(8)
    weight = net.blocks[0].up.weight
    for step in range(3):
        nn.functional.cross_entropy(net(tokens), tokens).backward()
        weight.grad[step + 4 :].zero_()
        weight.grad[:, :2] = 0
        weight.grad.view(-1)[5:20].mul_(0.5)
        optimizer.step()
        optimizer.state[weight]["momentum_buffer"][2:5].zero_()
        optimizer.zero_grad()
    return net


def far() -> float:
    net = Net().double()
    model = trained(dw.wrap_model(net))
    state = current_world().strategy.state(model, everywhere=True)
    wanted = trained_alone().state_dict()
    return max(float((state[name] - value).abs().max()) for name, value in wanted.items())


def trained_alone() -> nn.Module:
    found: nn.Module = trained(Net().double())
    return found


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("fsdp", 2),
        (TP, 2),
        ("fsdp", 3),  # which do not divide the rows
        nightly(FSDPStrategy(shard=2), 4, row="products", why="two ranks show it"),
        nightly(TWO_BY_TWO, 4, row="products", why="two ranks show it"),
    ],
)
@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_changes_of_parts_are_those_of_one_process(strategy: Any, ranks: int) -> None:
    """Rows, slices, masks, chunks and views of weights, gradients and states; and draws."""
    assert max(distributed(nprocs=ranks, strategy=strategy, returns="all")(far)()) < 1e-9


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
    for strategy in ("fsdp", TP):
        path = str(tmp_path / f"{strategy}.pt")
        assert max(distributed(nprocs=2, strategy=strategy, returns="all")(row_wise)(path)) < 1e-9
