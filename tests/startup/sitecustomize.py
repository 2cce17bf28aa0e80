"""Python runs this first in the processes of jobs, which spend most of their time on imports."""

import atexit
import gc
import os

import late

if "HVLIKE_TEST_NOTHING_LATE" not in os.environ:
    late.install()
# Collecting garbage while torch is imported takes a tenth of that.
gc.set_threshold(10_000, 10, 10)
# Looking through all of torch for garbage at the end of a process takes a quarter of its life.
atexit.register(gc.freeze)
