"""What is released is whole: the source distribution can be read and tested, the wheel runs where nothing else is."""

from __future__ import annotations

import configparser
import importlib.util
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import tarfile
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

import distwrap

ROOT = Path(__file__).parents[1]
RELEASE = runpy.run_path(str(ROOT / ".ci" / "release.py"))
# Extras that distwrap[all] leaves out: engines, which are asked for by their names, and what is for work on distwrap.
ENGINES = {"deepspeed", "horovod", "hivemind", "ray"}
FOR_DEVELOPMENT = {"versions", "docs", "dev", "examples", "test"}
NAMES_IN_CONDA = {"torch": "pytorch", "typing-extensions": "typing_extensions"}
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
EXTRAS = dict(SETUP["options.extras_require"])


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, made from a copy of the working tree and unpacked."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("sdist")
    RELEASE["copy_source"](folder / "source")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(folder)],
        cwd=folder / "source",
        check=True,
        capture_output=True,
        timeout=60,
    )
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.mark.slow("builds what would be released")
def test_everything_of_the_repository_is_in_it(unpacked: Path) -> None:
    """The package, its tests with their helpers, the documentation, the examples and the Makefile are there."""
    for folder in ("distwrap", "tests", "docs", "examples", "benchmarks", ".ci", ".conda", ".github"):
        ours = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        kept = {path for path in ours if "__pycache__" not in path.parts and path.suffix not in (".pyc", ".pt")}
        kept = {path for path in kept if path.parts[:2] != ("docs", "notebooks")}  # copies that make docs has made
        assert {path for path in kept if not (unpacked / path).exists()} == set()
    for name in ("Makefile", "LICENSE", "constraints.txt", "setup.cfg", "SECURITY.md", "CITATION.cff"):
        assert (unpacked / name).exists(), name


@pytest.mark.slow("builds what would be released")
def test_page_of_the_package(unpacked: Path) -> None:
    """The page of the package has the README, without links into the repository, which would lead nowhere there."""
    page = (unpacked / "PKG-INFO").read_text()
    assert "@distributed(nprocs=2" in page
    assert not [link for link in re.findall(r"\]\(([^)]+)\)", page) if not link.startswith(("http", "#"))]


@pytest.mark.nightly(row="packaging", why="test_everything_of_the_repository_is_in_it")
def test_tests_run_from_it(unpacked: Path) -> None:
    """Tests can be run from the unpacked distribution."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_options.py"],
        cwd=unpacked,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def elsewhere(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples, and an environment that has the wheel, what distwrap needs, and no checkout."""
    folder = tmp_path_factory.mktemp("elsewhere")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    venv.create(folder / "env", symlinks=True)
    python = folder / "env/bin/python"
    wheels = ["--no-deps", "--no-index"]
    for command in (
        [*pip, "wheel", *wheels, "--no-build-isolation", "--wheel-dir", folder, unpacked],
        [*pip, "--python", python, "install", *wheels, "--find-links", folder, "distwrap"],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    # A line of a .pth file adds a folder to sys.path, and reads no .pth of that folder: the checkout stays unknown.
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    here = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "packages_of_the_tests.pth").write_text("".join(f"{path}\n" for path in here))
    shutil.copytree(unpacked / "examples", folder / "examples")
    return folder


