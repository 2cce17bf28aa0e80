"""What a script writes into docs/ is what it would write now."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from support.documentation.blocks import PAGES, ROOT

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
