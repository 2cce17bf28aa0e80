"""Write the tables of docs/knobs.md from the one table, hvlike/config.py: python scripts/lib/knobs_page.py."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hvlike.config import IGNORED, SETTINGS, Setting  # noqa: E402

PAGE = ROOT / "docs" / "knobs.md"
KNOBS_HEAD = "| name | default | values | Horovod has it | effect |\n|---|---|---|---|---|\n"
IGNORED_HEAD = "| variable | why |\n|---|---|\n"
OWN_CHOICE = "What each rank may choose for itself: "


def row(entry: Setting) -> str:
    """How a knob stands there."""
    value = entry.default
    default = "unset" if value is None else f"{int(value)}" if isinstance(value, bool) else f"{value}"
    horovod = "yes" if entry.horovod else "no"
    return f"| `{entry.name}` | {default} | {entry.kind.expected} | {horovod} | {entry.effect} |"


def replaced(page: str, head: str, rows: list[str]) -> str:
    """The page with other rows below the head of a table."""
    before, _, after = page.partition(head)
    rest = after[after.index("\n\n") :]
    return before + head + "\n".join(rows) + rest


def page_of(page: str) -> str:
    """The page as it should be."""
    page = replaced(page, KNOBS_HEAD, [row(entry) for entry in SETTINGS.values()])
    page = replaced(page, IGNORED_HEAD, [f"| `{variable}` | {reason} |" for variable, reason in IGNORED.items()])
    before, _, after = page.partition(OWN_CHOICE)
    names = ", ".join(f"`{entry.name}`" for entry in SETTINGS.values() if not entry.same)
    return before + OWN_CHOICE + names + "." + after[after.index("\n") :]


if __name__ == "__main__":
    PAGE.write_text(page_of(PAGE.read_text()))
