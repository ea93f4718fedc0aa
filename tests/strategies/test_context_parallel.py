"""Context parallelism: blocks that compute pieces of sequences have the numbers of one process, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distwrap as dw
from distwrap import FSDPStrategy, distributed
from distwrap.errors import ModelError, OptionError
from distwrap.strategies.fsdp import plan_of
from distwrap.strategies.shards import local
from tests.slow import slow
from tests.strategies.blocks import KINDS, LENGTH, LETTERS, WIDTH, GatedMLP, Language, RMSNorm, texts
from tests.strategies.test_tensor_parallel import distance, share, ways

HEADS, KEYS = 4, 2


class Rotated(nn.Module):
    """Block that gets its angles, with fewer heads of keys than of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.mlp = RMSNorm(WIDTH), RMSNorm(WIDTH), GatedMLP(WIDTH, 2 * WIDTH)
        self.q, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, *, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        heads = (each(self.norm_1(x)).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k))
        q, k = (each * angles[0] + each.flip(-1) * angles[1] for each in heads)
        v = self.v(self.norm_1(x)).unflatten(-1, (KEYS, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm_2(x))  # type: ignore[no-any-return]


class Between(nn.Module):
    """Blocks between an embedding and a head; how they are called is for those that inherit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.head = nn.Embedding(LETTERS, WIDTH), nn.Linear(WIDTH, LETTERS)
        self.blocks = nn.ModuleList(self.block() for _ in range(2))

    def block(self) -> nn.Module:
        return Rotated()

    def between(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(torch.arange(x.shape[1]), torch.linspace(0.1, 1.0, WIDTH // HEADS)).to(x)
        for block in self.blocks:
            x = block(x, angles=(angles.cos(), angles.sin()))
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.between(self.token(tokens), tokens))  # type: ignore[no-any-return]

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Padded(Between):
    """Layers of torch that see both ways, but no padding."""

    def block(self) -> nn.Module:
        return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True)

    def between(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        padding = (tokens == 0) & (torch.arange(LENGTH) > 4)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=padding)
        return x


class Seen(nn.Module):
    """Block that makes a mask of scores out of one of words."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.qkv = nn.LayerNorm(WIDTH), GatedMLP(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, None]:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(-2, -3)
        attended = F.scaled_dot_product_attention(q, k, v, keep[:, None, None], 0.0)
        x = x + attended.transpose(-2, -3).flatten(-2) * keep.unsqueeze(-1)
        return x + self.mlp(x), None


class SeenByWords(Padded):
    def block(self) -> nn.Module:
        return Seen()

    def between(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, _ = block(x, (tokens != 0) | (torch.arange(LENGTH) < 2))
        return x


class Translated(Between):
    """Layers of torch with time first, a causal mask, and a memory of another length that trains too."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(5, WIDTH))

    def block(self) -> nn.Module:
        return nn.TransformerDecoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, norm_first=True)

    def between(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        memory, mask = self.memory.unsqueeze(1).expand(-1, len(x), -1), torch.ones(LENGTH, LENGTH).triu(1).bool()
        x = x.transpose(0, 1)
        for block in self.blocks:
            x = block(x, memory, tgt_mask=mask, tgt_is_causal=True)
        return x.transpose(0, 1)


class Chances(nn.Module):
    """Block of torch's attention as it is by default, which returns its chances, of a mask for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = GatedMLP(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        found, _ = self.attention(x, x, x, attn_mask=bias.repeat(len(x), 1, 1))
        return self.mlp(x + found)  # type: ignore[no-any-return]


class Biased(Between):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4, LENGTH, LENGTH))

    def block(self) -> nn.Module:
        return Chances()

    def between(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.bias)
        return x


NETS: dict[str, Any] = {
    **{kind: lambda kind=kind: Language(kind) for kind in KINDS},
    **{kind.__name__: kind for kind in (Between, Padded, SeenByWords, Translated, Biased)},
}


