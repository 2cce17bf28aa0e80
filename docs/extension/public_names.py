"""The directive `public-names`: the reference of the names that a table of a page lists.

    ```{public-names} hvlike api.md
    ```

documents the names in the first column of that page's tables, under the page's headings; a row may have several.
`:headings: Job, Constants` leaves out the others. Without a page: the module, and every name of its `__all__` but
modules.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| (.*) \|$", flags=re.MULTILINE)


def listed(page: str) -> dict[str, dict[str, str]]:
    """The names in the tables of a page with what the page says of them, by heading."""
    sections = re.split(r"^## (.+)\n", page, flags=re.MULTILINE)[1:]
    return {
        title: {name: said for names, said in ROW.findall(text) for name in re.findall(r"\w+", names)}
        for title, text in zip(sections[::2], sections[1::2], strict=True)
    }


def lines_for(module: str, name: str, said: str) -> list[str]:
    """The directives that document one name; none for a module. said: the text of a name that has no docstring."""
    thing = getattr(importlib.import_module(module), name)
    if inspect.ismodule(thing):
        return []
    path = f"{module}.{name}"
    if inspect.isclass(thing):
        # Modules of Horovod's have names of its own exceptions: links lead to the page of exceptions.
        again = ["   :no-index:"] if thing.__module__ == "hvlike.errors" else []
        return [f".. autoclass:: {path}", "   :members:", *again, ""]
    if inspect.isroutine(thing):
        return [f".. autofunction:: {path}", ""]
    return [f".. py:data:: {name}", f"   :module: {module}", "", f"   {said.replace('`', '``')}", ""]


class PublicNames(SphinxDirective):
    """See above."""

    required_arguments = 1
    optional_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {"headings": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """The nodes of all names, or a section for each heading of the page."""
        module, *page = self.arguments
        if not page:
            names = dict.fromkeys(importlib.import_module(module).__all__, "")
            return self.documented(module, names, [f".. automodule:: {module}", ""])
        path = Path(self.env.srcdir) / page[0]
        self.env.note_dependency(str(path))
        found: list[nodes.Node] = []
        tables = listed(path.read_text())
        for title in re.split(", *", self.options["headings"]) if "headings" in self.options else tables:
            names = tables[title]
            name = nodes.fully_normalize_name(title)
            section = nodes.section("", nodes.title(title, title), names=[name])
            self.state.document.note_implicit_target(section, section)
            section += self.documented(module, names, [])
            found.append(section)
        return found

    def documented(self, module: str, names: dict[str, str], head: list[str]) -> list[nodes.Node]:
        """The nodes of some names below what stands before them."""
        lines = [line for name, said in names.items() for line in lines_for(module, name, said)]
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
