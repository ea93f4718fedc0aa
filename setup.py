"""What setup.cfg cannot say: the README as it reads on a package page, where links into the repository lead nowhere."""

import re
from pathlib import Path

from setuptools import setup

readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
setup(long_description=re.sub(r"\[([^\]]+)\]\((?!https?:|#)[^)]+\)", r"\1", readme))
