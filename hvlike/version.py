"""The version of hvlike, which setup.cfg reads from here, and where its documentation is."""

from __future__ import annotations

__version__ = "0.1.0"

# Where messages send their reader: one place to change when the pages have an address.
_DOCUMENTATION = "docs/{name}.md in hvlike's source code"


def page(name: str) -> str:
    """Return how a message names a page of the documentation, so that who has installed a wheel finds it, too."""
    return _DOCUMENTATION.format(name=name)
