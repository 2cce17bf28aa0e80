"""Write the tables of docs/knobs.md from the one table, hvlike/config.py: python scripts/lib/knobs_page.py."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hvlike.config import IGNORED, SETTINGS, SWITCH, Setting  # noqa: E402

PAGE = ROOT / "docs" / "knobs.md"
KNOBS_HEAD = "| variable | default; allowed | effect |\n|---|---|---|\n"
IGNORED_HEAD = "| variables | why |\n|---|---|\n"
OWN_CHOICE = "These may differ between ranks: "
SHORT = {
    "a whole number of at least ": "≥ ",
    "a number of at least ": "≥ ",
    "the path of a file": "path",
    "one of ": "",
    "comma-separated numbers of cores, one for each rank of a node": "cores, as 2,3",
}


def row(entry: Setting) -> str:
    """How a knob stands there."""
    value = entry.default
    default = "unset" if value is None else f"{int(value)}" if isinstance(value, bool) else f"{value}"
    values = entry.kind.expected
    for words, short in SHORT.items():
        values = values.replace(words, short)
    # The effect of a switch says what its other value does.
    allowed = f"{default}" if entry.kind is SWITCH else f"{default}; {values}"
    names = ", ".join(f"`{variable}`" for variable in entry.spellings)
    # As code, or a page shows the two hyphens of an option as a dash.
    effect = re.sub(r"--[\w-]+ \w+", r"`\g<0>`", entry.effect)
    return f"| {names} | {allowed} | {effect} |"


def ignored_rows() -> list[str]:
    """Horovod's variables without effect, those with the same reason in one row."""
    reasons: dict[str, list[str]] = {}
    for variable, reason in IGNORED.items():
        reasons.setdefault(reason, []).append(f"`{variable}`")
    return [f"| {', '.join(variables)} | {reason} |" for reason, variables in reasons.items()]


def replaced(page: str, head: str, rows: list[str]) -> str:
    """The page with other rows below the head of a table."""
    before, _, after = page.partition(head)
    _, gap, rest = after.partition("\n\n")
    return before + head + "\n".join(rows) + (gap + rest or "\n")


def page_of(page: str) -> str:
    """The page as it should be."""
    page = replaced(page, KNOBS_HEAD, [row(entry) for entry in SETTINGS.values()])
    page = replaced(page, IGNORED_HEAD, ignored_rows())
    before, _, after = page.partition(OWN_CHOICE)
    names = ", ".join(f"`{entry.variable}`" for entry in SETTINGS.values() if not entry.same)
    return before + OWN_CHOICE + names + "." + after[after.index("\n") :]


if __name__ == "__main__":
    PAGE.write_text(page_of(PAGE.read_text()))
