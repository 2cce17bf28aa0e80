"""Draws random programs: `draw_program` gives the same one for the same seed, number of workers and home everywhere."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from support.autograd.operations import CHANGES, OPERATIONS
from support.autograd.programs import (
    Apply,
    Call,
    ChangeInPlace,
    Fetch,
    Hook,
    Leaf,
    Lookup,
    Pass,
    Places,
    Program,
    Refer,
    Remote,
    Routine,
    Start,
    Step,
    Use,
    Wait,
)

LEAVES = 4
"""Of each worker."""
MOST_ROUTINES = 8
MOST_CALLERS = 3
"""Routines that block a thread of RPC in a call of their own, so that programs beside each other leave threads free."""


@dataclass(eq=False)
class Memory:
    """What values lie in the same memory, and whether it may still be changed in place."""

    changeable: bool
    values: list[Value] = field(default_factory=list)


@dataclass(eq=False)
class Value:
    """What is known of a tensor when the program is drawn."""

    grad: bool
    memory: Memory
    table: bool = False
    leaf: bool = False
    """No hook is put on it."""
    used: bool = False

    def __post_init__(self) -> None:
        self.memory.values.append(self)


@dataclass(eq=False)
class Reference:
    """Values of a worker that may be fetched."""

    owner: int
    values: list[Value]
    used: bool = False


Results = tuple[list[Value], list[Reference]]


def sent(values: Sequence[Value]) -> list[Value]:
    """The same values after a message: copies, which share memory as they did before, and are then left as they are."""
    together = Counter(value.memory for value in set(values))
    tables = {value.memory for value in values if value.table}
    memories = {memory: Memory(together[memory] == 1 and memory not in tables) for memory in together}
    copies = {each: Value(each.grad, memories[each.memory], each.table) for each in values}
    return [copies[each] for each in values]


@lru_cache(maxsize=256)
def draw_program(seed: int, workers: int, home: int) -> Program:
    """A program of so many workers whose first routine runs on `home`."""
    return _Author(random.Random(f"{seed} {workers} {home}"), workers, home).program()


class _Author:
    """Draws one program."""

    def __init__(self, draw: random.Random, workers: int, home: int) -> None:
        self.draw = draw
        self.workers = workers
        self._home = home
        self.thrifty = draw.random() < 0.6
        """Every result is used: the only programs that FAST can run."""
        self.leaves = tuple(tuple(self._leaf(index) for index in range(LEAVES)) for _ in range(workers))
        self.memories = [[Memory(changeable=False) for _ in range(LEAVES)] for _ in range(workers)]
        """Of the leaves: one that is used twice arrives as one tensor where it is sent."""
        self.routines: dict[int, Routine] = {}
        self.numbers = 0
        self.callers = 0

    def _leaf(self, index: int) -> Leaf:
        # The first one is always of use.
        grad = index == 0 or self.draw.random() < 0.7
        table = grad and self.draw.random() < 0.3
        return Leaf(grad, table, grad and not table and self.draw.random() < 0.3)

    def program(self) -> Program:
        """Draw the first routine, with it all others, and what follows it."""
        first = _Writer(self, self._home, 0, [], [])
        routine = first.write(steps=self.draw.randint(4, 10))
        self.routines[0] = routine
        graded = [place for place, value in enumerate(first.values) if value.grad]
        distant = None
        if self.draw.random() < 0.2:
            distant = self.draw.randrange(self.workers), first.one(graded)
        routines = tuple(self.routines[number] for number in range(self.numbers))
        return Program(self.leaves, routines, distant, self._passes(first, graded, distant is not None))

    def _passes(self, first: _Writer, graded: list[int], distant: bool) -> tuple[Pass, ...]:
        count = self.draw.choice([1, 1, 2, 3])
        sinks = [place for place in graded if not first.values[place].used] or graded[-1:]
        passes = []
        for index in range(count):
            roots = sinks if self.thrifty else self.draw.choices(graded, k=self.draw.randint(1, 3))
            retain = index < count - 1 or self.draw.random() < 0.2
            passes.append(Pass(tuple(roots), retain, distant and self.draw.random() < 0.5))
        return tuple(passes)

    def worker_of(self, number: int) -> int:
        """Where a routine runs."""
        return self.routines[number].worker

    def begin(self, depth: int, values: list[Value], references: list[Reference]) -> tuple[int, Results]:
        """Draw a routine that another one calls with these arguments; returns its number and its results."""
        number = self.numbers
        writer = _Writer(self, self.draw.randrange(self.workers), depth, values, references)
        self.routines[number] = writer.write(steps=self.draw.randint(1, max(2, 6 - depth)))
        values = [writer.values[place] for place in self.routines[number].values]
        return number, (values, [writer.references[place] for place in self.routines[number].references])


class _Writer:
    """Draws one routine; knows of its values and references what must be known to go on."""

    def __init__(
        self, author: _Author, worker: int, depth: int, values: list[Value], references: list[Reference]
    ) -> None:
        self._author = author
        self._draw = author.draw
        self._worker = worker
        self._depth = depth
        self._steps: list[Step] = []
        self._started: dict[int, Results] = {}
        self._starts = 0
        self._calls = False
        self.values = values
        self.references = references
        author.numbers += 1

    def write(self, steps: int) -> Routine:
        """Draw all steps and what is returned."""
        if self._depth == 0 or self._draw.random() < 0.7:
            self._use(0)
        for _ in range(steps):
            self._one_step()
        # Also where the results are of no use: nothing runs on when a program is through.
        for started in list(self._started):
            self._wait(started)
        if self._author.thrifty:
            self._use_up()
        return Routine(self._worker, tuple(self._steps), self._results(), self._returned_references())

    def _use_up(self) -> None:
        for place in [place for place, each in enumerate(self.references) if not each.used]:
            self._fetch(place)
        if self._draw.random() < 0.5:
            for place in self._unused()[:-1]:
                self._apply("add", (place, len(self.values) - 1))

    def _unused(self) -> list[int]:
        return [place for place, value in enumerate(self.values) if not value.used]

    def _results(self) -> Places:
        if self._author.thrifty:
            return tuple(self._unused())
        return tuple(self._draw.choices(range(len(self.values)), k=self._draw.randint(1, 3)))

    def _returned_references(self) -> Places:
        if self._author.thrifty or not self.references or self._depth == 0 or self._draw.random() < 0.5:
            return ()
        return (self._draw.randrange(len(self.references)),)

    def one(self, places: Sequence[int]) -> int:
        """One of these places, the last ones sooner."""
        return places[max(self._draw.randrange(len(places)) for _ in range(2))]

    def some(self, most: int) -> Places:
        """Some values, perhaps one of them twice."""
        return tuple(self.one(range(len(self.values))) for _ in range(self._draw.randint(1, most)))

    # -- steps ----------------------------------------------------------------------------------

    def _one_step(self) -> None:
        kinds = {self._an_operation: 10, self._a_leaf: 3}
        if self.values:
            kinds |= {self._a_change: 3, self._a_hook: 2, self._a_lookup: 1, self._a_reference: 1}
            kinds |= {self._a_wait: 2, self._a_fetch: 3}
        may_block = self._calls or self._depth == 0 or self._author.callers < MOST_CALLERS
        if self.values and may_block and self._author.numbers < MOST_ROUTINES:
            kinds |= {self._a_call: 6, self._a_start: 3, self._a_remote: 2}
        (kind,) = self._draw.choices(list(kinds), list(kinds.values()))
        kind()

    def _use(self, leaf: int) -> None:
        about = self._author.leaves[self._worker][leaf]
        self._steps.append(Use(leaf))
        self.values.append(Value(about.grad, self._author.memories[self._worker][leaf], about.table, leaf=True))

    def _a_leaf(self) -> None:
        self._use(self._draw.randrange(LEAVES))

    def _apply(self, name: str, inputs: Places) -> None:
        operation = OPERATIONS[name]
        given = [self.values[place] for place in inputs]
        for each in given:
            each.used = True
            each.memory.changeable &= not operation.keeps
        grad = operation.grads and any(each.grad for each in given)
        self._steps.append(Apply(name, inputs))
        for _ in range(operation.outputs):
            memory = given[0].memory if operation.shares else Memory(changeable=not operation.keeps)
            self.values.append(Value(grad, memory))

    def _an_operation(self) -> None:
        if not self.values:
            self._a_leaf()
        names = list(OPERATIONS)
        if self._author.thrifty:
            names = [name for name in names if OPERATIONS[name].grads and name != "only the first"]
        (name,) = self._draw.choices(names, [OPERATIONS[name].weight for name in names])
        self._apply(name, tuple(self.one(range(len(self.values))) for _ in range(OPERATIONS[name].inputs)))

    def _a_change(self) -> None:
        targets = [place for place, value in enumerate(self.values) if value.memory.changeable]
        if not targets:
            return
        place, name = self.one(targets), self._draw.choice(list(CHANGES))
        memory, change = self.values[place].memory, CHANGES[name]
        others = [other for other, value in enumerate(self.values) if value.memory is not memory]
        if change.inputs and not others:
            return
        inputs = tuple(self.one(others) for _ in range(change.inputs))
        for other in inputs:
            self.values[other].used = True
            self.values[other].memory.changeable &= not change.keeps
        memory.changeable = not change.keeps
        grad = any(self.values[other].grad for other in (place, *inputs))
        if grad and not all(value.grad for value in memory.values):
            # torch takes a view of what had no gradient yet for a leaf, and crashes at a hook of it.
            memory.changeable &= len(memory.values) == 1
            for value in memory.values:
                value.leaf |= value is not self.values[place]
        for value in memory.values:
            value.grad |= grad
        self.values[place].used = False
        self._steps.append(ChangeInPlace(name, place, inputs))

    def _a_hook(self) -> None:
        # Leaves have hooks of their own; the gradient of a table may be sparse, where no hook expects it.
        targets = [place for place, each in enumerate(self.values) if each.grad and not each.table and not each.leaf]
        if targets:
            self._steps.append(Hook(self.one(targets)))

    def _a_lookup(self) -> None:
        tables = [place for place, value in enumerate(self.values) if value.table]
        if tables:
            place = self._draw.choice(tables)
            self.values[place].used = True
            self._steps.append(Lookup(place))
            self.values.append(Value(True, Memory(changeable=True)))

    # -- steps that concern other workers -----------------------------------------------------------

    def _a_call(self) -> None:
        number, values, references, results = self._begin(waits=True)
        self._steps.append(Call(number, values, references))
        self._add(results)

    def _a_start(self) -> None:
        number, values, references, results = self._begin(waits=False)
        self._steps.append(Start(number, values, references))
        self._started[self._starts] = results
        self._starts += 1

    def _a_wait(self) -> None:
        if self._started:
            self._wait(self._draw.choice(list(self._started)))

    def _wait(self, started: int) -> None:
        self._steps.append(Wait(started))
        self._add(self._started.pop(started))

    def _a_remote(self) -> None:
        number, values, references, (results, _) = self._begin(waits=False)
        self._steps.append(Remote(number, values, references))
        self._refer(self._author.worker_of(number), results)

    def _a_reference(self) -> None:
        values = self.some(2)
        self._steps.append(Refer(values))
        for place in values:
            self.values[place].used = True
        self._refer(self._worker, [self.values[place] for place in values])

    def _refer(self, owner: int, values: list[Value]) -> None:
        for each in values:
            each.memory.changeable = False
        self.references.append(Reference(owner, values))

    def _a_fetch(self) -> None:
        if self.references:
            self._fetch(self._draw.randrange(len(self.references)))

    def _fetch(self, place: int) -> None:
        reference = self.references[place]
        reference.used = True
        self._steps.append(Fetch(place))
        if reference.owner == self._worker:
            # The very same tensors.
            self.values += [Value(each.grad, each.memory, each.table, each.leaf) for each in reference.values]
        else:
            self.values += sent(reference.values)

    def _begin(self, *, waits: bool) -> tuple[int, Places, Places, Results]:
        if self._depth and not self._calls:
            self._calls = True
            self._author.callers += 1
        values = self.some(4)
        references: Places = ()
        if self.references and self._draw.random() < 0.5:
            references = (self._draw.randrange(len(self.references)),)
        given = [self.values[place] for place in values]
        for each in given:
            each.used = True
            each.memory.changeable &= waits
        passed = [Reference(self.references[place].owner, self.references[place].values) for place in references]
        number, results = self._author.begin(self._depth + 1, sent(given), passed)
        return number, values, references, results

    def _add(self, results: Results) -> None:
        values, references = results
        self.values += sent(values)
        self.references += [Reference(each.owner, each.values) for each in references]
