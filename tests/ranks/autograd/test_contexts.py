"""Contexts: whose they are, how RPCs carry them along, and where they are the context of a thread."""

import threading
from types import ModuleType
from typing import Any

import pytest
import torch
from support.autograd.sights import here, here_and_later, here_and_there, in_another_thread, is_known
from support.rpc.doors import await_promise, keep_promise, open_door, pass_door
from support.rpc.forms import FORMS

import hvlike.autograd
import hvlike.rpc
from hvlike.rpc.functions import async_execution
from hvlike.rpc.wire.autograd_hooks import NO_CONTEXT, this_thread

NESTED = "Already have an autograd context id for this thread"
UNKNOWN = "Could not find autograd context with id: "


def open_a_context() -> int:
    """The number of a new context; fails in a function that is called in one."""
    with hvlike.autograd.context() as context:
        return context


def context_of_a_value(rref: Any) -> int:
    """The context of a function whose argument has to be confirmed first."""
    assert rref.confirmed_by_owner()
    return this_thread.context


class Asked:
    """A value whose methods tell the context that they run in."""

    def __init__(self, door: str = "") -> None:
        if door:
            pass_door(door)

    def here(self) -> int:
        return this_thread.context

    @async_execution
    def later(self) -> Any:
        return hvlike.rpc.rpc_async(hvlike.rpc.get_worker_info(), here)


def test_numbers_are_ints_that_no_other_context_of_the_job_has(hvd: ModuleType, autograd: ModuleType) -> None:
    mine = []
    for _ in range(3):
        with autograd.context() as context:
            assert type(context) is int
            mine.append(context)
    of_all = [context for contexts in hvd.allgather_object(mine) for context in contexts]
    assert len(set(of_all)) == 3 * hvd.size()
    assert {context >> 48 for context in mine} == {hvd.rank()}


def test_a_thread_has_one_context_at_a_time(autograd: ModuleType) -> None:
    with autograd.context() as context:
        with pytest.raises(RuntimeError, match=NESTED):
            with autograd.context():
                pytest.fail("a context in a context")
        assert here() == context
        # A new dict each time.
        autograd.get_gradients(context)[torch.ones(1)] = torch.ones(1)
        assert autograd.get_gradients(context) == {}
    assert here() == NO_CONTEXT
    with autograd.context() as another:
        assert another != context


