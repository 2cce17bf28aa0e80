"""elastic.run when processes are lost under `mpirun --with-ft ulfm`. The campaign of support.kills does more of it."""

import os
import re
import sys
from pathlib import Path

import pytest
from support.job import IS_OPEN_MPI, LAUNCHER, OPEN_MPI_FLAGS, WRAPPERS, RunningJob, job_environment, run_job
from support.kills.campaign import FLAGS, run_once
from support.kills.judge import (
    Line,
    commits_of,
    own_states_of,
    read_lines,
    what_is_wrong,
    what_is_wrong_with_own_states,
)

pytestmark = [pytest.mark.in_turn(4), pytest.mark.skipif(not IS_OPEN_MPI, reason="only Open MPI has ULFM")]

STEPS, LIMIT = 300, 90.0  # Of so many steps some are left when a rank is killed, however fast they are


@pytest.fixture(scope="module")
def reference() -> list[Line]:
    """What two ranks say that nobody kills."""
    job, *_ = run_once(2, 0, STEPS, [], LIMIT)
    return read_lines(job.check().stdout)


@pytest.mark.timeout(120)
def test_a_spare_takes_over_and_the_result_is_the_same_bit_for_bit(reference: list[Line]) -> None:
    job, killed, _, left = run_once(2, 1, STEPS, [(0.05, [0])], LIMIT)
    lines = read_lines(job.stdout)
    assert what_is_wrong(lines, 2, 1, killed, commits_of(reference)) == [], job.describe()
    own = own_states_of(reference)
    assert what_is_wrong_with_own_states(lines, 2, own, from_disk=False) == [], job.describe()
    assert (job.survivors, left) == ((), [])
    assert "goes on with 2 of 2 ranks and 0 spares" in job.stderr


@pytest.mark.timeout(120)
def test_a_spare_that_is_left_alone_trains_from_the_beginning() -> None:
    job, killed, _, left = run_once(1, 1, STEPS, [(0.05, [0])], LIMIT)
    assert killed == [0]
    assert "1 BEGIN 0 1 0 0" in job.stdout, job.describe()
    assert "1 RESULT 0 1" in job.stdout, job.describe()
    assert (job.survivors, left) == ((), [])


PROCESS_SETS = """
import os, signal, sys
import torch
import hvlike as hvd

first, pair, alone = hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2]), hvd.ProcessSet([1])
hvd.init(process_sets=[first, pair, alone])
born = hvd.rank()


@hvd.elastic.run
def train(state):
    if state.step == 1:
        sets = [each.ranks for each in (first, pair, alone)]
        total = "not in"
        if pair.included():
            total = hvd.allreduce(torch.tensor([float(born)]), op=hvd.Sum, process_set=pair)
        sys.stdout.write(f"{hvd.rank()} of {hvd.size()}: {sets} {total}\\n")
        return "done"
    hvd.allreduce(torch.ones(1000), name="all of them")
    state.step += 1
    state.commit()
    if born == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(torch.ones(1000), name="one of them is lost")


print(train(hvd.elastic.ObjectState(step=0)), flush=True)
"""


