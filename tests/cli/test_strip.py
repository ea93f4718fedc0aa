"""``python -m distwrap strip``: real files of real wrappers, repaired."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distwrap.cli import main
from tests.interpreters import run_python


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    net[2].to(torch.bfloat16)
    return net


def wrapped_state() -> Any:
    return torch.compile(nn.DataParallel(model())).state_dict()


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A checkpoint as people have them: the model's state dict with two prefixes, an optimizer's, a number."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    path = tmp_path / "broken.pt"
    torch.save(
        {"model": wrapped_state(), "optimizer": optimizer.state_dict(), "ema": [wrapped_state()], "epoch": 3}, path
    )
    return path


@pytest.fixture
def right(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    torch.save(model().state_dict(), path)
    return path


def test_every_state_dict_in_a_file_is_stripped_and_the_rest_kept(broken: Path, tmp_path: Path) -> None:
    """Names, types, values, order and metadata are the plain model's; what is no state dict is untouched."""
    before = broken.read_bytes()
    assert main(["strip", str(broken), str(tmp_path / "out.pt")]) == 0
    out = torch.load(tmp_path / "out.pt", weights_only=True)
    expected = model().state_dict()
    for state in (out["model"], out["ema"][0]):
        assert type(state) is OrderedDict
        assert list(state) == list(expected)
        assert state._metadata == expected._metadata  # type: ignore[attr-defined]
        assert all(
            torch.equal(state[name], value) and state[name].dtype == value.dtype for name, value in expected.items()
        )
    assert out["epoch"] == 3
    assert out["optimizer"]["param_groups"][0]["lr"] == 1e-3
    assert broken.read_bytes() == before
    model().load_state_dict(out["model"])


def test_a_schedulers_milestones_are_copied_as_they_are(tmp_path: Path) -> None:
    """MultiStepLR counts its milestones, and a count is not doubled."""
    scheduler = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(model().parameters()), [30, 80])
    torch.save({"model": wrapped_state(), "scheduler": scheduler.state_dict()}, tmp_path / "in.pt")
    assert main(["strip", str(tmp_path / "in.pt"), str(tmp_path / "out.pt")]) == 0
    assert torch.load(tmp_path / "out.pt", weights_only=True)["scheduler"]["milestones"] == {30: 1, 80: 1}


def test_a_dry_run_shows_the_renames_and_writes_nothing(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has old and new name, type and shape of each key that would be renamed."""
    assert main(["strip", str(broken), str(tmp_path / "out.pt"), "--dry-run"]) == 0
    assert not (tmp_path / "out.pt").exists()
    printed = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert lines[0] == "old new type shape"
    assert "model/_orig_mod.module.0.weight model/0.weight float32 4 x 3" in lines
    assert "ema/0/_orig_mod.module.2.bias ema/0/2.bias bfloat16 2" in lines
    assert "model/_orig_mod.module.1.num_batches_tracked model/1.num_batches_tracked int64 scalar" in lines
    assert "18 keys renamed, 0 as they were, in 2 state dict(s)" in lines[-1]


def test_check_compares_names_and_shapes(
    broken: Path, right: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that fits says so; one that does not names each key, writes nothing, and exits with 1."""
    out = tmp_path / "out.pt"
    assert main(["strip", str(broken), str(out), "--check", str(right)]) == 0
    assert "fits" in capsys.readouterr().out
    other = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).state_dict()
    torch.save({"state": other}, tmp_path / "other.pt")
    out.unlink()
    assert main(["strip", str(broken), str(out), "--check", str(tmp_path / "other.pt")]) == 1
    printed = capsys.readouterr().err
    assert "missing: 3.weight" in printed
    assert "not in the model: 2.bias" in printed
    assert "shape: 0.weight is (4, 3), and (5, 3) in the model" in printed
    assert not out.exists()
    assert main(["strip", str(broken), "--check", str(right)]) == 0  # to look only


