"""Our docstrings in the form that Sphinx wants.

Ours say, after a first line of what it is, what each argument means ("tensor: any shape"), and then in paragraphs of
their own what is returned, which errors there are, and where the idea comes from. Examples and drawings are indented.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hvlike

# A line that begins with one of these begins a paragraph.
LABELS = ("Returns", "Collective", "Blocks", "Raises:", "Gradient:", "Source:", "Attribute", "Local.")
# What is said of an argument ends where one of these begins a sentence.
NO_ARGUMENT = re.compile(r"(?<=\. )(?=(?:Any worker|Collective|Every rank|Local|Returns)\b)")
LABEL = re.compile(r"(Raises|Gradient|Source|Collective):")
LITERAL = re.compile(r"`([^`]+)`")
SPECIAL = re.compile(r"([\\*_|`])")
INDENTATION = "    "


@dataclass
class Part:
    """Some lines that belong together: a paragraph, what is said of arguments, or a drawing."""

    lines: list[str] = field(default_factory=list)
    arguments: str = ""
    drawn: bool = False


def to_rest(lines: list[str], arguments: Iterable[str]) -> list[str]:
    """A docstring as reStructuredText.

    lines: the docstring, without its own indentation. arguments: names that "name: meaning" may explain.
    """
    result: list[str] = []
    for part in parts_of(lines, set(arguments)):
        if part.drawn:
            result += ["::", "", *((INDENTATION + line).rstrip() for line in part.lines), ""]
        else:
            text = marked(" ".join(line.strip() for line in part.lines))
            result += [
                f":param {part.arguments}: {text}" if part.arguments else LABEL.sub(r"**\1:**", text, count=1),
                "",
            ]
    return result


def parts_of(lines: list[str], arguments: set[str]) -> Iterator[Part]:
    """The parts of a docstring in their order."""
    part = Part()
    for block in blocks_of(lines):
        if block[0].startswith("  ") or block[0].startswith("- "):
            yield Part(lines=block, drawn=True)
            continue
        part = Part()
        for line in block:
            for begins, piece in pieces_of(line, arguments):
                ended = bool(part.lines) and part.lines[-1].endswith(".") and piece[:1].isupper()
                if begins or piece.startswith(LABELS) or (part.arguments and ended):
                    if part.lines:
                        yield part
                    part = Part(arguments=begins)
                    piece = piece.partition(": ")[2] if begins else piece
                said, *rest = NO_ARGUMENT.split(piece, maxsplit=1) if part.arguments else [piece]
                part.lines.append(said)
                if rest:
                    yield part
                    part = Part(lines=rest)
        yield part


def blocks_of(lines: list[str]) -> Iterator[list[str]]:
    """Lines between empty ones; indented blocks that follow each other are one."""
    block: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            if block and block[-1] == "" and not (block[0].startswith("  ") and line.startswith("  ")):
                yield block[:-1]
                block = []
            block.append(line.rstrip())
        elif block and block[-1] != "":
            block.append("")
    if any(block):
        yield block[:-1] if block[-1] == "" else block


def pieces_of(line: str, arguments: set[str]) -> Iterator[tuple[str, str]]:
    """A line, cut where it begins to explain other arguments: pairs (their names or "", text)."""
    start, names = 0, ""
    for found in re.finditer(r"(?:^|(?<=[.;] ))\*{0,2}([a-z_]\w*(?:, [a-z_]\w*)*): ", line):
        said = found[1].split(", ")
        if set(said) <= arguments:
            if found.start() > start:
                yield names, line[start : found.start()].strip()
            start, names = found.start(), found[1]
    yield names, line[start:]


def marked(text: str) -> str:
    """Text with its literals as literals, names of hvlike as links, and nothing else that has a meaning there."""
    result, end = "", 0
    for found in LITERAL.finditer(text):
        name = found[1]
        link = f":py:obj:`~hvlike.{name}`" if name in hvlike.__all__ else f"``{name}``"
        # What follows directly must be kept apart by a character that is not shown.
        result += SPECIAL.sub(r"\\\1", text[end : found.start()]) + link
        end = found.end()
        if text[end : end + 1].isalnum():
            result += "\\ "
    return result + SPECIAL.sub(r"\\\1", text[end:])


def arguments_of(thing: Any) -> list[str]:
    """The names of the arguments of a function, or of the constructor of a class."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return []
    return [*signature.parameters, "kwargs", "args"]


def on_docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Called by autodoc for each docstring; changes `lines`."""
    lines[:] = to_rest(lines, arguments_of(thing) if what != "module" else ())


def on_member(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Called by autodoc for each member; True leaves it out: methods made by a function carry another one's text."""
    return True if "<locals>" in getattr(thing, "__qualname__", "") else None


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    connect: Callable[..., Any] = app.connect
    connect("autodoc-process-docstring", on_docstring)
    connect("autodoc-skip-member", on_member)
    return {"parallel_read_safe": True}
