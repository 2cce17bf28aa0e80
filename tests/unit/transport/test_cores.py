"""Cores per rank decide who may spin and whether the background thread works beside the main thread."""

import pytest

from hvlike.transport.host.topology import (
    any_crowded,
    any_machine_crowded,
    cores_on_machine,
    cores_per_rank,
    has_spare_core,
    is_crowded,
    machine_id,
)


@pytest.mark.parametrize(
    ("affinities", "cores"),
    [
        ([{0}, {1}], 1.0),
        ([{0, 1}, {0, 1}], 1.0),
        ([{0, 1}] * 4, 0.5),
        ([{0, 1, 2, 3, 4, 5, 6, 7}] * 2, 4.0),
        ([{0}], 1.0),
        ([{0, 1}, {1}], 1.5),
    ],
)
def test_a_core_counts_for_all_ranks_that_may_run_on_it(affinities: list[set[int]], cores: float) -> None:
    assert cores_per_rank([frozenset(each) for each in affinities], 0) == pytest.approx(cores)


@pytest.mark.parametrize(("cores", "crowded", "spare"), [(0.5, True, False), (1.0, False, False), (2.0, False, True)])
def test_what_follows_for_waiting(cores: float, crowded: bool, spare: bool) -> None:
    assert is_crowded(cores) is crowded
    assert has_spare_core(cores) is spare


@pytest.mark.parametrize(
    ("affinities", "crowded"), [([{0}, {1}], False), ([{0}, {0}, {1, 2}], True), ([{0, 1}, {0, 1}, {0, 1}], True)]
)
def test_all_ranks_of_a_node_see_whether_one_of_them_is_crowded(affinities: list[set[int]], crowded: bool) -> None:
    assert any_crowded([frozenset(each) for each in affinities]) is crowded


@pytest.mark.parametrize(
    ("machines", "cores"), [(["a", "b", "c"], 2.0), (["a", "a", "b"], 1.0), (["a", "a", "a"], pytest.approx(2 / 3))]
)
def test_ranks_in_containers_of_one_machine_share_its_cores(machines: list[str], cores: float) -> None:
    assert cores_on_machine([(each, frozenset({0, 1})) for each in machines], 0) == cores


@pytest.mark.parametrize(("machines", "crowded"), [(["a", "b", "a", "b"], False), (["a", "b", "a", "a"], True)])
def test_all_ranks_of_a_job_see_whether_one_of_them_is_crowded(machines: list[str], crowded: bool) -> None:
    assert any_machine_crowded([(each, frozenset({0, 1})) for each in machines]) is crowded


def test_a_machine_has_one_number_for_all_its_processes() -> None:
    assert machine_id() == machine_id() != ""
