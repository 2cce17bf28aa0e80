"""The checks before a commit are those of scripts/test: one list, in scripts/lib/checks.sh."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LIST = (ROOT / "scripts" / "lib" / "checks.sh").read_text()
HOOKS = (ROOT / ".pre-commit-config.yaml").read_text()


def test_pre_commit_runs_every_check_and_no_other() -> None:
    found = re.search(r"^checks=\((.*)\)$", LIST, flags=re.MULTILINE)
    assert found
    entries = [shlex.split(entry) for entry in re.findall(r"^ +entry: (.*)$", HOOKS, flags=re.MULTILINE)]
    assert [entry[0] for entry in entries] == ["scripts/check"] * len(entries)
    assert [entry[1] for entry in entries] == shlex.split(found[1])


def test_every_check_of_the_list_is_defined() -> None:
    found = re.search(r"^checks=\((.*)\)$", LIST, flags=re.MULTILINE)
    assert found
    assert all(f'    "{check}") ' in LIST for check in shlex.split(found[1]))


@pytest.mark.parametrize("script", ["test", "check", "docs"])
def test_the_scripts_take_the_checks_from_there(script: str) -> None:
    text = (ROOT / "scripts" / script).read_text()
    assert "lib/checks.sh" in text
    assert "ruff" not in re.sub(r"^#.*", "", text, flags=re.MULTILINE)
