"""How long threads look before they sleep, and how long they sleep between looks; in seconds, with the reasons."""

TICK = 0.25
"""The longest a sleeper goes without a look at the health of the job."""

PICK_UP = 50e-6
"""How long a background thread that was rung leaves the loop to a thread that may be about to wait."""

SPIN = 300e-6
"""How long a waiter with a core of its own looks for what a rank of its node does; that one may be waking on this core.

With no limit but that of looks it was 1 to 3 ms. Reductions take as long with this one, with 100 us they took longer.
"""

LOOKS_FOR_AN_ANSWER = 3
"""As many times more looks while RPC runs, of ranks that share cores."""

HOT_LOOK = 2e-3
"""While RPC runs: how long who waits for an answer looks before it sleeps, and a background thread for the next request
where requests follow one another.

A core that sleeps for a moment wakes late and with empty caches: the same lines then take two to three times as long.
"""

INTERRUPTION = 200e-6
"""A look that takes longer shows that another thread wants the interpreter or the core: whoever looks goes to sleep."""

BUSY_POLL = 50e-3
"""How long a waiter with a core of its own looks for the next message of another node before it sleeps between looks.

Only who looks moves the bytes of a message: with 1 ms, 100 MiB over a fast link took a seventh longer.
"""

SHORTEST_POLL = 20e-6
LONGEST_POLL = 1e-3
LONGEST_IDLE_POLL = 10e-3
