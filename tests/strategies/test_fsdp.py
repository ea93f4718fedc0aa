"""``strategy="fsdp"``: numbers equal to one process, whatever the loop does with model and optimizer."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import FSDPStrategy, distributed
from distwrap.errors import CollectiveError, ModelError, OptionError
from distwrap.group.world import current_world
from distwrap.model.transparent import unwrap_model
from distwrap.strategies.fsdp.units import units_of
from tests.limits import SOON
from tests.slow import nightly

ROWS = 24


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Blocks of one kind between two layers, a weight of its own, one that is frozen, one that is shared."""

    def __init__(self, width: int = 6, *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(5, width), nn.Linear(width, 5, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.back = nn.Linear(5, width, bias=False)
        self.last.weight = nn.Parameter(self.back.weight.detach().T.clone())
        self.back.weight = self.first.weight
        self.scale, self.frozen = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(5), requires_grad=False)
        self.reset_parameters()
        self.batch_norm = nn.BatchNorm1d(5)

    def reset_parameters(self) -> None:
        for own in (self.scale, self.frozen):
            nn.init.ones_(own)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.back(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale + self.frozen  # type: ignore[no-any-return]

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self(x) - y).square().mean()

    def loss_without_forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) + nn.functional.linear(x, self.back.weight)
        for block in self.blocks:
            hidden = block(hidden)
        return (nn.functional.linear(hidden, self.last.weight) * self.scale + self.frozen - y).square().mean()


class Lacking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))


