"""Names for operations without one: numbered by kind."""

from hvlike.collectives.controller.tensor_queue import AutomaticNames


def test_every_kind_counts_for_itself() -> None:
    names = AutomaticNames()
    kinds = ("allreduce", "allreduce", "barrier", "allreduce")
    assert [names.next(kind) for kind in kinds] == ["noname.0", "noname.1", "noname.0", "noname.2"]
    assert names.counts() == {"allreduce": 3, "barrier": 1}


def test_aligned_names_go_on_alike() -> None:
    one, other = AutomaticNames(), AutomaticNames()
    one.next("allreduce")
    other.next("barrier")
    for names in (one, other):
        names.align({"allreduce": 1, "barrier": 1})
    assert one.counts() == other.counts()
    assert one.next("allreduce") == other.next("allreduce") == "noname.1"


def test_counts_are_a_copy() -> None:
    names = AutomaticNames()
    names.counts()["allreduce"] = 7
    assert names.next("allreduce") == "noname.0"
