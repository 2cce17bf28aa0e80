"""The directive `public-names`: the reference of the names that a table of a page lists.

    ```{public-names} hvlike Collectives
    ```

documents every name in the first column of the tables below that heading of api.md, in their order; a row may have
several. Without a section: the module, and every name of its `__all__` but modules.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \|", flags=re.MULTILINE)


def listed(page: str, section: str) -> list[str]:
    """The names in the tables of one section of a page."""
    found = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"no section {section!r}")
    return [name for row in ROW.findall(found[1]) for name in re.findall(r"\w+", row)]


def lines_for(module: str, name: str) -> list[str]:
    """The directives that document one name; none for a module."""
    thing = getattr(importlib.import_module(module), name)
    if inspect.ismodule(thing):
        return []
    path = f"{module}.{name}"
    if inspect.isclass(thing):
        return [f".. autoclass:: {path}", "   :members:", ""]
    if inspect.isroutine(thing):
        return [f".. autofunction:: {path}", ""]
    return [f".. py:data:: {path}", ""]


class PublicNames(SphinxDirective):
    """See above."""

    required_arguments = 1
    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """The nodes of all names."""
        module, *section = self.arguments
        if section:
            path = Path(self.env.srcdir) / "api.md"
            self.env.note_dependency(str(path))
            names, head = listed(path.read_text(), section[0]), []
        else:
            names, head = importlib.import_module(module).__all__, [f".. automodule:: {module}", ""]
        lines = [line for name in names for line in lines_for(module, name)]
        return self.parse_text_to_nodes("\n".join(["```{eval-rst}", *head, *lines, "```"]))


def skip_member(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Called by autodoc for each member; True leaves it out: methods made by a function carry another one's text."""
    return True if "<locals>" in getattr(thing, "__qualname__", "") else None


def show_examples(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Called by autodoc for each docstring, before napoleon: an example is a block of code."""
    lines[:] = [each for line in lines for each in (["Example::", ""] if line == "Example:" else [line])]


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("public-names", PublicNames)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("autodoc-process-docstring", show_examples, priority=400)
    return {"parallel_read_safe": True}
