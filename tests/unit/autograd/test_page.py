"""docs/autograd.md lists the names of hvlike.autograd and no others; each says what it is."""

import inspect
import re
from pathlib import Path

import pytest

from hvlike import autograd

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "autograd.md").read_text()


def test_the_page_lists_exactly_the_public_names() -> None:
    names = PAGE.partition("## Names")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", names, flags=re.MULTILINE)) == sorted(autograd.__all__)


@pytest.mark.parametrize("name", autograd.__all__)
def test_every_name_says_what_it_is(name: str) -> None:
    text = inspect.getdoc(getattr(autograd, name)) or ""
    assert len(text.partition("\n")[0].split()) >= 3, f"{name}: {text[:100]!r}"
    assert "Raises:" in text
