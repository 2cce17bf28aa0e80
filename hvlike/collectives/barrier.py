"""barrier: nobody goes on before all have come. The agreement itself is the barrier; no data moves."""

from __future__ import annotations

from hvlike.collectives.handles import synchronize
from hvlike.collectives.process_set import ProcessSet
from hvlike.collectives.request import Signature
from hvlike.collectives.submission import begin, submit


def barrier(process_set: ProcessSet | None = None) -> None:
    """Wait until every rank of the set has called this.

    Collective: every rank of the set. Blocks. Operations of other names may be in flight meanwhile.
    Raises: PeerLeftError, ShutdownError, DeadlockError (all HorovodInternalError).
    Source: MPI 4.1 section 6.3; horovod.torch.barrier.
    """
    membership, name = begin("barrier", None, process_set)
    synchronize(submit(membership, Signature("barrier"), name, [], lambda request: None, wake=False))
