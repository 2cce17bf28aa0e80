"""What a process spawned by a program of `python -m hvlike horovod` imports as its main module: that program again."""

import os
import runpy

from hvlike.horovod.importer import install

PROGRAM = "HVLIKE_HOROVOD_PROGRAM"  # The path of its file, which runpy hides

if __name__ == "__mp_main__":
    install()
    globals().update(runpy.run_path(os.environ[PROGRAM], run_name=__name__))
