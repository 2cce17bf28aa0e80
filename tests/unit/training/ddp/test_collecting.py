"""The thread that runs a part of a collecting pass knows of it meanwhile, and keeps nothing of it."""

import sys
import threading

import pytest
import torch

from hvlike.training.ddp.end_of_backward import Collected, collecting, collection

KEY = "hvlike.training.ddp.end_of_backward"


def test_a_pass_within_a_pass_has_its_own() -> None:
    outer, inner = Collected({}), Collected({})
    with collecting(outer):
        with collecting(inner):
            assert collection() is inner
        assert collection() is outer
    assert collection() is None


def test_references_are_counted() -> None:
    """Past bug: torch 2.5 drops a reference that it has not counted; the process died of that."""
    outer, inner = Collected({}), Collected({})
    before = sys.getrefcount(outer), sys.getrefcount(inner)
    for _ in range(10):
        with collecting(outer), collecting(inner):
            assert collection() is inner
        assert collection() is None
    assert (sys.getrefcount(outer), sys.getrefcount(inner)) == before


@pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="this torch can only put things there")
def test_nothing_is_left_in_a_thread_for_its_end() -> None:
    """Past bug: torch drops a thread's objects after Python is done with it; at the end of the process that aborted."""
    left = []

    def run() -> None:
        with collecting(Collected({})):
            pass
        left.append(torch._C._is_key_in_tls(KEY))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert left == [False]
