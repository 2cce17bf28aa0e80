"""The control messages of larger jobs, counted in simulated ones."""

import pytest
from support.simulation.scale import measure


@pytest.mark.parametrize(("hosts", "ranks"), [(2, 2), (6, 3)])
def test_a_named_operation_takes_one_message_of_each_host_and_a_steady_step_none(hosts: int, ranks: int) -> None:
    phases = measure(hosts, ranks).phases
    # Two named operations: the ranks of the first host tell rank 0 themselves, and a rank speaks for each other host.
    assert phases["named operation"].got[0] == 2 * (ranks - 1 + hosts - 1)
    assert phases["steady steps"].total == 0
    assert phases["init"].most_sent <= 2 * ranks
    # The end takes one of each host, too, and tells each host once.
    assert phases["shutdown"].got[0] == ranks - 1 + hosts - 1
    assert phases["shutdown"].most_sent == ranks - 1 + hosts - 1
