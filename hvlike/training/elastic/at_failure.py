"""What the loss of a rank will do to this job, said in a line before it happens."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from hvlike.transport.failure import fault_tolerance, job_record
from hvlike.transport.host.find_mpirun import OPEN_MPI, family_of_library

logger = logging.getLogger("hvlike")


class Said:
    already = False


def what_a_loss_does(environ: Mapping[str, str], vendor: str, size: int) -> str:
    """Return a sentence where a lost rank ends the job and nothing starts it again, else "". vendor: of the MPI."""
    if size == 1 or fault_tolerance.is_enabled(environ) or job_record.VARIABLE in environ:
        return ""
    goes_on = "go on without it under `mpirun --with-ft ulfm`, and " if family_of_library(vendor) == OPEN_MPI else ""
    return (
        "elastic.run: an error is answered by going back to the last commit, but a lost rank ends this job. The "
        f"others {goes_on}start again under `python -m hvlike launch` (docs/elastic.md)."
    )


def say_what_a_loss_does(environ: Mapping[str, str], vendor: str, rank: int, size: int) -> None:
    """Log the sentence, if there is one, on rank 0 and once."""
    text = what_a_loss_does(environ, vendor, size)
    if text and rank == 0 and not Said.already:
        Said.already = True
        logger.warning("%s", text)
