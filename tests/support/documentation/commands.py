"""Whether a command that a page shows would work: what can be told without running it for minutes."""

import argparse
import configparser
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from support.documentation.blocks import ROOT

from benchmarks.command import BENCHMARKS as OF_DEVELOPERS
from hvlike.__main__ import COMMANDS
from hvlike.bench.command import BENCHMARKS

# Names for the reader's own program.
OWN_PROGRAMS = ("train.py", "program.py")
# What comes before the installation from a checkout.
PREPARATIONS = (
    "python3 -m venv .venv && . .venv/bin/activate",
    "pip install torch --index-url https://download.pytorch.org/whl/cpu",
)


def problem_of(command: str) -> str | None:
    """Why a command is not known to work; None: it is.

    Examples have to be run by some test; arguments of benchmarks are parsed; scripts and extras have to exist.
    """
    words = shlex.split(command.partition(" > ")[0])
    words = words[words.index("python") :] if words[0] == "mpirun" and "python" in words else words
    if "scripts/bench" in words[:4]:
        return problem_of_benchmark(words[words.index("scripts/bench") + 1 :], OF_DEVELOPERS)
    if words[:3] == ["python", "-m", "hvlike"]:
        return problem_of_module(words[3:])
    if words[0] == "python" and len(words) > 1:
        return problem_of_program(words[1])
    if words[0].startswith("./scripts/"):
        return None if (ROOT / words[0]).exists() else f"there is no {words[0]}"
    if command in PREPARATIONS:
        return None
    if words[:2] == ["pip", "install"]:
        return problem_of_extras(words[-1])
    return "nothing is known of it: say above its block why it is not run"


def problem_of_module(arguments: list[str]) -> str | None:
    """Of `python -m hvlike ...`."""
    if arguments[0] not in COMMANDS:
        return f"there is no command {arguments[0]}"
    if arguments[0] != "bench" or arguments[1:] == ["-h"]:
        return None
    return problem_of_benchmark(arguments[1:], BENCHMARKS)


def problem_of_benchmark(arguments: list[str], benchmarks: Mapping[str, ModuleType]) -> str | None:
    """Of `python -m hvlike bench ...` or `scripts/bench ...`."""
    if arguments[0] not in benchmarks:
        return f"there is no benchmark {arguments[0]}"
    parser = argparse.ArgumentParser(exit_on_error=False)
    benchmarks[arguments[0]].add_arguments(parser)
    _, unknown = parser.parse_known_args(arguments[1:])
    return f"the benchmark takes no {unknown}" if unknown else None


def problem_of_program(path: str) -> str | None:
    """Of `python PATH ...`."""
    if path in OWN_PROGRAMS:
        return None
    if not (ROOT / path).exists():
        return f"there is no {path}"
    files = [file for name in ("test_*.py", "conftest.py") for file in (ROOT / "tests").rglob(name)]
    named = any(Path(path).stem in file.read_text() for file in files)
    return None if named else f"no test runs {path}"


def problem_of_extras(requirement: str) -> str | None:
    """Of `pip install '.[EXTRA,...]'`."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    extras = settings["options.extras_require"]
    wrong = [extra for extra in re.findall(r"[\w-]+", requirement) if extra not in extras and extra != "hvlike"]
    return f"there are no extras {wrong}" if wrong else None
