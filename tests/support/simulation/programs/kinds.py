"""Random programs for simulated jobs, by kind and seed, and what they have to end with.

    named      operations of all kinds, in process sets too, begun in another order on each rank
    calls      every call of the API, polled, waited for late or never, from two threads, in sessions
    inline     reductions in the calling thread, for which ranks are late
    threads    operations that the threads of each rank divide in another way
    bells      the loop, doorbells and counters of work alone; who is late was not woken
    board      the board of inline operations alone; all decide alike
    prompt     operations after which ranks stay away; who is late was not woken
    planned    training with DistributedOptimizer, with local passes and frozen layers
    join       ranks with different numbers of inputs, by Join and by hvd.join()
    mistakes   operations that differ between the ranks, or that a rank leaves for good
    stuck      a rank joins, the others ask for different operations, and go on after the error
    lost       a rank that is killed, fails or leaves
    elastic    ranks that are lost under fault tolerance, and the others go on
    rpc        calls that make further calls, RRefs passed on and kept, sessions one after the other
    leavers    sessions of RPC that some ranks leave while others call them
    autograd   distributed backward in all modes, several at a time, and steps of distributed optimizers
    torch      groups of torch.distributed, asynchronous work waited for in another order, point to point, objects
    crossed    groups of torch.distributed in other orders on each rank, of which some can never end
    training   every wrapper: process sets, compression, ZeRO, clipping, other threads, timelines
    fuzz       the training programs of scripts/fuzz, with their oracle

Every rank checks its own values against arithmetic, and raises AssertionError.
"""

from __future__ import annotations

from typing import Any

from support.simulation.programs.autograd import Autograd
from support.simulation.programs.bells import Bells
from support.simulation.programs.board import Boards
from support.simulation.programs.calls import Calls, Inline, Threads
from support.simulation.programs.collectives import Mistaken, Named, Planned, Stuck, Uneven
from support.simulation.programs.elastic import Elastic
from support.simulation.programs.fuzz import Fuzz
from support.simulation.programs.lost import Lost
from support.simulation.programs.prompt import Prompt
from support.simulation.programs.rpc import Rpc
from support.simulation.programs.rpc_leavers import Leavers
from support.simulation.programs.torch_crossed import Crossed
from support.simulation.programs.torch_groups import Torch
from support.simulation.programs.training import Training

KINDS: dict[str, Any] = {
    "named": Named,
    "calls": Calls,
    "inline": Inline,
    "threads": Threads,
    "bells": Bells,
    "board": Boards,
    "prompt": Prompt,
    "planned": Planned,
    "join": Uneven,
    "mistakes": Mistaken,
    "stuck": Stuck,
    "lost": Lost,
    "elastic": Elastic,
    "rpc": Rpc,
    "leavers": Leavers,
    "autograd": Autograd,
    "torch": Torch,
    "crossed": Crossed,
    "training": Training,
    "fuzz": Fuzz,
}
