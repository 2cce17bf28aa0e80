"""The knobs of a job: every rank reads its own, and all ranks go on with them or none does."""

from __future__ import annotations

import os
from typing import Any

from hvlike.config import Knobs, differing, read_knobs
from hvlike.errors import UsageError


class Settings:
    """The knobs of this rank, and what is wrong with them."""

    def __init__(self) -> None:
        """Read the environment. Local; a wrong value is kept for `check`, so that no rank is left waiting in init()."""
        self.knobs = Knobs()
        self._wrong = ""
        try:
            self.knobs = read_knobs(os.environ)
        except UsageError as error:
            self._wrong = str(error)

    def check(self, comm: Any) -> None:
        """Compare with the other ranks.

        comm: all ranks. Collective and blocking.
        Raises: UsageError, on every rank, for a value that is wrong on one of them or that differs.
        """
        answers = comm.allgather((self._wrong, self.knobs))
        wrong = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
        if not wrong:
            difference = differing([knobs for _, knobs in answers])
            wrong = [difference] if difference else []
        if wrong:
            raise UsageError(f"Horovod initialization failed: {'; '.join(wrong)}")
