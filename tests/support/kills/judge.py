"""What is right after ranks were killed: pure functions over what program.py has printed."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """One line of a process: its place at the start, what it says, and the rest."""

    place: int
    what: str
    words: tuple[str, ...]


def read_lines(output: str) -> list[Line]:
    """The lines of program.py in the output of a job."""
    lines = [line.split() for line in output.splitlines()]
    return [Line(int(line[0]), line[1], tuple(line[2:])) for line in lines if len(line) > 1 and line[0].isdigit()]


def commits_of(lines: Sequence[Line]) -> dict[int, str]:
    """The digest of each commit, of a run without failures; 0 is the state at the start."""
    begun = {int(line.words[2]): line.words[4] for line in lines if line.what == "BEGIN"}
    return begun | {int(line.words[0]): line.words[2] for line in lines if line.what == "COMMIT"}


def what_is_wrong(
    lines: Sequence[Line], ranks: int, spares: int, killed: Sequence[int], reference: Mapping[int, str]
) -> list[str]:
    """Everything that is not as promised; empty if all is right.

    ranks: how many trained at the start. spares: how many waited. killed: places of the killed processes. reference:
    the digests of the commits of the same job without failures.
    """
    wrong = []
    results = {line.place: line.words for line in lines if line.what == "RESULT"}
    again = {line.place: line.words for line in lines if line.what == "AGAIN"}
    left = ranks + spares - len(set(killed))
    expected = min(ranks, left)
    # A rank that was killed after its result is one of those that had it.
    alive = {place: words for place, words in results.items() if place not in killed}
    sizes = {int(words[1]) for words in results.values()}
    if len(sizes) != 1 or not expected <= min(sizes) <= ranks:
        wrong.append(f"results of {sorted(results)} at sizes {sorted(sizes)}, expected {expected}")
    if len({words[2] for words in results.values()}) > 1:
        wrong.append(f"the results differ: {results}")
    if len(alive) + _killed_at_the_end(lines, alive, killed) < min(expected, min(sizes, default=0)):
        wrong.append(f"only places {sorted(alive)} have a result, {expected} were expected")
    missing = sorted(set(alive) - set(again))
    # Who was killed just after all had agreed on the end is missed by what follows the training.
    if missing and sizes == {len(alive)}:
        wrong.append(f"places {missing} have not ended")
    wrong += [
        f"place {place}: a fresh run from the last commit gives {words[2:4]}, not {results[place][2:4]}"
        for place, words in again.items()
        if place in results and words[2:4] != results[place][2:4]
    ]
    for line in lines:
        if line.what == "BEGIN":
            rank, size, commit, _, state, *_ = line.words
            # With fewer ranks than at the start the run is another one from there on.
            comparable = int(size) == ranks or _is_first_smaller(lines, line)
            if comparable and reference.get(int(commit)) != state:
                wrong.append(f"place {line.place}, rank {rank} of {size} began from a wrong commit {commit}")
    if sizes == {ranks} and {words[2] for words in results.values()} != {reference[max(reference)]}:
        wrong.append("the result is not that of the run without failures")
    return wrong


def _killed_at_the_end(lines: Sequence[Line], alive: Collection[int], killed: Collection[int]) -> int:
    """How many ranks were killed after all had agreed on the end, before they could tell of their result: they took
    part in the attempt that has given the results, and nobody took their numbers over.
    """
    last = {line.place: line.words[:3] for line in lines if line.what == "BEGIN"}
    ended = {last[place][1:] for place in alive if place in last}
    held = {begun[0] for place, begun in last.items() if place not in killed}
    return len({last[place][0] for place in killed if place in last and last[place][1:] in ended} - held)


def own_states_of(lines: Sequence[Line]) -> dict[int, tuple[str, str]]:
    """What each rank had of its own at each commit of a run without failures: the digests, and the numbers."""
    begun = {int(line.words[2]): line.words[5:7] for line in lines if line.what == "BEGIN"}
    told = begun | {int(line.words[0]): line.words[3:5] for line in lines if line.what == "COMMIT"}
    return {commit: (words[0], words[1]) for commit, words in told.items() if len(words) == 2}


def what_is_wrong_with_own_states(
    lines: Sequence[Line],
    ranks: int,
    reference: Mapping[int, tuple[str, str]],
    *,
    from_disk: bool,
    lost: Collection[int] = (),
) -> list[str]:
    """What ranks had of their own has not come back: bit for bit to as many ranks, in sum to fewer.

    reference: own_states_of() the same job without failures. from_disk: a checkpoint was loaded, which leaves it out
    where there are fewer ranks. lost: commits of which the job said that nobody has all of it any more: all ranks go on
    with those of one, and from the first such commit on the training is another one.
    """
    wrong = []
    for line in lines if reference else ():
        if line.what == "COMMIT" and int(line.words[0]) < min(lost, default=math.inf):
            commit, size, _, state, _ = line.words
            if int(size) == ranks and not _was_smaller(lines, line, ranks) and state != reference[int(commit)][0]:
                wrong.append(f"place {line.place} made commit {commit} with wrong states of the ranks: {state}")
        if line.what == "BEGIN" and int(line.words[2]) < min(lost, default=math.inf):
            rank, size, commit, _, _, state, numbers = line.words
            expected, sums = reference[int(commit)]
            who = f"place {line.place}, rank {rank} of {size}"
            if int(size) == ranks and state != expected:
                wrong.append(f"{who} began with wrong states of the ranks, {commit}")
            right = _alike(numbers, sums) or (from_disk and _is_nothing(numbers))
            if _is_first_smaller(lines, line) and not right:
                wrong.append(f"{who} began with {numbers}, not {sums}, {commit}")
    for commit in lost:
        wrong += _not_those_of_one(lines, ranks, commit, reference if commit == min(lost) else {})
    return wrong


def _not_those_of_one(
    lines: Sequence[Line], ranks: int, commit: int, reference: Mapping[int, tuple[str, str]]
) -> list[str]:
    """What is wrong with the last attempts from a commit that was lost in part: all ranks have to have the same states,
    which are those of one of them in the reference.
    """
    wrong = []
    ended = {line.place for line in lines if line.what == "RESULT"}
    # Before the loss an attempt may have begun from the same commit, with the states of each rank.
    last = {line.place: line for line in lines if line.what == "BEGIN" and int(line.words[2]) == commit}
    for place in sorted(ended & set(last)):
        states = set(last[place].words[5].split(","))
        comparable = reference and not _was_smaller(lines, last[place], ranks)
        if len(states) > 1 or (comparable and not states <= set(reference[commit][0].split(","))):
            wrong.append(
                f"place {place} began from {commit}, of which states were lost, not with those of one: {states}"
            )
    return wrong


def _alike(one: str, other: str) -> bool:
    """Whether numbers are the same but for rounding; the first is a length, which may be less in a sum."""
    if "," not in one:
        return one == other
    (length, *ours), (most, *theirs) = ([float(each) for each in numbers.split(",")] for numbers in (one, other))
    near = 1e-5 * max(most, 1e-9)
    return length <= most + near and all(abs(a - b) <= near for a, b in zip(ours, theirs, strict=True))


def _is_nothing(numbers: str) -> bool:
    return not any(map(float, numbers.split(",")))


def _was_smaller(lines: Sequence[Line], line: Line, ranks: int) -> bool:
    """Whether the place of the line had begun with fewer ranks before."""
    mine = [each for each in lines if each.place == line.place]
    return any(each.what == "BEGIN" and int(each.words[1]) < ranks for each in mine[: mine.index(line)])


def _is_first_smaller(lines: Sequence[Line], line: Line) -> bool:
    sizes = [int(each.words[1]) for each in lines if each.what == "BEGIN" and each.place == line.place]
    mine = [each for each in lines if each.what == "BEGIN" and each.place == line.place].index(line)
    return all(size == max(sizes) for size in sizes[:mine])
