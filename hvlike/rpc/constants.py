"""Numbers that programs read from `rpc.constants`."""

from __future__ import annotations

DEFAULT_RPC_TIMEOUT_SEC = 60.0
"""Seconds after which a call without a timeout of its own fails."""

UNSET_RPC_TIMEOUT = -1.0
"""As the timeout of a call: take the default as it is when the call is made."""

DEFAULT_NUM_WORKER_THREADS = 16
"""Functions that run for callers at a time on one worker."""

DEFAULT_INIT_METHOD = "env://"
"""torch's; MPI has introduced the ranks to each other, so nothing is read from it."""

DEFAULT_SHUTDOWN_TIMEOUT = 0.0
"""Seconds a graceful shutdown waits; 0: as long as it takes."""
