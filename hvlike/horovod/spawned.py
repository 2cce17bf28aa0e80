"""What a process spawned by a program of `python -m hvlike horovod` imports as its main module: that program again."""

import os
import runpy

from hvlike.horovod.importer import install

PROGRAM = "HVLIKE_HOROVOD_PROGRAM"  # The path of its file, or -m and its module

if __name__ == "__mp_main__":
    install()
    program = os.environ[PROGRAM]
    run = runpy.run_module if program.startswith("-m ") else runpy.run_path
    globals().update(run(program.removeprefix("-m "), run_name=__name__))
