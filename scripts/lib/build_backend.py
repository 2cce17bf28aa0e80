"""The build backend: setuptools, told of the description for PyPI and of what a source distribution holds.

The description is README.md without what only works in a checkout. All other metadata is in setup.cfg.
"""

import re
from typing import Any

from setuptools.build_meta import *  # noqa: F403  The hooks of PEP 517 and PEP 660
from setuptools.command.egg_info import manifest_maker
from setuptools.dist import Distribution

ONLY_IN_A_CHECKOUT = re.compile(r"<!-- checkout only -->\n.*?<!-- end -->\n", flags=re.DOTALL)
COMMENT = re.compile(r"<!-- .*? -->\n")
LINK = re.compile(r"\[([^]]*)\]\((?!https://)[^)]*\)")


def description_of(readme: str) -> str:
    """The text of README.md without the parts marked `checkout only`; of a link to a file only its words are left."""
    return LINK.sub(r"\1", COMMENT.sub("", ONLY_IN_A_CHECKOUT.sub("", readme)))


_parse = Distribution.parse_config_files


def _parse_and_describe(distribution: Distribution, *arguments: Any, **options: Any) -> None:
    _parse(distribution, *arguments, **options)
    distribution.metadata.long_description = description_of(distribution.metadata.long_description or "")


# A hook runs in a process of its own: nobody else sees these.
Distribution.parse_config_files = _parse_and_describe
manifest_maker.template = "scripts/lib/sdist.in"
