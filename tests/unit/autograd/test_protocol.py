"""The protocol of a backward, simulated: random programs, messages in random order, and whatever may go wrong.

Every gradient arrives once and is right; when the root is done so are all; after an error nothing is left anywhere.
"""

from __future__ import annotations

import random

import pytest
from support.autograd.backward_world import Key, Message, Program, World, random_program

from hvlike.autograd.protocol import BackwardPhase, Mode

SEEDS = 60
COMPLETE = [Mode.SAFE, Mode.SMART]


def check_gradients(world: World, key: Key) -> None:
    expected = world.program.gradients(key)
    got: dict[int, int] = {}
    for (_, each), machine in world.machines.items():
        if each == key:
            got |= machine.resolved
    assert got == expected


def check_nothing_runs(world: World) -> None:
    for (rank, _), part in world.parts.items():
        if rank not in world.lost | world.released:
            assert part.phase in (BackwardPhase.FINISHED, BackwardPhase.FAILED)


@pytest.mark.parametrize("mode", COMPLETE)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_gradient_arrives(mode: Mode, size: int, late: bool) -> None:
    """Of one backward or several at once. late: messages may be opened late or never."""
    for seed in range(SEEDS):
        rng = random.Random(seed)
        world = World(random_program(rng, size, late=late, backwards=1 + seed % 3), mode, rng)
        world.begin()
        world.run_out()
        for key in world.program.roots:
            assert world.root_of(key).phase is BackwardPhase.FINISHED
            check_gradients(world, key)
        if not late:
            check_nothing_runs(world)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_fast_ends_well_exactly_when_every_result_is_used(size: int) -> None:
    ends = set()
    for seed in range(2 * SEEDS):
        rng = random.Random(seed)
        program = random_program(rng, size)
        world = World(program, Mode.FAST, rng)
        world.begin()
        world.run_out()
        for key in program.roots:
            root = world.root_of(key)
            engaged = {rank for (rank, each) in world.parts if each == key}
            used = program.gradients(key)
            # Whom the root has nothing to do with is never asked.
            complete = all(message.number in used for message in program.messages if message.source in engaged)
            assert root.phase is (BackwardPhase.FINISHED if complete else BackwardPhase.FAILED)
            assert complete or (root.error is not None and "is not used" in root.error)
            ends.add(root.phase)
        check_nothing_runs(world)
    assert len(ends) == 2


@pytest.mark.parametrize("mode", COMPLETE)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_an_error_reaches_the_root_and_ends_everything(mode: Mode, size: int) -> None:
    failed = 0
    for seed in range(SEEDS):
        rng = random.Random(seed)
        world = World(random_program(rng, size, backwards=1 + seed % 2), mode, rng)
        bad, rank = next(iter(world.program.roots)), rng.randrange(size)
        world.failing[bad, rank] = rng.randrange(3)
        world.begin()
        world.run_out()
        has_failed = (bad, rank) not in world.failing and world.parts[rank, bad].phase is BackwardPhase.FAILED
        failed += has_failed
        for key in world.program.roots:
            root = world.root_of(key)
            assert root.phase is (BackwardPhase.FAILED if key == bad and has_failed else BackwardPhase.FINISHED)
            if root.phase is BackwardPhase.FAILED:
                assert root.error is not None
                hops = root.error.split("Error on Node ")[1:]
                assert (hops[0], hops[-1]) == (root_prefix(hops, bad[0]), f"{rank}: it fails here")
        check_nothing_runs(world)
    assert failed > SEEDS / 20


def root_prefix(hops: list[str], root: int) -> str:
    """How the text of the root begins: with its own rank."""
    return f"{root}: it fails here" if len(hops) == 1 else f"{root}: "