def run_elsewhere(folder: Path, *arguments: str) -> str:
    """Run the Python of the new environment there, and return what it printed."""
    done = subprocess.run(
        [folder / "env/bin/python", *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly(row="packaging", why="`make check` builds it, and tests run its source")
def test_the_wheel_runs_an_example_in_an_empty_environment(elsewhere: Path) -> None:
    """Installed from the wheel, with nothing of the checkout in sight, distwrap trains the digits on two ranks."""
    found, version = run_elsewhere(elsewhere, "-c", "import distwrap as d; print(d.__file__, d.__version__)").split()
    assert (Path(found).is_relative_to(elsewhere / "env"), version) == (True, distwrap.__version__)
    printed = run_elsewhere(elsewhere, "examples/digits.py", "--epochs", "3", "--nprocs", "2")
    assert float(re.search(r"test accuracy (\S+),", printed)[1]) > 0.8
    assert (elsewhere / "digits.pt").exists()


@pytest.mark.slow("makes a virtual environment")
def test_an_environment_of_make_takes_the_torch_that_is_there(tmp_path: Path) -> None:
    """`make demo` makes a half-made environment whole, with the caller's torch, which nothing has installed."""
    venv.create(tmp_path / "env", symlinks=True)  # without pip, as a Ctrl-C leaves it
    made = [sys.executable, ROOT / ".ci" / "environment.py", tmp_path / "env"]
    done = subprocess.run(made, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == f"Taking torch {torch.__version__} of {sys.executable}.\n"
    code = "import torch; print(torch.__file__)"
    found = subprocess.run([tmp_path / "env/bin/python", "-c", code], capture_output=True, text=True, timeout=100)
    assert found.stdout.strip() == torch.__file__, found.stderr
    (packages,) = tmp_path.glob("env/lib/python*/site-packages")
    assert not (packages / "torch").exists()
    assert (packages / "pip").exists()


@pytest.mark.slow("runs pip")
def test_an_environment_of_make_is_none_where_pip_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pip that is killed without a word, as where memory runs out, ends the making with a failure."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    require = runpy.run_path(str(ROOT / ".ci" / "environment.py"))["require"]
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        server.settimeout(100)
        index = f"http://127.0.0.1:{server.getsockname()[1]}/"
        made = pool.submit(
            require, sys.executable, ["--isolated", "--quiet", "--index-url", index, "distwrap-of-nobody"], "it"
        )
        connection, _ = server.accept()  # pip waits for an answer
        with connection:
            for child in psutil.Process().children():
                if "pip" in child.cmdline():
                    child.kill()
            with pytest.raises(SystemExit) as ended:
                made.result(100)
    assert ended.value.code == 1


@pytest.mark.nightly(row="packaging", why="`make check` builds it, and cli/ runs the commands")
def test_the_wheel_has_the_commands(elsewhere: Path) -> None:
    """Installed from the wheel, ``python -m distwrap`` shows its commands and converts a script; ``distwrap`` is it."""
    assert "convert-checkpoint" in run_elsewhere(elsewhere, "-m", "distwrap")
    script = subprocess.run([elsewhere / "env/bin/distwrap", "--version"], capture_output=True, text=True, timeout=100)
    assert distwrap.__version__ in script.stdout
    diff = run_elsewhere(elsewhere, "-m", "distwrap", "convert", "examples/digits_plain.py")
    assert "+    model = wrap_model(model)" in diff


@pytest.mark.nightly(row="packaging", why="`make check` builds one")
def test_a_release_is_the_same_each_time(tmp_path: Path) -> None:
    """What `make dist` builds passes its checks, and has the same bytes when it is built again."""
    for tool in ("build", "twine", "check_wheel_contents"):
        spec = importlib.util.find_spec(tool)
        if spec is None or spec.origin is None:  # a folder build/ of the checkout has no origin
            pytest.skip(f"{tool} is not installed: it comes with the extra dev")
    built = []
    for times in range(2):
        # The clock goes on meanwhile, and so do the dates of files that a checkout writes anew.
        done = subprocess.run(
            [sys.executable, ROOT / ".ci/release.py", tmp_path / str(times)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=140,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        built.append({path.name: path.read_bytes() for path in (tmp_path / str(times)).iterdir()})
    assert sorted(built[0]) == [f"distwrap-{distwrap.__version__}{end}" for end in ("-py3-none-any.whl", ".tar.gz")]
    assert built[0] == built[1]


def test_each_extra_is_in_all_or_left_out_on_purpose() -> None:
    """distwrap[all] brings each extra but the engines and those for development."""
    names = set(EXTRAS["all"].strip().removeprefix("distwrap[").removesuffix("]").split(","))
    others = {name for name in EXTRAS if name not in names and not name.startswith("test-")}
    assert others == {"all"} | ENGINES | FOR_DEVELOPMENT
    page = (ROOT / "docs" / "reference" / "version_policy.md").read_text()
    assert not {name for name in names | ENGINES if f"`{name}`" not in page}


def test_all_files_name_one_version() -> None:
    """The citation and the conda recipe name the version of the package."""
    citation, recipe = (ROOT / "CITATION.cff").read_text(), (ROOT / ".conda" / "recipe.yaml").read_text()
    assert re.search(r"^version: (\S+)$", citation, re.MULTILINE)[1] == distwrap.__version__
    assert re.search(r'^  version: "(\S+)"$', recipe, re.MULTILINE)[1] == distwrap.__version__


def in_conda(requirement: str) -> str:
    """Write a requirement of setup.cfg as conda writes it."""
    name, version = re.fullmatch(r"([\w-]+)(.*)", requirement).groups()
    return f"{NAMES_IN_CONDA.get(name, name)} {version}".strip()


def listed_in_recipe(heading: str) -> list[str]:
    """Return the lines of a list in the conda recipe."""
    recipe = (ROOT / ".conda" / "recipe.yaml").read_text()
    return re.findall(r"- (.+)", re.search(rf"^  {heading}:\n((?:    .+\n)+)", recipe, re.MULTILINE)[1])


def test_the_conda_recipe_asks_for_what_setup_asks_for() -> None:
    """Requirements, what builds, the versions that extras want, and the oldest Python are those of setup.cfg."""
    needed = SETUP["options"]["install_requires"].split()
    assert listed_in_recipe("run") == ["python >=${{ python_min }}", *map(in_conda, needed)]
    (builder,) = (each for each in EXTRAS["test"].split() if each.startswith("setuptools"))
    assert in_conda(builder) in listed_in_recipe("host")
    brought = EXTRAS["all"].strip().removeprefix("distwrap[").removesuffix("]").split(",")
    wanted = {in_conda(each) for name in brought for each in EXTRAS[name].split()}
    assert set(listed_in_recipe("run_constraints")) == {each for each in wanted if ">=" in each}
    oldest = re.search(r'"(.+)"', (ROOT / ".conda" / "variants.yaml").read_text())[1]
    assert SETUP["options"]["python_requires"] == f">={oldest}"


@pytest.mark.nightly(row="packaging", why="test_the_conda_recipe_asks_for_what_setup_asks_for")
def test_the_conda_recipe_is_rendered() -> None:
    """rattler-build makes one package of the recipe, for any platform and Python."""
    rattler_build = pytest.importorskip("rattler_build")  # it has no wheel for some machines
    recipe = rattler_build.Stage0Recipe.from_file(ROOT / ".conda" / "recipe.yaml")
    (rendered,) = recipe.render(rattler_build.VariantConfig.from_file(ROOT / ".conda" / "variants.yaml"))
    package = rendered.recipe.to_dict()
    assert package["package"] == {"name": "distwrap", "version": distwrap.__version__}
    assert package["build"]["noarch"] == "python"
    assert f"python {SETUP['options']['python_requires']}" in package["requirements"]["run"]
