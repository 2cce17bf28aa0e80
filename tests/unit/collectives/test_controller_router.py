"""Messages find the controller of their process set: early ones wait for it, late ones are dropped."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hvlike.collectives.session.process_set_state import ControllerRouter

SHARED, PRIVATE = 1, 1 << 40
"""Numbers of sets: of those that all ranks know, and of those of torch.distributed, which have hashes of names."""


class Heard:
    """In the place of a controller."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, str, Any]] = []

    def hear(self, rank: int, what: str, value: Any) -> None:
        self.heard.append((rank, what, value))


@pytest.fixture
def listener() -> SimpleNamespace:
    found = SimpleNamespace()

    def listen(topic: Any, deliver: Callable[..., None]) -> None:
        found.deliver = deliver

    channel: Any = SimpleNamespace(listen=listen)
    fabric: Any = SimpleNamespace(channel=channel)
    found.router = ControllerRouter(fabric)
    return found


@pytest.mark.parametrize(("first", "second"), [(SHARED, PRIVATE), (PRIVATE, SHARED), (PRIVATE, PRIVATE - 1)])
def test_what_comes_before_the_set_is_there_waits_for_it(listener: SimpleNamespace, first: int, second: int) -> None:
    one, other = Heard(), Heard()
    listener.router.connect(first, one)
    listener.deliver(3, (second, "ready", "early"), [])
    listener.router.connect(second, other)
    assert other.heard == [(3, "ready", "early")]
    listener.deliver(3, (second, "ready", "later"), [])
    assert other.heard[1:] == [(3, "ready", "later")]
    assert one.heard == []


def test_what_comes_after_the_set_was_removed_is_dropped(listener: SimpleNamespace) -> None:
    controller = Heard()
    listener.router.connect(SHARED, controller)
    listener.router.disconnect(SHARED)
    listener.deliver(3, (SHARED, "resumed", None), [])
    assert controller.heard == []
    another = Heard()
    listener.router.connect(SHARED, another)
    assert another.heard == []