def test_a_real_child_called_module_survives_with_check(tmp_path: Path) -> None:
    """Where only the model can tell, ``--check`` lets it decide."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    torch.save(nn.DataParallel(Holder()).state_dict(), tmp_path / "in.pt")
    torch.save(Holder().state_dict(), tmp_path / "model.pt")
    arguments = ["strip", str(tmp_path / "in.pt"), str(tmp_path / "out.pt"), "--check", str(tmp_path / "model.pt")]
    assert main(arguments) == 0
    assert list(torch.load(tmp_path / "out.pt", weights_only=True)) == ["module.weight", "module.bias"]


def test_nothing_is_overwritten(broken: Path, right: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is there is left alone unless told; the file that is read is never the one that is written."""
    before = right.read_bytes()
    assert main(["strip", str(broken), str(right)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert right.read_bytes() == before
    assert main(["strip", str(broken), str(broken), "--force"]) == 2
    assert "the file that is read" in capsys.readouterr().err
    assert main(["strip", str(broken), str(right), "--force"]) == 0
    assert "epoch" in torch.load(right, weights_only=True)


class Bomb:
    """Runs something when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_unsafe_pickles_are_refused_unless_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that would run code is not read; with ``--unsafe`` it is."""
    torch.save({"model": wrapped_state(), "bomb": Bomb(tmp_path / "exploded")}, tmp_path / "in.pt")
    arguments = ["strip", str(tmp_path / "in.pt"), str(tmp_path / "out.pt")]
    assert main(arguments) == 2
    assert re.search(r"it holds [\w.]+, .*\. If .*--unsafe", capsys.readouterr().err)
    assert not (tmp_path / "exploded").exists()
    assert not (tmp_path / "out.pt").exists()
    assert main([*arguments, "--unsafe"]) == 0
    assert (tmp_path / "exploded").exists()


def test_safetensors_keep_types_and_metadata(tmp_path: Path) -> None:
    """A ``.safetensors`` file is stripped with its metadata; a ``.pt`` file with one state dict can become one."""
    safetensors = pytest.importorskip("safetensors.torch")
    state = {f"module.{name}": value for name, value in model().state_dict().items()}
    safetensors.save_file(state, tmp_path / "in.safetensors", metadata={"format": "pt", "by": "me"})
    assert main(["strip", str(tmp_path / "in.safetensors"), str(tmp_path / "out.safetensors")]) == 0
    with safetensors.safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "by": "me"}
        for name, value in model().state_dict().items():
            assert file.get_tensor(name).dtype == value.dtype
        assert torch.equal(file.get_tensor("0.weight"), model().state_dict()["0.weight"])
    torch.save(wrapped_state(), tmp_path / "in.pt")
    assert main(["strip", str(tmp_path / "in.pt"), str(tmp_path / "from.safetensors")]) == 0
    assert sorted(safetensors.load_file(tmp_path / "from.safetensors")) == sorted(model().state_dict())
    torch.save({"model": wrapped_state(), "epoch": 3}, tmp_path / "more.pt")
    assert main(["strip", str(tmp_path / "more.pt"), str(tmp_path / "more.safetensors")]) == 2


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_what_is_no_checkpoint_is_an_error_in_a_line(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty file, a text and a missing one are named, without a traceback."""
    if content is not None:
        (tmp_path / "in.pt").write_bytes(content)
    assert main(["strip", str(tmp_path / "in.pt"), str(tmp_path / "out.pt")]) == 2
    assert capsys.readouterr().err.startswith("distwrap strip: ")
    torch.save([1, 2], tmp_path / "list.pt")
    assert main(["strip", str(tmp_path / "list.pt"), str(tmp_path / "out.pt")]) == 2
    assert "holds no state dict" in capsys.readouterr().err
    assert main(["strip", str(tmp_path / "list.pt")]) == 2


def test_the_old_format_is_read_too(tmp_path: Path) -> None:
    """Files from before torch 1.6 cannot be mapped into memory, and are read whole."""
    torch.save(wrapped_state(), tmp_path / "in.pt", _use_new_zipfile_serialization=False)
    assert main(["strip", str(tmp_path / "in.pt"), str(tmp_path / "out.pt")]) == 0
    assert list(torch.load(tmp_path / "out.pt", weights_only=True)) == list(model().state_dict())


@pytest.mark.slow("writes a large file, and reads it in another process")
def test_a_large_file_needs_little_memory(tmp_path: Path) -> None:
    """Reading and writing 400 MB takes far less memory than that: the tensors stay in the file."""
    state = {f"module.{number}": torch.full((10_000_000,), float(number)) for number in range(10)}
    torch.save(state, tmp_path / "in.pt")
    code = (
        "import resource, sys; from distwrap.cli import main\n"
        "import torch; torch.load\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (1_500_000_000, -1))\n"
        "assert main(['strip', sys.argv[1], '--dry-run']) == 0\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = run_python("-c", code, tmp_path / "in.pt", timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 100_000  # kilobytes
