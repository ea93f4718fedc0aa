"""``distwrap`` and ``python -m distwrap``: what all commands have in common."""

from __future__ import annotations

import configparser
import os
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import distwrap
from distwrap import cli
from distwrap.cli import COMMANDS, main
from tests.forked_commands import PYTHON

ROOT = str(Path(distwrap.__file__).parents[1])


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("convert", ["{gone}"]),
        ("check", ["{gone}"]),
        ("estimate", ["gone_package:Net"]),
        ("strip", ["{gone}", "{out}"]),
        ("run", ["{gone}"]),
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


def test_the_versions_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """--version names distwrap, torch and Python, as they are."""
    assert main(["--version"]) == 0
    python = ".".join(map(str, sys.version_info[:3]))
    torch = version("torch")  # which need not have the build's name, as torch.__version__ has
    assert capsys.readouterr().out == f"distwrap {distwrap.__version__}, torch {torch}, Python {python}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``help COMMAND`` and ``COMMAND --help`` are the same, and end with examples that the command's parser takes."""
    with pytest.raises(SystemExit, match="0"):
        main(["help", name])
    text = capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert capsys.readouterr().out == text
    assert text.startswith(f"usage: python -m distwrap {name} ")
    examples = text[text.index("examples:\n") :].splitlines()[1:]
    assert len(examples) == len(COMMANDS[name].examples) > 0
    for example in examples:
        prefix = f"  python -m distwrap {name}"
        assert example.startswith(prefix)
        given = cli._parser(name).parse_args([name, *shlex.split(example.removeprefix(prefix))])
        assert callable(given.run)


def test_the_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """--help has each command with a line, and examples."""
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"\n    {name}" in text for name in COMMANDS)
    assert "examples:\n  python -m distwrap convert train.py\n" in text


def test_a_wrong_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt command is an error with the one that was meant."""
    with pytest.raises(SystemExit, match="2"):
        main(["convrt", "train.py"])
    assert "unknown command 'convrt'. Did you mean 'convert'? Known: check, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "code", "unbuffered"), [("--help", 0, "1"), ("help check", 0, ""), ("report", 1, "1"), ("check", 1, "")]
)
@pytest.mark.slow("a program")
def test_a_reader_that_leaves_early(command: str, code: int, unbuffered: str, tmp_path: Path) -> None:
    """A command whose output is no longer read, as after ``| head``, ends without a word.

    Its exit code is its own where it has come to its end, and that of SIGPIPE where it was still printing.
    """
    (tmp_path / "file").write_text("{}" if command == "report" else "import torch\ntorch.nn.DataParallel(net)\n")
    words = [*command.split(), *([str(tmp_path / "file")] if command in ("report", "check") else [])]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [PYTHON, "-m", "distwrap", *words],
        env={**os.environ, "PYTHONPATH": ROOT, "PYTHONUNBUFFERED": unbuffered},
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert done.stderr == ""
    assert done.returncode in ([code, 141] if unbuffered else [code])  # argparse has its own way


def test_the_package_brings_the_command() -> None:
    """setup.cfg names the function that the console script calls."""
    config = configparser.ConfigParser()
    config.read(Path(__file__).parents[2] / "setup.cfg")
    assert config["options.entry_points"]["console_scripts"].split() == ["distwrap", "=", "distwrap.cli:main"]
