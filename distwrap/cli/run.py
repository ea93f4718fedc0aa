"""``distwrap run``: a script that calls the helpers, on ranks that are started as those of a decorated function."""

import argparse
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from distwrap.cli.simulate import add_script, arguments_of_script
from distwrap.decorator import distributed
from distwrap.errors import DistwrapError, OptionError
from distwrap.options import DECLARATIONS, from_text
from distwrap.tracebacks import as_text

# The options of the decorator that a word can say, each by its own.
_WORDS = {f"--{name.replace('_', '-')}": name for name, declared in DECLARATIONS.items() if declared.text is not None}


def add_arguments(commands: Any) -> None:
    """Add the command's parser, with each option of the decorator that a word can say."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "run",
        description="Run a script on several ranks as @distributed runs a function: what it calls of distwrap finds "
        "the ranks, and a rank that fails, or for which others wait, is named. Exit code: the script's own, 1 where a "
        "rank has failed, 2 where nothing could be started.",
    )
    for word, name in _WORDS.items():
        short = ["-n"] if name == "nprocs" else []
        parser.add_argument(*short, word, metavar="X", help=DECLARATIONS[name].line.replace("%", "%%"))
    add_script(parser, ", which finds its process group made: one with torch's init_process_group() is for torchrun")
    parser.set_defaults(run=lambda given: run(_told_apart(given, parser)))


def _told_apart(given: argparse.Namespace, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the arguments, where ``-n 2`` alone, or options of ours before a ``--``, may follow the script.

    Raises:
        OptionError: it cannot be told whose an option behind the script is.
    """
    words, ours = list(given.arguments), {"-n", *_WORDS}
    own = words[: words.index("--")] if "--" in words else words
    found = [word for word in own if word.partition("=")[0] in ours or re.fullmatch(r"-n\d+", word)]
    if not found:
        return given
    if "--" not in words and not (found[0].startswith(("-n", "--nprocs")) and len(own) <= 2):
        raise OptionError(
            f"{found[0]} stands behind {given.script}, so it may be the script's or this command's. Write the command's"
            f" options before the script, or the script's own behind --: {given.script} -n 2 -- --epochs 1."
        )
    return parser.parse_args([*own, given.script, *words[len(own) :]], given)


def run(given: argparse.Namespace) -> int:
    """Run the script; return 1 if a rank has failed.

    Raises:
        OptionError: there is no such script, or an option is wrong.
        SystemExit: a rank has left the script with an exit code that is not 0.
    """
    if not Path(given.script).is_file():
        raise OptionError(f"there is no script {given.script}")
    words, texts = arguments_of_script(given), vars(given)
    options: dict[str, Any] = {
        name: from_text(word, name, texts[name]) for word, name in _WORDS.items() if texts[name] is not None
    }
    call = distributed(as_main).options(**options)
    try:
        with (  # which ranks of all launchers have from here
            mock.patch.object(sys, "argv", [given.script, *words]),
            mock.patch.object(sys, "path", [str(Path(given.script).resolve().parent), *sys.path]),
        ):
            call(given.script)
    except Exception as error:
        if isinstance(error, DistwrapError) and error.__cause__ is None:
            raise  # no rank's: nothing was started
        sys.stdout.flush()
        print(as_text(error), end="", file=sys.stderr)
        return 1
    return 0


def as_main(script: str) -> None:
    """Run a script on this rank, as Python would."""
    runpy.run_path(script, run_name="__main__")
