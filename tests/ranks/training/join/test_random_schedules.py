"""Random numbers of inputs, joinables, failures and early ends: nothing hangs, and all ranks end equal."""

from types import ModuleType

from support.training.schedules import run_schedules


def test_random_schedules(hvd: ModuleType) -> None:
    """A few of those that `mpirun -n 4 python schedules.py SEED COUNT` runs by the thousand."""
    ends = run_schedules(hvd, seed=4, count=14)
    assert sum(ends.values()) == 14
    assert hvd.size() == 1 or set(ends) == {"joined", "thrown", "failed"}
