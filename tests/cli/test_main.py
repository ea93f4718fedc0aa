"""``python -m distwrap``: what all commands have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from distwrap.cli import main


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("convert", ["{gone}"]),
        ("check", ["{gone}"]),
        ("estimate", ["gone_package:Net"]),
        ("strip", ["{gone}", "{out}"]),
        ("convert-checkpoint", ["{gone}", "{out}.pt"]),
    ],
)
def test_what_cannot_be_read_is_told_by_all_alike(
    command: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is not there is a line on standard error that begins with the command's name, and the exit code is 2."""
    places = [each.format(gone=tmp_path / "gone", out=tmp_path / "out") for each in arguments]
    assert main([command, *places]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"distwrap {command}: ")
    assert "gone" in told
    assert told.count("\n") == 1


def test_the_exit_codes_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command the help is printed, which says what the exit codes of all commands mean."""
    assert main([]) == 0
    assert "Exit codes: 0 where" in capsys.readouterr().out
