"""Several programs one after the other in one job: to import torch takes longer than what most of them do.

This file is also what the ranks of that job run.
"""

import contextlib
import json
import os
import runpy
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path


class Job:
    """Programs that run one after the other, when the output of the first one is asked for."""

    def __init__(self, ranks: int, programs: Mapping[str, str], **env: str) -> None:
        """programs: by name, what would stand behind `python` or `python -m`: a file or a module, and arguments."""
        self.programs = programs
        self._ranks, self._env = ranks, env
        self._outputs: dict[str, str] | AssertionError | None = None

    def output_of(self, name: str) -> str:
        """What a program has printed, rank after rank. AssertionError when one of this job has failed."""
        if self._outputs is None:
            try:
                self._outputs = self._run()
            except AssertionError as error:
                self._outputs = error
        if isinstance(self._outputs, AssertionError):
            raise self._outputs
        return self._outputs[name]

    def _run(self) -> dict[str, str]:
        from support.job import run_job

        lines = {name: shlex.split(line) for name, line in self.programs.items()}
        with tempfile.TemporaryDirectory(prefix="hvlike-in-turn-") as folder:
            run_job(Path(__file__), self._ranks, args=[folder, json.dumps(lines)], env=self._env, timeout=240).check()
            files = {name: [Path(folder) / f"{name}.{rank}" for rank in range(self._ranks)] for name in lines}
            return {name: "".join(file.read_text() for file in each) for name, each in files.items()}


def main(folder: str, programs: Mapping[str, Sequence[str]]) -> None:
    """What a rank does: each program as if it were started by itself."""
    import hvlike

    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
    own = sys.path[0]
    for name, (program, *arguments) in programs.items():
        is_file = program.endswith(".py")
        sys.path[0] = str(Path(program).parent) if is_file else own
        sys.argv[1:] = arguments
        with (Path(folder) / f"{name}.{rank}").open("w") as output, contextlib.redirect_stdout(output):
            try:
                if is_file:
                    runpy.run_path(program, run_name="__main__")
                else:
                    runpy.run_module(program, run_name="__main__", alter_sys=True)
            except SystemExit as end:
                if end.code:
                    raise
        hvlike.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
