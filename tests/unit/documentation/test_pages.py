"""The pages in docs/, README.md and the index of examples: code runs or says why not; what is generated is new."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from support.documentation.blocks import INDENTED, PAGES, ROOT, Block, blocks_of, commands_of, program_of
from support.documentation.commands import problem_of

PROGRAMS = ("python", "diff")
COMMANDS = ("console", "sh")
OUTPUT = ("text", "json")
BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def test_no_code_is_without_a_fence_and_a_language() -> None:
    wrong = [block.place for block in BLOCKS if block.language not in (*PROGRAMS, *COMMANDS, *OUTPUT)]
    assert not wrong, f"expected a fence with one of {PROGRAMS + COMMANDS + OUTPUT}"
    assert INDENTED not in PROGRAMS + COMMANDS + OUTPUT


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_known_to_work_or_say_why_they_are_not_run(page: object) -> None:
    found = [block for block in BLOCKS if block.page == page and block.language in COMMANDS and block.reason is None]
    problems = [(block.place, command, problem_of(command)) for block in found for command in commands_of(block)]
    assert not [problem for problem in problems if problem[2]]


def test_reasons_are_given_where_they_count() -> None:
    """A reason above output, or one that is a word, is a mistake."""
    wrong = [block.place for block in BLOCKS if block.reason is not None and block.language in OUTPUT]
    wrong += [block.place for block in BLOCKS if block.reason is not None and len(block.reason.split()) < 2]
    assert not wrong


def test_most_programs_are_run() -> None:
    shown = [block for block in BLOCKS if block.language in PROGRAMS]
    assert sum(program_of(block) is not None for block in shown) > 0.8 * len(shown)


def test_a_block_is_found_with_its_line_and_its_reason(tmp_path: object) -> None:
    page = ROOT / "README.md"
    first = next(blocks_of(page))
    assert page.read_text().splitlines()[first.line - 1] == first.text.splitlines()[0]


def test_what_is_not_known_is_a_problem() -> None:
    assert problem_of("mpirun -n 2 python train.py") is None
    assert problem_of("mpirun -n 2 python -m hvlike bench step --models mlp") is None
    for command in (
        "srun -n 2 python train.py",
        "mpirun -n 2 python examples/none.py",
        "python -m hvlike bench none",
        "python -m hvlike bench step --no-such-option",
        "./scripts/none",
        "pip install '.[none]'",
    ):
        assert problem_of(command), command


def test_of_a_difference_the_new_side_runs() -> None:
    block = Block(ROOT / "README.md", 1, "diff", " a = 1\n-b = 2\n+b = 3\n", None)
    assert program_of(block) == "a = 1\n\nb = 3\n"


DRAWING = runpy.run_path(str(ROOT / "docs" / "figures" / "draw.py"))
KNOBS_PAGE = runpy.run_path(str(ROOT / "scripts" / "lib" / "knobs_page.py"))


@pytest.mark.parametrize("figure", DRAWING["FIGURES"], ids=lambda figure: figure.name)
def test_figures_are_as_drawn(figure: Any) -> None:
    written = (ROOT / "docs" / "figures" / f"{figure.name}.svg").read_text()
    assert written == DRAWING["svg"](figure), "run docs/figures/draw.py"


def test_every_figure_is_shown() -> None:
    shown = {name for page in PAGES for name in re.findall(r"figures/(\w+)\.svg", page.read_text())}
    assert shown == {path.stem for path in (ROOT / "docs" / "figures").glob("*.svg")}


def test_the_tables_of_knobs_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "knobs.md").read_text()
    assert page == KNOBS_PAGE["page_of"](page), "run scripts/lib/knobs_page.py"


def test_a_knob_that_is_not_there_comes_into_its_table() -> None:
    page = (ROOT / "docs" / "knobs.md").read_text()
    without = re.sub(r"\| `HVLIKE_CYCLE_TIME`, .*\n", "", page).replace(
        "`HVLIKE_TIMELINE`, `HVLIKE_TIMELINE_M", "`HVLIKE_TIMELINE_M"
    )
    assert without != page
    assert KNOBS_PAGE["page_of"](without) == page


def paths_in(page: Path) -> set[str]:
    """The files and folders of this project that a page names in backquotes."""
    return set(re.findall(r"`((?:hvlike|tests|scripts|examples|docs)/[\w/.-]*(?:/|\.\w+))`", page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert not [path for path in paths_in(page) if not (ROOT / path).exists()]


INDEX = (ROOT / "examples" / "README.md").read_text()
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MODULES = sorted(path for path in EXAMPLES if "No program of its own" in path.read_text())


def test_every_example_is_in_the_index() -> None:
    assert re.findall(r"`examples/(\w+\.py)`", INDEX)
    assert not [path.name for path in EXAMPLES if f"`examples/{path.name}`" not in INDEX]
    assert [path.name for path in MODULES] == ["models.py", "transformer.py"]
    assert not [path.name for path in MODULES if f"| `examples/{path.name}`" in INDEX]


def test_the_ranks_are_those_of_the_program() -> None:
    rows = dict(re.findall(r"^\| `examples/(\w+\.py)` \| (\d+) \|", INDEX, flags=re.MULTILINE))
    commands = {path.name: re.search(r"mpirun .*-n (\d+) python", path.read_text()) for path in EXAMPLES}
    assert rows == {name: found[1] for name, found in commands.items() if found}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_that_is_run_names_the_programs_that_use_it(path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    importers = {each.name for each in EXAMPLES if f"from {path.stem} import" in each.read_text()}
    assert importers
    assert set(re.findall(r"\w+\.py", str(ended.value))) == importers
