"""Make a virtual environment with torch, for `make`, and say on one line what is under way.

    python3 .ci/environment.py [--own-torch] [--editable PACKAGE] FOLDER [words for pip]

The environment takes the torch of the Python that runs this, where that has one, but for --own-torch. Otherwise torch
is installed: on Linux without NVIDIA's driver the CPU build, which is a tenth of the bytes. An environment that was
left half made, or is of another Python, is made again.
"""

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
OLDEST_TORCH = (2, 6)
PACKAGES = ("torch>={}.{}".format(*OLDEST_TORCH), "numpy")
STEPS = ("Collecting", "Downloading", "Using cached", "Building", "Preparing", "Installing")  # of pip's lines
UNREACHABLE = re.compile("No matching distribution|NewConnectionError|Max retries|timed out|ConnectionReset")


def main():
    parser = argparse.ArgumentParser(description="Make a virtual environment with torch.")
    parser.add_argument("--own-torch", action="store_true", help="install torch also where the caller has one")
    parser.add_argument("--editable", metavar="PACKAGE", help="install this too, from its folder")
    parser.add_argument("folder", type=Path)
    parser.add_argument("pip_words", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if sys.platform == "win32":
        sys.exit("distwrap does not run on Windows: use WSL.")
    if sys.version_info < (3, 10):  # noqa: UP036  here it is not known yet
        sys.exit(f"distwrap needs Python 3.10 or newer, not {sys.version.split()[0]}: make PYTHON=python3.12 ...")
    python = args.folder / "bin" / "python"
    if not is_whole(python):
        make(args.folder)
    there = None if args.own_torch else folder_of_torch()
    link = Path(said_by(python, "import sysconfig; print(sysconfig.get_path('purelib'))")) / "torch_of_caller.pth"
    if there:
        link.write_text(f"import site; site.addsitedir({there!a})\n", encoding="utf-8")
    found = there and torch_in(python)
    if found:
        print(f"Taking torch {found} of {sys.executable}.", flush=True)
    else:
        link.unlink(missing_ok=True)
        if not torch_in(python):
            install_torch(python, args.pip_words)
    if args.editable:
        require(python, [*args.pip_words, "--editable", args.editable], "distwrap")


def is_whole(python):
    """Return whether an environment is of this Python's version and has a pip that runs."""
    try:
        pip = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, text=True)
    except OSError:  # none, or a link to a Python that is gone
        return False
    return pip.returncode == 0 and pip.stdout.rstrip().endswith("(python {}.{})".format(*sys.version_info))


def make(folder):
    """Make an environment, in place of one that is there; what else is in the folder stays where there is none."""
    clear = ["--clear"] if (folder / "pyvenv.cfg").exists() else []
    made = subprocess.run([sys.executable, "-m", "venv", *clear, folder], capture_output=True, text=True)
    if made.returncode:
        last = " ".join((made.stdout + made.stderr).split()[-20:])
        sys.exit(f"{sys.executable} made no environment. On Debian and Ubuntu, install python3-venv. It said: … {last}")


def said_by(python, code):
    """Return what code prints in an environment, by the environment alone; nothing where it fails."""
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def folder_of_torch():
    """Return the folder of packages from which this Python takes torch; None where it has none."""
    spec = importlib.util.find_spec("torch")
    return str(Path(spec.origin).parents[1]) if spec and spec.origin else None


def torch_in(python):
    """Return the version of the torch that an environment imports; nothing without one that is new enough."""
    version = said_by(python, "import torch; print(torch.__version__)")
    return version if version and tuple(map(int, version.split(".")[:2])) >= OLDEST_TORCH else ""


def install_torch(python, pip_words):
    """Install the CPU build where that is enough and can be had, and else what pip gives."""
    has_driver = shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists()
    if sys.platform == "linux" and not has_driver:
        quick = ["--index-url", CPU_BUILDS, "--retries", "1", "--timeout", "15"]
        what = "torch for CPUs, as there is no NVIDIA driver"
        failure = install(python, [*quick, *pip_words, *PACKAGES], what)
        if failure is None:
            return
        if not UNREACHABLE.search(failure):
            sys.exit(failure[-1500:] or 1)
        print(f"pip finds none at {CPU_BUILDS}.", flush=True)
    require(python, [*pip_words, *PACKAGES], "torch, which may bring CUDA")


def require(python, words, what):
    """Install something, or end with what pip has said."""
    failure = install(python, words, what)
    if failure is not None:
        sys.exit(failure[-1500:] or 1)


def install(python, words, what):
    """Run pip's install and tell on one line how it goes; return what it has said where it fails, and else None."""
    began = told = time.monotonic()
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off", *words]
    on_terminal = sys.stdout.isatty()
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(0.2)
            now = time.monotonic()
            if on_terminal or now - told > 15:
                steps = [line for line in lines_of(log) if line.startswith(STEPS)]
                line = f"Installing {what}: {now - began:.0f} s. {steps[-1] if steps else ''}"[:79]
                print(f"\r{line:<79}" if on_terminal else line, end="" if on_terminal else "\n", flush=True)
                told = now
        said = lines_of(log)
    code = process.returncode
    line = f"{'Could not install' if code else 'Installed'} {what}: {time.monotonic() - began:.0f} s."
    print(f"\r{line:<79}" if on_terminal else line, flush=True)
    if not code:
        return None
    print(f"pip has ended with code {code}. Its last line: {said[-1] if said else '(none)'}", flush=True)
    return "\n".join(said)


def lines_of(log):
    """Return the lines that pip has written."""
    lines = Path(log.name).read_text(errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]


if __name__ == "__main__":
    main()