def data(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(ROWS, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    return x.to(dtype), y.to(dtype)


def share(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(dw.world_size())[dw.rank()]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def alone(steps: int, step: Callable[[Any, torch.optim.Optimizer, torch.Tensor, torch.Tensor], object]) -> Net:
    """Return a model that one process has trained on all rows."""
    net = Net().double()
    optimizer = adamw(net)
    for _ in range(steps):
        step(net, optimizer, *data())
    return net


def plain_step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    return current_world().strategy.state(model, everywhere=True)


def distance(model: nn.Module, net: nn.Module) -> float:
    state = full(model)
    wanted = net.state_dict()
    assert list(state) == list(wanted)
    return max(float((state[name] - value).abs().max()) for name, value in wanted.items())


def _many_ways() -> dict[str, float]:
    """Return how far a few steps in each way are from one process."""
    found: dict[str, float] = {}
    x, y = (share(tensor) for tensor in data())
    for name, options in {
        "plain": {},
        "not resharded": {"reshard_after_forward": False},
        "by class": {"wrap": ["Block"]},
        "by size": {"wrap": 100},
        "by function": {"wrap": lambda module: isinstance(module, Block)},
        "recomputed": {"checkpointing": True},
        "recomputed in part": {"checkpointing": "selective"},
    }.items():
        net = Net(seed=dw.rank()).double()  # rank 0's numbers win
        optimizer = adamw(net)  # made before
        model = dw.wrap_model(net, **options)
        for _ in range(3):
            plain_step(model, optimizer, x, y)
        found[name] = distance(model, alone(3, plain_step))
    for method in ("loss", "loss_without_forward"):
        model = dw.wrap_model(Net().double())
        optimizer = adamw(model)
        for _ in range(3):
            optimizer.zero_grad()
            getattr(model, method)(x, y).backward()
            optimizer.step()
        found[method] = distance(model, alone(3, plain_step))
        dw.assert_in_sync(model)
    return found


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("fsdp", 2),
        nightly("fsdp", 3, row="products", why="two ranks show it"),
        nightly(FSDPStrategy(shard=2), 4, row="products", why="test_conformance.py, by hsdp's heart"),
    ],
)
@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_numbers_are_those_of_one_process(strategy: Any, ranks: int) -> None:
    """Units of any choice, activations computed again, methods that train: the weights are those of one process."""
    for found in distributed(nprocs=ranks, strategy=strategy, launcher="forkserver", returns="all")(_many_ways)():
        assert max(found.values()) < 1e-9, found
        assert len(found) == 9


def _clipped() -> list[float]:
    model = dw.wrap_model(Net().double())
    optimizer = adamw(model)
    x, y = (share(tensor) for tensor in data())
    norms = []
    for by_torch in (True, False, True):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        if by_torch:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
        else:
            dw.optimizer_step(optimizer, max_norm=0.1)
    return [distance(model, alone(3, _clipped_step)), *norms]


def _clipped_step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def _windows() -> float:
    """Accumulate sums over micro-batches of unlike size."""
    model = dw.wrap_model(Net().double())
    optimizer = adamw(model)
    x, y = (share(tensor) for tensor in data())
    for _ in range(2):
        batches = list(zip(x.split([1, len(x) - 1]), y.split([1, len(x) - 1]), strict=True))
        for (some, wanted), window in dw.accumulate(batches, 2, model):
            losses = (model(some) - wanted).square()
            dw.scale_loss(losses.sum(), losses.numel()).backward()
            if window.last:
                optimizer.step()
                optimizer.zero_grad()
    return distance(model, alone(2, plain_step))


def _state_goes_around() -> float:
    """Save after a step, load into one process's model and optimizer, and back, and go on."""
    x, y = (share(tensor) for tensor in data())
    model = dw.wrap_model(Net().double())
    optimizer = adamw(model)
    plain_step(model, optimizer, x, y)
    strategy = current_world().strategy
    net = Net(seed=7).double()
    net.load_state_dict(strategy.state(model, everywhere=True))
    own = adamw(net)
    own.load_state_dict(strategy.state(optimizer, everywhere=True))
    plain_step(net, own, *data())
    again = dw.wrap_model(Net(seed=8).double())
    its = adamw(again)
    again.load_state_dict({f"module.{name}": value for name, value in net.state_dict().items()})
    strategy.load_state(its, own.state_dict())
    plain_step(again, its, x, y)
    return distance(again, alone(3, plain_step))


def _loaded_whole() -> float:
    """An optimizer takes a whole state by its own load_state_dict(), before its first step and after one."""
    net = Net().double()
    own = adamw(net)
    plain_step(net, own, *data())
    state = copy.deepcopy((net.state_dict(), own.state_dict()))
    x, y = (share(tensor) for tensor in data())
    model = dw.wrap_model(Net(seed=8).double())
    optimizer = adamw(model)
    found = []
    for _ in range(2):
        model.load_state_dict(state[0])
        optimizer.load_state_dict(copy.deepcopy(state[1]))  # whose counts of steps torch takes as they are
        plain_step(model, optimizer, x, y)
        found.append(distance(model, alone(2, plain_step)))
    return max(found)


def _resumed_before() -> float:
    """An optimizer that has stepped before the model was divided goes on with its state."""
    net = Net().double()
    optimizer = adamw(net)
    plain_step(net, optimizer, *data())
    model = dw.wrap_model(net)
    x, y = (share(tensor) for tensor in data())
    plain_step(model, optimizer, x, y)
    return distance(model, alone(2, plain_step))


def _buffers() -> float:
    """BatchNorm trains with each rank's own statistics, and evaluates with rank 0's."""
    model = dw.wrap_model(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).double())
    x, _ = data()
    model(share(x)).sum().backward()
    model.eval()
    with torch.no_grad():
        outputs = dw.gather_object(model(x).tolist())
    return max(abs(a[0] - b[0]) for a, b in zip(*outputs[:2], strict=True))


def _as_the_users_own() -> None:
    net = Net().double()
    model = dw.wrap_model(net)
    assert isinstance(model, Net)
    assert unwrap_model(model) is net
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Net().named_parameters()]
    assert model.batch_norm.num_features == 5
    for refused in (copy.deepcopy, copy.copy, pickle.dumps, lambda model: model.float()):
        with pytest.raises(ModelError, match="divided"):
            refused(model)
    model.double()
    numbers = sum(p.to_local().numel() for p in model.parameters())
    assert numbers <= 0.7 * sum(p.numel() for p in Net().parameters())


