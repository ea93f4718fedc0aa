"""Build the source distribution and the wheel as they are released, check them, and put them into dist/.

    python .ci/release.py [DIST]

They are built from the files that git knows, in a temporary folder, with the setuptools that is installed here: nothing
is downloaded, and nothing but DIST is written. The same commit gives the same bytes each time; SOURCE_DATE_EPOCH, or
else the time of the commit, is the date of all that is in them.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GIT = ROOT.joinpath(".git").exists() and shutil.which("git")
IGNORED = (
    ".venv*",
    ".ci-venv*",
    ".nox",
    ".*_cache",
    ".hypothesis",
    "__pycache__",
    "build",
    "dist",
    "*.egg-info",
    "*.pt",
)
YEAR_2020 = 1577836800  # where nothing tells a date: a zip file begins in 1980, wherever the clock is set


def git(*words: str) -> str:
    """Return what git prints of this repository."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout


def copy_source(to: Path) -> None:
    """Copy what belongs to a release: what git knows, or all of an unpacked source distribution."""
    if GIT:
        for name in git("ls-files", "-z").split("\0"):
            if name and ROOT.joinpath(name).is_file():
                (to / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, to / name)
    else:
        shutil.copytree(ROOT, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*IGNORED))
    for path in to.rglob("*"):
        executable = path.is_dir() or os.access(ROOT / path.relative_to(to), os.X_OK)
        path.chmod(0o755 if executable else 0o644)


def date() -> int:
    """Return the date of a release, in seconds since 1970."""
    told = os.environ.get("SOURCE_DATE_EPOCH") or (git("log", "-1", "--format=%ct") if GIT else YEAR_2020)
    return int(told)


def repack(archive: Path, seconds: int) -> None:
    """Write a source distribution anew, with one date and no owner: setuptools writes in the time of day."""
    packed = archive.with_suffix(".new")
    with (
        tarfile.open(archive) as old,
        packed.open("wb") as file,
        gzip.GzipFile("", "wb", mtime=seconds, fileobj=file) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = seconds, 0, 0, "", ""
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isreg() else None)
    packed.replace(archive)


def python(*words: str | Path, folder: Path) -> None:
    """Run a module of this Python in a folder; where it fails, show the end of what it said, and end too."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, words)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        said = "\n".join(done.stdout.splitlines()[-40:])
        sys.exit(f"{said}\npython -m {' '.join(map(str, words))}: exit code {done.returncode}")


def main(to: Path) -> None:
    """Build, check, and put what is right in its place."""
    os.umask(0o022)
    seconds = date()
    os.environ["SOURCE_DATE_EPOCH"] = str(seconds)
    with tempfile.TemporaryDirectory(prefix="distwrap-release-") as name:
        source, built = Path(name, "source"), Path(name, "dist")
        source.mkdir()
        copy_source(source)
        python("build", "--no-isolation", "--outdir", built, folder=source)
        (archive,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
        repack(archive, seconds)
        python("twine", "check", "--strict", archive, wheel, folder=source)
        python("check_wheel_contents", "--package", "distwrap", wheel, folder=source)
        to.mkdir(parents=True, exist_ok=True)
        for old in (*to.glob("distwrap-*.tar.gz"), *to.glob("distwrap-*.whl")):
            old.unlink()
        for path in (archive, wheel):
            content = path.read_bytes()
            shutil.copyfile(path, to / path.name)
            print(f"{to / path.name}  {len(content) / 1e3:.0f} KB  sha256 {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").resolve())
