"""A wait in an order that goes without the coordinator is known to reports and to the search for deadlocks."""

import threading
from types import ModuleType

from hvlike.collectives.requests.request import find_call_site
from hvlike.collectives.session.context import current


def test_it_is_what_was_asked_for_last_and_its_thread_may_ask_for_more(hvd: ModuleType) -> None:
    controller = current().find_set(None, "test").controller
    seen: list[bool] = []
    leave = threading.Event()

    def wait() -> None:
        controller.wait_in_order("of a test", 1, lambda: True, lambda error: None, place=find_call_site())
        seen.append(True)
        leave.wait(30.0)

    # A daemon counts once it has asked for something.
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        assert current().fabric.loop.wait(lambda: bool(seen), 30.0)
        assert controller.tensor_queue.last is not None
        assert controller.tensor_queue.last[0] == ("step", "of a test")
        assert not controller.tensor_queue.has_one_thread()
    finally:
        leave.set()
        thread.join()
