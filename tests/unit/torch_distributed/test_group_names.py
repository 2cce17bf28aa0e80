"""The names under which the members of a group meet are the same on all of them, and never used twice."""

from hvlike.torch_distributed.groups import GroupNames


def test_members_that_know_different_numbers_of_groups_meet() -> None:
    one, other = GroupNames(), GroupNames()
    one.unique("a" * 40, [0, 2], default=False)
    first = one.unique("b" * 40, [0, 1], default=False)
    assert other.unique("c" * 40, [0, 1], default=False) == first
    assert one.unique("d" * 40, [0, 1], default=False) != first


def test_a_name_of_torch_that_comes_again_after_a_destroy_is_another_one() -> None:
    names = GroupNames()
    assert names.unique("0", [0, 1], default=True) != names.unique("0", [0, 1], default=True)
