"""docs/troubleshooting.md has every check, and shows a screen that the doctor of today would print."""

import re
from pathlib import Path

import pytest

from hvlike.doctor import command

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "troubleshooting.md").read_text()
SCREENS = dict(re.findall(r"<!-- screen: (.+?) -->\n```text\n(.*?)```", PAGE, flags=re.DOTALL))
FAILED = {"wrong mpirun": {"mpirun", "two ranks"}}


def test_every_check_is_explained_in_its_order() -> None:
    table = PAGE.partition("| check |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| ([^|]+?) \|", table, flags=re.MULTILINE) == list(command.CHECKS)


def test_the_screens_are_those_below() -> None:
    assert set(SCREENS) == set(FAILED)


@pytest.mark.parametrize("name", FAILED)
def test_a_screen_has_the_checks_of_today_and_fails_where_it_should(name: str) -> None:
    checks = re.findall(r"^ *(ok|warn|FAIL|skip)  (.{14})", SCREENS[name], flags=re.MULTILINE)
    assert [check.rstrip() for _, check in checks] == [check for check in command.CHECKS if check in FAILED[name]]
    assert {verdict for verdict, _ in checks} <= {"FAIL"}
    status = SCREENS[name].rstrip().splitlines()[-1]
    assert status == "1"
