"""A step's time is parted exactly: compute, wait for other ranks, wait for the reduction; nothing is counted twice."""

from pathlib import Path

import pytest
from support.observe.timelines import LANE, bucket, traces, wait

from hvlike.observe.timelines import Parts, calls, common, length, operations, rank_traces, trainings, union


def test_intervals_are_joined_and_cut() -> None:
    joined = union([(5, 6), (0, 2), (1, 3), (3, 4), (5.5, 5.6)])
    assert joined == [(0, 4), (5, 6)]
    assert common(joined, [(1, 5.25), (5.75, 9)]) == [(1, 4), (5, 5.25), (5.75, 6)]
    assert common(joined, []) == []
    assert length(joined) == 5


def test_the_parts_of_a_step(tmp_path: Path) -> None:
    #          0    10         30  33    40 ms
    #  rank 0  |wait| compute     |w       |   here at 30, others come at 33
    #  rank 1       | compute          |w  |   here at 33
    first = [wait(0, 0, 10), wait(1, 30, 40), bucket(25, 40)]
    second = [wait(0, 5, 10), wait(1, 33, 40), bucket(33, 40)]
    (training,) = trainings(traces(tmp_path, first, second))
    assert training.name == "one"
    one, other = training.ranks
    # The bucket of rank 0 began 5 ms before it waited.
    assert one.steps == {(0, 1): pytest.approx(Parts(30, 20, 3, 7, 5))}
    assert other.steps == {(0, 1): pytest.approx(Parts(30, 23, 0, 7, 0))}
    assert (one.host, other.host) == ("host0", "host1")
    assert training.last_to_come == {1: 1}


def test_parts_add_up_to_the_step_and_means_to_the_mean(tmp_path: Path) -> None:
    phases = [[wait(step, 10 * step + rank, 10 * step + 4) for step in range(6)] for rank in range(3)]
    (training,) = trainings(traces(tmp_path, *phases))
    for each in training.ranks:
        assert len(each.steps) == 5
        for parts in [*each.steps.values(), each.mean]:
            assert parts.compute + parts.others + parts.reduction == pytest.approx(parts.step)
        assert each.mean == pytest.approx(Parts(10, 6 + each.rank, 2 - each.rank, 2, 0))
    assert training.last_to_come == {2: 5}


def test_waits_of_other_rows_are_no_compute(tmp_path: Path) -> None:
    # ZeRO, say, waits for gradients and then for parameters.
    phases = [wait(0, 0, 1), wait(1, 10, 14), wait(1, 6, 8, row="step of two")]
    found = trainings(traces(tmp_path, phases))
    assert [each.name for each in found] == ["one"]  # of the other one wait is no step
    assert found[0].ranks[0].steps[0, 1] == pytest.approx(Parts(13, 7, 0, 6, 0))


def test_numbers_that_begin_anew_are_other_steps(tmp_path: Path) -> None:
    phases = [wait(step, at, at + 1) for at, step in ((0, 0), (10, 1), (20, 0), (30, 1))]
    (training,) = trainings(traces(tmp_path, phases))
    assert sorted(training.ranks[0].steps) == [(0, 1), (1, 0), (1, 1)]


def test_one_rank_alone_waits_for_nobody_that_is_known(tmp_path: Path) -> None:
    (training,) = trainings(traces(tmp_path, [wait(0, 0, 1), wait(1, 5, 9)]))
    assert training.ranks[0].steps[0, 1] == pytest.approx(Parts(8, 4, 0, 4, 0))
    assert not training.last_to_come


def test_steps_of_two_process_sets_are_two_trainings(tmp_path: Path) -> None:
    def of(number: int) -> list[tuple[str, str, float, float, dict[str, int]]]:
        return [("step of one", "WAIT", at, at + 1, {"step": at, "process_set": number}) for at in (0, 5)]

    found = trainings(traces(tmp_path, of(1), of(2)))
    assert sorted((each.process_set, len(each.ranks)) for each in found) == [(1, 1), (2, 1)]


def test_what_did_not_end_is_left_out() -> None:
    begun = {"ph": "B", "pid": 0, "tid": 1, "ts": 5.0, "name": "WAIT", "args": {"step": 0}}
    trace = {"otherData": {"rank": 0}, "traceEvents": [{"ph": "E", "pid": 0, "tid": 1, "ts": 1.0}, begun]}
    assert rank_traces([trace])[0].rows == {}


def test_named_operations_and_calls_by_kind(tmp_path: Path) -> None:
    row = "allreduce.loss"
    phases = [
        (row, "NEGOTIATE_ALLREDUCE", 0.0, 4.0, {"bytes": 400}),
        (row, "QUEUE", 4.0, 5.0, {}),
        (row, "ALLREDUCE", 5.0, 7.0, {"fused": 1}),
        (LANE, "ALLREDUCE", 5.0, 7.0, {"bytes": 400}),
        ("rpc calls 1", "f", 0.0, 8.0, {"function": "f"}),
        ("rpc serves 1", "RUN", 1.0, 2.0, {"function": "g"}),
    ]
    (found,) = operations(traces(tmp_path, phases, phases))
    assert (found.kind, found.count, found.bytes) == ("allreduce", 2, 800)
    assert (found.agreement, found.queue, found.execution, found.longest_agreement) == (4.0, 1.0, 2.0, 4.0)
    (called, served) = calls(traces(tmp_path, phases))
    assert (called.what, called.function, called.count, called.mean, called.longest) == ("call", "f", 1, 8.0, 8.0)
    assert (served.what, served.function, served.mean) == ("run", "g", 1.0)
