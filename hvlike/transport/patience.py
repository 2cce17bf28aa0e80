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
"""As many times longer while RPC runs: a short function with a large tensor is answered in less than a millisecond."""

HOT_LOOK = 200e-6
"""How long a background thread looks for the next request before it sleeps, where requests follow one another."""

BUSY_POLL = 50e-3
"""How long a waiter with a core of its own looks for the next message of another node before it sleeps between looks.

Only who looks moves the bytes of a message: with 1 ms, 100 MiB over a fast link took a seventh longer.
"""

SHORTEST_POLL = 20e-6
LONGEST_POLL = 1e-3
LONGEST_IDLE_POLL = 10e-3
