"""A thread that asks a device beside a capture is in the relaxed mode meanwhile, and has its own mode again after."""

import ctypes
from typing import Any

import pytest

from hvlike.backends.cuda.captures import BesideCaptures, find_exchange
from hvlike.backends.cuda.runtime import DeviceRuntime

GLOBAL, RELAXED = 0, 2


class Driver:
    """A library with the mode of one thread."""

    def __init__(self) -> None:
        self.mode = GLOBAL

    def exchange(self, mode: Any) -> int:
        held = ctypes.cast(mode, ctypes.POINTER(ctypes.c_int)).contents
        held.value, self.mode = self.mode, held.value
        return 0


def test_the_mode_is_relaxed_inside_and_the_old_one_after() -> None:
    driver = Driver()
    with BesideCaptures(driver.exchange):
        assert driver.mode == RELAXED
        with BesideCaptures(driver.exchange):
            assert driver.mode == RELAXED
        assert driver.mode == RELAXED
    assert driver.mode == GLOBAL


def test_an_error_leaves_the_old_mode() -> None:
    driver = Driver()
    with pytest.raises(ValueError, match="asked"), BesideCaptures(driver.exchange):
        raise ValueError("asked")
    assert driver.mode == GLOBAL


@pytest.mark.skipif(find_exchange() is not None, reason="CUDA is loaded here")
def test_without_cuda_there_is_nothing_to_do() -> None:
    with DeviceRuntime().beside_captures():
        pass
