"""Give a distribution its description: README.md without what only works in a checkout. All else is in setup.cfg."""

import re
from pathlib import Path

from setuptools import setup

ONLY_IN_A_CHECKOUT = re.compile(r"<!-- checkout only -->\n.*?<!-- end -->\n", flags=re.DOTALL)
COMMENT = re.compile(r"<!-- .*? -->\n")
LINK = re.compile(r"\[([^]]*)\]\((?!https://)[^)]*\)")


def description_of(readme: str) -> str:
    """The text of README.md without the parts marked `checkout only`; of a link to a file only its words are left."""
    return LINK.sub(r"\1", COMMENT.sub("", ONLY_IN_A_CHECKOUT.sub("", readme)))


if __name__ == "__main__":
    setup(long_description=description_of((Path(__file__).parent / "README.md").read_text()))
