"""What a release consists of says the same everywhere: version, date, dependencies, and versions it is tested with."""

import configparser
import re
from pathlib import Path

import pytest

import hvlike

ROOT = Path(__file__).resolve().parents[3]
CHANGES = (ROOT / "CHANGELOG.md").read_text().splitlines()
CITATION = (ROOT / "docs" / "CITATION.cff").read_text()
RECIPE = (ROOT / "scripts" / "conda" / "meta.yaml").read_text()
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")

OF_CONDA = {"torch": "pytorch"}


def test_the_newest_changes_are_those_of_this_version() -> None:
    newest = next(line for line in CHANGES if line.startswith("## "))
    assert re.fullmatch(rf"## {re.escape(hvlike.__version__)} \(\d{{4}}-\d\d-\d\d\)", newest)
    assert len(CHANGES) <= 60


def test_citation_and_recipe_are_of_this_version() -> None:
    date = re.search(r"\((.*)\)", next(line for line in CHANGES if line.startswith("## ")))
    assert date is not None
    assert f"version: {hvlike.__version__}\n" in CITATION
    assert f'date-released: "{date[1]}"' in CITATION
    assert f'version: "{hvlike.__version__}"' in RECIPE


@pytest.mark.parametrize("line", SETUP["options"]["install_requires"].split())
def test_the_recipe_has_the_dependencies_of_the_wheel(line: str) -> None:
    name, least = line.split(">=")
    assert f"    - {OF_CONDA.get(name, name)} >={least}\n" in RECIPE
    assert f"    - python {SETUP['options']['python_requires']}\n" in RECIPE


def test_classifiers_name_the_pythons_that_were_tested() -> None:
    named = set(re.findall(r"Python :: (3\.\d+)\n", SETUP["metadata"]["classifiers"] + "\n"))
    page = (ROOT / "docs" / "CONTRIBUTING.md").read_text()
    tested = set(re.findall(r"^\| (3\.\d+)\.\d+ \|", page, re.MULTILINE))
    # The developers' own.
    assert named - {"3.11"} <= tested


def test_what_people_look_for_is_there() -> None:
    assert (ROOT / "docs" / "SECURITY.md").is_file()
    assert "url" in SETUP["metadata"]
    assert "project_urls" in SETUP["metadata"]
