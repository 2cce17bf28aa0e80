"""A killed worker ends what involves it on every survivor, in time and by name; the survivors go on.

A part of the campaign: PYTHONPATH=tests python -m support.lost_workers.
"""

import pytest
from support.job import IS_OPEN_MPI, WRAPPERS
from support.lost_workers.campaign import Loss, run

pytestmark = [
    pytest.mark.in_turn(2),
    pytest.mark.skipif(not IS_OPEN_MPI, reason="a flag of Open MPI's mpirun"),
    pytest.mark.timeout(150),
]


@pytest.mark.parametrize(
    "loss",
    [
        Loss(seed=2, ranks=3, victim=0, moment="as it sends", delay=0.3),
        Loss(seed=1, ranks=3, victim=1, moment="at work", delay=0.4),
        Loss(seed=0, ranks=3, victim=0, moment="in shutdown", delay=0.2),
        Loss(seed=0, ranks=2, victim=1, moment="in init_rpc", delay=0.2),
    ],
    ids=str,
)
def test_survivors_end_what_involves_the_lost_worker_and_begin_anew(loss: Loss) -> None:
    wrong = run(loss, 60).wrong
    assert not wrong, wrong


def test_a_wrapper_between_launcher_and_worker_hides_no_loss() -> None:
    wrong = run(Loss(seed=1, ranks=3, victim=1, moment="at work", delay=0.4), 60, WRAPPERS["a shell"]).wrong
    assert not wrong, wrong
