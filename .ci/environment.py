"""Make a virtual environment with torch, for `make`, and say on one line what is under way.

    python3 .ci/environment.py [--own-torch] [--editable PACKAGE] FOLDER [words for pip]

The environment takes the torch of the Python that runs this, where that has one, but for --own-torch. Otherwise torch
is installed: on Linux without NVIDIA's driver the CPU build, which is a tenth of the bytes.
"""

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
OLDEST_TORCH = (2, 6)
STEPS = ("Collecting", "Downloading", "Using cached", "Building", "Preparing", "Installing")  # of pip's lines


def main():
    parser = argparse.ArgumentParser(description="Make a virtual environment with torch.")
    parser.add_argument("--own-torch", action="store_true", help="install torch also where the caller has one")
    parser.add_argument("--editable", metavar="PACKAGE", help="install this too, from its folder")
    parser.add_argument("folder", type=Path)
    parser.add_argument("pip_words", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if sys.version_info < (3, 10):  # noqa: UP036  here it is not known yet
        sys.exit(f"distwrap needs Python 3.10 or newer, not {sys.version.split()[0]}: make PYTHON=python3.12 ...")
    python = args.folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", args.folder], check=True)
    (packages,) = args.folder.glob("lib/python*/site-packages")
    there = None if args.own_torch else torch_of_caller()
    if there:
        print(f"Taking torch {there[1]} of {sys.executable}.", flush=True)
        (packages / "torch_of_caller.pth").write_text(f"import site; site.addsitedir({there[0]!r})\n")
    elif not (packages / "torch").exists():
        install_torch(python, args.pip_words)
    if args.editable:
        require(python, [*args.pip_words, "--editable", args.editable], "distwrap")


def torch_of_caller():
    """Return the folder and the version of the torch that this Python has; None without one that is new enough."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    folder, found = Path(spec.origin).parent, {}
    exec((folder / "version.py").read_text(), found)
    version = found["__version__"]
    numbers = tuple(int(number) for number in version.split(".")[:2])
    return (str(folder.parent), version) if numbers >= OLDEST_TORCH else None


def install_torch(python, pip_words):
    """Install the CPU build where that is enough and can be had, and else what pip gives."""
    has_driver = shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists()
    if sys.platform == "linux" and not has_driver:
        quick = ["--index-url", CPU_BUILDS, "--retries", "1", "--timeout", "15"]
        if not install(python, [*quick, *pip_words, "torch", "numpy"], "torch for CPUs, as no GPU is seen"):
            return
        print(f"pip finds none at {CPU_BUILDS}.", flush=True)
    require(python, [*pip_words, "torch", "numpy"], "torch, which may bring CUDA")


def require(python, words, what):
    """Install something, or end with what pip has said."""
    said = install(python, words, what)
    if said:
        sys.exit(said[-1500:])


def install(python, words, what):
    """Run pip's install and tell on one line how it goes; return what it has said where it fails, and else nothing."""
    began = told = time.monotonic()
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off", *words]
    on_terminal = sys.stdout.isatty()
    with tempfile.NamedTemporaryFile("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(0.2)
            now = time.monotonic()
            if on_terminal or now - told > 15:
                lines = map(str.strip, Path(log.name).read_text().splitlines())
                steps = [line for line in lines if line.startswith(STEPS)]
                line = f"Installing {what}: {now - began:.0f} s. {steps[-1] if steps else ''}"[:79]
                print(f"\r{line:<79}" if on_terminal else line, end="" if on_terminal else "\n", flush=True)
                told = now
        said = Path(log.name).read_text() if process.returncode else ""
    line = f"{'Could not install' if said else 'Installed'} {what}: {time.monotonic() - began:.0f} s."
    print(f"\r{line:<79}" if on_terminal else line, flush=True)
    return said


if __name__ == "__main__":
    main()
