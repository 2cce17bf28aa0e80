"""Tests of ranks import public names, and the seams that docs/CONTRIBUTING.md lists; each of these has a use."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# What a program may import: modules of public names, RPC and distributed autograd, integrations and commands.
PUBLIC = re.compile(r"(?!config|untraced)\w+|rpc/(functions|remote_module)|(integrations|doctor)/\w+")


def listed() -> set[str]:
    """The seams: files without `.py`, and folders."""
    _, _, below = (ROOT / "docs" / "CONTRIBUTING.md").read_text().partition("\n| seam |")
    rows = below.partition("\n\n")[0].splitlines()[2:]
    return {each for row in rows for each in re.findall(r"`([\w/]+)`", row.split("|")[1])}


def imported(text: str) -> Iterator[str]:
    """The files of hvlike that are imported there, like `nn` and `transport/world`; nothing for `import hvlike`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            # What is imported of a folder is a file, or a name of its __init__.py.
            names = [f"{node.module}.{each.name}" for each in node.names]
        else:
            continue
        for name in names:
            first, *parts = name.split(".")
            while first == "hvlike" and parts and not is_module("/".join(parts)):
                parts.pop()
            if first == "hvlike" and parts:
                yield "/".join(parts)


def is_module(place: str) -> bool:
    path = ROOT / "hvlike" / place
    return path.with_suffix(".py").is_file() or path.is_dir()


def seams_of(place: str, seams: set[str]) -> set[str]:
    """The seams that a file belongs to."""
    return {each for each in seams if place == each or place.startswith(f"{each}/")}


def test_tests_of_ranks_import_nothing_else() -> None:
    seams = listed()
    strange, used = set(), set()
    for path in (ROOT / "tests" / "ranks").rglob("*.py"):
        for place in imported(path.read_text()):
            found = seams_of(place, seams)
            used |= found
            if not found and not PUBLIC.fullmatch(place):
                strange.add(f"{path.relative_to(ROOT)}: hvlike/{place}")
    assert not strange, "neither public nor a seam"
    assert seams == used, "nothing uses these seams"


def test_each_seam_is_there() -> None:
    seams = listed()
    assert len(seams) > 20
    assert [each for each in seams if not is_module(each)] == []


def test_what_is_imported_is_found() -> None:
    text = "import hvlike\nfrom hvlike import nn, Sum\ndef f():\n    from hvlike.transport import world\nimport os.path"
    text += "\nfrom hvlike.transport.loop.loop import Loop\nfrom hvlike.rpc import rpc_sync\nimport hvlike.rpc"
    assert list(imported(text)) == ["nn", "transport/loop/loop", "rpc", "rpc", "transport/world"]
