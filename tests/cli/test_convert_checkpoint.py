"""``python -m distwrap convert-checkpoint``: each format into each other, bit by bit, and without much memory."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import distwrap as dw
from distwrap.cli import main
from distwrap.testing import run_ranks
from tests.checkpoint.test_streaming import EACH, peak_of, same


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(net.parameters())
    net[0](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": dict(net.state_dict()), "optimizer": optimizer.state_dict(), "epoch": 3, "betas": (0.5, [1, 2])}


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    """The same state as distwrap writes it, and as torch alone does."""
    found = {name: tmp_path / name for name in ("a.pt", "parts", "torch's", "model.safetensors", "folder")}
    whole = state()
    dw.save(whole, found["a.pt"])
    dw.save(whole, found["parts"], io="sharded")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(whole, checkpoint_id=str(found["torch's"]))
    dw.save(whole["model"], found["model.safetensors"])
    dw.save(whole["model"], found["folder"], io="safetensors")
    return found


def convert(*words: object) -> None:
    assert main(["convert-checkpoint", *map(str, words)]) == 0


def test_each_format_becomes_each_other(sources: dict[str, Path], tmp_path: Path) -> None:
    """A whole state to a file and to parts, and its model to safetensors, in one file and in several."""
    expected = state()
    for name in ("a.pt", "parts", "torch's"):
        convert(sources[name], tmp_path / "out.pt", "--force")
        assert same(torch.load(tmp_path / "out.pt", weights_only=True), expected), name
        convert(sources[name], tmp_path / "out", "--format", "sharded", "--force")
        assert same(dw.load(tmp_path / "out"), expected), name
        convert(sources[name], tmp_path / "out.safetensors", "--key", "model", "--force")
        found = safetensors.torch.load_file(tmp_path / "out.safetensors")
        assert same({key: found[key] for key in expected["model"]}, expected["model"]), name
        several = tmp_path / f"of {name}"
        convert(sources[name], several, "--key", "model", "--format", "safetensors", "--max-shard-size", "60")
        assert len([*several.glob("model-0000*-of-0000*.safetensors")]) > 2
        assert same({key: dw.load(several)[key] for key in expected["model"]}, expected["model"]), name
    for name in ("model.safetensors", "folder", "of a.pt"):
        convert(tmp_path / name, tmp_path / "out.pt", "--force")
        found = torch.load(tmp_path / "out.pt", weights_only=True)
        assert same({key: found[key] for key in expected["model"]}, expected["model"]), name


def test_prefixes_are_stripped_on_wish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Linear(2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": nn.DataParallel(net).state_dict()}, checkpoint_id=str(tmp_path / "a"))
    convert(tmp_path / "a", tmp_path / "a.safetensors", "--key", "model", "--strip")
    assert sorted(dw.load(tmp_path / "a.safetensors")) == ["bias", "weight"]
    assert "2 keys renamed" in capsys.readouterr().out


@pytest.mark.slow("converts hundreds of megabytes")
def test_it_takes_little_memory(tmp_path: Path) -> None:
    """Two tensors at a time of what is read from parts; and what is mapped."""

    def on_rank() -> list[int]:
        dw.save({f"w{index}": torch.rand(EACH // 4) for index in range(8)}, tmp_path / "parts", io="sharded")
        for name in ("warm.pt", "warm"):
            convert(tmp_path / "parts", tmp_path / name, *FORMAT.get(name, ()))
        sizes = [
            peak_of(lambda name=name: convert(tmp_path / "parts", tmp_path / name, *FORMAT.get(name, ())))  # type: ignore[misc]
            for name in OUT
        ]
        return [size // EACH for size in sizes]

    assert max(found := run_ranks(on_rank, 1, timeout=60)[0]) <= 3, found


OUT = ("a.pt", "a.safetensors", "a")
FORMAT = dict.fromkeys(("a", "warm"), ("--format", "sharded"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gone", "out.pt"), r"gone is not there"),
        (("a.pt", "out"), r"out has no suffix: say --format file, safetensors or sharded"),
        (("a.pt", "out.safetensor"), r"ends in \.safetensor, which is no known format: use \.safetensors or \.pt"),
        (("a.pt", "a.pt"), r"a\.pt is the file that is read"),
        (("a.pt", "parts"), r"parts has no suffix"),
        (("a.pt", "model.safetensors"), r"model\.safetensors exists already"),
        (("a.pt", "out.safetensors"), r"dict 'optimizer', int 'epoch' too\. Give .* --key, of: 'model'"),
        (("a.pt", "out.safetensors", "--key", "net"), r"a\.pt has no 'net'\. It has: 'model', 'optimizer'"),
        (("empty", "out.pt"), r"empty is a folder without a checkpoint: it has neither torch's \.metadata, nor"),
        (("words.pt", "out.pt"), r"cannot .* .*words\.pt"),
        (("small.pt", "out.safetensors"), r"fewer numbers of a tensor of shape \(4000, 4000\) than it needs"),
        (("a.pt", "out", "--format", "safetensors", "--max-shard-size", "much"), "max_shard_size='much' is not a size"),
    ],
)
def test_wrong_input_is_told(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "words.pt").write_text("words")
    torch.save({"w": torch.ones(1).expand(4000, 4000)}, tmp_path / "small.pt")
    before = sorted(path.name for path in tmp_path.iterdir())
    places = [str(tmp_path / word) for word in words[:2]]
    assert main(["convert-checkpoint", *places, *words[2:]]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
