"""Blocks of a model in stages on several ranks train as one process does; the user's step is a method with the loss."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distwrap as dw
from distwrap.errors import CollectiveError, ModelError, OptionError
from distwrap.group.world import current_world
from distwrap.strategies.pipeline import PipelineStrategy
from distwrap.strategies.pipeline.placement import find_blocks
from distwrap.strategies.pipeline.remote import RemoteTensor, is_here
from distwrap.testing import run_ranks, simulate

WORDS, LENGTH, WIDTH, BATCH = 11, 5, 8, 12


class Block(nn.Module):
    """Block that changes its input in place, and takes a mask beside it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        attended = torch.softmax((x @ x.transpose(1, 2)).masked_fill(~mask, -1e4), -1) @ x
        x = x.clone()
        x += attended
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class GPT(nn.Module):
    """A small language model: embeddings, blocks with something between them, a head that may be the embedding."""

    def __init__(self, *, tied: bool = False, blocks: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.factor = 1.0
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        for block in self.blocks:
            x = 1.01 * block(x, mask)  # what is between two blocks is computed once, with the second one
        return self.head(self.norm(x))

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.factor * F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def loss_sum(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), reduction="sum")

    def known_loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean over words that are known, which no batch has as many of as another."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), ignore_index=0)

    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    def write(self, tokens: torch.Tensor, count: int) -> list[int]:
        """Write the likeliest words."""
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens[:, -LENGTH:])[:, -1:].argmax(-1)], 1)
        return [int(token) for token in tokens[0]]


def data(count: int = 4) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, WORDS, (count * BATCH, LENGTH + 1), generator=generator)
    return TensorDataset(words[:, :-1], words[:, 1:])


def batches(count: int = 4) -> Any:
    """Return the batches of this rank's share, of which all shares together have as many as one process."""
    return dw.shard_loader(DataLoader(data(count), BATCH), batch_size="global")


def simulated(strategy: PipelineStrategy, nprocs: int = 2) -> Any:
    return dw.distributed(strategy=strategy, nprocs=nprocs, launcher="simulate", returns="all")


