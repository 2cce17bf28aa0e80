"""Training that goes on after an error of the job: Horovod's `elastic` for the ranks of one MPI job.

Example::

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            ...
            state.commit()

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)
    state.register_reset_callbacks([on_reset])
    train(state)

After a HorovodInternalError all ranks go back to the last commit and train on, in the same job. Under
`mpirun --with-ft ulfm` they do so without a rank that is lost, or a spare takes its place.

With HVLIKE_CHECKPOINT_DIR commits are written there, and training starts from the newest one. A job that is asked to
end (SIGTERM, SIGUSR1) ends at its next commit with status EXIT_PREEMPTED; `python -m hvlike launch` starts jobs again.
"""

from __future__ import annotations

from hvlike.errors import HorovodInternalError, HostsUpdatedInterrupt
from hvlike.training.elastic.durable import preempted
from hvlike.training.elastic.local_parts import ElasticSampler, RandomState
from hvlike.training.elastic.run import run
from hvlike.training.elastic.state import ObjectState, State, TorchState
from hvlike.transport.failure.exit_status import EXIT_PREEMPTED
from hvlike.untraced import keep_untraced

__all__ = ["ElasticSampler", "ObjectState", "RandomState", "State", "TorchState", "preempted", "run"]
__all__ += ["EXIT_PREEMPTED"]
__all__ += ["HorovodInternalError", "HostsUpdatedInterrupt"]

keep_untraced(globals())