def _hooks_and_lists() -> None:
    net = Net().double()
    held = list(net.parameters())
    handle = net.scale.register_hook(lambda grad: grad)
    with pytest.raises(ModelError, match="'scale' has a gradient hook"):
        dw.wrap_model(net)
    handle.remove()
    model = dw.wrap_model(net)
    seen: list[str] = []
    model.scale.register_post_accumulate_grad_hook(lambda parameter: seen.append("scale"))
    x, y = (share(tensor) for tensor in data())
    (model(x) - y).square().mean().backward()
    assert seen == ["scale"]
    with pytest.raises(ModelError, match="replaced this parameter"):
        nn.utils.clip_grad_norm_(held, 1.0)
    with pytest.raises(ModelError, match="LBFGS"):
        torch.optim.LBFGS(model.parameters()).step(lambda: (model(x) - y).square().mean())
    with pytest.raises(ModelError, match="never be called"):
        model.first.weight.register_hook(lambda grad: grad)


def _in_half_precision() -> list[float]:
    found = []
    for precision in ("bf16", "fp16"):
        torch.manual_seed(0)
        model = dw.wrap_model(Net(), precision=precision)
        optimizer = adamw(model)
        x, y = (share(tensor) for tensor in data(torch.float32))
        for _ in range(3):
            optimizer.zero_grad()
            outputs = model(x)
            assert outputs.dtype == torch.float32
            dw.backward((outputs - y).square().mean())
            dw.optimizer_step(optimizer)  # skipped at first, until the scale of fp16 fits
        state, wanted = full(model), alone(3, plain_step).state_dict()
        found.append(max(float((state[name] - value).abs().max()) for name, value in wanted.items()))
        assert model.first.weight.dtype == torch.float32
        if precision == "fp16":  # an overflow on one rank skips the step on all
            before = full(model)
            optimizer.zero_grad()
            dw.backward(model(x * (1e30 if dw.rank() else 1)).square().mean())
            assert not dw.optimizer_step(optimizer)
            assert all(value.equal(before[name]) for name, value in full(model).items())
    return found


