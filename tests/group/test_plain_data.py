"""Plain data travels between ranks that have no secret; anything else is refused, and nothing is called."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import datetime
import enum
import io
import os
import pickle
import random
import resource
import sys
from pathlib import Path, PosixPath
from typing import Any

import numpy
import pytest
import torch

import distwrap as dw
from distwrap.errors import CollectiveError
from distwrap.group.collectives import broadcast, gather_object
from distwrap.group.signing import sign, verify
from distwrap.group.tensors_apart import dump_plain, load_plain
from distwrap.group.world import current_world
from distwrap.network.secret import signature
from distwrap.testing import run_ranks
from tests.group.test_signing import Harmful


class Own:
    """A class of the user's."""


class Failed(ValueError):
    """An exception of the user's."""


class Colour(enum.IntEnum):
    RED = 1


NAMED = collections.namedtuple("NAMED", "x")

PLAIN = [
    None,
    [True, 1, 2**100, -0.5, float("inf"), 1 + 2j, "a\ud800", b"\0", bytearray(b"x")],
    {"a": (1, [2]), 3: {4, 5}, (6,): frozenset([7])},
    collections.OrderedDict([("b", 1), ("a", 2)]),
    [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1)],
    [collections.Counter("aab"), collections.defaultdict(list, a=[1]), collections.deque([1, 2], 3)],
    [datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc), datetime.timedelta(1), Path("/data"), range(3)],
    slice(1, None, 2),
]
ERRORS = [KeyError("x"), FileNotFoundError(2, "No such file", "/data"), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")]


@pytest.mark.parametrize("value", PLAIN, ids=str)
def test_plain_values(value: Any) -> None:
    """What is plain comes out as it went in, of the same types."""
    found = load_plain(dump_plain(value))
    assert found == value
    assert repr(found) == repr(value)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_pythons_own_exceptions(error: Exception) -> None:
    """An exception of Python's own comes out with its type and its arguments."""
    found = load_plain(dump_plain(error))
    assert type(found) is type(error)
    assert (str(found), found.args, vars(found)) == (str(error), error.args, vars(error))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64])
def test_tensors(dtype: torch.dtype) -> None:
    """Tensors come out with their dtype, shape and bits, also empty, strided and conjugated ones."""
    base = torch.randn(3, 4).to(dtype)
    tensors = [
        base,
        base.t(),
        base[::2, 1],
        base[0, 0],
        base[:0],
        base.clone().conj(),
        torch.nn.Linear(2, 2).weight.data,
    ]
    for before, after in zip(tensors, load_plain(dump_plain(tensors)), strict=True):
        assert after.dtype == before.dtype
        assert after.shape == before.shape
        assert torch.equal(after, before)
    once, again = load_plain(dump_plain([base, base]))
    assert once is again
    layer = torch.nn.Linear(2, 2)
    weight, bias, alias = load_plain(dump_plain([layer.weight, layer.bias.requires_grad_(False), layer.weight]))
    assert (type(weight), weight.requires_grad, bias.requires_grad) == (torch.nn.Parameter, True, False)
    assert torch.equal(weight, layer.weight)
    assert weight is alias
    assert [each.requires_grad for each in load_plain(dump_plain([layer.weight * 2, base]))] == [True, False]


def test_arrays() -> None:
    """So do numpy's arrays and numbers."""
    arrays = [numpy.arange(6.0).reshape(2, 3).T, numpy.array(3), numpy.array(["a", "bc"]), numpy.zeros((0, 2), "i2")]
    for before, after in zip(arrays, load_plain(dump_plain(arrays)), strict=True):
        assert after.dtype == before.dtype
        numpy.testing.assert_array_equal(after, before)
        assert isinstance(after, numpy.ndarray)
        assert after.flags.fnc == before.flags.fnc, "a sum of it would differ in its last bits"
    number = load_plain(dump_plain(numpy.float32(0.5)))
    assert number == 0.5
    assert type(number) is numpy.float32


def test_the_state_of_a_model() -> None:
    """A state dict travels, with the versions of its modules that torch keeps in it."""
    state = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()
    found = load_plain(dump_plain(state))
    assert list(found) == list(state)
    assert found._metadata == state._metadata  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Own(), "test_plain_data.Own"),
        ([{"deep": Own()}], "test_plain_data.Own"),
        (Colour.RED, "test_plain_data.Colour"),
        (NAMED(1), "test_plain_data.NAMED"),
        (os.system, "builtins.builtin_function_or_method"),
        (Own, "test_plain_data.Own"),
        (Failed("x"), "test_plain_data.Failed"),
        (torch.eye(2).to_sparse(), "torch.Tensor"),
        (numpy.array([Own()]), "numpy.ndarray"),
        (numpy.ones((2, 2)).view(numpy.matrix), "numpy.matrix"),
        (collections.defaultdict(os.getcwd), "builtins.builtin_function_or_method"),
    ],
    ids=range(11),
)
def test_anything_else_is_refused(value: Any, name: str) -> None:
    """The error names the type, and what to do."""
    with pytest.raises(
        TypeError, match=rf"(a|the class) [\w.]*{name} is not plain data .* DISTWRAP_SECRET_FILE .*TRUST_NETWORK=1"
    ):
        dump_plain(value)


