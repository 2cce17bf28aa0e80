"""RRefs behind the class: who owns what, how long it lives, remote() and proxies.

identity, effects       names, and what follows from an event
entry, owner_table      the owner's side of the lifetime protocol
fork, fork_table        the user's side
lifetime                both sides together, pure
session                 the same with a lock and the agent
creation, fetching      remote() and to_here()
carrying, confirmation  RRefs as arguments and results
types, proxy            calling methods of a value on its owner
hooks, inspection       what the life cycle of RPC and its statistics use
"""

from hvlike.rpc.rrefs.hooks import (
    LiveRRef,
    checks_leaks,
    debug_info,
    install,
    leaked,
    live,
    release_all,
    set_leak_checking,
    uninstall,
)
from hvlike.rpc.rrefs.rref import remote
from hvlike.rpc.rrefs.session import when_confirmed

__all__ = [
    "LiveRRef",
    "checks_leaks",
    "debug_info",
    "install",
    "leaked",
    "live",
    "release_all",
    "remote",
    "set_leak_checking",
    "uninstall",
    "when_confirmed",
]
