"""A progress bar on rank 0 alone, with and without tqdm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tqdm.auto import tqdm

import distwrap as dw
from distwrap.testing import run_ranks
from tests.interpreters import run_python


def test_a_bar_on_rank_zero_and_silence_elsewhere(capfd: pytest.CaptureFixture[str]) -> None:
    """All ranks iterate over everything, and one bar is shown, not one a rank."""

    def on_rank() -> tuple[list[int], bool]:
        items = range(3)
        shown = dw.progress(items, desc=f"bar of rank {dw.rank()}")
        return list(shown), shown is items

    assert run_ranks(on_rank, 2) == [([0, 1, 2], False), ([0, 1, 2], True)]
    printed = capfd.readouterr().err
    assert "bar of rank 0: 100%" in printed
    assert "rank 1" not in printed


def test_options_go_to_tqdm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Options for tqdm are passed on, as ``disable`` and ``total``."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # its thread would outlive the test
    assert list(dw.progress(iter("ab"), total=2, desc="letters")) == ["a", "b"]
    assert "2/2" in capsys.readouterr().err
    assert list(dw.progress("ab", disable=True)) == ["a", "b"]
    assert capsys.readouterr().err == ""


def test_a_bar_asks_for_one_iterator() -> None:
    """A loop under a bar begins once, so that a loader starts its workers once, and draws one seed for them."""
    begun = []

    class Loader:
        def __iter__(self) -> Iterator[int]:
            begun.append(True)
            return iter([3, 4])

        def __len__(self) -> int:
            return 2

    bar = dw.progress(Loader(), leave=False)
    assert not begun
    assert len(bar) == 2  # type: ignore[arg-type]
    assert list(bar) == [3, 4]
    assert len(begun) == 1


WITHOUT_TQDM = """
import sys
sys.modules["tqdm"] = None
import distwrap as dw
assert list(dw.progress(range(3), desc="epoch 1")) == [0, 1, 2]
assert list(dw.progress(iter("ab"))) == ["a", "b"]
assert list(dw.progress("ab", disable=True, leave=False)) == ["a", "b"]
"""


@pytest.mark.slow("a program")
def test_without_tqdm_it_is_a_line_of_text() -> None:
    """Where tqdm is not installed, a line says how many there were, with the total where that is known."""
    result = run_python("-W", "error", "-c", WITHOUT_TQDM, timeout=60)
    assert result.returncode == 0, result.stderr
    first, second = result.stderr.splitlines()
    assert first.startswith("epoch 1: 3 of 3, ")
    assert second.startswith("progress: 2, ")
