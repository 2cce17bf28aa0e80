"""A process set pickles as its ranks and comes back as the registered set of these ranks."""

import copy
import pickle
from types import ModuleType

from hvlike.collectives.requests.process_set import ProcessSet


def test_a_registered_set_comes_back_as_itself(hvd: ModuleType) -> None:
    assert pickle.loads(pickle.dumps(hvd.global_process_set)) is hvd.global_process_set
    assert copy.deepcopy(hvd.global_process_set) is hvd.global_process_set


def test_another_set_comes_back_with_its_ranks() -> None:
    restored = pickle.loads(pickle.dumps(ProcessSet([500, 400])))
    assert restored.ranks == [400, 500]
    assert restored.process_set_id is None
