"""Plans of tensor parallelism: which layers of a model are divided, found from its structure or named by its user.

A pair has one or more layers that lead to hidden numbers, and one layer back. The first are divided by outputs and the
last by inputs, so each rank computes the values between them alone. There are several first layers for queries, keys
and values, or for a gate. A plan found here is a guess, which `proof` tests before it is used.

Source: https://arxiv.org/abs/1909.08053
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from distwrap.errors import ModelError
from distwrap.strategies.fsdp.attention import why_not
from distwrap.strategies.fsdp.plan_words import WORDS
from distwrap.strategies.fsdp.units import alike_blocks
from distwrap.wording import unknown_name

_LARGE = 4096  # fewest rows of a single layer or embedding that is divided
_POINTWISE = (nn.Dropout, nn.Identity)
_NOT_POINTWISE = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d, nn.GLU, nn.MultiheadAttention)


@dataclass(frozen=True)
class Cuts:
    """Layers that are divided together, with the word of each, and numbers of heads that are smaller on each rank.

    Attributes:
        words: the word of each module, by name.
        numbers: the number of heads on a rank, by the names of a module and its attribute.
        by_sequence: whether the other layers compute with pieces of the sequence.
    """

    words: dict[str, str] = field(default_factory=dict)
    numbers: dict[tuple[str, str], int] = field(default_factory=dict)
    by_sequence: bool = False

    def __or__(self, other: Cuts) -> Cuts:
        return Cuts({**self.words, **other.words}, {**self.numbers, **other.numbers})


def guesses(module: nn.Module, ranks: int) -> Iterator[tuple[list[Cuts], str]]:
    """Yield groups of a module's layers: ways to divide each, the best first, and the reason if there is none.

    Args:
        module: a module whose layers may make pairs.
        ranks: the number of ranks in the group.
    """
    if isinstance(module, nn.MultiheadAttention):
        why = why_not(module, ranks)
        yield [] if why else [Cuts({"": "heads"})], why
    elif isinstance(module, nn.Sequential):
        yield from _in_a_row(module, ranks)
    elif not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        groups = _groups(_own_layers(module))
        for ins, out in groups:
            yield _ways(module, ins, out, ranks, alone=len(groups) == 1)


def large(module: nn.Module, ranks: int) -> str:
    """Return the word for a layer or embedding that is large enough to be divided alone, or an empty text."""
    if isinstance(module, nn.Linear) and module.out_features >= _LARGE and module.out_features % ranks == 0:
        return "gathered"
    if isinstance(module, nn.Embedding) and module.num_embeddings >= _LARGE and module.num_embeddings % ranks == 0:
        return "vocabulary" if module.max_norm is None and not module.sparse else ""
    return ""


def asked_for(model: nn.Module, plan: Mapping[str, str] | Callable[[str, nn.Module], str | None], ranks: int) -> Cuts:
    """Return the division that a user's plan asks for.

    Raises:
        ModelError: a pattern or word fits no module, or a module cannot be divided by the ranks.
    """
    named = {name: module for name, module in model.named_modules() if name}
    words: dict[str, str] = {}
    if isinstance(plan, Mapping):
        for pattern, word in plan.items():
            found = [name for name in named if fnmatchcase(name, pattern)]
            if not found:
                raise ModelError(unknown_name("module of the model, in plan=,", pattern, named))
            words.update(dict.fromkeys(found, word))
    else:
        words = {name: word for name, module in named.items() if (word := plan(name, module) or "")}
    words = {name: word for name, word in words.items() if word != "whole"}
    for name, word in words.items():
        why = _why_word_does_not_fit(named[name], word, ranks)
        if why:
            raise ModelError(f"plan= says {word!r} of {name!r}, a {type(named[name]).__name__}: {why}.")
    numbers: dict[tuple[str, str], int] = {}
    for name in dict.fromkeys(name.rpartition(".")[0] for name, word in words.items() if word != "gathered"):
        for attribute, value in _heads(model.get_submodule(name)).items():
            if value % ranks:
                where = f"{name or 'the model'}.{attribute}"
                raise ModelError(
                    f"{where} is {value}, which cannot be divided over the {ranks} ranks of a tensor-parallel group."
                )
            numbers[name, attribute] = value // ranks
    return Cuts(words, numbers)


def shared_weights(model: nn.Module) -> set[int]:
    """Return the ids of parameters that several modules have."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return {key for key, count in owners.items() if count > 1}


def blocks_of(model: nn.Module) -> set[int]:
    """Return the ids of the blocks in a model's lists of alike blocks, except single layers."""
    return {id(block) for block in alike_blocks(model) if not isinstance(block, nn.Linear)}


def holds_blocks(module: nn.Module, blocks: set[int]) -> bool:
    """Return whether a module contains blocks."""
    return any(id(part) in blocks for part in module.modules() if part is not module)


def unit_of(model: nn.Module, name: str, blocks: set[int]) -> str:
    """Return the name of the block that is once computed as a whole, to prove the division of this module."""
    parts = name.split(".")
    outer = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((each for each in outer if id(model.get_submodule(each)) in blocks), name)


