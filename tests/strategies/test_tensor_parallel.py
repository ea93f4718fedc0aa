"""Tensor parallelism: each style and ready-made plan gives the numbers of one process; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import distwrap as dw
from distwrap import FSDPStrategy, distributed
from distwrap.errors import ModelError, OptionError
from distwrap.group.world import current_world
from distwrap.strategies.fsdp import plan_of
from distwrap.testing import check_plan, simulate
from tests.slow import nightly
from tests.strategies.blocks import KINDS, WIDTH, Language, texts

PLANS: dict[str, Any] = {
    "llama": {
        "blocks.*.attention.w[qkv]": "colwise",
        "blocks.*.attention.wo": "rowwise",
        "blocks.*.mlp.w[13]": "colwise",
        "blocks.*.mlp.w2": "rowwise",
    },
    "gpt": {
        "blocks.*.qkv": "packed3",
        "blocks.*.out": "rowwise",
        "blocks.*.mlp.0": "colwise",
        "blocks.*.mlp.2": "rowwise",
        "token": "vocabulary",
        "head": "gathered",
    },
    "torch": "transformer",
    "nano": "gpt",
}
TWO = FSDPStrategy(tensor_parallel=2)  # with a plan in wrap_model()

Make = Callable[[Any], torch.optim.Optimizer]
SHAPES: dict[str, Make] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def share(whole: torch.Tensor) -> torch.Tensor:
    layout = current_world().layout
    return whole.chunk(layout.size)[layout.rank]


def clipped(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    """Step with a norm that torch clips, and return it."""
    optimizer.zero_grad()
    model.loss(tokens).backward()
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def accumulated(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    """Step after two micro-batches of unlike size, each by its own count."""
    parts = tokens.split([1, len(tokens) - 1])
    for part, window in dw.accumulate(parts, 2, model):
        losses = nn.functional.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten(), reduction="none")
        dw.scale_loss(losses.sum(), losses.numel()).backward()
        if window.last:
            optimizer.step()
            optimizer.zero_grad()
    return 0.0


def whole_batch(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    optimizer.zero_grad()
    model.loss(tokens).backward()
    optimizer.step()
    return 0.0


def ways(number: int) -> list[tuple[str, Make, Any, Any]]:
    """Return the ways to train that are compared with one process: both, and in turns where ranks share the cores."""
    both = [
        ("sgd, clipped", SHAPES["sgd"], clipped, clipped),
        ("adamw, accumulated", SHAPES["adamw"], accumulated, whole_batch),
    ]
    return both if dw.world_size() == 2 else [both[number % 2]]


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    return current_world().strategy.state(model, everywhere=True)


def distance(model: nn.Module, net: nn.Module) -> float:
    state, wanted = full(model), net.state_dict()
    assert list(state) == list(wanted)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in net.named_parameters()]
    return max(float((state[name] - value).abs().max()) for name, value in wanted.items())


def _trained() -> tuple[dict[str, float], dict[str, str]]:
    """Train each kind of block in two ways, and return how far it is from one process."""
    found, tables = {}, {}
    for number, kind in enumerate(KINDS):
        for name, make, step, alone in ways(number):
            net = Language(kind).double()
            own = dw.wrap_optimizer(make(net.parameters()), apart=True)
            wanted = [alone(net, own, texts()) for _ in range(3)]
            mine = Language(kind).double()
            optimizer = make(mine.parameters())  # before it is wrapped
            model = dw.wrap_model(mine, plan=PLANS[kind], check=True)
            with torch.no_grad():
                model(texts()[:, :-1])  # the first forward is one of evaluation
            norms = [step(model, optimizer, share(texts())) for _ in range(3)]
            dw.assert_in_sync(model)
            found[f"{kind}, {name}"] = max(
                distance(model, net), *(abs(a - b) for a, b in zip(norms, wanted, strict=True))
            )
            tables[kind] = plan_of(model)
    return found, tables


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch's, of any head over three dimensions
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_numbers_are_those_of_one_process(ranks: int) -> None:
    """Blocks as in Llama, GPT and torch train to the weights of one process, clipped and accumulated."""
    found, tables = distributed(nprocs=ranks, strategy=TWO, launcher="forkserver")(_trained)()
    assert max(found.values()) < 1e-9, found
    assert len(found) == len(KINDS) * (2 if ranks == 2 else 1)
    lines = {line.split()[0]: line for line in tables["llama"].splitlines()}
    assert "whole" in lines["blocks.*.attention.q_norm"]
    assert "colwise" in lines["blocks.*.attention.wk"]
    assert "packed3" in tables["gpt"]
    assert "heads " in tables["torch"]


class Tied(nn.Module):
    """An embedding whose weight is the head's too, around a pair of layers, a temperature and a gate."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.head = nn.Embedding(12, 8, padding_idx=7), nn.Linear(8, 12)
        self.head.weight = self.token.weight
        self.up, self.down, self.temperature = nn.Linear(8, 32), nn.Linear(16, 8), nn.Parameter(torch.ones(1) * 1.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        gate, value = self.up(x).chunk(2, -1)
        return self.head(x + self.down(F.silu(gate) * value * self.temperature))  # type: ignore[no-any-return]


STYLES: list[dict[str, str]] = [
    {"up": "packed2", "down": "rowwise"},
    {"up": "colwise"},
    {"down": "rowwise"},
    {"down": "colwise", "up": "rowwise"},
    {"up": "gathered"},
    {"token": "vocabulary"},
    {"head": "gathered"},
    {"token": "vocabulary", "head": "gathered", "up": "packed2", "down": "rowwise"},
]


def _tied(plan: dict[str, str] | None) -> list[torch.Tensor]:
    """Return losses, a prediction, and all weights."""
    net = Tied().double()
    model = net if plan is None else dw.wrap_model(net, plan=plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = optimizer if plan else dw.wrap_optimizer(optimizer, apart=True)
    tokens, losses = torch.arange(24).view(4, 6) % 12, []
    for _ in range(3):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with torch.no_grad():
        last = model.eval()(tokens)
    return [*losses, last, *(net.state_dict() if plan is None else full(model)).values()]


def _styles() -> dict[str, float]:
    wanted = _tied(None)
    return {str(plan): _apart(_tied(plan), wanted) for plan in STYLES}


def _apart(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def test_each_style_gives_the_numbers_of_one_process() -> None:
    """Also for a weight that two modules share, and for numbers that all ranks have among divided ones."""
    for found in simulate(_styles, 2, strategy=TWO):
        assert max(found.values()) < 1e-9, found


class Odd(nn.Module):
    """A block that does between its divided layers what a user pleases."""

    def __init__(self, between: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(8, 16), nn.Linear(16, 8), between
        self.norm, self.extra = nn.LayerNorm(16), torch.zeros(())
        self.register_buffer("mean", torch.zeros(16))
        nn.init.zeros_(self.down.weight)  # as adaLN-zero and ReZero begin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.between(self, self.up(x)))  # type: ignore[no-any-return]


def _statistics(block: Any, h: torch.Tensor) -> torch.Tensor:
    block.extra = h.square().mean() if block.training else torch.zeros(())
    if block.training:
        block.mean.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)
    return h - block.mean


def _part_changed_by_index(block: Any, h: torch.Tensor) -> torch.Tensor:
    h = F.gelu(h)
    h[..., 3:7] = 0.5
    return h


def _by_numbers(block: Any, h: torch.Tensor) -> torch.Tensor:
    return h * h.detach().max().item() if float(h.detach().sum()) > 0 else h / (1 + h.abs().max())


def _energy(block: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        of = h.detach().requires_grad_()
        return torch.autograd.grad(of.softmax(-1).square().sum(), of)[0] + h


BETWEEN: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "gelu": lambda block, h: F.gelu(h),
    "softmax": lambda block, h: h.softmax(-1),
    "norm": lambda block, h: block.norm(h),
    "normalize": lambda block, h: F.normalize(h, dim=-1) * 3,
    "sort": lambda block, h: h.sort(-1).values,
    "flip and cut": lambda block, h: torch.cat([h[..., 5:].flip(-1), h[..., :5]], -1),
    "odd heads": lambda block, h: h.unflatten(-1, (16, 1)).cumsum(-2).flatten(-2) * 0.1,
    "statistics": _statistics,
    "index": _part_changed_by_index,
    "numbers": _by_numbers,
    "dropout": lambda block, h: F.dropout(h, 0.5, block.training),
    "noise": lambda block, h: h + torch.randn_like(h),
    "prelu": lambda block, h: F.prelu(h, torch.full((1,), 0.3, dtype=h.dtype)),
    "energy": _energy,
    "rotated halves": lambda block, h: torch.cat([-h[..., 8:], h[..., :8]], -1),
    "joined twice": lambda block, h: torch.cat([h, h * 2], -1)[..., 4:20],
    "pairs": lambda block, h: torch.einsum("bli,blj->blij", h, h).mean(2) * 0.01,
    "logsigmoid": lambda block, h: F.logsigmoid(h),
    "outer product": lambda block, h: torch.einsum("bli,blj->bij", h, h)[:, :1] + h,
}


class Oddities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Odd(between) for between in BETWEEN.values())

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        block = self.blocks[number]
        return (block(x) * 1.1).square().mean() + block.extra  # type: ignore[no-any-return]


def _oddities(plan: dict[str, str] | None) -> dict[str, list[torch.Tensor]]:
    net = Oddities().double()
    model = net if plan is None else dw.wrap_model(net, plan=plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    optimizer = optimizer if plan else dw.wrap_optimizer(optimizer, apart=True)
    found = {}
    for number, name in enumerate(BETWEEN):
        losses = []
        torch.manual_seed(number)
        for step in range(4):
            model.train(step < 3)
            x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            loss = model(x, number)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found[name] = losses
    return found


def _odd_distances() -> dict[str, float]:
    wanted, found = _oddities(None), _oddities({"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
    return {name: _apart(found[name], each) for name, each in wanted.items()}


def test_what_a_block_does_between_divided_layers_is_what_it_does_in_one_process() -> None:
    """Functions of all hidden numbers, statistics, draws, code in training alone, blocks that end in zeros."""
    for found in simulate(_odd_distances, 2, strategy=TWO):
        assert max(found.values()) < 1e-9, found


class Own(nn.Module):
    """A block that takes its own part of a divided tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: Any = self.up(x)
        local = h.to_local() if hasattr(h, "to_local") else h
        return self.down(h / local.norm())  # type: ignore[no-any-return]


class Again(Odd):
    """A block that computes a function again, which drops numbers of a divided tensor."""

    def __init__(self) -> None:
        super().__init__(lambda block, h: h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: self.down(F.dropout(self.up(x))), x, use_reentrant=False)  # type: ignore[no-any-return]


def _refused() -> list[str]:
    """Return what is said of plans and blocks that are wrong, and of batches and draws that differ."""
    said = []
    pair = {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"}
    plans: list[tuple[nn.Module, Any]] = [
        (nn.Sequential(Own().double()), {"0.up": "colwise", "0.down": "rowwise"}),
        (Language("gpt"), {"blocks.*.nothing": "colwise"}),
        (Language("llama"), {"blocks.*.norm_1": "colwise"}),
        (Tied(), {"token": "vocabulary", "head": "rowwise"}),
        (Language("gpt"), None),
        (Language("gpt"), "llama"),
    ]
    for net, plan in plans:
        with pytest.raises((ModelError, OptionError)) as caught:
            dw.wrap_model(net, plan=plan, check=True)(torch.ones(2, 8).double())
        said.append(str(caught.value))

    def fails(model: Any, run: Callable[[Any], object]) -> None:
        with pytest.raises(ModelError) as caught:
            run(model)
        said.append(str(caught.value))

    def penalty(model: Any) -> None:
        torch.autograd.grad(model.loss(texts()), model.head.weight, create_graph=True)

    fails(dw.wrap_model(Language("gpt").double(), plan=pair), lambda model: model(texts()[dw.rank() :: 2, :-1]))
    fails(dw.wrap_model(Language("gpt").double(), plan=pair), penalty)
    model = dw.wrap_model(Language("gpt").double(), plan=pair)
    model.blocks[0].mlp[0].register_forward_hook(lambda module, args, h: h[..., :4].mul_(2))
    fails(model, lambda model: model(texts()[:, :-1]))
    fails(dw.wrap_model(Again().double(), plan={"up": "colwise"}), lambda model: model(torch.ones(2, 4, 8).double()))
    noisy = dw.wrap_model(Odd(lambda block, h: F.dropout(h)).double(), plan={"up": "colwise"})
    torch.manual_seed(dw.rank())
    fails(noisy, lambda model: model(torch.ones(2, 4, 8).double()))
    return said


def test_what_is_wrong_is_an_error_by_name() -> None:
    """Plans that fit nothing, none, and what would give other numbers than one process."""
    for said in simulate(_refused, 2, strategy=TWO):
        for words, text in zip(
            (
                "check=True: '0', a Own of which plan= divides layers, does not compute what it computes whole: output",
                "unknown module of the model, in plan=, 'blocks.*.nothing'",
                "plan= says 'colwise' of 'blocks.0.norm_1', a RMSNorm: it is a style of Linear",
                "'vocabulary' of 'token' and 'rowwise' of 'head', which share the weight 'weight'",
                '"blocks.*.qkv": "packed3",\n    "blocks.*.out": "rowwise",',
                "plan='llama' divides nothing of Language",
                "the ranks of a tensor-parallel group compute one batch together, but were given different ones",
                "create_graph=True through layers that tensor_parallel= divides",
                "mul_() changes a part of a tensor that plan= divides over the ranks, and the part is a copy",
                "dropout in a function under torch.utils.checkpoint()",
                "they draw different random numbers",
            ),
            said,
            strict=True,
        ):
            assert words in text


def _joined(plan: Any) -> torch.Tensor:
    found: torch.Tensor = dw.wrap_model(Language("gpt").double(), plan=plan, check=True)(texts()[:, :-1])
    return found.detach()


def test_a_joined_projection_that_is_not_packed_is_right_and_told(capfd: Any, monkeypatch: Any) -> None:
    """torch's own "colwise" of it would give each rank other queries, keys and values."""
    monkeypatch.delenv("DISTWRAP_QUIET", raising=False)
    wanted = Language("gpt").double()(texts()[:, :-1]).detach()
    for found in simulate(_joined, 2, {"blocks.*.qkv": "colwise", "blocks.*.out": "rowwise"}, strategy=TWO):
        assert float((found - wanted).abs().max()) < 1e-9
    told = capfd.readouterr().err
    assert "unflatten() in blocks.* needs the whole of a tensor that plan= divides" in told
    assert "say 'packed2' or 'packed3'" in told


def test_a_right_plan_is_not_told_to_be_slow(capfd: Any, monkeypatch: Any) -> None:
    """Neither by its embedding, nor by the comparison of check=, which computes the whole."""
    monkeypatch.delenv("DISTWRAP_QUIET", raising=False)
    for plan in (PLANS["gpt"], {**PLANS["gpt"], "head": "whole"}):
        simulate(_joined, 2, plan, strategy=TWO)
    told = capfd.readouterr().err
    assert "vocabulary" in told
    assert "needs the whole" not in told


def test_a_plan_is_checked_in_one_process() -> None:
    """check_plan() compares each block on simulated ranks, and returns the table of the division."""
    table = check_plan(Language("gpt").double(), "gpt", texts()[:, :-1])
    assert "blocks.*.qkv     Linear     packed3  72 x 24, 72  36 x 24, 72" in table, table
    with pytest.raises(ModelError, match="output 0 differs"):
        check_plan(nn.Sequential(Own().double()), {"0.up": "colwise"}, torch.ones(2, 8).double())


def _divides() -> None:
    plans: list[Any] = [{"head": "gathered"}, "transformer"]
    for plan in plans:
        with pytest.raises(ModelError, match=r"14 are not divisible by 3|divides nothing of Language"):
            dw.wrap_model(Language("llama", 14), plan=plan)


def test_what_does_not_divide_is_refused() -> None:
    """Ranks that do not divide layers or the run are named, before anything is trained."""
    distributed(nprocs=3, strategy="tp")(_divides)()
    with pytest.raises(OptionError, match="groups of 2"):
        distributed(nprocs=3, strategy=TWO)(_divides)()
    options: list[dict[str, Any]] = [{"tensor_parallel": 1}, {"plan": {}}, {"check": True}]
    for each in (*options, {"tensor_parallel": 2, "shard": 2}):
        with pytest.raises(OptionError, match="FSDPStrategy"):
            FSDPStrategy(**each)
    wrong: list[tuple[Any, str]] = [({"*": "columnwise"}, "'colwise'"), ("lama", "'llama'"), (3, "it is one of")]
    for plan, words in wrong:
        with pytest.raises(OptionError, match=words):
            FSDPStrategy(tensor_parallel=2, plan=plan)
    with pytest.raises(OptionError, match="sequence_parallel=…"):
        FSDPStrategy(tensor_parallel=2, sequence_parallel=True)  # type: ignore[call-arg]


class Holding(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.self_attn = attention

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.self_attn(*args, **kwargs)


def _goes_around(folder: Path) -> dict[str, float]:
    """Save in both forms, load into one process and back, and go on; large alphabets; masks; half precision."""
    found, make = {}, SHAPES["adamw"]
    net = Language("gpt", 4096).double()
    own = dw.wrap_optimizer(make(net.parameters()), apart=True)
    model = dw.wrap_model(Language("gpt", 4096).double(), plan=PLANS["gpt"])
    optimizer = make(model.parameters())
    letters = texts(letters=4096)
    for _ in range(2):
        whole_batch(net, own, letters)
        whole_batch(model, optimizer, share(letters))
    for io in ("auto", "sharded"):
        dw.save({"model": model, "optimizer": optimizer}, folder / io, io=io)
        again = dw.wrap_model(Language("gpt", 4096).double(), plan=PLANS["gpt"])
        its = make(again.parameters())
        dw.load(folder / io, into={"model": again, "optimizer": its})
        found[f"loaded from {io}"] = distance(again, net)
    whole_batch(net, own, letters)
    whole_batch(again, its, share(letters))
    found["loaded, and on"] = distance(again, net)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True).double()
    for parameter in layer.parameters():
        parameter.data.copy_(torch.linspace(-1, 1, parameter.numel()).sin().view_as(parameter))
    x = torch.linspace(-3, 3, 2 * 8 * WIDTH, dtype=torch.float64).cos().view(2, 8, WIDTH)
    padding = torch.arange(8).expand(2, 8) > 5
    expected = layer(x, src_key_padding_mask=padding).detach()
    attended, chances = layer.self_attn(x, x, x, attn_mask=torch.ones(8, 8).triu(1).bool())
    attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True).double()
    attention.load_state_dict(layer.self_attn.state_dict())
    cut = dw.wrap_model(layer, plan="transformer")
    found["a mask"] = float((cut(x, src_key_padding_mask=padding).detach() - expected).abs().max())
    cut.eval()
    with torch.no_grad():
        found["in eval()"] = float((cut(x, src_key_padding_mask=padding) - expected).abs().max())
    mine = dw.wrap_model(Holding(attention), plan="transformer")
    outputs = mine(x, x, x, attn_mask=torch.ones(8, 8).triu(1).bool())
    pairs = zip(outputs, (attended, chances), strict=True)
    found["chances"] = max(float((mine - own).detach().abs().max()) for mine, own in pairs)
    return found


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch's, of any head over three dimensions
@pytest.mark.parametrize(("strategy", "ranks"), [(TWO, 2), nightly(TWO, 4, row="products", why="two ranks show it")])
@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_states_masks_and_vocabularies(strategy: Any, ranks: int, tmp_path: Path) -> None:
    """Checkpoints of both forms, large embeddings and heads, and masks of attention are as in one process."""
    found = distributed(nprocs=ranks, strategy=strategy)(_goes_around)(tmp_path)
    assert max(found.values()) < 1e-9, found
    whole, put_together = (dw.load(tmp_path / io)["model"] for io in ("auto", "sharded"))  # in one process
    assert list(whole) == list(Language("gpt").state_dict())
    assert all(torch.equal(value, put_together[name]) for name, value in whole.items())


def _in_bf16() -> float:
    """Train in bf16 under autocast, beside one process that does."""
    net, model = Language("gpt"), dw.wrap_model(Language("gpt"), precision="bf16", plan=PLANS["gpt"])
    own = dw.wrap_optimizer(SHAPES["sgd"](net.parameters()), apart=True)
    optimizer = SHAPES["sgd"](model.parameters())
    for _ in range(3):
        own.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = net.loss(texts())
        loss.backward()
        own.step()
        whole_batch(model, optimizer, share(texts()))
    return distance(model, net)


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_half_precision() -> None:
    """In bf16 the weights are those of one process in bf16, but for its rounding."""
    assert distributed(nprocs=2, strategy=TWO)(_in_bf16)() < 5e-3
