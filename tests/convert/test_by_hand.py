"""Scripts of libraries that convert does not rewrite: each is refused with the page to convert it by."""

from __future__ import annotations

from pathlib import Path

import pytest

from distwrap.cli import main
from distwrap.convert.by_hand import LIBRARIES, Library
from distwrap.convert.converting import convert
from distwrap.convert.script import Script
from distwrap.errors import ConversionError

PAGES = Path(__file__).parents[2] / "docs" / "coming_from"
LOOP = """
import torch
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters())
for x in torch.utils.data.DataLoader(data):
    model(x).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.page)
def test_the_program_of_a_page_is_refused(library: Library, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program before of a page is not changed, the exit code is 2, and the error names line, page and calls."""
    code = (PAGES / "programs" / f"{Path(library.page).stem}_before.py").read_text()
    script = tmp_path / "train.py"
    script.write_text(code)
    assert main(["convert", str(script), "--write"]) == 2
    told = capsys.readouterr()
    assert f"{script}, line " in told.err
    assert f"docs/coming_from/{library.page}" in told.err
    assert "wrap_model(model)" in told.err
    assert told.out == ""
    assert script.read_text() == code
    assert "by hand" in (PAGES / library.page).read_text()


@pytest.mark.parametrize(
    ("code", "page"),
    [
        ("from accelerate.utils import set_seed", "accelerate.md"),
        ("def f():\n    import accelerate as a", "accelerate.md"),
        ("try:\n    from accelerate import *\nexcept ImportError: pass", "accelerate.md"),
        ("from lightning import Fabric as F", "fabric.md"),
        ("from lightning import fabric", "fabric.md"),
        ("from lightning import *\nFabric()", "fabric.md"),
        ("import lightning as L\nL.Fabric(devices=2)", "fabric.md"),
        ("import lightning\nlightning.fabric.Fabric()", "fabric.md"),
        ("from lightning.fabric.utilities import seed", "fabric.md"),
        ("import lightning_fabric as lf", "fabric.md"),
        ("from horovod import torch as hvd", "horovod.md"),
        ("import horovod", "horovod.md"),
    ],
)
def test_any_import_of_a_library_is_refused(code: str, page: str) -> None:
    """Each way to import a library, or Lightning's Fabric, is seen, wherever it stands."""
    with pytest.raises(ConversionError, match=f"line [1-3]: .*{page}"):
        convert(Script(f"{code}\n{LOOP}"))


@pytest.mark.parametrize(
    "code",
    [
        "import lightning as L\nL.seed_everything(3)",
        "from lightning.pytorch import Trainer",
        "from lightning import *",
        "from .accelerate import Accelerator",
        "from . import horovod",
        "import accelerated, horovods",
        "accelerate = fabric = 3",
    ],
)
def test_other_names_are_no_such_library(code: str) -> None:
    """A script with other modules, of other packages or of its own, is converted."""
    assert convert(Script(f"{code}\n{LOOP}")).is_result


def test_a_script_with_distwrap_and_accelerate_is_left() -> None:
    """A script that uses distwrap already stays as it is, also where an Accelerator is in it."""
    code = f"import accelerate\nimport distwrap\n{LOOP}"
    assert convert(Script(code)).text == code
