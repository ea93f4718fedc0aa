"""Tensor and sequence parallelism: numbers equal to one process, plans that are found, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distwrap as dw
from distwrap import FSDPStrategy, distributed
from distwrap.errors import ModelError, OptionError
from distwrap.group.world import current_world
from distwrap.strategies.fsdp import plan_of
from tests.slow import nightly
from tests.strategies.blocks import KINDS, WIDTH, Language, texts

BY_SEQUENCE = FSDPStrategy(tensor_parallel=2, sequence_parallel=True)
TWO_BY_TWO = FSDPStrategy(tensor_parallel=2)

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
            model = dw.wrap_model(mine)
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
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("tp", 2),
        (BY_SEQUENCE, 2),
        (TWO_BY_TWO, 4),
        nightly(BY_SEQUENCE, 4, row="products", why="two ranks show it, and four without the sequence"),
        nightly("tp", 3, row="products", why="two ranks show it, but for heads that do not divide"),
    ],
)
@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_numbers_are_those_of_one_process(strategy: Any, ranks: int) -> None:
    """Blocks as in Llama, GPT and torch train to the weights of one process, clipped and accumulated."""
    found, tables = distributed(nprocs=ranks, strategy=strategy, launcher="forkserver")(_trained)()
    assert max(found.values()) < 1e-9, found
    assert len(found) == len(KINDS) * (2 if ranks == 2 else 1)
    ranks = 3 if ranks == 3 else 2
    cut = f"{2 * WIDTH // ranks} x {WIDTH}"
    assert all(cut in table for table in tables.values()), tables
    if ranks == 3:
        assert "n_heads=4 is not divisible by 3 ranks" in tables["llama"]
        assert "4 heads are not divisible by 3 ranks" in tables["torch"]
        return
    lines = {line.split()[0]: line for line in tables["llama"].splitlines()}
    assert "whole, gradients summed  6 " in lines["blocks.*.attention.q_norm"]
    assert "colwise" in lines["blocks.*.attention.wk"]
    assert "packed3" in tables["gpt"]
    assert "heads " in tables["torch"]
    assert "72 x 24, 72  72 x 24, 72" in tables["nano"]  # whole
    assert "blocks.*.c_attn is whole: its forward raises" in tables["nano"]


def _refused() -> list[str]:
    """Return what is said of plans that are wrong, and of batches that differ."""
    said = []
    pairs = {"blocks.*.qkv": "colwise", "blocks.*.out": "rowwise"}
    for kind, plan in (
        ("gpt", pairs),  # the wrong rows of queries, keys and values
        ("gpt", {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "gathered"}),
        ("gpt", {"blocks.*.nothing": "colwise"}),
        ("llama", {"blocks.*.norm_1": "colwise"}),
        ("nano", {"blocks.*.c_attn": "packed3", "blocks.*.c_proj": "rowwise"}),
    ):
        with pytest.raises(ModelError) as caught:
            dw.wrap_model(Language(kind).double(), plan=plan)(texts()[:, :-1])
        said.append(str(caught.value))
    model = dw.wrap_model(Language("gpt").double())
    with pytest.raises(ModelError) as caught:
        model(texts()[dw.rank() :: 2, :-1])
    said.append(str(caught.value))
    model = dw.wrap_model(Language("gpt").double(), plan={"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"})
    for _ in range(2):  # and it goes on with a plan that is right
        model.loss(texts()).backward()
    return said


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_a_wrong_plan_is_an_error_by_name() -> None:
    """A plan that computes something else, or names what is not there, is refused, and so are unlike batches."""
    said = distributed(nprocs=2, strategy="tp")(_refused)()
    for words, text in zip(
        (
            "'blocks.0', a GPTBlock that is cut over 2 ranks, does not compute what it computes in one "
            "process: output 0 differs",
            "does not compute what it computes in one process: its forward raises",
            "unknown module of the model, in plan=, 'blocks.*.nothing'",
            "plan= says 'colwise' of 'blocks.0.norm_1', a RMSNorm: it is a style of Linear",
            "'blocks.0', a NanoBlock that is cut over 2 ranks, does not compute what it computes in one process",
            "the ranks of a tensor-parallel group compute one batch together, but were given different ones: "
            "'tensor 0' is",
        ),
        said,
        strict=True,
    ):
        assert words in text


def _divides() -> None:
    for plan in ({"blocks.*.attention.wq": "colwise"}, {"head": "gathered"}):
        with pytest.raises(ModelError, match=r"is 4, which cannot be divided over the 3 ranks|14 are not divisible"):
            dw.wrap_model(Language("llama", 14), plan=plan)


def test_what_does_not_divide_is_refused() -> None:
    """Ranks that do not divide heads, layers or the run are named, before anything is trained."""
    distributed(nprocs=3, strategy="tp")(_divides)()
    with pytest.raises(OptionError, match="groups of 2"):
        distributed(nprocs=3, strategy=TWO_BY_TWO)(_divides)()
    for options in ({"tensor_parallel": 1}, {"plan": {}}, {"tensor_parallel": 2, "shard": 2}):
        with pytest.raises(OptionError, match="FSDPStrategy"):
            FSDPStrategy(**options)
    with pytest.raises(OptionError, match="'colwise'"):
        FSDPStrategy(tensor_parallel=2, plan={"*": "columnwise"})


def _goes_around(folder: Path) -> dict[str, float]:
    """Save in both forms, load into one process and back, and go on; large alphabets; masks; half precision."""
    found, make = {}, SHAPES["adamw"]
    net = Language("gpt", 4096).double()
    own = dw.wrap_optimizer(make(net.parameters()), apart=True)
    model = dw.wrap_model(Language("gpt", 4096).double())
    optimizer = make(model.parameters())
    assert "vocabulary" in plan_of(model)
    assert "gathered" in plan_of(model)
    letters = texts(letters=4096)
    for _ in range(2):
        whole_batch(net, own, letters)
        whole_batch(model, optimizer, share(letters))
    for io in ("auto", "sharded"):
        dw.save({"model": model, "optimizer": optimizer}, folder / io, io=io)
        again = dw.wrap_model(Language("gpt", 4096).double())
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
    cut = dw.wrap_model(layer)
    found["a mask"] = float((cut(x, src_key_padding_mask=padding).detach() - expected).abs().max())
    cut.eval()
    with torch.no_grad():
        found["in eval()"] = float((cut(x, src_key_padding_mask=padding) - expected).abs().max())
    mine = dw.wrap_model(attention)
    outputs = mine(x, x, x, attn_mask=torch.ones(8, 8).triu(1).bool())
    pairs = zip(outputs, (attended, chances), strict=True)
    found["chances"] = max(float((mine - own).detach().abs().max()) for mine, own in pairs)
    return found


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch's, of any head over three dimensions
@pytest.mark.parametrize(
    ("strategy", "ranks"), [("tp", 2), nightly(TWO_BY_TWO, 4, row="products", why="two ranks show it")]
)
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
    net, model = Language("gpt"), dw.wrap_model(Language("gpt"), precision="bf16")
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
    assert distributed(nprocs=2, strategy="tp")(_in_bf16)() < 5e-3


def _wraps_one_layer() -> None:
    dw.wrap_model(nn.Linear(3, 1))


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_a_model_of_which_nothing_is_cut_is_told(capfd: Any, monkeypatch: Any) -> None:
    """Then each rank computes and holds all of it."""
    monkeypatch.delenv("DISTWRAP_QUIET", raising=False)
    dw.distributed(nprocs=2, strategy="tp", launcher="spawn")(_wraps_one_layer)()
    assert "Nothing of Linear is cut, so that each of 2 ranks computes all of it" in capfd.readouterr().err
