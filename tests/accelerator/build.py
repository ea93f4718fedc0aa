"""The pretended devices' extension, built once for each torch, Python and source, and kept in ``build/``."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).parent / "csrc"
ROOT = Path(__file__).parents[2]
NAME = "pretend_c"
FIRST = (2, 9)  # in older versions of torch the classes from which those of csrc/ are derived are others


def missing() -> str | None:
    """Return why the extension cannot be built here; ``None`` where it can be, or is."""
    if _folder().joinpath("done").exists():
        return None
    from distwrap.versions import TORCH_RELEASE  # not above: torch imports this file before its devices are known

    if TORCH_RELEASE < FIRST:
        return f"the pretended accelerator needs torch {FIRST[0]}.{FIRST[1]} or newer, and this is {torch.__version__}"
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"the pretended accelerator needs a C++ compiler, and there is no {compiler!r} here"
    if shutil.which("ninja", path=_path()) is None:
        return "the pretended accelerator needs ninja (pip install ninja)"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the pretended accelerator needs Python's headers (on Debian: python3-dev)"
    return None


def build() -> Path:
    """Return the folder of the extension, which is built where it is not there."""
    folder = _folder()
    if folder.joinpath("done").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "building", "w") as lock:  # which the kernel lets go of, whoever ends
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.joinpath("done").exists():
            import pytest  # not above: every rank on pretended devices imports this file
            from torch.utils import cpp_extension

            folder.joinpath("lock").unlink(missing_ok=True)  # torch's, of a build that was killed
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PATH", _path())
                cpp_extension.load(
                    NAME,
                    [str(each) for each in sorted(SOURCES.glob("*.cpp"))],
                    extra_cflags=["-O1", "-g0"],
                    build_directory=str(folder),
                    is_python_module=False,
                )
            folder.joinpath("done").touch()
    return folder


def load() -> Any:
    """Import the extension, which is built where it is not there."""
    spec = importlib.util.spec_from_file_location(NAME, build() / f"{NAME}.so")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _path() -> str:
    """Return where programs are looked for: in a virtual environment also where it was not activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _folder() -> Path:
    text = f"{torch.__version__} {sys.version}".encode() + b"".join(
        each.read_bytes() for each in sorted(SOURCES.iterdir())
    )
    return ROOT / "build" / f"pretend-{hashlib.sha256(text).hexdigest()[:16]}"