def _trained() -> tuple[dict[str, float], str]:
    found = {}
    for number, (kind, net_of) in enumerate(NETS.items()):
        for name, make, step, alone in ways(number):
            net = net_of().double()
            own = dw.wrap_optimizer(make(net.parameters()), apart=True)
            wanted = [alone(net, own, texts(6)) for _ in range(3)]
            mine = net_of().double()
            optimizer = make(mine.parameters())
            model = dw.wrap_model(mine)
            norms = [step(model, optimizer, share(texts(6))) for _ in range(3)]
            dw.assert_in_sync(model)
            found[f"{kind}, {name}"] = max(
                distance(model, net), *(abs(a - b) for a, b in zip(norms, wanted, strict=True))
            )
    return found, plan_of(model)


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("cp", 2), slow(FSDPStrategy(context_parallel=2), 4, why="four ranks"), slow("cp", 4, why="four ranks")],
)
@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_numbers_are_those_of_one_process(strategy: Any, ranks: int) -> None:
    """Causal, bidirectional, rotated, padded, grouped and crossed attention train to the weights of one process."""
    found, table = distributed(nprocs=ranks, strategy=strategy, launcher="forkserver")(_trained)()
    assert max(found.values()) < 1e-9, found
    assert "whole, gradients summed" in table


class ByItself(nn.Module):
    """Block that computes its own positions, as `forward` of those that inherit says it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.mlp, self.conv = nn.Linear(WIDTH, 3 * WIDTH), GatedMLP(WIDTH, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x + self.position[: x.shape[1]])  # type: ignore[no-any-return]


class ByHand(ByItself):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + (q @ k.transpose(-2, -1)).softmax(-1) @ v  # type: ignore[no-any-return]


class Convolved(ByItself):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(F.pad(x, (0, 0, 2, 0)).transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class Masked(ByItself):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1), attn_mask=mask)


class LeavesALoss(ByItself):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.extra = self.mlp(x).square().mean()
        return x + self.mlp(x)  # type: ignore[no-any-return]


def _refused() -> tuple[list[str], float]:
    said = []
    for block in (ByItself, ByHand, Convolved, Masked, LeavesALoss):
        net = nn.Sequential(*(block() for _ in range(2))).double()
        with pytest.raises(ModelError) as caught:
            dw.wrap_model(net)(torch.ones(3, LENGTH, WIDTH).double().cumsum(1).sin())
        said.append(str(caught.value))
    net = Between().double()
    model, letters = dw.wrap_model(Between().double()), texts()[:, :5]
    with pytest.raises(ModelError) as caught:
        model(letters)
    said.append(str(caught.value))
    with torch.no_grad():
        far = float((model(letters) - net(letters)).abs().max())
    model.loss(texts()).backward()
    return said, far


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_what_is_not_seen_is_refused() -> None:
    """Blocks that see the sequence in another way are errors by name; without gradients any length is computed."""
    said, far = distributed(nprocs=2, strategy="cp")(_refused)()
    for words, text in zip(
        (
            *(f"a {kind} that is cut over 2 ranks" for kind in ("ByItself", "ByHand", "Convolved", "Masked")),
            "what it leaves in 'extra' differs",
            "got a tensor of shape (8, 5, 24), whose sequence of 5 words cannot be divided over 2 ranks. Pad",
        ),
        said,
        strict=True,
    ):
        assert words in text
    assert far < 1e-12
    with pytest.raises(OptionError, match="do not go together"):
        FSDPStrategy(tensor_parallel=2, context_parallel=2)


def _saved() -> tuple[float, float]:
    """Return how many bytes a backward needs of the blocks, cut and whole."""

    def count(net: nn.Module) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = local(tensor).untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        own = {local(parameter).untyped_storage().data_ptr() for parameter in net.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = net(x)
        assert output.requires_grad
        return sum(size for place, size in sizes.items() if place not in own)

    x = torch.randn(2, 256, WIDTH, requires_grad=True, generator=torch.Generator().manual_seed(0))
    layer = nn.TransformerEncoder(Padded().block(), 4, enable_nested_tensor=False)
    model = dw.wrap_model(nn.TransformerEncoder(Padded().block(), 4, enable_nested_tensor=False))
    model(x)
    return count(model), count(layer)


@pytest.mark.slow("trains many loops, and each of them in one process besides")
def test_a_piece_needs_a_piece_of_the_memory() -> None:
    """Each of two ranks keeps about half of the activations; keys and values are whole."""
    mine, whole = distributed(nprocs=2, strategy="cp")(_saved)()
    assert mine < 0.65 * whole, (mine, whole)
