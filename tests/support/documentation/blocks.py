"""The code blocks of the pages: README.md, the index of examples, and everything in docs/."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
ADDED = re.compile(r"^[+ ]", flags=re.MULTILINE)
REMOVED = re.compile(r"^-.*\n", flags=re.MULTILINE)

INDENTED = "an indented block"


@dataclass(frozen=True)
class Block:
    """A piece of code, or of output."""

    page: Path
    line: int
    """Of its first line in the page."""
    language: str
    text: str
    reason: str | None
    """Why it is not run, as the line above it says."""

    @property
    def place(self) -> str:
        """Where it stands, for people."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    """All blocks of a page in their order; directives of Sphinx are none."""
    previous: Token | None = None
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        if token.type in ("fence", "code_block") and not token.info.startswith("{"):
            assert token.map is not None
            said = NOT_RUN.fullmatch(previous.content.strip()) if previous and previous.type == "html_block" else None
            fenced = token.type == "fence"
            language = token.info if fenced else INDENTED
            yield Block(page, token.map[0] + 1 + fenced, language, token.content, said[1] if said else None)
        previous = token


def program_of(block: Block) -> str | None:
    """What of a block is a program in Python: all of it, or the lines that a difference leaves; None: it is not run."""
    if block.reason is None and block.language == "python":
        return block.text
    if block.reason is None and block.language == "diff":
        return ADDED.sub("", REMOVED.sub("\n", block.text))
    return None


def commands_of(block: Block) -> list[str]:
    """The commands of a block, without comments; a line that ends with a backslash goes on in the next."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    commands = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines)
    return [" ".join(command.split()) for command in commands if command]
