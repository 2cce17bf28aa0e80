"""All that one rank has found out without MPI."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from hvlike.doctor.facts import files, gpu, nccl, processor, shared_memory, software, surroundings
from hvlike.doctor.facts.files import Files
from hvlike.doctor.facts.gpu import Gpus
from hvlike.doctor.facts.nccl import NcclState
from hvlike.doctor.facts.processor import Processor
from hvlike.doctor.facts.shared_memory import SharedMemory
from hvlike.doctor.facts.software import Software
from hvlike.doctor.facts.surroundings import Surroundings
from hvlike.doctor.probe import Gap, Prober
from hvlike.transport import library
from hvlike.transport.library import Library


@dataclass(frozen=True)
class RankFacts:
    """What one rank says to the first one. A Gap: it could not find out."""

    host: str
    software: Software | Gap
    surroundings: Surroundings
    library: Library | Gap
    processor: Processor | Gap
    memory: SharedMemory | Gap
    files: Files | Gap
    gpus: Gpus | Gap
    nccl: NcclState | Gap


def collect(prober: Prober) -> RankFacts:
    """Look at this process and its machine, every question in a process of its own. Local."""
    launcher = os.getppid()
    return RankFacts(
        host=socket.gethostname(),
        software=prober.ask(software.collect),
        surroundings=surroundings.collect(os.environ),
        library=prober.ask(lambda: library.ask(os.environ)),
        processor=prober.ask(lambda: processor.collect(launcher)),
        memory=prober.ask(shared_memory.collect),
        files=prober.ask(files.collect),
        gpus=prober.ask(gpu.collect),
        nccl=prober.ask(nccl.collect),
    )
