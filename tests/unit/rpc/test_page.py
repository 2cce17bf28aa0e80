"""docs/rpc.md lists the names of hvlike.rpc and no others; each says what it is."""

import inspect
import re
from pathlib import Path

import pytest

from hvlike import rpc

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "rpc.md").read_text()


def test_the_page_lists_exactly_the_public_names() -> None:
    names = PAGE.partition("## Names")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", names, flags=re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"\w+", row)) == sorted(rpc.__all__)


@pytest.mark.parametrize("name", rpc.__all__)
def test_every_name_says_what_it_is(name: str) -> None:
    text = inspect.getdoc(getattr(rpc, name)) or ""
    assert len(text.partition("\n")[0].split()) >= 3, f"{name}: {text[:100]!r}"
