"""A loss of ranks that has not happened: the running ranks have what the survivors of a larger job would have."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from hvlike.training.elastic.copies import flatten_state
from hvlike.training.elastic.local_state import Commit, LocalState, LocalStates

COMMIT = 7


def after_loss(hvd: ModuleType, states: Mapping[int, dict[str, Any]], lost: Sequence[int]) -> LocalStates:
    """What this rank has of a commit of as many ranks as there are states, of which `lost` have ended.

    As many must be left as there are ranks.
    """
    ranks = len(states)
    survivors = [each for each in range(ranks) if each not in lost]
    assert len(survivors) == hvd.size()
    own = survivors[hvd.rank()]
    held = LocalStates("part")
    numbers = dict.fromkeys((own, (own - 1) % ranks))
    held.commits[COMMIT, 0] = Commit(ranks, {each: flatten_state(states[each]) for each in numbers})
    return held


def give_back(held: LocalStates, number: int, part: LocalState) -> None:
    """Load what the ranks have of a commit into a part; all of it is there."""
    found = held.find(number)
    assert not found.lost
    held.give_back(found, part)
