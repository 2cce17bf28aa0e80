"""Runs random programs for some minutes, and shrinks and prints those that end as no page says."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hypothesis
import torch
from hypothesis import HealthCheck, Phase
from support.fuzz import changes, passes, steps, uneven
from support.fuzz.jobs import Job
from support.fuzz.judge import is_sound, judge
from support.fuzz.oracle import simulate
from support.fuzz.planted import PLANTS, planted
from support.fuzz.programs import COMPILED, KINDS, SEVERAL, TORCH, Program, Setting
from support.fuzz.strategies import programs

BLOCK = 50
COMPILED_BLOCK = 5
SHRINKING_SECONDS = 60.0


class Fault(AssertionError):
    """A program that ends as no page says."""


class TimeIsOver(BaseException):
    """Shrinking has taken long enough; hypothesis lets it pass."""


@dataclass
class Found:
    """A fault, shrunk."""

    seed: int
    setting: Setting
    program: Program
    text: str
    tried: int

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.setting}, found after {self.tried} programs\n{self.program}\n{self.text}"


@dataclass
class Runner:
    """Runs programs on a job and judges them."""

    job: Job
    without: tuple[str, ...] = ()
    shrinking_seconds: float = SHRINKING_SECONDS
    quiet: bool = False
    sound: Runner | None = None  # Runs hvlike without a planted fault: what fails there too is another fault
    tried: int = 0
    unsound: int = 0
    found: list[Found] = field(default_factory=list)
    other_faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.job.ranks)
        self._known: dict[Program, str | None] = {}
        self._failed_at: float | None = None

    def check(self, program: Program, setting: Setting) -> str | None:
        """Return what is wrong with how a program ends."""
        if program.kind in TORCH:
            pairs = self.job.run(program, setting)
            found, expected = [each[0] for each in pairs], [each[1] for each in pairs]
            refused = any(each.failure is not None for each in expected) and not any(each.failure for each in found)
            if refused or not is_sound(expected):
                # Over gloo torch refuses it, or nothing can be compared.
                self.unsound += 1
                hypothesis.reject()
            return judge(
                program, setting, found, expected, lambda other: [pair[1] for pair in self.job.run(other, setting)]
            )
        run_oracle = partial(simulate, ranks=setting.ranks, pool=self._pool)
        expected = run_oracle(program)
        second = [] if program.second is None else run_oracle(program.second)
        if not (is_sound(expected) and is_sound(second)):
            self.unsound += 1
            hypothesis.reject()
        found = self.job.run(program, setting)
        if program.second is None:
            return judge(program, setting, found, expected, run_oracle)
        wrong = judge(program, setting, [each[0] for each in found], expected, run_oracle)
        return wrong or judge(program.second, setting, [each[1] for each in found], second, run_oracle)

    def block(self, kind: str, seed: int, setting: Setting, count: int) -> Found | None:
        """Run `count` programs of one seed; return the first fault, shrunk."""
        self._known.clear()
        self._failed_at = None
        last: list[tuple[Program, str]] = []

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
        )
        @hypothesis.given(programs(kind, setting.ranks, self.without))
        def run(program: Program) -> None:
            wrong = self._judged(program, setting)
            if wrong:
                last.append((program, wrong))
                raise Fault

        before = self.tried
        try:
            run()
        except (Fault, TimeIsOver):
            program, text = min(last, key=lambda each: len(str(each[0])))
            found = Found(seed, setting, program, text, self.tried - before)
            self.found.append(found)
            return found
        return None

    def run(self, given: argparse.Namespace) -> str:
        """Run blocks of programs until time, programs or faults are enough; return a line about them."""
        begin, seed, kinds = time.monotonic(), given.seed, given.kind or (*KINDS, *SEVERAL)
        interrupted = False
        while not interrupted and time.monotonic() - begin < 60 * given.minutes and self.tried < given.programs:
            overlap = bool(seed // len(kinds) % 2) if given.overlap is None else given.overlap == "1"
            setting = Setting(given.ranks, overlap, given.nodes or None)
            block = COMPILED_BLOCK if kinds[seed % len(kinds)] in COMPILED else BLOCK
            found = None
            try:
                found = self.block(kinds[seed % len(kinds)], seed, setting, min(block, given.programs - self.tried))
            except KeyboardInterrupt:
                interrupted = True
            if found is not None:
                if not self.quiet:
                    print(found, "\n", flush=True)
                if len(self.found) >= given.faults:
                    break
            seed += 1
        seconds = time.monotonic() - begin
        return (
            f"{self.tried} programs from seed {given.seed} to {seed} in {seconds:.0f} s ({self.tried / seconds:.1f} a "
            f"second), {self.unsound} without an end that can be foretold; {len(self.found)} faults"
        )

    def _judged(self, program: Program, setting: Setting) -> str | None:
        """Judge a program once."""
        if program not in self._known:
            if self._failed_at is not None and time.monotonic() - self._failed_at > self.shrinking_seconds:
                raise TimeIsOver
            if self._failed_at is None:
                self.tried += 1
            self._known[program] = self._check_both(program, setting)
            if self._known[program] and self._failed_at is None:
                self._failed_at = time.monotonic()
        return self._known[program]

    def _check_both(self, program: Program, setting: Setting) -> str | None:
        """Return what is wrong with it here; what is wrong without the planted fault too is kept beside."""
        wrong = self.check(program, setting)
        if not wrong or self.sound is None:
            return wrong
        other = self.sound.check(program, setting)
        if other:
            self.other_faults.append(f"{setting}\n{program}\n{other}")
        return None if other else wrong


def parse(text: str) -> Program:
    """Return the program that was printed so."""
    names = {
        each.__name__: each
        for module in (passes, steps, changes, uneven)
        for each in vars(module).values()
        if isinstance(each, type)
    }
    program: Program = eval(text, {"Program": Program, **names})
    return program


def main(arguments: Sequence[str]) -> int:
    """The command line of scripts/fuzz."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (10)")
    parser.add_argument("--programs", type=int, default=sys.maxsize, help="how many at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first block of programs (0)")
    parser.add_argument("--ranks", type=int, default=2, help="of the job (2)")
    kinds = (*KINDS, *SEVERAL, *TORCH, *COMPILED)
    parser.add_argument("--kind", choices=kinds, action="append", help="what wraps the model; default: in turn")
    parser.add_argument("--overlap", choices=("0", "1"), help="reduce beside backward; default: both in turn")
    parser.add_argument("--nodes", type=int, default=0, help="pretended nodes; default: one, and two in turn")
    parser.add_argument("--faults", type=int, default=1, help="how many faults end the run (1)")
    parser.add_argument("--without", action="append", default=[], help="a part of models that is left out")
    parser.add_argument("--shrink", type=float, default=SHRINKING_SECONDS, help="seconds to shrink each (60)")
    parser.add_argument("--device", default="", help="of the tensors of all ranks, such as cuda (the CPU)")
    parser.add_argument("--planted", action="store_true", help="show that faults planted into a copy are found")
    parser.add_argument("--replay", type=Path, help="run the one program that this file holds, as it was printed")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if given.planted:
        return find_planted(given)
    compiles = bool(given.kind) and bool({*COMPILED, "fsdp2"} & {*given.kind})
    with Job(given.ranks, compiles=compiles, device=given.device) as job:
        runner = Runner(job, tuple(given.without), given.shrink)
        if given.replay:
            setting = Setting(given.ranks, given.overlap == "1", given.nodes or None)
            wrong = runner.check(parse(given.replay.read_text()), setting)
            print(wrong or "as the pages promise")
            return int(bool(wrong))
        print(runner.run(given))
        return int(bool(runner.found))


def find_planted(given: argparse.Namespace) -> int:
    """Plant one fault after the other; return for how many it is not found, or another fault is."""
    missed = 0
    for fault in PLANTS:
        given.kind = fault.kinds
        compiles = bool(fault.kinds)
        with (
            planted(fault) as folder,
            Job(given.ranks, folder, compiles=compiles) as job,
            Job(given.ranks, compiles=compiles) as sound,
        ):
            runner = Runner(job, tuple(given.without), given.shrink, quiet=True, sound=Runner(sound))
            runner.run(given)
        missed += not runner.found or bool(runner.other_faults)
        where = f"after {runner.tried} programs" if runner.found else f"NOT FOUND in {runner.tried}"
        print(f"{where}: {fault.name}", flush=True)
        if runner.found:
            print(f"{runner.found[0].program}\n{runner.found[0].text[:300]}\n", flush=True)
        if runner.other_faults:
            print(f"A fault that is not planted, too: {min(runner.other_faults, key=len)}\n", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
