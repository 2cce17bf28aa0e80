"""python -m hvlike launch: start a job, and start it again after failures, from its newest whole checkpoint.

    start ---> RUNNING --- record: finished ---------------------------> the launcher's status (0)
                 ^   |---- record: preempted, or asked by a signal ----> 75
                 |   |---- no record, --restarts used up --------------> 1
                 +---+---- no record: a failure, whatever the status

The job tells by its record how it has ended (transport/failure/exit_status.py).
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvlike.errors import LaunchError
from hvlike.launch.attempt import Requests, run_attempt, say, with_variables
from hvlike.training.elastic.checkpoint_files import list_files
from hvlike.transport.failure.exit_status import EXIT_PREEMPTED, FINISHED, PREEMPTED, VARIABLE, JobRecord
from hvlike.transport.host.find_mpirun import ask_mpi_library, find_mpirun

CHECKPOINT = "HVLIKE_CHECKPOINT_DIR"
EXIT_GAVE_UP, EXIT_CANNOT_START = 1, 2
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0

_EPILOG = """\
A failure is an end without a record of success: rank 0 writes one when its program ends well. The program calls
hvd.init(), and uses hvd.elastic.run, or hvd.checkpoint and hvd.elastic.preempted(). A file of hosts in the command is
read anew at each start, so a job can go on with fewer hosts.

SIGTERM, SIGINT, SIGHUP and SIGUSR1 ask the job to end at its next commit.

exit status:
  0    the job has finished; another one here: its launcher's, after the program of rank 0 ended well
  75   the job was asked to end, and is to be started again
  1    it has failed, more often than --restarts allows without a new checkpoint in between
  2    wrong arguments, or the command cannot be run
"""


def main(arguments: list[str]) -> int:
    """Run the command until it has finished, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hvlike launch",
        usage="python -m hvlike launch [--restarts N] [--checkpoint DIR] [--grace S] -- mpirun ... python train.py\n"
        "       python -m hvlike launch -n N ... -- python train.py",
        description="Start a job, and start it again after failures, from its newest whole checkpoint.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    chosen = "start N ranks of the command by the launcher of the MPI library: mpirun, or in an allocation srun"
    parser.add_argument("-n", "--ranks", type=int, metavar="N", help=chosen)
    parser.add_argument("--restarts", type=int, default=3, metavar="N", help="failures in a row without progress (3)")
    parser.add_argument("--checkpoint", metavar="DIR", help="on a disk of this host and of rank 0's")
    parser.add_argument("--grace", type=float, default=60.0, metavar="S", help="seconds to reach a commit (60)")
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, unknown = parser.parse_known_args(arguments[:split])
    if unknown:
        before = f": put -- before the command, as in: python -m hvlike launch -- {' '.join(unknown)}"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{'' if '--' in arguments else before}")
    command = arguments[split + 1 :]
    if not command:
        parser.error("the command is missing: python -m hvlike launch --checkpoint DIR -- mpirun -n 4 python train.py")
    if options.ranks is not None:
        if options.ranks < 1:
            parser.error(f"argument -n: expected a number of ranks above 0, got {options.ranks}")
        try:
            command = find_mpirun(ask_mpi_library(os.environ), os.environ).command(options.ranks, command)
        except LaunchError as error:
            say(str(error))
            return EXIT_CANNOT_START
    checkpoint = options.checkpoint or os.environ.get(CHECKPOINT) or None
    with tempfile.TemporaryDirectory(prefix="hvlike-launch-") as place, Requests() as requests:
        # The ranks see the checkpoint folder; the other one only those of this host.
        folder = Path(place if checkpoint is None else checkpoint).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        record = JobRecord(folder / f".launch-{socket.gethostname()}-{os.getpid()}")
        variables = {VARIABLE: str(record.path)} | ({} if checkpoint is None else {CHECKPOINT: str(folder)})
        try:
            return _run(command, variables, folder, record, requests, options, [place, *record.files])
        finally:
            record.remove()


def _run(
    command: Sequence[str],
    variables: Mapping[str, str],
    folder: Path,
    record: JobRecord,
    requests: Requests,
    options: argparse.Namespace,
    remove: Sequence[str],
) -> int:
    """Start the job until it has finished, is asked to end, or is given up. variables: what its ranks see besides.
    remove: what goes with this process, should that be killed.
    """
    environment = {**os.environ, **variables}
    line = with_variables(command, list(variables))
    failures = 0
    while not requests.signals:
        before = _files(folder)
        record.remove()
        try:
            status = run_attempt(line, environment, requests, options.grace, remove)
        except OSError as error:
            say(f"{command[0]} cannot be run: {error}")
            return EXIT_CANNOT_START
        final = final_status(record.read(), status, asked=bool(requests.signals), ulfm="--with-ft" in command)
        if final is not None:
            return final
        files = _files(folder)
        failures = 1 if set(files).difference(before) else failures + 1
        if failures > options.restarts:
            say(f"the job has failed {failures} times in a row without a new checkpoint: it is given up")
            return EXIT_GAVE_UP
        pause = pause_before(failures)
        newest = files[0][0] if files else "the beginning"
        say(
            f"the job has failed ({_describe(status)}); it starts again in {pause:g} s from {newest} ({failures} of "
            f"{options.restarts} restarts without a new checkpoint)"
        )
        requests.wait(pause)
    return EXIT_PREEMPTED


def _files(folder: Path) -> list[tuple[str, int]]:
    """The checkpoints, the newest first, by name and time."""
    return [(file.path.name, file.path.stat().st_mtime_ns) for file in list_files(folder)]


def final_status(ending: str | None, status: int, *, asked: bool, ulfm: bool) -> int | None:
    """The exit status of `launch` after an attempt; None: the job has failed and may be started again. Pure function.

    ending: what the record says. status: the launcher's. asked: the job was to end. ulfm: mpirun was told that MPI
    survives the loss of ranks, and its status says nothing.
    """
    if ending == FINISHED:
        return 0 if ulfm or status < 0 else status
    if ending == PREEMPTED or asked:
        return EXIT_PREEMPTED
    return None


def pause_before(failures: int) -> float:
    """Seconds before a restart: ranks on other nodes need some to notice that their launcher has gone."""
    return float(min(PAUSE_SECONDS * 2 ** min(failures, 10), LONGEST_PAUSE_SECONDS))


def _describe(status: int) -> str:
    if status >= 0:
        return f"status {status} of its launcher"
    return f"its launcher was ended by {signal.Signals(-status).name}"
