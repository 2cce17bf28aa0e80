"""MpiStore: the key-value store of torch.distributed over hvlike's messages. Rank 0 holds the table; no port is opened.

Any thread of any rank calls, but for hvlike's own loop. A call is one message to rank 0 and one back; rank 0 answers
from its loop, whatever its Python code does meanwhile.

init_process_group("hvlike") gets its rank and size from MPI and a store from here. MASTER_ADDR and MASTER_PORT are not
needed, and not used. RANK and WORLD_SIZE may be set, to what MPI says.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from hvlike.collectives.health.departures import Errors
from hvlike.collectives.session import context
from hvlike.collectives.session.context import Context
from hvlike.errors import LaunchError, UsageError
from hvlike.system.system import of_process, system
from hvlike.torch_distributed.key_value_table import Answer, Due, Table
from hvlike.transport.host import mpi_library, rank_variables
from hvlike.transport.host.launchers import detect_launcher
from hvlike.transport.loop.coroutine import Coroutine, pause
from hvlike.transport.messages.traffic import Topic
from hvlike.transport.world import World

HOLDER = 0  # The rank that has the table
LAST_WORDS_SECONDS = 1.0  # What a rank that has left, or another one, had sent before is taken first
CANCEL_SECONDS = 2.0  # How long a call whose time is over waits to learn what is missing

# Bound from C++, with overloads that no class written in Python can repeat.
_StoreBase: Any = Store


class MpiStore(_StoreBase):
    """A store among all ranks of hvlike. Each rank makes as many stores as the others, and in the same order.

    torch calls it from C++ too (PrefixStore, gloo), with bytes for values and its own names for some methods.
    A call that its timeout ends raises torch.distributed.DistStoreError with the keys that are missing; one that cannot
    be served, as a rank has left, torch.distributed.DistNetworkError.

    Source: torch.distributed.Store, torch.distributed.TCPStore.
    """

    def __init__(self) -> None:
        """Local; hvlike runs."""
        super().__init__()
        self._calls = _calls_of(context.current())
        self._number = next(self._calls.stores)
        # torch keeps only the part of it that is not Python.
        _process.kept.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, _encode(value))

    def get(self, key: str) -> bytes:
        value: bytes = self._ask("get", key)
        return value

    def add(self, key: str, amount: int) -> int:
        total: int = self._ask("add", key, int(amount))
        return total

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", list(keys), timeout=timeout)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        value: bytes = self._ask("compare_set", key, _encode(expected_value), _encode(desired_value))
        return value

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key))

    def num_keys(self) -> int:
        count: int = self._ask("num_keys")
        return count

    def list_keys(self) -> list[str]:
        keys: list[str] = self._ask("list_keys")
        return keys

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", key, _encode(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values: list[bytes] = self._ask("multi_get", list(keys))
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        if len(keys) != len(values):
            raise UsageError(f"multi_set: got {len(keys)} keys and {len(values)} values.")
        self._ask("multi_set", list(keys), [_encode(value) for value in values])

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._ask("queue_push", key, _encode(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        value: bytes | None = self._ask("queue_pop", key, bool(block))
        if value is None:
            raise dist.QueueEmptyError(f"queue is empty: {key}")
        return value

    def queue_len(self, key: str) -> int:
        length: int = self._ask("queue_len", key)
        return length

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> MpiStore:
        return self

    # What torch calls them from C++.
    deleteKey, getNumKeys, listKeys, hasExtendedApi = delete_key, num_keys, list_keys, has_extended_api

    def _ask(self, what: str, *arguments: Any, timeout: timedelta | None = None) -> Any:
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        return self._calls.ask(self._number, what, arguments, seconds)


def _encode(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class _Call:
    """One call in flight, on the rank that waits for it."""

    answer: Answer | None = None


class _Calls:
    """The calls of this rank to the tables of rank 0; on rank 0 the tables, too. One for each run of hvlike."""

    def __init__(self, running: Context) -> None:
        self.running = running
        self.stores = itertools.count()
        self._loop = running.fabric.loop
        self._channel = running.fabric.channel
        self._rank = running.world.rank
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._over = ""  # Why no call can be served any more
        self._lost = ""  # On rank 0: who has left
        self._tables: defaultdict[int, Table] = defaultdict(Table)
        self._channel.listen(Topic.STORE_ANSWER, self._take_answer)
        if self._rank == HOLDER:
            self._channel.listen(Topic.STORE, self._serve)
        running.before_close.append(self._end)
        running.departures.listen(self._lose)

    def ask(self, table: int, what: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        """Return the answer of rank 0. Any thread but the loop's driver. seconds: 0: no limit."""
        mpi_library.check_not_forked()
        number, call = next(self._numbers), _Call()
        self._calls[number] = call
        message = (table, number, what, arguments)
        try:
            if self._over:
                raise dist.DistNetworkError(self._text(what, arguments, self._over))
            self._loop.post(lambda: self._send(HOLDER, Topic.STORE, message), wake=False)
            in_time = self._loop.wait(lambda: call.answer is not None, seconds or None)
            if not in_time:
                # It may have ended just now; if not, rank 0 tells what is missing.
                self._loop.post(lambda: self._send(HOLDER, Topic.STORE, (table, number, "cancel", ())), wake=False)
                self._loop.wait(lambda: call.answer is not None, CANCEL_SECONDS)
        finally:
            del self._calls[number]
        answer = call.answer
        if answer is not None and answer.ok:
            return answer.value
        if answer is None or not in_time:
            missing = f"rank {HOLDER}, which holds the store, does not answer" if answer is None else answer.value
            reason = f"wait timeout after {round(1000 * seconds)}ms, {missing}"
            raise dist.DistStoreError(self._text(what, arguments, reason))
        error = UsageError if what == "add" and not self._over else dist.DistNetworkError
        raise error(self._text(what, arguments, answer.value))

    def _text(self, what: str, arguments: tuple[Any, ...], reason: str) -> str:
        keys = arguments[0] if arguments else []
        named = ", ".join([keys] if isinstance(keys, str) else keys)
        return f"MpiStore.{what} on rank {self._rank}: {reason}, keys: {named}"

    def _send(self, rank: int, topic: Topic, message: tuple[Any, ...]) -> None:
        self._channel.send(rank, topic, message, kind="store")

    # -- in the loop --------------------------------------------------------------------------------

    def _take_answer(self, source: int, message: tuple[int, Answer], tensors: list[Tensor]) -> None:
        number, answer = message
        call = self._calls.get(number)
        if call is not None and call.answer is None:
            call.answer = answer

    def _serve(self, source: int, message: tuple[int, int, str, tuple[Any, ...]], tensors: list[Tensor]) -> None:
        number, call, what, arguments = message
        table = self._tables[number]
        caller = (source, call)
        if what == "cancel":
            self._tell([(caller, Answer(False, f"nobody has set {', '.join(table.cancel(caller))}"))])
            return
        if self._lost:
            table.lose(self._lost)
        self._tell(table.call(caller, what, *arguments))

    def _tell(self, due: Due) -> None:
        for (rank, number), answer in due:
            self._send(rank, Topic.STORE_ANSWER, (number, answer))

    def _lose(self, errors: Errors) -> None:
        """Some ranks have left."""
        if self._rank == HOLDER or HOLDER in errors:
            self._loop.start(self._give_up(errors), wake=False)

    def _give_up(self, errors: Errors) -> Coroutine[None]:
        yield from pause(LAST_WORDS_SECONDS)
        reasons = " ".join(str(error).rstrip(".") for error in errors.values())
        if HOLDER in errors:
            self._fail(f"{reasons}, and it held the store")
            return
        self._lost = reasons
        for table in self._tables.values():
            self._tell(table.lose(reasons))

    def _fail(self, reason: str) -> None:
        self._over = self._over or reason
        for call in list(self._calls.values()):
            call.answer = call.answer or Answer(False, self._over)

    def _end(self) -> None:
        """hvlike is shut down, or the program ends. Rank 0 goes on answering the others as long as its loop turns."""
        self.running.before_close.remove(self._end)
        self._loop.post(lambda: self._fail("hvlike has been shut down on this rank"))


