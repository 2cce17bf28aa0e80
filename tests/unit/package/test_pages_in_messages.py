"""Messages name pages of the documentation by `page()`, and those are there."""

import re
from pathlib import Path

from hvlike.version import page

ROOT = Path(__file__).resolve().parents[3]
SOURCES = {path: path.read_text() for path in (ROOT / "hvlike").rglob("*.py")}


def test_every_page_that_a_message_names_is_there() -> None:
    names = {name for text in SOURCES.values() for name in re.findall(r"""\bpage\(['"]([\w-]+)['"]\)""", text)}
    assert len(names) > 4
    for name in names:
        assert (ROOT / "docs" / f"{name}.md").is_file(), name
        assert f"docs/{name}.md" in page(name)


def test_none_names_a_page_in_another_way() -> None:
    found = [str(path) for path, text in SOURCES.items() if re.search(r"docs/[\w-]+\.md", text)]
    assert found == [], "an installed hvlike has no folder docs/"
