"""Configuration of sphinx: `sphinx-build -W -n docs docs/_build`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "ejkernel"
author = copyright = "The ejkernel developers"
release = version = "0.1.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "formulas"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "ejkernel"
pygments_style = "default"

# The axes in the types are also in the docstrings, where they can be read.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_use_rtype = False
napoleon_attr_annotations = False
default_role = "literal"
smartquotes_action = "D"  # only dashes: a prime is no quotation mark