class _OpenStores:
    def __init__(self) -> None:
        self.kept: list[MpiStore] = []
        self.calls: _Calls | None = None
        self.lock = system.Lock()


_process = of_process(_OpenStores)


def _calls_of(running: Context) -> _Calls:
    with _process.lock:
        if _process.calls is None or _process.calls.running is not running:
            _process.calls = _Calls(running)
        return _process.calls


def find_place(url: str) -> tuple[MpiStore, int, int]:
    """Return the store, this rank and the number of ranks. Starts hvlike if it does not run.

    Collective: every rank calls it. Blocks until all have. url: env://, with the rank and world_size that
    init_process_group was given.

    Raises:
        LaunchError: On every rank, where this is no MPI job of as many ranks as the environment says.
        UsageError: Where rank or world_size are not MPI's.
    """
    world = start_hvlike()
    given = parse_qs(urlparse(url).query)
    rank, size = (int(given[name][0]) if name in given else None for name in ("rank", "world_size"))
    check_place(rank, size, world)
    if system.mpi is None:
        # After a loss the variables are those of before, and this rank may have another number.
        anew = world.job is not None and world.job.losses > 0
        if rank is None and size is None and not anew:
            check_environment(os.environ, world.rank, world.size)
        set_variables(os.environ, world, anew=anew)
    return MpiStore(), world.rank, world.size


