"""Every exception that hvlike raises at its users is one of hvlike/errors.py; the few others have a reason."""

import ast
import builtins
import pickle
from pathlib import Path

import pytest

import hvlike
from hvlike import errors

PACKAGE = Path(hvlike.__file__).parent

REASONS = {
    "NotImplementedError": "a method that a user's class has to define",
    "AttributeError": "what Python asks of __getattr__",
    "StopIteration": "what Python asks of an iterator",
    "SystemExit": "the end of a program that is `python -m hvlike`",
}
INSIDE = {
    # Caught by our own code, which tells the user in its own words.
    ("training/elastic/checkpoint_files.py", "ValueError"),
    ("config.py", "ValueError"),
    ("observe/recorder.py", "OSError"),
    ("launch/attempt.py", "OSError"),
    ("cuda/nccl.py", "ImportError"),
    ("wire/devices.py", "RuntimeError"),
    ("memory/process_memory.py", "OSError"),
    ("system/semaphore.py", "OSError"),
    ("host/topology.py", "IndexError"),
    # What Python asks of an importer.
    ("horovod/importer.py", "ModuleNotFoundError"),
    # Horovod promises it.
    ("session/basics.py", "ImportError"),
}
# Programs of `python -m hvlike`, and code that other packages call by their own rules.
NOT_THE_LIBRARY = ("bench/", "doctor/", "integrations/")


def raised(tree: ast.AST) -> list[tuple[str, int]]:
    """Names and lines of the exceptions that are made where they are raised."""
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    calls = [each.func if isinstance(each, ast.Call) else each for each in calls]
    return [(each.id, each.lineno) for each in calls if isinstance(each, ast.Name)]


def test_builtin_exceptions_are_raised_for_a_reason_only() -> None:
    strange = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name.startswith(NOT_THE_LIBRARY):
            continue
        for exception, line in raised(ast.parse(path.read_text())):
            built_in = isinstance(getattr(builtins, exception, None), type) and exception not in REASONS
            if built_in and not any(name.endswith(file) and exception == inside for file, inside in INSIDE):
                strange.append(f"hvlike/{name}:{line}: {exception}")
    assert strange == []


def test_the_tree_is_drawn_with_every_class_in_its_place() -> None:
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]
    assert errors.__doc__ is not None
    lines = [line for line in errors.__doc__.splitlines() if "── " in line or line.strip() == "HvlikeError"]
    drawn = {line.split("(")[0].replace("│", " ").split("── ")[-1].split()[0]: line for line in lines}
    assert set(drawn) == {each.__name__ for each in classes}
    for each in classes:
        assert issubclass(each, errors.HvlikeError)
        assert each.__doc__
        others = [base.__name__ for base in each.__bases__ if not issubclass(base, errors.HvlikeError)]
        for other in others:
            if each is not errors.HvlikeError and other != "RuntimeError":
                assert other in drawn[each.__name__], each


@pytest.mark.parametrize("name", [name for name, each in vars(errors).items() if isinstance(each, type)])
def test_an_exception_pickles(name: str) -> None:
    error = getattr(errors, name)("text") if name != "HostsUpdatedInterrupt" else errors.HostsUpdatedInterrupt(True)
    assert pickle.loads(pickle.dumps(error)).args == error.args
