"""All that is public: with Horovod's names; it says what it is and takes, stands in docs/api.md, and is not traced."""

from __future__ import annotations

import ast
import copy
import enum
import importlib
import inspect
import pickle
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

import hvlike
from hvlike.untraced import REASON, is_untraced

MODULES = ["", ".rpc", ".autograd", ".nn", ".optim", ".join", ".elastic", ".checkpoint"]

# Read, not imported: the libraries that they are for take seconds.
INTEGRATIONS = {
    "torch_distributed": ["init_process_group"],
    "distributed_checkpoint": ["save", "load"],
    "lightning": ["HvlikeStrategy", "HorovodStrategy"],
    "huggingface": ["init", "HvlikeTrainer", "DataParallelTrainer", "HvlikeAccelerator"],
}
ENTRY = re.compile(r"^ {4}\*{0,2}(\w+)(?: \([^)]*\))?: ", flags=re.MULTILINE)
NOTHING = (None, "None", inspect.Signature.empty, type(None), "NoReturn", "Never")
PACKAGE = Path(hvlike.__file__).parent


@dataclass(frozen=True)
class Public:
    """A public function, or a class with what its constructor takes."""

    name: str
    text: str
    parameters: tuple[str, ...]
    returns: bool


def section(text: str, name: str) -> str | None:
    """The lines below `Args:` or another heading; None: there is no such heading."""
    found = re.search(rf"^{name}:[ ]?(.*(?:\n(?: {{4}}.*)?)*)", text, flags=re.MULTILINE)
    return found[1] if found else None


def problems(thing: Public) -> list[str]:
    """What its docstring lacks."""
    if not thing.text:
        return ["has no docstring"]
    described = set(ENTRY.findall(section(thing.text, "Args") or ""))
    wrong = [f"does not describe {name}" for name in thing.parameters if name not in described]
    described = {name for name in described if not name.startswith("_")}
    wrong += [f"describes {name}, which it does not take" for name in sorted(described - set(thing.parameters))]
    # Without parameters the first line can say it.
    if thing.returns and thing.parameters and section(thing.text, "Returns") is None:
        wrong.append("does not say what it returns")
    return wrong


def of_callable(name: str, function: Any, *, method: bool = False) -> Public:
    """What to check of a function or method."""
    signature = inspect.signature(function)
    parameters = [each for each in signature.parameters if not each.startswith("_")][method:]
    if inspect.isgeneratorfunction(inspect.unwrap(function)):
        returns = False
    else:
        returns = signature.return_annotation not in NOTHING
    return Public(name, inspect.getdoc(function) or "", tuple(parameters), returns)


def of_class(name: str, kind: type) -> Iterator[Public]:
    """A class with its constructor, and its public methods that are written in hvlike."""
    init = vars(kind).get("__init__")
    text = (kind.__doc__ and inspect.getdoc(kind)) or ""
    parameters: tuple[str, ...] = ()
    if "Args:" in text:
        # Also that of a dataclass or a named tuple, which nobody has to describe.
        parameters = tuple(each for each in inspect.signature(kind).parameters if not each.startswith("_"))
    elif inspect.isfunction(init) and init.__code__.co_filename != "<string>" and not issubclass(kind, BaseException):
        text += "\n\n" + (inspect.getdoc(init) or "" if init.__doc__ else "")
        parameters = tuple(each for each in inspect.signature(init).parameters if not each.startswith("_"))[1:]
    yield Public(name, text.strip(), parameters, returns=False)
    for attribute, value in vars(kind).items():
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if attribute.startswith("_") or not inspect.isfunction(function) or "<locals>" in function.__qualname__:
            continue
        yield of_callable(f"{name}.{attribute}", function, method=not isinstance(value, staticmethod))


def of_modules() -> Iterator[Public]:
    """What hvlike and its public modules export and define."""
    for suffix in MODULES:
        module = importlib.import_module(f"hvlike{suffix}")
        for name in module.__all__:
            thing = getattr(module, name)
            home = (getattr(thing, "__module__", None) or "").split(".")
            if home[0] != "hvlike" or name.startswith("__"):
                continue
            shown = f"hvlike{suffix}.{name}"
            if name == "Compression":
                things = {key: value for key, value in vars(thing).items() if inspect.isclass(value)}
                yield from (next(of_class(f"{shown}.{key}", value)) for key, value in things.items())
            elif inspect.isclass(thing):
                yield from of_class(shown, thing)
            elif inspect.isroutine(thing):
                yield of_callable(shown, thing)


Nodes = dict[str, Any]


