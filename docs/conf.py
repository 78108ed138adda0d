"""How ``make docs`` builds the site, without a network: Sphinx, furo and MyST-NB; see ``_ext`` for what is our own."""

import sys
from pathlib import Path

import fedcommons

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project, author, release = "fedcommons", "The fedcommons developers", fedcommons.__version__
copyright = author
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx_copybutton", "sphinx_design"]
extensions += ["links", "mathml", "generated", "public_names", "tables", "results", "claims", "modules"]  # of _ext
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"fedcommons {release}"
html_logo = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "scorer.js")
html_copy_source = html_show_sourcelink = False
html_show_sphinx = html_use_index = False

myst_enable_extensions = ["dollarmath", "deflist", "colon_fence"]
myst_fence_as_directive = ["math"]  # a git host shows such blocks as formulas, too
myst_heading_anchors = 4  # links such as privacy.md#threat-model work here as they do on a git host
nb_execution_mode = "off"  # the notebook holds its outputs; tests/test_examples.py runs the notebook
suppress_warnings = ["myst.header"]  # a page of results may go from # to ###

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