def prepared(make: Any = torch.optim.AdamW, *, dtype: torch.dtype = torch.float64, **net: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = dw.wrap_model(GPT(**net).to(dtype))
    return model, dw.wrap_optimizer(make(model.parameters(), lr=0.01))


def full(model: nn.Module) -> dict[str, Any]:
    """Return the full weights as lists, on every rank."""
    state = PipelineStrategy().state(model, everywhere=True)
    return {name: tensor.tolist() for name, tensor in state.items()}


def trained(how: str, make: Any, tied: bool) -> tuple[dict[str, Any], list[float]]:
    """Train an epoch in one of the ways of a hand-written loop; return the weights and the losses."""
    model, optimizer = prepared(make, tied=tied, blocks=4)
    losses: list[float] = []
    if how == "accumulate":
        for (x, y), window in dw.accumulate(batches(), 2, model):
            dw.backward(model.loss(x, y) / window.size)
            if window.last:
                dw.optimizer_step(optimizer)
                optimizer.zero_grad()
    elif how == "scale_loss":
        for (x, y), window in dw.accumulate(batches(), 3, model):
            count = (4 + 2 * window.index) // shares()  # of rows, of which micro-batches have different numbers
            loss = model.loss_sum(x[:count], y[:count])
            dw.backward(dw.scale_loss(loss, count * LENGTH))
            if window.last:
                dw.optimizer_step(optimizer)
                optimizer.zero_grad()
    else:
        method = model.known_loss if how == "neither" else model.loss
        for x, y in batches():
            loss = method(x, y)
            losses.append(dw.mean(loss.item()))
            if how == "plain":
                loss.backward()
                optimizer.step()
            else:
                dw.backward(loss)
                dw.optimizer_step(optimizer, max_norm=0.3 if how == "clip" else None)
            optimizer.zero_grad()
    return full(model) if dw.world_size() > 1 else plain(model), losses


def plain(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
CASES = (
    ("plain", SGD, True),
    ("plain", ADAMW, False),
    ("accumulate", ADAMW, True),
    ("scale_loss", SGD, False),
    ("clip", ADAMW, True),
    ("neither", SGD, False),
)


def shares() -> int:
    return current_world().layout.size


def known(targets: torch.Tensor) -> torch.Tensor:
    return (targets != 0).sum()


# What is said of each loss.
SAID: dict[str, dict[str, Any]] = {
    "loss": {"loss": "loss", "check": True},
    "loss_sum": {"loss": "loss_sum", "reduction": "sum"},
    "known_loss": {"loss": "known_loss", "weight": known},
}


def everything(loss: str) -> dict[str, Any]:
    """Train in all ways of a loop with a loss, in float64; return the weights, and the losses beside them."""
    found: dict[str, Any] = {}
    for how, make, tied in CASES:
        if loss == {"scale_loss": "loss_sum", "neither": "known_loss"}.get(how, "loss"):
            weights, losses = trained(how, make, tied)
            found[f"{how} by {make.__name__}, tied={tied}"] = {**weights, "losses": losses}
    return found


@pytest.fixture(scope="module")
def in_one_process() -> dict[str, Any]:
    [found] = run_ranks(lambda: {loss: everything(loss) for loss in SAID}, 1, timeout=60)
    return dict(found)


@pytest.mark.parametrize(
    ("nprocs", "loss", "options"),
    [
        (2, "loss", {"launcher": "fork"}),
        (2, "loss_sum", {}),
        (2, "known_loss", {"schedule": "gpipe"}),
        (3, "loss", {"schedule": "gpipe"}),
        (2, "loss", {"schedule": "interleaved"}),
        (4, "loss", {"stages": 2, "split": ["blocks.2"]}),
    ],
    ids=lambda value: str(value),
)
@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_it_trains_as_one_process_does(
    nprocs: int, loss: str, options: dict[str, Any], in_one_process: dict[str, Any]
) -> None:
    """Every schedule and kind of loss, on two pipelines too, gives one process's weights, in all ways of a loop."""
    launcher = {"launcher": options.get("launcher", "simulate"), "nprocs": nprocs, "returns": "all", "timeout": 60}
    said = {**SAID[loss], **{name: value for name, value in options.items() if name != "launcher"}}
    run = dw.distributed(strategy=PipelineStrategy(**said), **launcher)
    for found in run(everything)(loss):
        assert found
        for case, values in found.items():
            try:
                approximately(values, in_one_process[loss][case])
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from None


def approximately(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(
        {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()},
        {name: torch.tensor(value, dtype=torch.float64) for name, value in expected.items()},
        rtol=0,
        atol=tolerance,
    )


def in_half(precision: str, poisoned: bool) -> tuple[dict[str, Any], list[bool]]:
    """Train in half precision, perhaps with a batch whose gradients overflow."""
    model, optimizer = prepared(torch.optim.SGD, dtype=torch.float32)
    taken = []
    for number, (x, y) in enumerate(batches()):
        model.factor = 1e30 if poisoned and number == 1 else 1.0
        dw.backward(model.loss(x, y))
        taken.append(dw.optimizer_step(optimizer, max_norm=1.0))
        optimizer.zero_grad()
    return full(model) if dw.world_size() > 1 else plain(model), taken


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_half_precision(precision: str) -> None:
    """In half precision it trains as one process does, and skips a step on all ranks alike."""
    poisoned = precision == "fp16"
    one = dw.distributed(strategy="single", precision=precision)(in_half)
    expected, steps = one(precision, poisoned)
    assert (False in steps) == poisoned
    strategy = PipelineStrategy(loss="loss")
    run = dw.distributed(strategy=strategy, nprocs=2, precision=precision, returns="all", timeout=60)
    for found, taken in run(in_half)(precision, poisoned):
        assert taken == steps
        approximately(found, expected, 2e-3)


def memory(tied: bool) -> dict[str, Any]:
    model, optimizer = prepared(tied=tied)
    before = {id(parameter) for parameter in model.parameters()}
    dw.backward(model.loss(*next(iter(batches()))))
    dw.optimizer_step(optimizer)
    here = {name: parameter for name, parameter in model.named_parameters() if is_here(parameter)}
    assert before == {id(parameter) for parameter in model.parameters()}
    assert {id(parameter) for parameter in here.values()} == set(map(id, optimizer.state))
    return {
        "all": sum(parameter.numel() for parameter in model.parameters()),
        "here": sum(parameter.numel() for parameter in here.values()),
        "names": sorted(name for name in here if not name.startswith("blocks")),
        "blocks": sorted({int(name.split(".")[1]) for name in here if name.startswith("blocks")}),
    }


@pytest.mark.slow("others of its kind are in make test")
def test_a_rank_has_its_stage_alone() -> None:
    """Each rank has its blocks; the first one also what is registered before them, and the last one what is after."""
    run = dw.distributed(strategy="pipeline", nprocs=3, returns="all", timeout=60)(memory)
    found = run(False)
    assert [each["blocks"] for each in found] == [[0, 1], [2, 3], [4, 5]]
    names = [each["names"] for each in found]
    assert names == [["position.weight", "token.weight"], [], ["head.weight", "norm.bias", "norm.weight"]]
    assert sum(each["here"] for each in found) == found[0]["all"]
    assert max(each["here"] for each in found) < 0.45 * found[0]["all"]
    assert "token.weight" in run(True)[2]["names"]  # which is the head too


def evaluated() -> dict[str, Any]:
    model, optimizer = prepared()
    x, y = next(iter(batches()))
    model.eval()
    with torch.no_grad():
        found = {"before": model(x).tolist(), "loss": model.loss(x, y).item()}
    found["words"] = model.write(x[:1], 4)
    model.train()
    outputs = model(x)  # a loss of the loop's own
    F.mse_loss(outputs, torch.ones_like(outputs)).backward()
    optimizer.step()
    with torch.inference_mode():
        found["after"] = model(x).tolist()
    found["count"] = model.count()
    return found


@pytest.mark.slow("others of its kind are in make test")
def test_evaluation_and_losses_of_the_loops_own() -> None:
    """Without gradients any method runs through all stages; with them ``model(x)`` does too, as a whole batch."""
    expected = evaluated()
    for found in dw.distributed(strategy="pipeline", nprocs=2, returns="all", timeout=60)(evaluated)():
        assert (found["words"], found["count"]) == (expected["words"], expected["count"])
        for name in ("before", "loss", "after"):
            approximately({name: found[name]}, {name: expected[name]})


def saved(folder: Path, name: str) -> None:
    model, optimizer = prepared(tied=True)
    for x, y in batches(2):
        dw.backward(model.loss(x, y))
        dw.optimizer_step(optimizer)
        optimizer.zero_grad()
    dw.assert_in_sync(model)
    for io in ("file", "sharded"):
        dw.save({"model": model, "optimizer": optimizer}, folder / f"{name} {io}", io=io)


def gone_on(folder: Path) -> list[list[float]]:
    """Go on from each checkpoint in a folder, and return the losses."""
    found = []
    for path in sorted(folder.iterdir()):
        model, optimizer = prepared(tied=True)
        dw.load(path, into={"model": model, "optimizer": optimizer}, io=path.name.split()[1])
        losses = []
        for x, y in batches(2):
            loss = model.loss(x, y)
            losses.append(dw.mean(loss.item()))
            dw.backward(loss)
            dw.optimizer_step(optimizer)
            optimizer.zero_grad()
        found.append(losses)
    return found


@pytest.mark.slow("launches of three strategies, in turn")
def test_checkpoints_go_from_one_strategy_to_another(tmp_path: Path) -> None:
    """What a pipeline saves, one process, DDP and other pipelines go on with, and the other way round."""
    saved(tmp_path, "one")
    [expected, _] = gone_on(tmp_path)
    dw.distributed(strategy="pipeline", nprocs=2, timeout=60)(saved)(tmp_path, "two")
    runs = [gone_on, *(dw.distributed(strategy=name, nprocs=n)(gone_on) for name, n in (("pipeline", 3), ("ddp", 2)))]
    for run in runs:
        for losses in run(tmp_path):
            assert losses == pytest.approx(expected, abs=1e-9)


# Errors by name


class Unlike(GPT):
    """Models that cannot be divided, each in one way."""

    way = ""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, outputs = self.token(tokens), []
        for block in reversed(self.blocks) if self.way == "backwards" else self.blocks:
            x = block(x, torch.ones(LENGTH, LENGTH, dtype=torch.bool))
            outputs.append(x)
            if self.way == "looking" and x.sum().item() > 1e9:
                break
        return self.head(x + outputs[0] if self.way == "skipping" else x)


def test_a_loss_that_is_a_module_and_a_split_that_is_misspelt() -> None:
    """The messages say which methods and lists there are."""
    for options, words in (
        ({"loss": "blocks"}, r"in loss= 'blocks'\. .*forward"),
        ({"split": ["block.2"]}, r"in split= 'block'\. Did you mean 'blocks'\?"),
        ({"split": ["blocks.1", "blocks.2"]}, r"name 1, without the first stage's"),
    ):
        with pytest.raises((ModelError, OptionError), match=words):
            simulate(lambda: dw.wrap_model(GPT()) and None, 2, strategy=PipelineStrategy(**options))  # type: ignore[arg-type]


def refused() -> None:
    with pytest.raises(ModelError, match="none at all"):
        dw.wrap_model(Lossy())
    with pytest.raises(ModelError, match="blocks' of 1"):
        dw.wrap_model(GPT(blocks=1))
    with pytest.raises(OptionError, match="Leave comm out"):
        dw.wrap_model(GPT(), comm="bytegrad")
    with pytest.raises(ModelError, match=r"method of Linear in loss="):
        dw.wrap_model(nn.Linear(2, 2))
    model = dw.wrap_model(Unlike())
    x, y = next(iter(batches()))
    with pytest.raises(ModelError, match="given different ones: 'tensor 0'"):
        model.loss((x + dw.rank()) % WORDS, y)
    for model.way, words in (("backwards", r"called 'blocks.5'"), ("looking", r"computed from blocks\.0"), ("", "")):
        if words:
            with pytest.raises(ModelError, match=words):
                model.loss(x[: 6 if model.way == "looking" else 12], y[: 6 if model.way == "looking" else 12])
    model.way = "skipping"
    with pytest.raises((ModelError, CollectiveError), match=r"depends on blocks\.0|raised in a forward"):
        model.loss(x, y)
    with pytest.raises(ModelError, match=r"'blocks.0' is called outside of a forward"):
        model.blocks[0](x)
    model.way = ""
    loss = model.loss(x, y)
    loss.backward()
    with pytest.raises(ModelError, match="a second backward"):
        loss.backward()
    with pytest.raises(ModelError, match="To clip by a norm over all gradients"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ModelError, match="steps by all parameters at once"):
        torch.optim.LBFGS(model.parameters()).step(lambda: loss)
    with pytest.raises(ModelError, match="copied or pickled"):
        torch.save(model.state_dict(), BytesIO())
    if dw.rank() == 0:
        model.eval()
        with torch.no_grad(), pytest.raises(CollectiveError, match="forward 1 of Unlike without gradients"):
            model(x)


class Lossy(nn.Module):
    def loss(self) -> None:
        """Return nothing."""


@pytest.mark.slow("others of its kind are in `make test`")
def test_what_cannot_be_divided_is_refused_by_name() -> None:
    """Models without a chain of blocks, methods that do not follow it, and steps over a part are errors by name."""
    dw.distributed(strategy=PipelineStrategy(loss="loss"), nprocs=2, timeout=60)(refused)()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "zigzag"}, "zigzag"),
        ({"stages": 1}, "stages=1: it must be a whole number from 2"),
        ({"microbatches": 0}, "microbatches=0: it must be"),
        ({"loss": "loss", "reduction": "max"}, "max"),
        ({"reduction": "sum"}, "reduction= is of use with loss= alone"),
        ({"loss": "loss", "reduction": "sum", "weight": len}, "a sum needs no weights"),
        ({"split": "blocks.1"}, "it is a list of names"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    """An option that makes no sense is refused where the strategy is made."""
    with pytest.raises(OptionError, match=words):
        PipelineStrategy(**options)


def test_stages_that_do_not_divide_the_ranks_are_refused() -> None:
    """Ranks that would be left over are an error before any training."""
    with pytest.raises(OptionError, match="a multiple of 3"):
        dw.distributed(strategy=PipelineStrategy(stages=3), nprocs=2)(refused)()


def test_blocks_are_cut_into_stages_of_alike_size() -> None:
    """Stages have as many parameters each as can be, and begin where the user says."""
    net = GPT(blocks=5)
    assert find_blocks(net, 2, None).names == [f"blocks.{number}" for number in range(5)]
    assert find_blocks(net, 3, None).ends in ([2, 4, 5], [2, 3, 5], [1, 3, 5])
    heavy = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8))
    assert find_blocks(heavy, 2, None).ends == [1, 5]
    assert find_blocks(net, 3, ["blocks.1", "blocks.2"]).ends == [1, 2, 5]
    assert find_blocks(net, 2, ["blocks"]).names == ["token", "position", "blocks", "norm", "head"]
    with pytest.raises(OptionError, match="unknown block"):
        find_blocks(net, 2, ["blocks.9"])
    with pytest.raises(OptionError, match="beginnings"):
        find_blocks(net, 3, ["blocks.1"])