def of_source(name: str, node: ast.FunctionDef | ast.ClassDef, bases: Nodes) -> Iterator[Public]:
    """What to check of a function or class that is only read. bases: other classes, of which it may be one."""
    text = ast.get_docstring(node) or ""
    if isinstance(node, ast.FunctionDef):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        names = tuple(each.arg for each in arguments if each is not None and each.arg not in ("self", "cls"))
        returns = node.returns is not None and ast.unparse(node.returns) not in NOTHING
        yield Public(name, text, names, returns)
        return
    kinds = [node, *(bases[each.id] for each in node.bases if isinstance(each, ast.Name) and each.id in bases)]
    methods = [each for kind in reversed(kinds) for each in kind.body if isinstance(each, ast.FunctionDef)]
    own = [next(of_source(name, each, bases)) for each in methods if each.name == "__init__"][-1:]
    text = "\n\n".join([text, *(each.text for each in own)]).strip()
    yield Public(name, text, own[0].parameters if own else (), returns=False)
    for each in methods:
        if not each.name.startswith("_") and not each.decorator_list:
            yield from of_source(f"{name}.{each.name}", each, bases)


def of_integrations() -> Iterator[Public]:
    """What docs/reference/modules.md lists of hvlike.integrations."""
    for module, names in INTEGRATIONS.items():
        place = PACKAGE / "integrations" / module
        files = sorted(place.glob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
        nodes = definitions(files)
        bases = definitions(sorted(place.parent.glob(f"{module}_*.py")))
        for name in names:
            yield from of_source(f"hvlike.integrations.{module}.{name}", nodes[name], bases)


def definitions(files: Iterable[Path]) -> Nodes:
    """Functions and classes of some files, by name."""
    return {node.name: node for file in files for node in ast.parse(file.read_text()).body if hasattr(node, "name")}


PUBLIC = {thing.name: thing for thing in [*of_modules(), *of_integrations()]}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_parameters_and_results_are_described(name: str) -> None:
    assert not problems(PUBLIC[name])


def test_the_check_finds_what_is_missing() -> None:
    text = "Do it.\n\nArgs:\n    tensor: Any shape.\n    gone: Nobody knows.\n\nRaises:\n    UsageError: Never."
    assert problems(Public("do", text, ("tensor", "name"), True)) == [
        "does not describe name",
        "describes gone, which it does not take",
        "does not say what it returns",
    ]
    text = "Do it.\n\nArgs:\n    tensor: Any shape,\n        any strides.\n    name (str): Its.\n\nReturns:\n    It."
    assert not problems(Public("do", text, ("tensor", "name"), True))


TRACED_MODULES = ["names", "join", "nn", "optim", "elastic", "checkpoint", "rpc", "autograd"]
STARTING = {"horovod", "run"}  # What starts jobs
TRACED_INTEGRATIONS = ["huggingface", "lightning", "pytorch_lightning"]

# A module's forward is compiled with what it calls; what asks for the place of a rank is a constant of a graph.
TRACED = {
    "DistributedDataParallel.forward",
    "SyncBatchNorm.forward",
    *("ProcessSet.size", "ProcessSet.rank", "ProcessSet.included"),
    *("is_initialized", "is_homogeneous", "size", "rank", "local_size", "local_rank", "cross_size", "cross_rank"),
}


def functions_of(member: Any) -> Iterator[FunctionType]:
    if isinstance(member, FunctionType):
        yield member
    elif isinstance(member, staticmethod | classmethod):
        yield member.__func__
    elif isinstance(member, property):
        yield from (each for each in (member.fget, member.fset, member.fdel) if each is not None)


def is_ours(target: Any) -> bool:
    return str(getattr(target, "__module__", "")).startswith("hvlike")


def public_functions(module: Any) -> Iterator[FunctionType]:
    for name in module.__all__:
        target = getattr(module, name)
        if isinstance(target, FunctionType) and is_ours(target):
            yield target
        elif isinstance(target, type) and not issubclass(target, BaseException | enum.Enum):
            for kind in filter(is_ours, target.__mro__):
                for key, member in vars(kind).items():
                    if not key.startswith("_") or key.startswith("__"):
                        yield from functions_of(member)


def test_all_public_modules_are_listed() -> None:
    paths = [*PACKAGE.glob("*.py"), *PACKAGE.glob("*/__init__.py")]
    named = [path for path in paths if "\n__all__ = " in path.read_text()]
    assert {path.parent.name if path.stem == "__init__" else path.stem for path in named} - STARTING == set(
        TRACED_MODULES
    )


@pytest.mark.parametrize("name", [*TRACED_MODULES, *(f"integrations.{each}" for each in TRACED_INTEGRATIONS)])
def test_public_functions(name: str) -> None:
    if name.startswith("integrations"):
        pytest.importorskip({"huggingface": "transformers"}.get(name.partition(".")[2], "lightning"))
    module: Any = importlib.import_module("hvlike.names" if name == "names" else f"hvlike.{name}")
    found = list(public_functions(hvlike if name == "names" else module))
    assert found
    marked = [each for each in found if getattr(each, "_torchdynamo_disable", False)]
    assert {each.__qualname__ for each in found if each not in marked} <= TRACED | STARTING
    assert all(vars(each)["_torchdynamo_disable_msg"] == REASON for each in marked)
    assert all(is_untraced(each.__code__) for each in marked if each.__code__.co_filename.startswith(str(PACKAGE)))


HOROVOD = re.findall(
    r"\w+",
    """
    elastic Compression allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters
    allreduce allreduce_async allreduce_ allreduce_async_
    grouped_allreduce grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_
    sparse_allreduce_async allgather allgather_async grouped_allgather grouped_allgather_async
    broadcast broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async
    reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async
    join barrier poll synchronize init shutdown is_initialized start_timeline stop_timeline
    size local_size cross_size rank local_rank cross_rank mpi_threads_supported mpi_enabled mpi_built
    gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built
    ProcessSet global_process_set add_process_set remove_process_set Average Sum Adasum Min Max Product
    HorovodInternalError DistributedOptimizer SyncBatchNorm _check_has_gpu
""",
)
BLOCKING = [
    "allreduce",
    "allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
    "barrier",
    "join",
    "synchronize",
    "init",
]
ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "api.md").read_text()


