"""The pages in docs/ and README.md: every block of code says what it is, and runs or says why not."""

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
