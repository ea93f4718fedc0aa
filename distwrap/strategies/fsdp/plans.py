"""Plans of tensor parallelism: one word for each layer that is divided, said by the user.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, NoReturn

from torch import nn

from distwrap.errors import ModelError, OptionError
from distwrap.wording import unknown_name

Plan = Literal["auto", "transformer", "llama", "gpt"] | Mapping[str, str] | Callable[[str, nn.Module], str | None]

WORDS = ("colwise", "rowwise", "packed2", "packed3", "heads", "gathered", "vocabulary", "whole")

# Names of layers in well-known models, whose layers of other kinds, or of other sizes, stay whole.
READY: dict[str, dict[str, str]] = {
    "transformer": {  # of torch
        **dict.fromkeys(("*self_attn", "*multihead_attn"), "heads"),
        "*linear1": "colwise",
        "*linear2": "rowwise",
    },
    "llama": {  # of Hugging Face, and of Meta
        **dict.fromkeys(("*[qkv]_proj", "*gate_proj", "*up_proj", "*w[qkv]", "*w1", "*w3"), "colwise"),
        **dict.fromkeys(("*o_proj", "*down_proj", "*wo", "*w2"), "rowwise"),
        **dict.fromkeys(("*embed_tokens", "*tok_embeddings"), "vocabulary"),
        **dict.fromkeys(("*lm_head", "output"), "gathered"),
    },
    "gpt": {  # of nanoGPT, timm, and of many a notebook
        **dict.fromkeys(("*c_attn", "*qkv"), "packed3"),
        **dict.fromkeys(("*c_fc", "*fc1", "*mlp.0"), "colwise"),
        **dict.fromkeys(("*c_proj", "*fc2", "*mlp.2", "*.proj", "*.out"), "rowwise"),
        "*wte": "vocabulary",
        "*lm_head": "gathered",
    },
}


def check_plan(plan: object) -> None:
    """Refuse a value that is not a plan.

    Raises:
        OptionError: it is not a plan's name, words by patterns of names, or a function.
    """
    if plan is None or (callable(plan) and not isinstance(plan, type)):
        return
    if isinstance(plan, str):
        if plan not in ("auto", *READY):
            raise OptionError(unknown_name("plan of FSDPStrategy(plan=…)", plan, ("auto", *READY)))
        return
    if not isinstance(plan, Mapping) or not all(isinstance(pattern, str) for pattern in plan):
        raise OptionError(
            f"FSDPStrategy(plan={plan!r}): it is one of {', '.join(map(repr, READY))}; words by patterns of modules' "
            "names as {'blocks.*.mlp.0': 'colwise', 'blocks.*.mlp.2': 'rowwise'}; or a function of a name and a module."
        )
    for word in plan.values():
        if word not in WORDS:
            raise OptionError(unknown_name("style of a module in plan=", word, WORDS))


def words_of(model: nn.Module, plan: Plan | None, ranks: int) -> dict[str, str]:
    """Return the word of each module that a plan divides, by its name.

    Args:
        model: the whole model.
        plan: the user's plan.
        ranks: the number of ranks that divide a layer.

    Raises:
        OptionError: there is no plan; the message has one to paste.
        ModelError: a pattern or word fits no module, or a module cannot be divided by the ranks.
    """
    named = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    if plan is None or plan == "auto":
        _refuse_to_guess(model, named, ranks)
    words: dict[str, str] = {}
    for pattern, word in (READY[plan] if isinstance(plan, str) else plan if isinstance(plan, Mapping) else {}).items():
        found = [name for name in named if fnmatchcase(name, pattern)]
        if isinstance(plan, str):
            found = [name for name in found if not why_not(named[name], word, ranks)]
        elif not found:
            raise ModelError(unknown_name("module of the model, in plan=,", pattern, named))
        words.update(dict.fromkeys(found, word))
    if callable(plan):
        words = {name: word for name, module in named.items() if (word := plan(name, module) or "")}
    words = {name: word for name, word in words.items() if word != "whole"}
    for name, word in words.items():
        if why := why_not(named[name], word, ranks):
            raise ModelError(f"plan= says {word!r} of {name!r}, a {type(named[name]).__name__}: {why}.")
    if not words:
        raise ModelError(
            f"plan={plan if isinstance(plan, str) else '…'!r} divides nothing of {type(model).__name__}, so that each "
            f"rank would compute all of it. Its modules: {', '.join(list(named)[:12])}, …"
        )
    attentions = [name for name, word in words.items() if word == "heads"]
    return words | dict.fromkeys((f"{name}.out_proj" for name in attentions), "rowwise")


def why_not(module: nn.Module, word: str, ranks: int) -> str:
    """Return why a module cannot be divided in the way of a word, or an empty text."""
    if word not in WORDS:
        return unknown_name("style", word, WORDS)
    kind: type[Any] = {"heads": nn.MultiheadAttention, "vocabulary": nn.Embedding}.get(word, nn.Linear)
    if not isinstance(module, kind):
        return f"it is a style of {kind.__name__}"
    own = dict(module.named_parameters(recurse=False))
    if isinstance(module, nn.MultiheadAttention):
        if module.num_heads % ranks:
            return f"its {module.num_heads} heads are not divisible by {ranks} ranks"
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
            return "it has kdim=, vdim=, add_bias_kv= or add_zero_attn=, which are not divided"
        size = 3 * module.embed_dim
    elif "weight" not in own:
        return "its weight is not a parameter of its own, as under a parametrization"
    else:
        size = own["weight"].shape[word == "rowwise"]
    parts = ranks * pieces_of(word)
    return f"{size} are not divisible by {parts}" if size % parts else ""


def pieces_of(word: str) -> int:
    """Return how many projections one weight has, each of which is divided by itself."""
    return {"packed2": 2, "packed3": 3, "heads": 3}.get(word, 1)


def _refuse_to_guess(model: nn.Module, named: Mapping[str, nn.Module], ranks: int) -> NoReturn:
    found = {name: "heads" for name, module in named.items() if isinstance(module, nn.MultiheadAttention)}
    for name, module in (("", model), *named.items()):
        layers = {key: part for key, part in module.named_children() if isinstance(part, nn.Linear)}
        *first, last = layers.values() if layers else (None,)
        if first and name not in found and last.out_features == first[0].in_features:  # type: ignore[union-attr]
            words = ["packed3" if part.out_features == 3 * part.in_features else "colwise" for part in first]
            found |= dict(zip((f"{name}.{key}".lstrip(".") for key in layers), (*words, "rowwise"), strict=True))
    found |= {name: "vocabulary" for name, module in named.items() if not why_not(module, "vocabulary", ranks)}
    found = {pattern_of(name): word for name, word in found.items()}
    lines = "\n".join(f'    "{pattern}": "{word}",' for pattern, word in found.items())
    raise OptionError(
        f"tensor_parallel= needs a plan=, which is not guessed: 'transformer' for torch's layers, 'llama', 'gpt', or "
        f"words by names. Layers of {type(model).__name__} that look like pairs; paste them, and correct them:\n"
        f"plan={{\n{lines}\n}}\nAn answer of a wrong word is slow, not wrong; check=True compares each block once."
    )


def pattern_of(name: str) -> str:
    """Return a module's name in which each number is ``*``."""
    return re.sub(r"\b\d+\b", "*", name)
