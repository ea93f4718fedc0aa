"""Settings of Sphinx for the documentation: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_extension")]

import distwrap  # noqa: E402

# Notebooks are examples, and lie with these. The site has copies of them, whose links go to its pages.
COPIES = HERE / "notebooks"
COPIES.mkdir(exist_ok=True)
for notebook in (HERE.parent / "examples" / "notebooks").glob("*.ipynb"):
    COPIES.joinpath(notebook.name).write_text(notebook.read_text().replace("](../../docs/", "](../"))

project = "distwrap"
author = "the authors of distwrap"
copyright = author
version = release = distwrap.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "reference_pages"]
exclude_patterns = ["_extension"]
nitpicky = False
default_role = "code"

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 4
# The notebooks are run by the tests; the site shows what they had printed when they were saved.
nb_execution_mode = "off"
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_preprocess_types = False

html_theme = "furo"
html_title = f"distwrap {release}"
html_static_path = ["_static"]
html_css_files = ["distwrap.css"]
html_copy_source = False
html_show_sourcelink = False
pygments_style = "tango"
pygments_dark_style = "monokai"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
