"""Run programs that import horovod: `install()` at the top of one, or `python -m hvlike horovod train.py`."""

from hvlike.horovod.importer import install

__all__ = ["install"]