class Views(nn.Module):
    """A block whose output is a view, which the model changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.tanh()).view(-1, 5)  # type: ignore[no-any-return]


class InPlace(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Views() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1
        return x.view(-1, 5)


def _changed_in_place() -> float:
    found = []
    for blocks in (1, 3):
        model, net = dw.wrap_model(InPlace(blocks).double()), InPlace(blocks).double()
        for trained, rows in ((model, share), (net, lambda tensor: tensor)):
            outputs = trained(rows(data()[0]))
            outputs += 2
            (outputs.square().mean()).backward()
        pairs = zip(model.parameters(), net.parameters(), strict=True)
        found += [float((mine.grad.full_tensor() - other.grad).abs().max()) for mine, other in pairs]
    return max(found)


def _everything() -> dict[str, Any]:
    _as_the_users_own()
    _hooks_and_lists()
    return {
        "clipped": _clipped(),
        "windows": _windows(),
        "state": _state_goes_around(),
        "loaded": _loaded_whole(),
        "resumed": _resumed_before(),
        "buffers": _buffers(),
        "in place": _changed_in_place(),
        "half": _in_half_precision(),
    }


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_a_loop_finds_what_it_expects() -> None:
    """Clips, windows, states, buffers, precisions, hooks, copies: right, or refused by name."""
    for found in distributed(nprocs=2, strategy="fsdp", launcher="forkserver", returns="all")(_everything)():
        distance, first, last = found["clipped"]
        assert distance < 1e-9
        assert first == pytest.approx(float(_norm_alone()), rel=1e-9) != last
        names = ("windows", "state", "loaded", "resumed", "buffers", "in place")
        assert max(found[name] for name in names) < 1e-9, found
        assert max(found["half"]) < 0.05, found


def _norm_alone() -> torch.Tensor:
    net = Net().double()
    x, y = data()
    (net(x) - y).square().mean().backward()
    return nn.utils.clip_grad_norm_(net.parameters(), 0.1)


def _empty() -> tuple[float, float, int]:
    torch.manual_seed(1)
    with dw.init_empty():
        net = Net(width=64)
    before = net.first.weight.is_meta
    model = dw.wrap_model(net)
    state = full(model) if dw.world_size() > 1 else model.state_dict()
    model(data(torch.float32)[0]).sum().backward()
    return float(sum(value.double().abs().sum() for value in state.values())), float(state["scale"].sum()), before


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_a_model_without_numbers_gets_the_same_on_any_number_of_ranks() -> None:
    """init_empty(): what is drawn over two and three ranks is what is drawn in one process."""
    sums = [distributed(nprocs=ranks, strategy="fsdp")(_empty)() for ranks in (1, 2, 3)]
    assert sums[0][0] == pytest.approx(sums[1][0], rel=1e-6) == pytest.approx(sums[2][0], rel=1e-6)
    assert sums[0][2]
    assert sums[0][0] > 100
    with dw.init_empty():
        lacking = nn.Sequential(nn.Linear(2, 2), Lacking())
    with pytest.raises(ModelError, match="no reset_parameters"):
        dw.wrap_model(lacking, strategy="fsdp")


@distributed(nprocs=2, strategy="fsdp", timeout=1.5 * SOON)
def _forward_on_one_rank(where: str) -> None:
    model = dw.wrap_model(Net().double())
    optimizer = adamw(model)
    x, y = (share(tensor) for tensor in data())
    for step in range(3):
        if where == "in training" and step == 2 and dw.rank() == 0:
            with torch.no_grad():
                model(x)
        plain_step(model, optimizer, x, y)
    batches = 3 - dw.rank() if where == "uneven" else 2
    if where != "rank 0 evaluates" or dw.rank() == 0:
        with torch.no_grad():
            for _ in range(batches):
                model(x)
    if where == "in a barrier":
        dw.barrier()
    plain_step(model, optimizer, x, y)


@pytest.mark.parametrize("where", ["in training", "rank 0 evaluates", "uneven"])
@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_a_forward_on_one_rank_is_an_error_at_once(where: str) -> None:
    """Where one rank runs a forward that the others do not, all end with its name, and not with a time limit."""
    began = time.monotonic()
    with pytest.raises(CollectiveError, match=r"forward \d of Net"):
        _forward_on_one_rank(where)
    assert time.monotonic() - began < SOON


def test_units() -> None:
    """The units of a model are the blocks of its lists; what shares a weight is in none of them."""
    net = Net()
    assert [type(unit) for unit in units_of(net, "auto")] == [Block] * 3
    tower = nn.Sequential(nn.Embedding(500, 6), Net(), nn.Linear(6, 500))
    assert [type(unit).__name__ for unit in units_of(tower, "auto")].count("Block") == 3
    assert {type(unit) for unit in units_of(tower, "auto")} == {Block, nn.Embedding, nn.Linear}
    assert [type(unit) for unit in units_of(net, "Block")] == [Block] * 3
    with pytest.raises(ModelError, match="shares the weight"):
        units_of(net, lambda module: module is net.back)
    with pytest.raises(ModelError, match="Did you mean 'Block'"):
        units_of(net, ["Blok"])
    with pytest.raises(ModelError, match="no module"):
        units_of(net, lambda module: False)
    with pytest.raises(ModelError, match="no forward"):
        units_of(net, ["ModuleList"])


def test_wrong_options_are_refused_before_anything_starts() -> None:
    """Options of no meaning are refused where they are written."""
    for options in ({"shard": 0}, {"shard": "rack"}, {"wrap": 0}, {"wrap": Block}, {"checkpointing": "some"}):
        with pytest.raises(OptionError, match=next(iter(options))):
            FSDPStrategy(**options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="comm="):
        distributed(nprocs=2, strategy="fsdp", comm="bytegrad")(_windows)()
    with pytest.raises(OptionError, match=r"'backend'\. Known: ") as raised:
        dw.wrap_model(Net(), strategy="fsdp", backend="gloo")
    assert "Did you mean" not in str(raised.value)
    with pytest.raises(OptionError, match="divisor"):
        distributed(nprocs=3, strategy=FSDPStrategy(shard=2))(_windows)()
    with pytest.raises(OptionError, match="Did you mean 'wrap'"):
        dw.wrap_model(Net(), strategy="fsdp", wrapp="auto")
