"""How Sphinx builds these pages; `./scripts/docs` runs it with warnings as errors."""

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "extension")]

from hvlike.version import __version__  # noqa: E402

project = "hvlike"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
extensions += ["public_names", "search_texts"]  # of docs/extension
exclude_patterns = ["_build"]

# Anchors for links to headings of other pages, as GitHub makes them.
myst_heading_anchors = 3

# Docstrings are written in Google's style; `name` in them is a link where there is such a name.
napoleon_numpy_docstring = False
default_role = "py:obj"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
# Not needed to build these pages: the libraries that hvlike.integrations is for.
autodoc_mock_imports = ["accelerate", "lightning", "lightning_utilities", "torchmetrics", "transformers"]
add_module_names = False
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"hvlike {release}"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["tables.js"]
html_search_scorer = str(DOCS / "static" / "search_scores.js")
# What a click copies: commands without prompt and output; nothing where there is nothing to run.
copybutton_selector = "div.highlight-python pre, div.highlight-sh pre, div.highlight-console pre"
copybutton_prompt_text = "$ "
