"""The pace of an exchange: a slow network is told from a late peer, and a small sample says nothing."""

from collections.abc import Iterable

from hvlike.backends.network.progress import SLOW_BYTES_PER_SECOND, SMALLEST_SAMPLE, BandwidthEstimator

MESSAGE = SMALLEST_SAMPLE // 4


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def exchange(pace: BandwidthEstimator, clock: Clock, seconds: Iterable[float]) -> bool:
    """An exchange of messages that arrive after so many seconds each; whether the network counts as slow after it."""
    pace.begin()
    for each in seconds:
        clock.now += each
        pace.arrived(MESSAGE)
    pace.end()
    return pace.slow


def made() -> tuple[BandwidthEstimator, Clock]:
    clock = Clock()
    return BandwidthEstimator(clock), clock


FAST = 0.5 * MESSAGE / SLOW_BYTES_PER_SECOND
SLOW = 2.0 * MESSAGE / SLOW_BYTES_PER_SECOND


def test_the_rate_decides() -> None:
    pace, clock = made()
    assert not pace.slow
    assert exchange(pace, clock, [SLOW] * 5)
    assert not exchange(pace, clock, [FAST] * 5)


def test_waiting_for_the_first_message_does_not_count() -> None:
    pace, clock = made()
    assert not exchange(pace, clock, [100.0] + [FAST] * 4)


def test_few_bytes_change_nothing() -> None:
    pace, clock = made()
    assert not exchange(pace, clock, [SLOW] * 4)
    assert exchange(pace, clock, [SLOW] * 5)
    assert exchange(pace, clock, [FAST] * 4)
    assert exchange(pace, clock, [])
