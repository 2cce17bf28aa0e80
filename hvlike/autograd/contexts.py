"""All contexts of this worker: created here or by the first message that arrives in them, until their release.

The creator of a context releases it and tells the workers that it has reached; each of them tells those that it has
reached itself. Every release names the oldest context of its creator that is still alive. Older ones are over, so a
worker remembers released contexts only from that number on, for messages that arrive late.

Contexts, messages and backwards have numbers that are unique in a session: the rank that gave them and a counter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from weakref import ref

from torch import Tensor

from hvlike.autograd.context import DistributedContext, record_recv, record_send
from hvlike.autograd.timeline import show_send
from hvlike.errors import RpcError, WrongTypeError
from hvlike.rpc.agent.agent import Agent
from hvlike.rpc.agent.agent import current_agent as current_agent
from hvlike.rpc.wire import autograd_hooks as seam
from hvlike.rpc.wire.autograd_hooks import NO_CONTEXT, NO_MESSAGE, Note, in_context, unknown_context
from hvlike.rpc.wire.devices import follow

_BITS = 48
"""Of the number; the rank stands above them."""


class IdGenerator:
    """Gives the names of one worker, in ascending order. Safe from any thread."""

    def __init__(self, rank: int, first: int = 0) -> None:
        self._numbers = count((rank << _BITS) + first)

    def new(self) -> int:
        """The next name."""
        return next(self._numbers)


def first_id_after(rank: int) -> int:
    """Above all names that a worker gives."""
    return (rank + 1) << _BITS


def rank_of_id(identifier: int) -> int:
    """The rank that gave this name."""
    return identifier >> _BITS


def id_in_words(identifier: int) -> str:
    """The rank that gave this name, and its number there."""
    giver = rank_of_id(identifier)
    return f"{giver}.{identifier - (giver << _BITS)}"


RELEASE, WITHDRAW = 50, 51
"""Kinds of notices.