def _why_word_does_not_fit(module: nn.Module, word: str, ranks: int) -> str:
    if word not in WORDS:
        return unknown_name("style", word, WORDS)
    kind = {"heads": nn.MultiheadAttention, "vocabulary": nn.Embedding}.get(word, nn.Linear)
    if not isinstance(module, kind):
        return f"it is a style of {kind.__name__}"
    if isinstance(module, nn.MultiheadAttention):
        return why_not(module, ranks)
    size = module.num_embeddings if isinstance(module, nn.Embedding) else getattr(module, "out_features", 0)
    size = getattr(module, "in_features", size) if word == "rowwise" else size
    parts = ranks * int(word[-1]) if word.startswith("packed") else ranks
    return f"{size} are not divisible by {parts}" if size % parts else ""


def _in_a_row(module: nn.Sequential, ranks: int) -> Iterator[tuple[list[Cuts], str]]:
    """Yield pairs of layers of a sequence with only elementwise functions between them."""
    first: tuple[str, nn.Linear] | None = None
    for name, part in module.named_children():
        if isinstance(part, nn.Linear):
            if first is None:
                first = name, part
                continue
            hidden = part.in_features
            if hidden % ranks:
                yield [], f"{hidden} hidden numbers are not divisible by {ranks} ranks"
            else:
                yield [Cuts({first[0]: "colwise", name: "rowwise"})], ""
            first = None
        elif not _is_pointwise(part):
            first = None


def _is_pointwise(part: nn.Module) -> bool:
    is_activation = type(part).__module__ == "torch.nn.modules.activation"
    return isinstance(part, _POINTWISE) or (is_activation and not isinstance(part, _NOT_POINTWISE))


Layers = list[tuple[str, nn.Linear]]


def _own_layers(module: nn.Module) -> Layers:
    """Return a module's own layers in order, with those that are alone in an ``nn.Sequential``, as with dropout."""
    found: Layers = []
    for name, child in module.named_children():
        inside = [(f"{name}.{key}" if key else name, part) for key, part in child.named_modules()]
        layers = [(key, part) for key, part in inside if isinstance(part, nn.Linear)]
        if isinstance(child, nn.Linear) or (isinstance(child, nn.Sequential) and len(layers) == 1):
            found += layers
    return found


def _groups(layers: Layers) -> list[tuple[Layers, tuple[str, nn.Linear]]]:
    """Return the first layers and the last layer of each group."""
    found: list[tuple[Layers, tuple[str, nn.Linear]]] = []
    start = 0
    while start < len(layers):
        width, end = layers[start][1].in_features, 0
        for at in range(start + 1, len(layers)):
            ins, out = layers[start:at], layers[at][1]
            if ins[-1][1].in_features != width:
                break
            if out.out_features == width and _come_together([part.out_features for _, part in ins], out.in_features):
                end = at
        if end:
            found.append((layers[start:end], layers[end]))
        start = max(end, start) + 1
    taken = {name for ins, out in found for name, _ in (*ins, out)}
    for name, part in layers:  # a gate that was defined after the last layer
        for ins, _ in found:
            alike = (part.in_features, part.out_features) == (ins[0][1].in_features, ins[0][1].out_features)
            if name not in taken and alike and part.in_features != part.out_features:
                ins.append((name, part))
                taken.add(name)
    return found


def _come_together(outs: list[int], hidden: int) -> bool:
    """Return whether layers of these output sizes may feed one with `hidden` inputs: alike, packed or fewer heads."""
    if len(outs) == 1:
        return outs[0] in (hidden, 2 * hidden, 3 * hidden)
    fewer = [size for size in outs if size != hidden]
    return not fewer or (len(outs) == 3 and len(fewer) == 2 and len(set(fewer)) == 1 and hidden % fewer[0] == 0)


def _ways(
    module: nn.Module, ins: Layers, out: tuple[str, nn.Linear], ranks: int, *, alone: bool
) -> tuple[list[Cuts], str]:
    hidden, width = out[1].in_features, out[1].out_features
    sizes = {hidden, *(part.out_features for _, part in ins)}
    if bad := [size for size in sizes if size % ranks]:
        return [], f"{bad[0]} hidden numbers are not divisible by {ranks} ranks"
    packs = ins[0][1].out_features // hidden if len(ins) == 1 else 1
    plain = Cuts({**{name: "colwise" for name, _ in ins}, out[0]: "rowwise"})
    packed = [Cuts({ins[0][0]: f"packed{packs}", out[0]: "rowwise"})] if packs > 1 else []
    heads = _heads(module)
    if not heads:
        return [*packed, plain], ""
    ways, why = [], ""
    if odd := [name for name, value in heads.items() if value % ranks]:
        why = f"{odd[0]}={heads[odd[0]]} is not divisible by {ranks} ranks"
    else:
        fewer = Cuts({}, {("", name): value // ranks for name, value in heads.items()})
        whole = {name: value for name, value in vars(module).items() if type(value) is int and value == hidden}
        also = Cuts({}, {("", name): value // ranks for name, value in whole.items()})
        ways = [way | fewer for way in (*packed, plain)]
        ways += [way | also for way in ways] if whole else []
    is_attention = hidden == width or (alone and (packs == 3 or len(ins) >= 3))
    if is_attention:
        return ways, why
    return [*packed, plain, *ways], ""


def _heads(module: nn.Module) -> dict[str, int]:
    """Return the numbers of heads that a module has, by the names of its attributes."""
    numbers = {name: value for name, value in vars(module).items() if type(value) is int and value > 0}
    return {name: value for name, value in numbers.items() if re.search("head", name) and not _is_size(name)}


def _is_size(name: str) -> bool:
    return re.search("dim|size|width|per|groups", name) is not None