def _calls(function: Any, *args: Any) -> bytes:
    class Call:
        def __reduce__(self) -> tuple[Any, ...]:
            return function, args

    return pickle.dumps(([Call()], []))


def test_a_strangers_pickle_calls_nothing(tmp_path: Path) -> None:
    """A pickle that would call something is refused, whatever it calls, and by whatever way it names it."""
    harmful = tmp_path / "was here"
    code = io.BytesIO()
    torch.save(Harmful(str(harmful)), code)
    copyreg.add_extension("os", "mkdir", 240)
    try:
        extension = b"\x80\x02\x82\xf0X" + len(str(harmful)).to_bytes(4, "little") + str(harmful).encode() + b"\x85R."
        attacks = [
            pickle.dumps(Harmful(str(harmful))),
            _calls(os.mkdir, str(harmful)),
            _calls(eval, f"__import__('os').mkdir({str(harmful)!r})"),
            _calls(getattr, "", "join"),
            _calls(torch.storage._load_from_bytes, code.getvalue()),  # type: ignore[attr-defined]
            f"cos\nmkdir\n(V{harmful}\ntR.".encode(),
            f"(V{harmful}\nios\nmkdir\n.".encode(),
            b"\x80\x04\x8c\x05torch\x8c\x0dSize.__class__\x93.",
            b"\x80\x04\x8c\x05torch\x8c\x04load\x93.",
            extension,
        ]
        for attack in attacks:
            with pytest.raises(CollectiveError, match="cannot be unpickled on the other ranks"):
                verify(signature(attack, b"") + attack, b"", 1)
            assert not harmful.exists()
    finally:
        copyreg.remove_extension("os", "mkdir", 240)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of memory")
@pytest.mark.slow("thousands of broken messages")
def test_broken_bytes() -> None:
    """Whatever bytes come, they are read or refused: 2,000 mutations of a message, in a GiB of memory."""
    whole = dump_plain([{"a": torch.ones(3)}, PLAIN, numpy.ones(2)])
    rng, limits = random.Random(0), resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, limits[1]))
    try:
        for _ in range(2000):
            data = bytearray(whole[: rng.randrange(1, len(whole))] if rng.random() < 0.3 else whole)
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            with contextlib.suppress(CollectiveError):
                verify(signature(bytes(data), b"") + bytes(data), b"", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_secret_that_the_user_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """DISTWRAP_TRUST_NETWORK=1 lets objects through again."""
    monkeypatch.setenv("DISTWRAP_TRUST_NETWORK", "1")
    assert isinstance(verify(sign(Own(), b""), b"", 0), Own)


def _without_a_secret() -> list[Any]:
    current_world().secret = b""
    assert gather_object({"rank": dw.rank()}) == [{"rank": 0}, {"rank": 1}]
    sent = broadcast({"w": torch.arange(3), "n": [1, "x"]} if dw.rank() == 0 else None)
    assert sent["w"].tolist() == [0, 1, 2]
    assert dw.gather([torch.ones(2), 3])[1].tolist() == [3, 3]
    dw.reduce({"a": 1.0})
    problems = []

    @dw.rank_zero_only(broadcast=True)
    def gives(what: Any) -> Any:
        if isinstance(what, Exception):
            raise what
        return what

    assert gives([1, torch.ones(1)])[0] == 1
    for call in (
        lambda: gather_object(Own() if dw.rank() == 1 else 1),
        lambda: broadcast(Own()),
        lambda: gives(Own()),
        lambda: gives(KeyError("the cause")),
        lambda: gives(Failed("the cause")),
    ):
        try:
            call()
        except Exception as error:  # noqa: BLE001
            problems.append(f"{type(error).__name__}: {error}")
    return problems


def test_ranks_without_a_secret() -> None:
    """Every helper works with plain data, and where an object is none, says so on every rank."""
    for rank, problems in enumerate(run_ranks(_without_a_secret, 2)):
        assert len(problems) == 5
        assert problems[0].startswith(
            "CollectiveError: rank 1: its Own cannot be sent to the other ranks: TypeError: a "
        )
        assert problems[1].startswith("CollectiveError: rank 0: its Own cannot be sent")
        assert problems[2].startswith("TypeError: rank 0's Own cannot be sent") or rank == 0
        assert problems[3] == "KeyError: 'the cause'"
        assert "the cause" in problems[4]
        assert problems[4].startswith("TypeError: rank 0's Failed cannot be sent") or rank == 0
        assert all("test_plain_data.Own is not plain data" in text for text in problems[:2])


@pytest.mark.parametrize("kind", [collections.Counter, PosixPath, torch.nn.Parameter, KeyError])
def test_no_class_is_changed(kind: type) -> None:
    """Nothing that comes from another rank changes what the whole process uses: each path had another parent."""
    change = f"c{kind.__module__}\n{kind.__name__}\n".encode() + b"(N}X\6\0\0\0parentK\7stb."
    before = getattr(kind, "parent", None)
    with pytest.raises(pickle.UnpicklingError, match=f"it would change the class {kind.__name__}"):
        load_plain(change)
    assert getattr(kind, "parent", None) is before