def start_hvlike() -> World:
    """Return the world of hvlike, which is started if it does not run yet. Collective and blocking in that case."""
    context.start_context(None, [])
    return context.current().world


def check_place(rank: int | None, size: int | None, world: World) -> None:
    """Check what init_process_group was given. Raises: UsageError, LaunchError."""
    wrong = []
    if rank is not None and rank != world.rank:
        wrong.append(f"rank={rank}, but this is MPI's rank {world.rank}")
    if size is not None and size != world.size:
        wrong.append(f"world_size={size}, but MPI has started {world.size} {'rank' if world.size == 1 else 'ranks'}")
    if not wrong:
        return
    if world.size == 1 and size is not None and size > 1:
        raise LaunchError(_alone(f"world_size={size}", size))
    raise UsageError(
        f'init_process_group("hvlike") got {" and ".join(wrong)}. Leave out rank, world_size and store: they are '
        "MPI's. For some of the ranks make a group (torch.distributed.new_group)."
    )


def check_environment(environment: Mapping[str, str], rank: int, size: int) -> None:
    """RANK and WORLD_SIZE say what MPI says; or what the launcher says, where hvlike runs on some ranks of its job."""
    launcher = detect_launcher(environment)
    for name, number, of_launcher in (
        ("WORLD_SIZE", size, launcher and launcher.size),
        ("RANK", rank, launcher and launcher.rank),
    ):
        value = environment.get(name, str(number))
        if value in (str(number), str(of_launcher)):
            continue
        if name == "WORLD_SIZE" and size == 1:
            raise LaunchError(_alone(f"WORLD_SIZE={value}", value))
        raise LaunchError(
            f'init_process_group("hvlike"): the environment has {name}={value}, but this is MPI\'s rank {rank} of '
            f"{size}. Unset RANK and WORLD_SIZE, or start the program by mpirun alone (`mpirun -n N python ...`)."
        )


def _alone(said: str, size: object) -> str:
    return (
        f'init_process_group("hvlike"): {said}, but MPI has started one process here: each of the {size} would train '
        f"a model of its own. Start the program by `mpirun -n {size} python ...`, without torchrun or "
        "torch.multiprocessing.spawn."
    )


def set_variables(environment: MutableMapping[str, str], world: World, *, anew: bool = False) -> None:
    """Set the variables that torchrun sets, where they are missing or anew; RANK and WORLD_SIZE in any case. Local."""
    found = rank_variables.places(world)
    rank_variables.set_missing(environment, {name: found[name] for name in ("RANK", "WORLD_SIZE")}, anew=True)
    if world.size == 1:
        # In a job of several ranks init() has done it.
        found |= rank_variables.master(world, environment)
    rank_variables.set_missing(environment, found, anew=anew)
