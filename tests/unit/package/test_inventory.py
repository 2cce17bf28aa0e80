"""Every name that horovod.torch exports is there, says what it does, and stands in docs/api.md; nothing else does."""

import copy
import inspect
import pickle
import re
from pathlib import Path
from types import ModuleType

import pytest

import hvlike

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
ROWS = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", PAGE, flags=re.MULTILINE)
LISTED = [name for row in ROWS for name in re.findall(r"\w+", row)]


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


def test_the_page_lists_the_public_names_and_no_others() -> None:
    assert sorted(LISTED) == sorted(hvlike.__all__)


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


def test_the_readme_leads_to_the_page() -> None:
    assert "docs/api.md" in (ROOT / "README.md").read_text()


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
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", names, flags=re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"\w+", row)) == sorted(hvlike.rpc.__all__)
