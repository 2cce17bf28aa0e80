"""All contexts of this worker: created here or by the first message that arrives in them, until their release.

The creator of a context releases it and tells the workers that it has reached; each of them tells those that it has
reached itself. Every release names the oldest context of its creator that is still alive. Older ones are over, so a
worker remembers released contexts only from that number on, for messages that arrive late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor

from hvlike.autograd.context import DistributedContext, new_ids, new_send, rank_of_id
from hvlike.errors import RpcError, WorkerLostError, WrongTypeError
from hvlike.rpc.agent.agent import Agent, current_agent
from hvlike.rpc.wire.autograd_hooks import (
    NO_CONTEXT,
    NO_MESSAGE,
    Note,
    in_context,
    install_autograd_hooks,
    this_thread,
    unknown_context,
)
from hvlike.system.system import of_process, system

RELEASE = 50  # Notice: the context is over; the oldest of the same creator that is not (context, oldest)
WITHDRAW = 51  # Notice, receiver -> sender: this message was dropped unopened (context, message)
MESSAGES_ROW = "autograd messages"  # Row of the timeline for messages whose tensors require grad, and for gradients


class Backwards:
    """What hvlike.autograd.backward sets here; it imports this module."""

    table: Callable[[Agent], Any]  # Makes the BackwardTable of a session
    run: Callable[[int, list[Tensor], bool], None]


class Contexts:
    """The contexts of this process in the running session, the AutogradHooks of RPC. From any thread."""

    def __init__(self) -> None:
        self.agent: Agent | None = None
        self.backwards: Any = None  # The BackwardTable of the session
        self._rank = -1
        self._lock = system.Lock()
        self._contexts: dict[int, DistributedContext] = {}
        self._oldest: dict[int, int] = {}  # By creator: its contexts with lower ids are released
        self._released: set[int] = set()  # Those with higher ids that are

    def begin(self, agent: Agent) -> None:
        """A session of RPC begins. Called before the agent takes messages."""
        self.agent = agent
        with self._lock:
            # The agent before may have heard of a lost worker after `end`.
            self._oldest.clear()
            self._released.clear()
        if self._rank != agent.rank:
            # Kept from session to session: a thread that outlives its session finds no context of the next one.
            self._rank = agent.rank
            self._context_ids = new_ids(agent.rank)
            self._message_ids = new_ids(agent.rank, NO_MESSAGE + 1)
        agent.hear(RELEASE, self._hear_release)
        agent.hear(WITHDRAW, self._hear_withdrawal)
        agent.when_lost.append(self._lose)
        self.backwards = Backwards.table(agent)

    def backward(self, context: int, roots: list[Tensor], retain_graph: bool) -> None:
        Backwards.run(context, roots, retain_graph)

    def end(self) -> None:
        backwards, self.backwards = self.backwards, None
        if backwards is not None:
            backwards.end()
        with self._lock:
            left = list(self._contexts.values())
            self.agent = None
            self._contexts.clear()
        for each in left:
            each.release()

    def create(self) -> DistributedContext:
        with self._lock:
            made = DistributedContext(next(self._context_ids))
            self._contexts[made.id] = made
            self._last = made.id
        return made

    def release(self, made: DistributedContext) -> None:
        with self._lock:
            if self._contexts.get(made.id) is not made:
                return
            del self._contexts[made.id]
            own = (each for each in self._contexts if rank_of_id(each) == self._rank)
            oldest = min(own, default=self._last + 1)
        self._end(made, oldest, self._rank)

    def find(self, context: int) -> DistributedContext:
        """Return the context with this id. Raises: RuntimeError where it is not on this worker."""
        found = self.get(context)
        if found is None:
            creator, agent = rank_of_id(context), self.agent
            if agent is not None and creator in agent.vanished:
                raise WorkerLostError(f"{unknown_context(context)}: {agent.lost[creator]}", [creator])
            raise unknown_context(context)
        return found

    def get(self, context: int) -> DistributedContext | None:
        return self._contexts.get(context)

    def all(self) -> list[DistributedContext]:
        with self._lock:
            return list(self._contexts.values())

    def live(self) -> list[int]:
        return [each.id for each in self.all()]

    @property
    def remembered_releases(self) -> int:
        """The number of released contexts whose ids are kept, for messages that arrive late."""
        return len(self._released)

    def gradients(self, context: int) -> dict[Tensor, Tensor]:
        """Return a copy of a context's map from leaves to gradients. Raises: RuntimeError where it is not here."""
        found = self.find(context)
        found.gradients_ready.follow()
        return dict(found.gradients)

    def sent(self, context: int, rank: int, about: str, graded: Sequence[Tensor]) -> Note | None:
        with self._lock:
            found = self._contexts.get(context)
            if found is None:
                return None
            # From now on the release goes there too, even if it begins before the message has left.
            found.reached.add(rank)
        if not graded:
            return context, NO_MESSAGE
        message = next(self._message_ids)
        found.record_send(new_send(message, rank, about, graded))
        if self.agent is not None and (recorder := self.agent.fabric.recorder).on:
            shown = {"context": context, "message": message, "to": rank, "tensors": len(graded)}
            recorder.instant(recorder.row(MESSAGES_ROW), f"SEND {about}".rstrip(), shown)
        return context, message

    def left(self, note: Note) -> None:
        context, message = note
        found, agent = self._contexts.get(context), self.agent
        if found is not None and agent is not None and message != NO_MESSAGE:
            agent.fabric.loop.post(partial(_scan_ahead, ref(found)), wake=False)

    def came(self, note: Note, rank: int, graded: Sequence[Tensor]) -> Sequence[Tensor]:
        context, message = note
        with self._lock:
            found = self._contexts.get(context)
            if found is None:
                if self.agent is None or self._is_released(context):
                    return graded
                found = self._contexts[context] = DistributedContext(context)
        return found.record_recv(message, rank, graded) if message != NO_MESSAGE else graded

    def unwanted(self, note: Note, rank: int) -> None:
        agent = self.agent
        if note[1] != NO_MESSAGE and agent is not None:
            agent.notify(rank, WITHDRAW, note)

    def _is_released(self, context: int) -> bool:
        """Whether a context that is not here has been. With the lock held."""
        creator = rank_of_id(context)
        return creator == self._rank or context < self._oldest.get(creator, 0) or context in self._released

    def _hear_release(self, source: int, value: tuple[int, int], _: object = None) -> None:
        context, oldest = value
        if rank_of_id(context) == self._rank:
            return
        found = self._take_released(context, oldest)
        for each in found:
            self._end(each, oldest, source)
        self._drop(found)

    def _lose(self, rank: int, error: Exception) -> None:
        """A worker is gone, and with it the contexts that it has created. In the loop."""
        end = next(new_ids(rank + 1))  # Above all ids of that rank
        found = self._take_released(end - 1, end)
        for each in found:
            each.release()
        self._drop(found)

    def _take_released(self, context: int, oldest: int) -> list[DistributedContext]:
        """Note that a context of another worker is over, as are those that it has created before `oldest`: the worker
        that was to tell of them may have left the session. Remove and return those that are here.
        """
        creator = rank_of_id(context)
        with self._lock:
            oldest = self._oldest[creator] = max(oldest, self._oldest.get(creator, 0))
            self._released = {
                each for each in self._released | {context} if rank_of_id(each) != creator or each >= oldest
            }
            over = [each for each in self._contexts if rank_of_id(each) == creator and self._is_released(each)]
            return [self._contexts.pop(each) for each in over]

    def _drop(self, found: list[DistributedContext]) -> None:
        """Drop the last references, not in the loop: the user's graphs may have finalisers."""
        if found and self.agent is not None:
            self.agent.submit(found.clear)

    def _hear_withdrawal(self, source: int, value: Note, _: object = None) -> None:
        found = self._contexts.get(value[0])
        if found is not None and self.agent is not None:
            self.agent.submit(partial(found.withdraw, value[1]))

    def _end(self, released: DistributedContext, oldest: int, source: int) -> None:
        """Pass the release on, except to the creator and to `source`, which has told of it."""
        agent = self.agent
        if agent is not None:
            for rank in released.reached.difference((source, rank_of_id(released.id), self._rank)):
                # This thread sends it if it can: the next call would have to wait for one that is woken to send it.
                agent.post(rank, RELEASE, (released.id, oldest), [])
        released.release()


