"""The index of the examples names every program, with the number of ranks that the program itself names."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.documentation.blocks import ROOT

INDEX = (ROOT / "examples" / "README.md").read_text()
PROGRAMS = sorted((ROOT / "examples").glob("*.py"))


MODULES = sorted(path for path in PROGRAMS if "No program of its own" in path.read_text())


def test_every_example_is_in_the_index() -> None:
    assert re.findall(r"`examples/(\w+\.py)`", INDEX)
    assert not [path.name for path in PROGRAMS if f"`examples/{path.name}`" not in INDEX]


def test_the_ranks_are_those_of_the_program() -> None:
    rows = dict(re.findall(r"^\| `examples/(\w+\.py)` \| (\d+) \|", INDEX, flags=re.MULTILINE))
    commands = {path.name: re.search(r"mpirun .*-n (\d+) python", path.read_text()) for path in PROGRAMS}
    assert rows == {name: found[1] for name, found in commands.items() if found}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_that_is_run_names_the_programs_that_use_it(path: Path) -> None:
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    importers = {each.name for each in PROGRAMS if f"from {path.stem} import" in each.read_text()}
    assert importers
    assert set(re.findall(r"\w+\.py", done.stderr)) == importers


def test_what_is_no_program_has_no_row() -> None:
    assert [path.name for path in MODULES] == ["models.py", "transformer.py"]
    assert not [path.name for path in MODULES if f"| `examples/{path.name}`" in INDEX]
