"""Tests reach into hvlike through public names: no `x._y`, no import of a name that begins with an underscore."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]

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
        for line, name in private_names(ast.parse(path.read_text())):
            if name not in NOT_OURS | OF_TORCH | OF_HOROVOD and (file, name) not in STILL:
                found.append(f"tests/{file}:{line}: {name}")
    assert found == []


def test_what_is_still_allowed_is_still_needed() -> None:
    found = {(file, name) for file, _ in STILL for _, name in private_names(ast.parse((TESTS / file).read_text()))}
    assert STILL - found == set()


def test_private_names_are_found() -> None:
    text = "import os\nfrom hvlike.x import _y\nself._a = hvd._b._c\nos._exit(1)\nz.__dict__"
    assert sorted(private_names(ast.parse(text))) == [(2, "_y"), (3, "_b"), (3, "_c")]