def _scan_ahead(context: ref[DistributedContext]) -> None:
    """In the loop. Does not keep a context that has been released meanwhile."""
    found = context()
    if found is not None:
        found.scan_ahead()


contexts = of_process(Contexts)
install_autograd_hooks(contexts)


@contextmanager
def context() -> Iterator[int]:
    """Open a context of distributed autograd; every RPC that this thread makes in the block belongs to it.

    So do the RPCs that these calls make on other workers, and those of callbacks of rpc_async's futures. Other threads
    have no context. When the block ends, so does the context: on this worker at once, soon on all workers that it has
    reached. Local, does not block.

    Yields:
        The id of the context, an int that is unique in the session.

    Raises:
        RuntimeError: Outside of a session of RPC, and inside of another context.

    Example:
        >>> with autograd.context() as context_id:
        ...     autograd.backward(context_id, [model(x).sum()])

    Source: torch.distributed.autograd.context.
    """
    current_agent()
    current = this_thread.context
    if current != NO_CONTEXT:
        raise RpcError(f"Already have an autograd context id for this thread: {current}. Leave that one first.")
    made = contexts.create()
    try:
        with in_context(made.id):
            yield made.id
    finally:
        contexts.release(made)


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """Return the gradients that the backwards of a context have left on this worker.

    Local, from any thread of any worker that the context has reached. Does not wait for a backward that runs.

    Args:
        context_id: From `context`.

    Returns:
        A new dict from leaf tensors, by identity, to gradients of the same shapes. Only leaves that got a gradient are
        in it. A gradient does not require grad, and further backwards of the context add to it in place.

    Raises:
        RuntimeError: "Could not find autograd context with id" where there is none.
        TypeError: If the id is not an int.

    Source: torch.distributed.autograd.get_gradients.
    """
    return contexts.gradients(checked_id("get_gradients", context_id))


def checked_id(function: str, context_id: object) -> int:
    if not isinstance(context_id, int):
        raise WrongTypeError(
            f"{function}(): incompatible function arguments: context_id must be the int that hvlike.autograd.context() "
            f"gives, got {context_id!r}."
        )
    return context_id
