"""Rules of the source: imports point downward, names of others stay private, tests of ranks import seams alone."""

import ast
import builtins
import functools
import pickle
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from hvlike import errors
from hvlike.version import page

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "hvlike"


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


MEASURING = ("bench", "doctor")
"""These run alone, not within a program."""

MAKERS = {
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "sparse_compressed_tensor",
    "sparse_coo_tensor",
    "tensor",
    "zeros",
}
"""The functions of torch that heed the default device."""


def calls_without_device(tree: ast.AST) -> Iterator[int]:
    """The lines on which a tensor is made without a word on its device."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in MAKERS
            and all(keyword.arg != "device" for keyword in node.keywords)
        ):
            yield node.lineno


def test_no_tensor_is_made_on_the_default_device() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in MEASURING
        for line in calls_without_device(parsed(path))
    ]
    assert not found, f"add device= (of the tensors at hand, or 'cpu'): {', '.join(found)}"


def test_a_forgotten_device_is_seen() -> None:
    text = "x = torch.zeros(3)\ny = torch.zeros(3, device='cpu')\nz = torch.relu(y)"
    assert list(calls_without_device(ast.parse(text))) == [1]


def files() -> dict[str, Path]:
    """The files of the folders, by module. Those in hvlike/ itself only pass public names on."""
    paths = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE and path.name != "__init__.py"]
    return {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in paths}


def imports(nodes: list[ast.stmt]) -> Iterator[str]:
    """What a file imports when it is imported itself."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{each.name}" for each in node.names))
        elif isinstance(node, ast.ClassDef | ast.Try | ast.With):
            yield from imports(node.body)
        elif isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            yield from imports([*node.body, *node.orelse])


def test_there_is_no_circle() -> None:
    paths = files()
    among_files = {name: set(imports(parsed(path).body)) & paths.keys() for name, path in paths.items()}
    assert len(among_files) > 100
    assert sum(map(len, among_files.values())) > 500
    among_folders: dict[Path, set[Path]] = {}
    for name, imported in among_files.items():
        others = {paths[each].parent for each in imported} - {paths[name].parent}
        among_folders.setdefault(paths[name].parent, set()).update(others)
    # Each raises CycleError, which names the circle.
    TopologicalSorter(among_files).prepare()
    TopologicalSorter(among_folders).prepare()


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
        for exception, line in raised(parsed(path)):
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


TESTS = ROOT / "tests"

# Of namedtuples and of torch, and what torch has made public with an underscore and hvlike offers under the same name.
NOT_OURS = {
    "_replace",
    "_asdict",
    "_fields",
    "_nnz",
    "_version",
    "_indices",
    "_values",
    "_base",
    "_is_view",
    "_schema",
    "_set_generator_metaclass",
}
OF_TORCH = {
    "_OptimizerHookState",
    "_all_gather",
    "_allgather_base",
    "_barrier",
    "_check_has_gpu",
    "_coalescing_manager",
    "_ddp_params_and_buffers_to_ignore",
    "_device_types",
    "_flatten",
    "_get_backend",
    "_get_ddp_logging_data",
    "_get_debug_info",
    "_get_future",
    "_get_sequence_number_for_group",
    "_get_type",
    "_hook_then_optimizer",
    "_is_current_rpc_agent_set",
    "_join_config",
    "_make_nccl_premul_sum",
    "_reduce_scatter_base",
    "_register_builtin_comm_hook",
    "_reset_state",
    "_set_leak_checking",
    "_set_params_and_buffers_to_ignore_for_model",
    "_set_pg_timeout",
    "_set_rpc_timeout",
    "_set_static_graph",
    "_set_thread_isolation_mode",
    "_source_rank",
    "_world",
}
OF_HOROVOD = {"_handles", "_parameter_names", "_requires_update", "_should_synchronize"}

