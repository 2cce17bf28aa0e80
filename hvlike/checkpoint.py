"""Checkpoints of a job: `save(folder, step, model=model, optimizer=optimizer, epoch=3)` and `load`.

Example::

    loaded = hvd.checkpoint.load("checkpoints", model=model, optimizer=optimizer)
    first = 0 if loaded is None else loaded.step + 1
    for step in range(first, steps):
        ...
        if step % 1000 == 0:
            hvd.checkpoint.save("checkpoints", step, model=model, optimizer=optimizer)

Rank 0 writes; a file appears whole or not at all, carries its checksum in its name, and is checked before it is loaded.
If a file is damaged, the one before it is loaded. All ranks load the same, and learn of a failure together.
"""

from __future__ import annotations

from hvlike.errors import CheckpointError
from hvlike.training.elastic.checkpoint import Checkpoint, load, save
from hvlike.untraced import keep_untraced

__all__ = ["Checkpoint", "CheckpointError", "load", "save"]

keep_untraced(globals())
