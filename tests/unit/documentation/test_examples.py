"""The index of the examples names every program, with the number of ranks that the program itself names."""

import re

from support.documentation.blocks import ROOT

INDEX = (ROOT / "examples" / "README.md").read_text()
PROGRAMS = sorted((ROOT / "examples").glob("*.py"))


def test_every_example_is_in_the_index() -> None:
    assert re.findall(r"`examples/(\w+\.py)`", INDEX)
    assert not [path.name for path in PROGRAMS if f"`examples/{path.name}`" not in INDEX]


def test_the_ranks_are_those_of_the_program() -> None:
    rows = dict(re.findall(r"^\| `examples/(\w+\.py)` \| (\d+) \|", INDEX, flags=re.MULTILINE))
    commands = {path.name: re.search(r"mpirun .*-n (\d+) python", path.read_text()) for path in PROGRAMS}
    assert rows == {name: found[1] for name, found in commands.items() if found}
