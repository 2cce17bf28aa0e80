"""docs/troubleshooting.md has every check."""

import re
from pathlib import Path

from hvlike.doctor import command

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "troubleshooting.md").read_text()


def test_every_check_is_explained_in_its_order() -> None:
    table = PAGE.partition("| check |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| ([^|]+?) \|", table, flags=re.MULTILINE) == list(command.CHECKS)