@pytest.mark.timeout(90)
def test_process_sets_go_on_with_the_members_that_are_left(tmp_path: os.PathLike[str]) -> None:
    env = {"OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    job = run_job(PROCESS_SETS, 3, env=env, flags=FLAGS)
    assert "0 of 2: [[0], [1], []] not in" in job.stdout, job.describe()
    assert "1 of 2: [[0], [1], []] tensor([2.])" in job.stdout
    assert job.stdout.count("done") == 2
    assert "all ranks of the process set [1] are lost" in job.stderr


INTERRUPTED = """
import contextlib, os, signal, sys, time
import hvlike as hvd
from hvlike.transport.failure.fault_tolerance import Job

pair = hvd.ProcessSet([1, 3])
hvd.init(process_sets=[pair])
born = hvd.rank()
begin = Job.begin


def interrupted(self, connect):
    Job.begin = begin
    self.begin(connect)
    if born == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    while not (self.comm.Get_failed().size or self.comm.Is_revoked()):
        with contextlib.suppress(self.mpi.Exception):
            self.comm.Iprobe()
        time.sleep(0.01)


@hvd.elastic.run
def train(state):
    if state.step == 1:
        sys.stdout.write(f"{born} is {hvd.rank()} of {hvd.size()}: {pair.ranks}\\n")
        return
    state.step += 1
    state.commit()
    Job.begin = interrupted
    if born == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.barrier()


train(hvd.elastic.ObjectState(step=0))
"""


@pytest.mark.timeout(90)
def test_process_sets_after_a_restart_that_another_loss_interrupts(tmp_path: os.PathLike[str]) -> None:
    """The ranks have agreed on their numbers when one more is lost, and rank 0 has not told those of the sets."""
    job = run_job(INTERRUPTED, 4, env={"OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}, flags=FLAGS)
    assert "1 is 0 of 2: [0, 1]" in job.stdout, job.describe()
    assert "3 is 1 of 2: [0, 1]" in job.stdout


ERROR_ON_RANKS = """
import sys
import hvlike as hvd

hvd.init()
born = hvd.rank()


errors = sys.argv[2:]


@hvd.elastic.run
def train(state):
    hvd.barrier()
    if born == 1 and errors:
        raise hvd.HorovodInternalError(errors.pop())
    if str(born) in sys.argv[1]:
        raise KeyError("no such file")
    hvd.barrier()


train(hvd.elastic.ObjectState())
print("done", hvd.rank(), hvd.size(), flush=True)
"""


@pytest.mark.timeout(90)
def test_an_exception_on_one_rank_ends_that_rank_only(tmp_path: os.PathLike[str]) -> None:
    env = {"OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    job = run_job(ERROR_ON_RANKS, 2, env=env, flags=FLAGS, args=["1", "met by rank 1 alone"])
    assert "done 0 1" in job.stdout, job.describe()
    # Rank 0, which tells of it, has only heard that another rank starts again.
    assert re.search(r"goes on with 2 of 2 ranks .* HorovodInternalError: met by rank 1 alone", job.stderr)
    assert "KeyError: 'no such file'" in job.stderr
    assert "rank 1 of 2" in job.stderr
    assert "the others go on without it" in job.stderr


@pytest.mark.timeout(90)
def test_an_exception_on_all_ranks_ends_the_job(tmp_path: os.PathLike[str]) -> None:
    env = {"OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    job = run_job(ERROR_ON_RANKS, 2, env=env, flags=FLAGS, args=["01"])
    assert job.returncode == 1, job.describe()
    assert "done" not in job.stdout


UNSEEN = """
import os, signal, sys
import torch
import hvlike as hvd

hvd.init()
born, how = hvd.rank(), sys.argv[1]
# A spare is told that it stands in for the last rank.
waits = os.environ["OMPI_COMM_WORLD_RANK"] == "3"


def end():
    if how == "_exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


if waits and how == "spare first":
    end()


@hvd.elastic.run
def train(state):
    while state.step < 20:
        hvd.allreduce(torch.ones(10), name="work")
        state.step += 1
        state.commit()
        if state.step == 5 and born == 1 and not waits:
            end()


train(hvd.elastic.ObjectState(step=0))
print("done", hvd.rank(), "of", hvd.size(), flush=True)
"""


@pytest.mark.timeout(90)
@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("between", "how", "spares", "left"),
    [
        ("a shell", "killed", 0, 2),
        ("Python", "killed", 0, 2),
        ("timeout", "killed", 1, 3),
        ("a shell", "spare first", 1, 2),
        ("nothing", "_exit", 0, 2),
    ],
)
def test_a_loss_that_the_launcher_does_not_see(
    between: str, how: str, spares: int, left: int, tmp_path: os.PathLike[str]
) -> None:
    """A wrapper ends in order when the rank below it is killed, and Open MPI tells nobody."""
    # Of several processes that end with a status the launcher would end the job.
    flags = [*FLAGS, "--runtime-options", "error-nonzero-status=0"] if how == "spare first" else FLAGS
    env = {"OMPI_MCA_btl_sm_backing_directory": str(tmp_path), "HVLIKE_SPARES": str(spares)}
    job = run_job(UNSEEN, 3 + spares, env=env, flags=flags, between=WRAPPERS[between], args=[how], timeout=60)
    done = sorted(line for line in job.stdout.splitlines() if line.startswith("done"))
    assert done == [f"done {rank} of {left}" for rank in range(left)], job.describe()
    assert job.survivors == (), job.describe()


TOO_FEW = """
import os, signal, sys
import hvlike as hvd

hvd.init()
born = hvd.rank()


@hvd.elastic.run
def train(state):
    os.write(1, f"rank {hvd.rank()} of {hvd.size()} begins at {state.step}\\n".encode())
    first = state.step == 0
    while state.step < 6:
        hvd.barrier()
        state.step += 1
        state.commit()
        if first and state.step == 4 and born == 0:
            os.kill(os.getpid(), signal.SIGKILL)


train(hvd.elastic.ObjectState(step=0))
"""


@pytest.mark.timeout(120)
def test_too_few_ranks_write_their_commit_and_end_and_launch_starts_again_from_it(tmp_path: Path) -> None:
    program, memory = tmp_path / "train.py", tmp_path / "memory"
    program.write_text(TOO_FEW)
    memory.mkdir()
    env = {"OMPI_MCA_btl_sm_backing_directory": str(memory), "HVLIKE_MIN_RANKS": "2"}
    launch = [sys.executable, "-m", "hvlike", "launch", "--checkpoint", str(tmp_path / "commits"), "--"]
    command = [*launch, str(LAUNCHER), *OPEN_MPI_FLAGS, *FLAGS, "-n", "2", sys.executable, str(program)]
    with RunningJob(command, job_environment(env), tmp_path) as running:
        job = running.wait(100).check()
    assert "1 of 2 ranks is left, and HVLIKE_MIN_RANKS=2" in job.stderr, job.describe()
    begun = [f"rank {rank} of 2 begins at {step}" for rank in (0, 1) for step in (0, 4)]
    assert sorted(job.stdout.splitlines()) == begun


@pytest.mark.timeout(120)
def test_two_neighbours_lost_at_once_take_their_shards_from_the_disk() -> None:
    job, killed, _, left = run_once(3, 0, STEPS, [(0.05, [1, 2])], LIMIT, "zero")
    lines = read_lines(job.stdout)
    assert what_is_wrong(lines, 3, 0, killed, commits_of(lines)) == [], job.describe()
    assert (job.survivors, left) == ((), [])
    assert "what only ranks [1] of 3 had of optimizer is lost. elastic.run goes back to the disk" in job.stderr


ENDS_EARLY = """
import os, signal
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
import hvlike as hvd
hvd.init()
"""


@pytest.mark.timeout(90)
def test_a_rank_that_ends_before_mpi_has_started_ends_the_job(tmp_path: os.PathLike[str]) -> None:
    """The launcher does not, and MPI_Init would wait for ever."""
    env = {"OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    job = run_job(ENDS_EARLY, 2, env=env, flags=FLAGS, timeout=60)
    assert not job.timed_out, job.describe()
    assert job.returncode == 1
    assert job.stderr.count("hvlike: rank 1 of 2 on ") == 1, job.describe()
