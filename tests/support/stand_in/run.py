"""Run a program or a module as `python` would, with the stand-in for CUDA: run.py [-m MODULE | FILE] ARG.."""

import runpy
import sys

import stand_in  # noqa: F401

if sys.argv[1] == "-m":
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
