"""How Sphinx builds these pages; `./scripts/docs` runs it with warnings as errors."""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "extension")]

from sphinx.application import Sphinx  # noqa: E402

from hvlike.version import __version__  # noqa: E402

project = "hvlike"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings", "public_names"]
exclude_patterns = ["_build"]

# Anchors for links to headings of other pages, as GitHub makes them.
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
# Not needed to build these pages: the libraries that hvlike.integrations is for.
autodoc_mock_imports = ["accelerate", "lightning", "torchmetrics", "transformers"]
add_module_names = False
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"hvlike {release}"
html_show_copyright = False


def leave_out_missing_pages(app: Sphinx, page: str, text: list[str]) -> None:
    """Pages that are still being written have their place already: in the table of contents, and in links."""

    def kept(found: re.Match[str]) -> str:
        return found[0] if (DOCS / f"{found['page']}.md").exists() else found["text"]

    if page == "index":
        text[0] = re.sub(r"^(?P<page>[\w/-]+)(?P<text>)\n", kept, text[0], flags=re.MULTILINE)
    elif "/" not in page:
        text[0] = re.sub(r"\[(?P<text>[^\]]+)\]\((?P<page>[\w-]+)\.md[^)]*\)", kept, text[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", leave_out_missing_pages)
