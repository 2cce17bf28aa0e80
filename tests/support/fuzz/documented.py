"""The errors that the pages describe: the cause of each, by what it is known on a rank."""

from __future__ import annotations

import re

# By cause: class, a pattern of its text, and the page that describes it.
DOCUMENTED: dict[str, tuple[str, str, str]] = {
    "nothing to train": ("DataParallelError", "any parameter that requires a gradient", "docs/ddp.md"),
    # Its text begins like the next one's.
    "interrupted backward": ("DataParallelError", "interrupted by an error", "docs/ddp.md"),
    "unused parameters": ("DataParallelError", "Expected to have finished reduction", "docs/ddp.md"),
    "resized parameter": ("RuntimeError", "returned an invalid gradient", "docs/ddp.md"),
}


class DocumentedError(Exception):
    """An error that the pages describe, in the oracle; its text is the cause."""


def is_cause(cause: str, classes: tuple[str, ...], text: str) -> bool:
    """Whether an error of these classes is what the pages describe for this cause."""
    kind, pattern, _ = DOCUMENTED[cause]
    return kind in classes and re.search(pattern, text) is not None


def cause_of(error: Exception) -> str | None:
    """Return the cause of a documented error, None for others."""
    if isinstance(error, DocumentedError):
        return str(error)
    classes = tuple(each.__name__ for each in type(error).__mro__)
    return next((cause for cause in DOCUMENTED if is_cause(cause, classes, str(error))), None)
