"""Every collective of torch.distributed does what its definition says: a model of all of them, as of hvlike's own.

hypothesis draws the same on every rank: kinds, operations, shapes, layouts, groups; see collectives/api/test_model.py.
"""

import traceback
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.collectives.inputs import SHAPES, chunk_shapes
from support.pretended_nodes import WAYS, going
from support.torch_distributed.backend import BACKEND, World, start
from support.torch_distributed.operations import DTYPES, FORMS, MOVING, REDUCING, Call, Members, ops_of

OF_GROUPS = ("shared",) if BACKEND == "gloo" else ("shared", "packets", "waves")


def make(ranks: list[int], world: World) -> Members | None:
    """Make a group; None on other ranks."""
    group = dist.new_group(ranks)
    return Members(group, tuple(ranks), ranks.index(world.rank)) if world.rank in ranks else None


@pytest.fixture(scope="module")
def groups(request: pytest.FixtureRequest) -> Iterator[list[Members | None]]:
    """All ranks, and some of them, where torch.distributed was started anew on so many pretended nodes."""

    def started() -> Iterator[list[Members | None]]:
        start()
        world = World(dist.get_rank(), dist.get_world_size(), 0)
        everybody = Members(dist.group.WORLD, tuple(range(world.size)), world.rank)
        yield [
            everybody,
            everybody,
            make(list(range(1, world.size)) or [0], world),
            make([0, world.size - 1][: world.size], world),
        ]
        dist.destroy_process_group()

    if BACKEND == "gloo":
        yield from started()
        return
    hvd = request.getfixturevalue("hvd")
    if hvd.size() <= (WAYS[request.param].ranks_per_node or 0):
        pytest.skip("all ranks would be on one node")
    with going(hvd, WAYS[request.param]):
        yield from started()


@st.composite
def calls(draw: st.DrawFn, dtype: torch.dtype) -> Call:
    ops = ops_of(dtype)
    shapes = SHAPES * 3 if BACKEND != "gloo" else tuple(shape for shape in SHAPES if shape and 0 not in shape)
    return Call(
        draw(st.sampled_from(REDUCING + MOVING if ops else MOVING)),
        draw(st.sampled_from(ops or ("SUM",))),
        dtype,
        draw(st.sampled_from([*shapes, *chunk_shapes(dtype)[:3]])),
        draw(st.integers(0, len(FORMS) - 1)),
        draw(st.booleans()),
        draw(st.booleans()) and BACKEND != "gloo",
        draw(st.booleans()),
        draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("groups", OF_GROUPS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@settings(max_examples=2, phases=[Phase.generate], report_multiple_bugs=False)
@given(data=st.data())
def test_programs(groups: list[Members | None], dtype: torch.dtype, data: st.DataObject) -> None:
    """What is asynchronous is waited for after all have begun."""
    program = data.draw(st.lists(st.tuples(calls(dtype), st.integers(0, 3)), min_size=2, max_size=8))
    failure = ""
    try:
        begun = [(call, call.run(groups[number])) for call, number in program if groups[number] is not None]
        for call, done in begun:
            call.check(done)
    except Exception:
        failure = f"rank {dist.get_rank()}: {traceback.format_exc()}"
    # All fail in the same way or none: what comes next must be the same on every rank.
    failures = [""] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    assert not any(failures), "".join(failures)