RELEASE     the context is over; the oldest of the same creator that is not  (context, oldest)
WITHDRAW    receiver -> sender: this message was dropped unopened  (context, message)
"""


class _Creator:
    """What is known of the released contexts of one worker."""

    def __init__(self) -> None:
        self.oldest = 0
        """All below are released."""
        self.released: set[int] = set()
        """Those from `oldest` on."""

    def has_released(self, context: int) -> bool:
        return context < self.oldest or context in self.released

    def release(self, context: int, oldest: int) -> bool:
        """Note a release; whether `oldest` has moved."""
        moved = oldest > self.oldest
        if moved:
            self.oldest = oldest
            self.released = {each for each in self.released if each >= oldest}
        if context >= self.oldest:
            self.released.add(context)
        return moved


class Contexts:
    """The contexts of this process in the running session of RPC: see hvlike.rpc.wire.autograd_hooks. From any
    thread."""

    def __init__(self) -> None:
        self.agent: Agent | None = None
        self.when_session_begins: list[Callable[[Agent], None]] = []
        """Called before the agent takes messages."""
        self.when_session_ends: list[Callable[[], None]] = []
        """Called while the contexts are still there."""
        self.run_backward: Callable[[int, list[Tensor], bool], None] | None = None
        """Put here by what does it."""
        self._rank = -1
        self._lock = threading.Lock()
        self._contexts: dict[int, DistributedContext] = {}
        self._own: dict[int, None] = {}
        """Those created here that live, in order."""
        self._creators: dict[int, _Creator] = {}

    # -- sessions -----------------------------------------------------------------------------

    def begin(self, agent: Agent) -> None:
        """A session of RPC begins: before the agent takes messages."""
        self.agent = agent
        if self._rank != agent.rank:
            # Not anew for every session: a thread that outlives its session finds no context of the next one.
            self._rank = agent.rank
            self._context_ids = IdGenerator(agent.rank)
            self._message_ids = IdGenerator(agent.rank, NO_MESSAGE + 1)
        agent.hear(RELEASE, self._hear_release)
        agent.hear(WITHDRAW, self._hear_withdrawal)
        agent.when_lost.append(self._lose)
        for hook in self.when_session_begins:
            hook(agent)

    def end(self) -> None:
        """The session has ended on this worker: so have its contexts."""
        for hook in self.when_session_ends:
            hook()
        with self._lock:
            left = list(self._contexts.values())
            self.agent = None
            self._contexts.clear()
            self._own.clear()
            self._creators.clear()
        for each in left:
            each.release()

    # -- contexts -----------------------------------------------------------------------------

    def create(self) -> DistributedContext:
        """A new context, which lives until it is released here."""
        with self._lock:
            made = DistributedContext(self._context_ids.new())
            self._contexts[made.id] = made
            self._own[made.id] = None
            self._last = made.id
        return made

    def release(self, made: DistributedContext) -> None:
        """End a context that was created here, at once; the workers that it has reached are told."""
        with self._lock:
            if self._contexts.get(made.id) is not made:
                return
            del self._contexts[made.id], self._own[made.id]
            oldest = next(iter(self._own), self._last + 1)
        self._end(made, oldest, self._rank)

    def find(self, context: int) -> DistributedContext:
        """The context of that number. Raises: RuntimeError where it is not on this worker."""
        found = self._contexts.get(context)
        if found is None:
            raise unknown_context(context)
        return found

    def live(self) -> list[int]:
        """The contexts that are on this worker."""
        with self._lock:
            return list(self._contexts)

    def gradients(self, context: int) -> dict[Tensor, Tensor]:
        """A copy of the context's map from leaves to gradients. Raises: RuntimeError where it is not here."""
        found = self.find(context)
        follow(found.marks)
        return dict(found.gradients)

    def backward(self, context: int, roots: list[Tensor], retain_graph: bool) -> None:
        """See hvlike.autograd.backward."""
        if self.run_backward is None:
            raise unknown_context(context)
        self.run_backward(context, roots, retain_graph)

    # -- messages -----------------------------------------------------------------------------

    def sent(self, context: int, rank: int, about: str, graded: Sequence[Tensor]) -> Note | None:
        """A message is packed, see hvlike.rpc.wire.autograd_hooks."""
        with self._lock:
            found = self._contexts.get(context)
            if found is None:
                return None
            # From now on the release goes there too, even if it begins before the message has left.
            found.reached.add(rank)
        if not graded:
            return context, NO_MESSAGE
        message = self._message_ids.new()
        record_send(found, message, rank, about, graded)
        agent = self.agent
        if agent is not None and agent.fabric.recorder.on:
            show_send(agent.fabric.recorder, context, found.sends[message])
        return context, message

    def left(self, note: Note) -> None:
        """A message is about to leave, see hvlike.rpc.wire.autograd_hooks."""
        context, message = note
        found, agent = self._contexts.get(context), self.agent
        if found is not None and agent is not None and message != NO_MESSAGE:
            agent.fabric.loop.post(partial(_look_ahead, ref(found)), wake=False)

    def came(self, note: Note, rank: int, graded: Sequence[Tensor]) -> Sequence[Tensor]:
        """A message is opened, see hvlike.rpc.wire.autograd_hooks."""
        context, message = note
        with self._lock:
            found = self._contexts.get(context)
            if found is None:
                if self.agent is None or self._is_released(context):
                    return graded
                found = self._contexts[context] = DistributedContext(context)
        return record_recv(found, message, rank, graded) if message != NO_MESSAGE else graded

    def unwanted(self, note: Note, rank: int) -> None:
        """A message will never be opened, see hvlike.rpc.wire.autograd_hooks."""
        agent = self.agent
        if note[1] != NO_MESSAGE and agent is not None:
            agent.notify(rank, WITHDRAW, note)

    # -- within -------------------------------------------------------------------------------

    def _is_released(self, context: int) -> bool:
        """Of a context that is not here. With the lock held."""
        giver = rank_of_id(context)
        if giver == self._rank:
            return True
        creator = self._creators.get(giver)
        return creator is not None and creator.has_released(context)

    def _hear_release(self, source: int, value: tuple[int, int]) -> None:
        """In the loop."""
        context, oldest = value
        giver = rank_of_id(context)
        if giver == self._rank:
            return
        with self._lock:
            over = [context]
            if self._creators.setdefault(giver, _Creator()).release(context, oldest):
                # Whoever was to tell of these may have left the session.
                over += self._below(giver, oldest)
            found = [self._contexts.pop(each) for each in over if each in self._contexts]
        for each in found:
            self._end(each, oldest, source)
        self._let_go(found)

    def _lose(self, rank: int, error: Exception) -> None:
        """A worker is gone, and with it the contexts that it has created. In the loop."""
        end = first_id_after(rank)
        with self._lock:
            self._creators.setdefault(rank, _Creator()).release(end - 1, end)
            found = [self._contexts.pop(each) for each in self._below(rank, end)]
        for each in found:
            each.release()
        self._let_go(found)

    def _below(self, giver: int, oldest: int) -> list[int]:
        """The contexts here that this worker has created before `oldest`. With the lock held."""
        return [each for each in self._contexts if rank_of_id(each) == giver and each < oldest]

    def _let_go(self, found: list[DistributedContext]) -> None:
        """Drop the last references, not in the loop: the user's graphs may have finalisers."""
        if found and self.agent is not None:
            self.agent.submit(found.clear)

    def _hear_withdrawal(self, source: int, value: Note) -> None:
        """In the loop."""
        found = self._contexts.get(value[0])
        if found is not None and self.agent is not None:
            self.agent.submit(partial(found.withdraw, value[1]))

    def _end(self, released: DistributedContext, oldest: int, source: int) -> None:
        """Pass the release on; the creator and `source`, who has told of it, know already."""
        agent = self.agent
        if agent is not None:
            for rank in released.reached.difference((source, rank_of_id(released.id), self._rank)):
                # Sent by this thread if it can: the next call would have to wait for one that is woken to send it.
                agent.post(rank, RELEASE, (released.id, oldest), [])
        released.release()


