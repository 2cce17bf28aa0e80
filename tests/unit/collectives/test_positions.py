"""How far a rank is in orders that go without the coordinator, and which of its waits end: a table, no messages."""

from hvlike.collectives.controller.positions import Positions
from hvlike.collectives.health.wait_for_graph import GROUP, STEP
from hvlike.collectives.requests.join_protocol import JoinFailure
from hvlike.collectives.requests.request import find_call_site
from hvlike.errors import DeadlockError, HorovodInternalError, JoinError

FAILURE = JoinFailure(JoinError("a member has left"), {"model": 3})


class Waits:
    """A rank that waits in some orders; what stops a wait is noted by its name and number."""

    def __init__(self) -> None:
        self.positions = Positions(lambda action: action())
        self.stopped: dict[tuple[str, int], HorovodInternalError] = {}

    def wait(self, name: str, number: int) -> None:
        stop = lambda error: self.stopped.setdefault((name, number), error)  # noqa: E731
        self.ended = self.positions.wait_begins(name, number, find_call_site(), ": 4 tensors", stop)


def test_a_member_that_has_left_ends_the_operations_that_it_has_not_begun() -> None:
    waits = Waits()
    waits.wait("model", 3)
    waits.wait("model", 4)
    waits.wait("other", 1)
    waits.positions.fail(FAILURE)
    assert waits.stopped == {("model", 4): FAILURE.error, ("other", 1): FAILURE.error}


def test_so_do_those_that_begin_later_until_it_takes_part_again() -> None:
    waits = Waits()
    waits.positions.fail(FAILURE)
    waits.wait("model", 3)
    waits.wait("model", 5)
    assert list(waits.stopped) == [("model", 5)]
    waits.positions.fail(None)
    waits.wait("model", 6)
    assert list(waits.stopped) == [("model", 5)]


def test_a_deadlock_ends_the_waits_in_its_order_alone() -> None:
    waits = Waits()
    waits.wait("model", 3)
    waits.wait("other", 3)
    waits.positions.stop(("allreduce", "model"), DeadlockError("of others"))
    assert not waits.stopped
    waits.positions.stop(("step", "model"), DeadlockError("of this one"))
    assert list(waits.stopped) == [("model", 3)]


def test_a_wait_that_is_over_is_neither_stopped_nor_shown() -> None:
    waits = Waits()
    waits.wait("model", 3)
    waits.ended()
    waits.wait("other", 1)
    ((key, shown),) = waits.positions.submissions(0.0)
    assert key == ("step", "other")
    assert shown.detail == ": 4 tensors"
    assert "test_positions.py" in shown.place
    waits.positions.close(HorovodInternalError("the end"))
    assert list(waits.stopped) == [("other", 1)]


class Groups:
    """The groups of torch.distributed of a rank."""

    def __init__(self) -> None:
        self.stopped: list[str] = []

    def made(self) -> dict[str, int]:
        return {"a": 3}

    def may_go_on(self) -> bool:
        return False

    def stop(self, name: str, error: HorovodInternalError) -> None:
        self.stopped.append(name)


def test_a_deadlock_in_a_group_ends_the_group_and_no_step_of_its_name() -> None:
    waits, groups = Waits(), Groups()
    waits.wait("a", 1)
    error = DeadlockError("no rank can go on")
    waits.positions.stop((GROUP, "a"), error)
    waits.positions.calls = groups
    waits.positions.stop((GROUP, "a"), error)
    waits.positions.stop((STEP, "b"), error)
    assert groups.stopped == ["a"]
    assert waits.stopped == {}