# Where a test replaces or watches a part of the machine from outside: each is to be made a seam, none to be added.
STILL = {
    ("ranks/backends/cuda/conftest.py", "_advance"),
}
STANDARD = ("os", "sys", "torch")


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and names of private attributes of others, and of private names that are imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hvlike"):
            yield from ((node.lineno, each.name) for each in node.names if each.name.startswith("_"))
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
            continue
        text = ast.unparse(node.value)
        own = text in ("self", "cls", "super()")
        if not own and text.split(".")[0] not in STANDARD:
            yield node.lineno, node.attr


@pytest.mark.parametrize("folder", ["gpu", "jobs", "ranks", "support", "unit"])
def test_nothing_reaches_into_private_attributes(folder: str) -> None:
    found = []
    for path in sorted((TESTS / folder).rglob("*.py")):
        file = str(path.relative_to(TESTS))
        for line, name in private_names(parsed(path)):
            if name not in NOT_OURS | OF_TORCH | OF_HOROVOD and (file, name) not in STILL:
                found.append(f"tests/{file}:{line}: {name}")
    assert found == []


def test_what_is_still_allowed_is_still_needed() -> None:
    found = {(file, name) for file, _ in STILL for _, name in private_names(parsed(TESTS / file))}
    assert STILL - found == set()


def test_private_names_are_found() -> None:
    text = "import os\nfrom hvlike.x import _y\nself._a = hvd._b._c\nos._exit(1)\nz.__dict__"
    assert sorted(private_names(ast.parse(text))) == [(2, "_y"), (3, "_b"), (3, "_c")]


# What a program may import: modules of public names, RPC and distributed autograd, integrations and commands.
PUBLIC = re.compile(r"(?!config|untraced)\w+|rpc/(functions|remote_module)|(integrations|doctor)/\w+")


def listed() -> set[str]:
    """The seams: files without `.py`, and folders."""
    _, _, below = (ROOT / "docs" / "CONTRIBUTING.md").read_text().partition("\n| seam |")
    rows = below.partition("\n\n")[0].splitlines()[2:]
    return {each for row in rows for each in re.findall(r"`([\w/]+)`", row.split("|")[1])}


def imported(tree: ast.AST) -> Iterator[str]:
    """The files of hvlike that are imported there, like `nn` and `transport/world`; nothing for `import hvlike`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            # What is imported of a folder is a file, or a name of its __init__.py.
            names = [f"{node.module}.{each.name}" for each in node.names]
        else:
            continue
        for name in names:
            first, *parts = name.split(".")
            while first == "hvlike" and parts and not is_module("/".join(parts)):
                parts.pop()
            if first == "hvlike" and parts:
                yield "/".join(parts)


def is_module(place: str) -> bool:
    path = ROOT / "hvlike" / place
    return path.with_suffix(".py").is_file() or path.is_dir()


def seams_of(place: str, seams: set[str]) -> set[str]:
    """The seams that a file belongs to."""
    return {each for each in seams if place == each or place.startswith(f"{each}/")}


def test_tests_of_ranks_import_nothing_else() -> None:
    seams = listed()
    strange, used = set(), set()
    for path in (ROOT / "tests" / "ranks").rglob("*.py"):
        for place in imported(parsed(path)):
            found = seams_of(place, seams)
            used |= found
            if not found and not PUBLIC.fullmatch(place):
                strange.add(f"{path.relative_to(ROOT)}: hvlike/{place}")
    assert not strange, "neither public nor a seam"
    assert seams == used, "nothing uses these seams"


def test_each_seam_is_there() -> None:
    seams = listed()
    assert len(seams) > 20
    assert [each for each in seams if not is_module(each)] == []


def test_what_is_imported_is_found() -> None:
    text = "import hvlike\nfrom hvlike import nn, Sum\ndef f():\n    from hvlike.transport import world\nimport os.path"
    text += "\nfrom hvlike.transport.loop.loop import Loop\nfrom hvlike.rpc import rpc_sync\nimport hvlike.rpc"
    assert list(imported(ast.parse(text))) == ["nn", "transport/loop/loop", "rpc", "rpc", "transport/world"]