def listed(text: str) -> list[str]:
    """The names in the first columns of tables, sorted."""
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text, flags=re.MULTILINE)
    return sorted(name for row in rows for name in re.findall(r"\w+", row))


@pytest.mark.parametrize("name", HOROVOD)
def test_every_name_of_horovod_is_there(name: str) -> None:
    assert hasattr(hvlike, name)
    assert name in hvlike.__all__


@pytest.mark.parametrize("name", sorted(set(hvlike.__all__) - {"__version__"}))
def test_every_name_says_what_it_is(name: str) -> None:
    thing = getattr(hvlike, name)
    text = inspect.getdoc(thing) or ""
    first = text.partition("\n")[0]
    assert len(first.split()) >= 4, f"{name}: {first!r}"
    if inspect.isfunction(thing) and inspect.signature(thing).return_annotation not in (None, "None"):
        assert re.search(r"[Rr]eturn|^True|^False|Say whether|`allreduce`|`broadcast`", text), (
            f"{name} returns something"
        )


@pytest.mark.parametrize("name", BLOCKING)
def test_collectives_say_who_calls_blocks_and_raises(name: str) -> None:
    text = inspect.getdoc(getattr(hvlike, name)) or ""
    assert re.search(r"[Bb]lock", text)
    assert "Raises:" in text or name == "barrier"


def test_the_page_lists_the_public_names_and_no_others_and_the_readme_leads_there() -> None:
    assert listed(PAGE) == sorted(hvlike.__all__)
    assert "docs/api.md" in (ROOT / "README.md").read_text()


def test_each_of_its_tables_is_on_one_page_of_the_reference() -> None:
    pages = [page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md")]
    headings = [
        heading for page in pages for line in re.findall(r":headings: (.+)", page) for heading in line.split(", ")
    ]
    assert sorted(headings) == sorted(re.findall(r"^## (.+)", PAGE, flags=re.MULTILINE))


def test_what_the_page_names_inside_modules_exists() -> None:
    elastic: ModuleType = hvlike.elastic
    for name in ("run", "TorchState", "ObjectState", "State", "ElasticSampler"):
        assert f"`{name}`" in PAGE
        assert inspect.getdoc(getattr(elastic, name))
    for name in ("none", "fp16", "bf16"):
        assert hasattr(hvlike.Compression, name)


def test_each_reduction_says_what_it_does() -> None:
    ops = [hvlike.Average, hvlike.Sum, hvlike.Adasum, hvlike.Min, hvlike.Max, hvlike.Product]
    assert len({inspect.getdoc(op) for op in ops}) == len(ops)
    for op in ops:
        assert type(op)(int(op)) is op
        assert pickle.loads(pickle.dumps(op)) is op
        assert copy.deepcopy(op) is op


@pytest.mark.parametrize(("module", "words"), [(hvlike.autograd, "Raises:"), (hvlike.rpc, "")], ids=["autograd", "rpc"])
def test_each_name_of_a_module_stands_on_its_page_and_says_what_it_is(module: ModuleType, words: str) -> None:
    page = (ROOT / "docs" / f"{module.__name__.partition('.')[2]}.md").read_text()
    for name in module.__all__:
        assert re.search(rf"`{name}`|`{name}\(|`with {name}\(", page), name
        text = inspect.getdoc(getattr(module, name)) or ""
        assert len(text.partition("\n")[0].split()) >= 3, f"{name}: {text[:100]!r}"
        assert words in text, name


def test_the_page_of_rpc_lists_no_other_names() -> None:
    names = (ROOT / "docs" / "rpc.md").read_text().partition("## Names")[2].partition("\n## ")[0]
    assert listed(names) == sorted(hvlike.rpc.__all__)