def test_remote_tensors_have_sizes_and_no_numbers() -> None:
    """What is computed from a remote tensor is remote, knows its device and a source, and cannot be read."""
    remote = RemoteTensor.like(torch.ones(2, 3), "a")
    found = (torch.ones(3) * remote).softmax(-1)
    assert (type(found), found.shape, found.device, found.source) == (RemoteTensor, (2, 3), torch.device("cpu"), "a")
    assert is_here(torch.ones_like(remote))
    assert torch.equal(remote.new_zeros(2), torch.zeros(2))
    remote[0].add_(torch.ones(3))
    for read in (lambda: remote.sum().item(), lambda: bool(remote.sum() > 0), lambda: remote.nonzero(), remote.numpy):
        with pytest.raises(ModelError, match="reads numbers"):
            read()
    real = torch.ones(2, 3)
    for write in (lambda: real.add_(remote), lambda: real.__iadd__(remote), lambda: real.__setitem__(0, remote[0])):
        with pytest.raises(ModelError, match="would write numbers"):
            write()
    assert torch.equal(real, torch.ones(2, 3))


class Conditioned(nn.Module):
    """Blocks that all take what is computed before them, as the time of a diffusion."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.time = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.double()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        time = self.time(x[:, :1])
        for block in self.blocks:
            x = torch.tanh(block(x) + time)
        return (x - 1).square().mean()


def conditioned() -> list[float]:
    model = dw.wrap_model(Conditioned())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss = model.loss(x)
        dw.backward(loss)
        dw.optimizer_step(optimizer, max_norm=0.5)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow("others of its kind are in `make test`")
def test_what_several_stages_use_is_named() -> None:
    """A module outside of the blocks that all stages use is an error that names the option, with which it trains."""
    with pytest.raises(
        (ModelError, CollectiveError), match=r"depends on time\.\w+, whose numbers another stage has.*everywhere="
    ):
        simulated(PipelineStrategy(loss="loss"))(conditioned)()
    [expected] = run_ranks(conditioned, 1, timeout=60)
    for found in simulated(PipelineStrategy(loss="loss", everywhere=["time"], check=True))(conditioned)():
        assert found == pytest.approx(expected, abs=1e-9)
