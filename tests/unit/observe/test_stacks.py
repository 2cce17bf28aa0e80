"""Where the main thread is: shown while it is in the user's code, and not while it waits inside hvlike."""

import gc
import sys
import threading

import pytest

from hvlike.observe.log import frame_of, main_stack


def seen_from_a_thread() -> str:
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(main_stack()))
    thread.start()
    thread.join()
    return seen[0]


def test_the_users_code_is_shown() -> None:
    stack = seen_from_a_thread()
    assert "in seen_from_a_thread" in stack
    assert stack.count("  File ") == 8


def test_a_wait_inside_hvlike_is_no_place() -> None:
    # The loop's own wait, as a traceback knows it.
    code = compile("def wait(look):\n    return look()\n", "/somewhere/hvlike/transport/loop/loop.py", "exec")
    names: dict[str, object] = {}
    exec(code, names)
    wait = names["wait"]
    assert callable(wait)
    assert wait(seen_from_a_thread) == ""


def test_the_main_thread_does_not_look_at_itself() -> None:
    assert main_stack() == ""


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="garbage is collected between bytecodes alone there")
def test_no_garbage_is_collected_while_threads_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a thread that starts or ends meanwhile, and this one, wait for each other for ever."""
    collects: list[bool] = []
    look = sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: (collects.append(gc.isenabled()), look())[1])
    assert frame_of(threading.main_thread()) is not None
    assert (collects, gc.isenabled()) == ([False], True)
