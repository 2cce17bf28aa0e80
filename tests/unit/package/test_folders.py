"""Imports point downward: no circle among the files of hvlike, nor among its folders."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3] / "hvlike"


def files() -> dict[str, Path]:
    """The files of the folders, by module. Those in hvlike/ itself only pass public names on."""
    paths = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE and path.name != "__init__.py"]
    return {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in paths}


def imports(nodes: list[ast.stmt]) -> Iterator[str]:
    """What a file imports when it is imported itself."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{each.name}" for each in node.names))
        elif isinstance(node, ast.ClassDef | ast.Try | ast.With):
            yield from imports(node.body)
        elif isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            yield from imports([*node.body, *node.orelse])


def test_there_is_no_circle() -> None:
    paths = files()
    among_files = {name: set(imports(ast.parse(path.read_text()).body)) & paths.keys() for name, path in paths.items()}
    assert len(among_files) > 100
    assert sum(map(len, among_files.values())) > 500
    among_folders: dict[Path, set[Path]] = {}
    for name, imported in among_files.items():
        others = {paths[each].parent for each in imported} - {paths[name].parent}
        among_folders.setdefault(paths[name].parent, set()).update(others)
    # Each raises CycleError, which names the circle.
    TopologicalSorter(among_files).prepare()
    TopologicalSorter(among_folders).prepare()
