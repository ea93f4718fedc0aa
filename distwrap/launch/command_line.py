"""The command line of this process, to run it again: same interpreter, script, arguments and folder."""

import os
import sys
from typing import Any

from distwrap import _started
from distwrap.errors import LaunchError


def command(rank: int) -> list[str]:
    """Return the command line that runs this process's script for another rank.

    Raises:
        LaunchError: there is no script that could be run again.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    inline = "-c" in sys.orig_argv[:-1]
    if (file is None or os.path.basename(file).startswith("<")) and not inline:
        typed = hasattr(sys, "ps1") or "IPython" in sys.modules
        what = "this is an interactive session or a notebook" if typed else "the program came through standard input"
        raise LaunchError(
            f"launcher='script' runs the script again, and there is no script: {what}. Use "
            "launcher='forkserver' (with the 'notebook' extra)."
        )
    return [*again(sys.orig_argv, file, getattr(main, "__spec__", None) is not None), *_for_hydra(rank)]


def again(orig_argv: list[str], main_file: str | None, in_module: bool) -> list[str]:
    """Rebuild a command line.

    Args:
        orig_argv: ``sys.orig_argv``.
        main_file: ``__main__.__file__``, absolute; takes the place of the script, so that a script that has changed
            its working directory is found again.
        in_module: whether it was started with ``-m``.

    Example:
        >>> again(["python", "-X", "dev", "train.py", "--lr", "1"], "/home/me/train.py", False)[1:]
        ['-X', 'dev', '/home/me/train.py', '--lr', '1']
    """
    command = [sys.executable, *orig_argv[1:]]
    if main_file is not None and not in_module:
        for index, word in enumerate(command[1:], start=1):
            if word == main_file or os.path.basename(word) == os.path.basename(main_file):
                command[index] = main_file
                break
    return command


def directory() -> str | None:
    """Return the folder in which the script was started; ``None`` where it is no more."""
    config = _hydra()
    started = config.runtime.cwd if config is not None else _started.FOLDER
    return started if os.path.isdir(started) else None


def _hydra() -> Any:
    """Return Hydra's configuration; ``None`` outside of ``@hydra.main``."""
    core = sys.modules.get("hydra.core.hydra_config")
    return core.HydraConfig.get() if core is not None and core.HydraConfig.initialized() else None


def _for_hydra(rank: int) -> list[str]:
    """Return arguments that give all ranks the same output folder of Hydra, and each rank its own log file.

    Source: https://hydra.cc/docs/configure_hydra/workdir/
    """
    config = _hydra()
    if config is None:
        return []
    if config.mode is not None and config.mode.name == "MULTIRUN":
        raise LaunchError(
            "launcher='script' cannot run again for each job of a Hydra --multirun. Use launcher='forkserver', which "
            "starts ranks without running the script again."
        )
    folder = config.runtime.output_dir.replace('"', r"\"")
    return [f'hydra.run.dir="{folder}"', "hydra.output_subdir=null", f"hydra.job.name={config.job.name}_rank_{rank}"]
