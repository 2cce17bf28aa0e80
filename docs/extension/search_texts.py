"""Excerpts in the search results of pages that are opened as files, where a browser lets no script read other pages.

The texts of all pages become one script, `_static/search_texts.js`, which static/search_from_files.js reads instead.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def add_script(app: Any, page: str, template: str, context: Any, doctree: Any) -> None:
    """Called by Sphinx for each page: the page of results needs the script."""
    if page == "search":
        app.add_js_file("search_from_files.js")


def write_texts(app: Any, error: Exception | None) -> None:
    """Called by Sphinx at the end."""
    if error is None and app.builder.name == "html":
        texts = {name: app.env.get_doctree(name).astext() for name in sorted(app.env.found_docs)}
        script = f"window.searchTexts = {json.dumps(texts)};\n"
        (Path(app.outdir) / "_static" / "search_texts.js").write_text(script)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("html-page-context", add_script)
    app.connect("build-finished", write_texts)
    return {"parallel_read_safe": True}
