"""Telling the MPI of this process which others are lost, where its launcher has not noticed anything; ending a job
before MPI has started.

Under fault tolerance Open MPI learns of a lost process by an event of PMIx, the protocol between a process and the
daemon of the launcher that has started it. From behind a cut link no event comes, and MPI's agreement among survivors
would wait for ever. So a process that knows better sends the event to itself: MPI then takes these processes for failed
and can do without them, as if they had been killed.

Source: PMIx standard 4.1, PMIx_Notify_event, PMIX_ERR_PROC_ABORTED, PMIX_RANGE_PROC_LOCAL, PMIx_Abort.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from typing import Any

from hvlike.transport.host.mpi_library import mapped_files

_ABORTED, _ABORTED_NAME = -7, b"PMIX_ERR_PROC_ABORTED"
_PROC, _PROC_NAME = 22, b"PMIX_PROC"
_LOCAL_RANGE = 7
_AFFECTED = b"pmix.evproc"
_INFO_BYTES = 4096  # Of a pmix_info_t, and much more


class _Process(ctypes.Structure):
    _fields_ = (("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


def report_lost(ranks: Iterable[int]) -> bool:
    """Have MPI take these ranks of COMM_WORLD for lost, in this process. Local; False where PMIx cannot be told."""
    library = _load()
    namespace = os.environ.get("PMIX_NAMESPACE", "").encode()
    if library is None or not namespace:
        return False
    told = True
    for rank in ranks:
        process, info = _Process(namespace, rank), ctypes.create_string_buffer(_INFO_BYTES)
        arguments = (_ABORTED, ctypes.byref(process), _LOCAL_RANGE, info, ctypes.c_size_t(1), None, None)
        told &= not library.PMIx_Info_load(info, _AFFECTED, ctypes.byref(process), ctypes.c_uint16(_PROC))
        told &= not library.PMIx_Notify_event(*arguments)
    return told


def abort(status: int, reason: str) -> bool:
    """Have the launcher end all processes of the job, this one too. From any thread; False where it cannot be asked."""
    library = _load()
    return library is not None and not library.PMIx_Abort(status, reason.encode(), None, ctypes.c_size_t(0))


def _load() -> Any:
    """The PMIx that MPI has loaded, if the numbers above mean there what they should; else None."""
    paths = mapped_files("libpmix.so")
    if not paths:
        return None
    library = ctypes.CDLL(paths[0])
    if not all(hasattr(library, f"PMIx_{name}") for name in ("Info_load", "Notify_event", "Data_type_string", "Abort")):
        return None
    library.PMIx_Error_string.restype = library.PMIx_Data_type_string.restype = ctypes.c_char_p
    names = library.PMIx_Error_string(_ABORTED), library.PMIx_Data_type_string(ctypes.c_uint16(_PROC))
    return library if names == (_ABORTED_NAME, _PROC_NAME) else None
