"""Python runs this first in the processes of jobs: collecting garbage while torch is imported takes a tenth of that."""

import gc

gc.set_threshold(10_000, 10, 10)