def test_a_function_that_was_called_in_a_context_has_that_one(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    with autograd.context():
        with pytest.raises(RuntimeError, match=NESTED):
            rpc.rpc_sync(peer, open_a_context)
    assert rpc.rpc_sync(peer, open_a_context) >> 48 == peer


def test_other_threads_are_in_no_context(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    with autograd.context() as context:
        assert in_another_thread(here) == NO_CONTEXT
        assert in_another_thread(lambda: rpc.rpc_sync(peer, here)) == NO_CONTEXT
        other = in_another_thread(open_a_context)
        assert other != context
        assert here() == context
        assert rpc.rpc_sync(peer, here) == context


def test_every_form_of_call_takes_the_context_along_without_any_tensor(
    rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    for form in FORMS.values():
        for function, args in ((here, ()), (torch.add, (torch.ones(2), 1))):
            with autograd.context() as context:
                answer = form(peer, function, args)
                assert function is torch.add or answer == context
                known = in_another_thread(lambda: rpc.rpc_sync(peer, is_known, (context,)))
                assert known
        assert form(peer, here) == NO_CONTEXT


def test_to_here_takes_the_context_along(rpc: ModuleType, autograd: ModuleType, peer: int, hvd: ModuleType) -> None:
    rref = rpc.remote(peer, torch.ones, (2,))
    with autograd.context() as context:
        rref.to_here()
        known = in_another_thread(lambda: rpc.rpc_sync(peer, is_known, (context,)))
        assert known
    assert here() == NO_CONTEXT


def test_calls_within_calls_are_in_the_context(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    beyond = (peer + 1) % hvd.size()
    with autograd.context() as context:
        assert rpc.rpc_sync(peer, here_and_there, (beyond,)) == (context, context)
        assert rpc.rpc_sync(beyond, is_known, (context,))
        assert rpc.remote(peer, here_and_there, (hvd.rank(),)).to_here() == (context, context)
    assert rpc.rpc_sync(peer, here_and_there, (beyond,)) == (NO_CONTEXT, NO_CONTEXT)


def test_callbacks_of_a_future_are_in_the_context_of_its_call(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    door = f"callbacks {hvd.rank()}"
    with autograd.context() as context:
        # The callbacks are there before the answer is, so that they run in another thread than this.
        future = rpc.rpc_async(peer, pass_door, (door,))
        seen = future.then(lambda done: (this_thread.context, rpc.rpc_sync(peer, here))).then(
            lambda done: (*done.wait(), this_thread.context)
        )
        in_another_thread(lambda: rpc.rpc_sync(peer, open_door, (door,)))
        assert seen.wait() == (context, context, context)


def test_callbacks_of_a_call_that_fails_are_in_its_context_too(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    door = f"failing {hvd.rank()}"
    with autograd.context() as context:
        future = rpc.rpc_async(peer, pass_door, (door, None, "one argument too many"))
        assert future.then(lambda done: this_thread.context).wait() == context
        future = rpc.rpc_async(peer, pass_door, (door,), timeout=0.05)
        seen: list[int] = []
        told = threading.Event()

        def tell(done: Any) -> None:
            seen.append(this_thread.context)
            told.set()

        future.add_done_callback(tell)
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            future.wait()
        assert told.wait(60)
        rpc.rpc_sync(peer, open_door, (door,))
        assert seen == [context]


def test_continuations_of_async_functions_are_in_the_context(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    beyond = (peer + 1) % hvd.size()
    for form in FORMS.values():
        with autograd.context() as context:
            assert form(peer, here_and_later, (beyond,)) == (context,) * 4
        assert form(peer, here_and_later, (beyond,)) == (NO_CONTEXT,) * 4


def test_methods_by_an_rref_run_in_the_context(rpc: ModuleType, autograd: ModuleType, peer: int) -> None:
    rref = rpc.remote(peer, Asked)
    with autograd.context() as context:
        assert rref.rpc_sync().here() == context
        assert rref.rpc_async().here().wait() == context
        assert rref.remote().here().to_here() == context
        assert rref.rpc_sync().later() == context
        assert rref.rpc_async().later().wait() == context
    assert rref.rpc_sync().here() == NO_CONTEXT


def test_a_look_up_of_a_type_leaves_each_caller_in_its_own_context(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    door = f"types {hvd.rank()}"
    rref = rpc.remote(peer, Asked, (door,))
    with autograd.context() as context:
        # This one asks for the type, the others wait for the same answer.
        first = rref.rpc_async().here()
        without = in_another_thread(lambda: rref.rpc_async().here())

        def call_in_another() -> tuple[int, Any]:
            with autograd.context() as another:
                future = rref.rpc_async().here()
                rpc.rpc_sync(peer, open_door, (door,))
                return another, future.wait()

        another, found = in_another_thread(call_in_another)
        assert first.wait() == context
        assert without.wait() == NO_CONTEXT
        assert found == another


def test_functions_whose_rrefs_are_confirmed_first_run_in_the_context(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    beyond = (peer + 1) % hvd.size()
    rref = rpc.remote(peer, torch.ones, (2,))
    with autograd.context() as context:
        assert rpc.rpc_sync(beyond, context_of_a_value, (rref,)) == context
        assert rpc.remote(beyond, context_of_a_value, (rref,)).to_here() == context
    assert rpc.rpc_sync(beyond, context_of_a_value, (rref,)) == NO_CONTEXT


def test_a_future_that_another_call_completes_answers_in_the_context_of_its_own(
    hvd: ModuleType, rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    promise = f"promise {hvd.rank()}"
    with autograd.context() as context:
        answer = rpc.rpc_async(peer, await_promise, (promise,)).then(lambda done: (done.wait(), this_thread.context))

        def keep_in_another() -> None:
            with autograd.context():
                rpc.rpc_sync(peer, keep_promise, (promise, 3))

        in_another_thread(keep_in_another)
        assert answer.wait() == (3, context)


def test_gradients_of_no_context_cannot_be_had(hvd: ModuleType, autograd: ModuleType) -> None:
    for unknown in (12345 << 48, -1):
        with pytest.raises(RuntimeError, match=f"{UNKNOWN}{unknown}$"):
            autograd.get_gradients(unknown)
    for wrong in ("1", 1.0, None, [1]):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            autograd.get_gradients(wrong)
    with pytest.raises(TypeError):
        autograd.get_gradients()


def test_gradients_may_be_asked_for_by_any_worker_and_thread_that_knows_the_context(
    rpc: ModuleType, autograd: ModuleType, peer: int
) -> None:
    with autograd.context() as context:
        assert rpc.rpc_sync(peer, hvlike.autograd.get_gradients, (context,)) == {}
        assert in_another_thread(lambda: autograd.get_gradients(context)) == {}


def test_without_a_session_there_is_no_context(hvd: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        with hvlike.autograd.context():
            pytest.fail("a context without a session")
    with pytest.raises(RuntimeError, match=UNKNOWN):
        hvlike.autograd.get_gradients(0)
