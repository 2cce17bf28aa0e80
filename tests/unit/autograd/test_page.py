"""docs/autograd.md explains the names of hvlike.autograd; each says what it is."""

import inspect
import re
from pathlib import Path

import pytest

from hvlike import autograd

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "autograd.md").read_text()


@pytest.mark.parametrize("name", autograd.__all__)
def test_every_name_says_what_it_is(name: str) -> None:
    assert re.search(rf"`{name}[`(]|`with {name}\(", PAGE)
    text = inspect.getdoc(getattr(autograd, name)) or ""
    assert len(text.partition("\n")[0].split()) >= 3, f"{name}: {text[:100]!r}"
    assert "Raises:" in text