def _look_ahead(context: ref[DistributedContext]) -> None:
    """In the loop. What has been released meanwhile is not kept for this."""
    found = context()
    if found is not None:
        found.look_ahead()


contexts = Contexts()
"""Those of this process."""

seam.install_autograd_hooks(contexts)


@contextmanager
def context() -> Iterator[int]:
    """A context of distributed autograd: `with context() as context_id`; every RPC of this thread in it belongs to it.

    The number is unique in the session. What other threads do is in no context; what RPCs do on other workers, and the
    callbacks of rpc_async's futures, are in this one. When the block is left the context ends: here at once, soon on
    all workers that it has reached.
    Raises: RuntimeError outside of a session of RPC, and inside of another context.
    Source: torch.distributed.autograd.context.
    """
    current_agent()
    if seam.current_context() != NO_CONTEXT:
        raise RpcError(
            f"Already have an autograd context id for this thread: {seam.current_context()}. Leave that one first."
        )
    made = contexts.create()
    try:
        with in_context(made.id):
            yield made.id
    finally:
        contexts.release(made)


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """The gradients that this context's backwards have left on this worker: a new dict, by leaf tensor.

    context_id: from `context`. Only leaves that got a gradient are in it; to be looked up by the tensor object itself.
    A gradient does not require grad, and further backwards of the context add to it in place.
    Local, from any thread of any worker that the context has reached; does not wait for a backward that goes on.
    Raises: RuntimeError "Could not find autograd context with id" where there is none; TypeError for an id that is no
        int.
    Source: torch.distributed.autograd.get_gradients.
    """
    return contexts.gradients(checked_id("get_gradients", context_id))


def checked_id(function: str, context_id: object) -> int:
    """A context's number, as the user has given it. Raises: TypeError."""
    if not isinstance(context_id, int):
        raise WrongTypeError(
            f"{function}(): incompatible function arguments: context_id must be the int that hvlike.autograd.context() "
            f"gives, got {context_id!r}."
        )
    return context_id