@pytest.mark.parametrize("mode", COMPLETE)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_worker_is_lost(mode: Mode, size: int) -> None:
    ends = set()
    for seed in range(2 * SEEDS):
        rng = random.Random(seed)
        world = World(random_program(rng, size, backwards=2), mode, rng)
        world.to_lose.append(rng.randrange(size))
        world.begin()
        world.run_out()
        check_nothing_runs(world)
        ends |= {world.root_of(key).phase for key in world.program.roots if key[0] not in world.lost}
    assert ends == {BackwardPhase.FINISHED, BackwardPhase.FAILED}


@pytest.mark.parametrize("mode", COMPLETE)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_context_is_released_on_a_worker(mode: Mode, size: int) -> None:
    ends = set()
    for seed in range(2 * SEEDS):
        rng = random.Random(seed)
        world = World(random_program(rng, size), mode, rng)
        world.to_release.append(rng.randrange(size))
        world.begin()
        world.run_out()
        check_nothing_runs(world)
        ends |= {world.root_of(key).phase for key in world.program.roots}
    assert BackwardPhase.FINISHED in ends
    assert size == 1 or BackwardPhase.FAILED in ends


def calls(used: int, unused: int = 0, *, chain: bool = False, unused_chain: bool = False) -> Program:
    """Calls from worker 0 to worker 1 and their answers; in a chain each call takes the answer before."""
    messages: list[Message] = []
    roots: set[int] = set()

    def call(made_of: set[int]) -> set[int]:
        number = len(messages) + 1
        messages.extend([Message(number, 0, 1, made_of), Message(number + 1, 1, 0, {number})])
        return {number + 1}

    for count, is_chain, is_used in ((used, chain, True), (unused, unused_chain, False)):
        answer: set[int] = set()
        for place in range(count):
            answer = call(answer if is_chain else set())
            if is_used and (not is_chain or place == count - 1):
                roots |= answer
    return Program(2, messages, {(0, 0): roots})


@pytest.mark.parametrize(
    ("program", "mode", "expected"),
    [
        # gradients, nones, marks, acknowledgements, done, messages in all
        (calls(1), Mode.FAST, (2, 0, 0, 0, 1, 2)),
        (calls(1), Mode.SAFE, (2, 0, 0, 0, 1, 2)),
        (calls(1), Mode.SMART, (2, 0, 2, 2, 1, 6)),
        (calls(1, 1), Mode.SAFE, (2, 2, 0, 0, 1, 2)),
        (calls(1, 1), Mode.SMART, (2, 0, 2, 2, 1, 6)),
        (calls(20, chain=True), Mode.SAFE, (40, 0, 0, 0, 1, 40)),
        (calls(20, chain=True), Mode.SMART, (40, 0, 40, 40, 1, 82)),
        (calls(20), Mode.SAFE, (40, 0, 0, 0, 1, 2)),
        (calls(20), Mode.SMART, (40, 0, 2, 2, 1, 6)),
        (calls(1, 20), Mode.SAFE, (2, 40, 0, 0, 1, 2)),
        (calls(1, 20), Mode.SMART, (2, 0, 2, 2, 1, 6)),
        (calls(1, 20, unused_chain=True), Mode.SAFE, (2, 40, 0, 0, 1, 40)),
        (calls(1, 20, unused_chain=True), Mode.SMART, (2, 0, 2, 2, 1, 6)),
    ],
)
def test_nothing_is_said_that_need_not_be(
    program: Program, mode: Mode, expected: tuple[int, int, int, int, int, int]
) -> None:
    world = World(program, mode, random.Random(0))
    world.begin()
    world.run_out()
    check_gradients(world, (0, 0))
    answers = [each for message in world.sent for each in message.gradients.values()]
    nones = sum(answer in (None, [None]) for answer in answers)
    counts = (
        len(answers) - nones,
        nones,
        sum(bool(message.marks) for message in world.sent),
        sum(message.acknowledged for message in world.sent),
        sum(message.done for message in world.sent),
        len(world.sent),
    )
    assert counts == expected
