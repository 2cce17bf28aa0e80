"""Faults that are planted into a copy of hvlike: simulated jobs that do not find them are no test.

Kinds are those that can find the fault: by default, all.
"""

from __future__ import annotations

from support.fuzz.planted import plant

BELL = "transport/memory/doorbell.py"
LOOP = "transport/loop/loop.py"
SYNC = "backends/shared_memory/work_sync.py"
BOARD = "backends/shared_memory/board.py"
AGREEMENT = "collectives/controller/inline_agreement.py"
CHANNEL = "transport/messages/channel.py"
PROXY = "collectives/session/joined_proxy.py"

PLANTS = [
    plant(
        "a driver that leaves does not look whether it was rung",
        (BELL, "            pass\n        return self.rung()\n", "            pass\n        return False\n"),
        kinds=("bells",),
    ),
    plant(
        "who rings looks only once who drives",
        (BELL, "        if self._words[_DRIVEN] != driven:\n            self._posts[1 - driven]()\n", ""),
        kinds=("bells",),
    ),
    plant(
        "a driver does not say that it sleeps",
        (BELL, "        self._words[_ASLEEP] = how\n        self._fence()\n", "        self._fence()\n"),
        kinds=("bells",),
    ),
    plant(
        "a driver that leaves takes what was posted before all see that it has left",
        (
            BELL,
            "        with self._fence.barrier:\n            pass\n        return self.rung()",
            "        return self.rung()",
        ),
        kinds=("bells",),
    ),
    plant(
        "a driver sleeps before all see that it does",
        (BELL, "        self._words[_ASLEEP] = how\n        self._fence()\n", "        self._words[_ASLEEP] = how\n"),
        kinds=("bells",),
    ),
    plant(
        "others see that a rank has arrived before they see at what",
        (SYNC, "        self.region.order()\n        words[ARRIVED] = number\n", "        words[ARRIVED] = number\n"),
        kinds=("bells",),
    ),
    plant(
        "a driver sleeps without a last look",
        (
            LOOP,
            "            self._wait = self._advance(self._bell.rung() or self._in_background)\n"
            "            if self._wait is Wait.AGAIN:\n",
            "            if self._wait is Wait.AGAIN:\n",
        ),
        kinds=("bells",),
    ),
    plant(
        "a thread that runs an item keeps a ring that was for the loop",
        (LOOP, "            unheard = not summoned if called() else", "            unheard = False if called() else"),
        kinds=("bells",),
    ),
    plant(
        "who waits beside the background thread does not wake it",
        (LOOP, "                if self._inbox or self._in_background:\n", "                if False:\n"),
        kinds=("prompt",),
    ),
    plant(
        "a rank leaves a reduction before the others have done their part",
        (SYNC, "            while words[DEPARTED] < number:\n", "            while False:\n"),
        kinds=("bells",),
    ),
    plant(
        "a rank reaches into memory of ranks that are not there",
        (
            SYNC,
            "while not any(all(counters[peer].words[ARRIVED] >= number for peer in peers) for _ in range(checks)):",
            "while False:",
        ),
    ),
    plant(
        "an entry on the board is not looked at again before it counts",
        (
            BOARD,
            "                if peer[entry] != number:\n                    return None\n            self._agreed",
            "                pass\n            self._agreed",
        ),
        kinds=("board",),
    ),
    plant(
        "an inline operation takes a place that others still read",
        (BOARD, " and all(peer[FINISHED] >= needed for peer in self._peers)\n", "\n"),
        kinds=("inline",),
    ),
    plant(
        "a message is sent and not counted",
        (CHANNEL, "            self._sent[self._place[rank]] += 1\n            self._bells", "            self._bells"),
    ),
    plant(
        "a message is sent, and nobody rings",
        (
            CHANNEL,
            "            self._sent[self._place[rank]] += 1\n            self._bells[rank].ring()\n",
            "            self._sent[self._place[rank]] += 1\n",
        ),
    ),
    plant(
        "the last job of a queue comes first",
        (
            "backends/op_queue.py",
            "return self._jobs.popleft()\n",
            "return self._jobs.pop()\n",
        ),
    ),
    plant(
        "a join ends with the first plan that has ended",
        (
            PROXY,
            "        return all(each.finished for each in list(self._by_name.values()) if each.serial in plans)\n",
            "        return any(each.finished for each in list(self._by_name.values()))\n",
        ),
    ),
    plant(
        "a rank that has joined contributes what the last step has left",
        (PROXY, "                tensor.zero_()\n", "                pass\n"),
    ),
    plant(
        "a step does not wait for its buckets",
        (
            "training/gradients/planned_reducer.py",
            "                self._wait_in_step(step, self._site, schedule.described)\n",
            "                self._running = []\n",
        ),
    ),
    # What these take back was found by simulated jobs.
    plant(
        "nobody stays at the end for what others still send",
        (
            "collectives/health/shutdown_barrier.py",
            "        if not self._lost:\n            barrier =",
            "        if False:\n            barrier =",
        ),
        kinds=("mistakes",),
    ),
    plant(
        "the end of a job waits for a lost rank",
        (
            "collectives/health/shutdown_barrier.py",
            "        else:\n            self._error = error\n",
            "",
        ),
        kinds=("lost",),
    ),
    plant(
        "a duplicate is used before it is made",
        (
            "transport/failure/fault_tolerance.py",
            "        adopted = FaultTolerantCommunicator(self.mpi, comm, self._adopt)\n",
            "        adopted = FaultTolerantCommunicator(self.mpi, comm, self.adopt)\n",
        ),
        kinds=("elastic",),
    ),
    plant(
        "a start that fails leaves its thread",
        (
            "collectives/session/context.py",
            "            self.fabric.close()\n            raise\n",
            "            raise\n",
        ),
        kinds=("elastic",),
    ),
    plant(
        "an answer outlives its session",
        ("rpc/agent/calls.py", "    if agent.ended is not None:\n        # The function", "    if False:\n        #"),
        kinds=("rpc", "leavers"),
    ),
    plant(
        "a loss that is heard of as the session ends asks for the session",
        (
            "rpc/api.py",
            "            agent.when_lost.append(partial(_end_rounds, agent))\n",
            "            agent.when_lost.append(lambda rank, error: _end_rounds(current_agent(), rank, error))\n",
        ),
        kinds=("leavers", "rpc"),
    ),
    plant(
        "values that will never be there are waited for after the session",
        ("rpc/rrefs/session.py", "        self.perform(self.lifetime.end, failure)\n", ""),
        kinds=("rpc", "leavers"),
    ),
    plant(
        "an RRef in a late answer belongs to the session that is there",
        ("rpc/rrefs/rref.py", "    session = incoming.session\n", "    session = current_session()\n"),
        kinds=("rpc", "leavers"),
    ),
    plant(
        "a rank's count is visible before its entry on the board",
        (
            BOARD,
            "            if order is not None:\n"
            "                # Who sees the count, and not the entry, takes the operation for passed.\n"
            "                order()\n",
            "",
        ),
        kinds=("board",),
    ),
    plant(
        "what comes early is kept for sets with larger numbers only",
        (
            "collectives/session/process_set_state.py",
            "        elif number not in self._ended:\n",
            "        elif number > max(self.controllers, default=-1):\n",
        ),
        kinds=("torch",),
    ),
    plant(
        "a rank judges the other nodes by what it has heard itself",
        (
            "transport/failure/heartbeat.py",
            "        for row in self._rows:\n            self._hearing.read(row)\n",
            "        return\n",
        ),
        kinds=("elastic",),
    ),
    plant(
        "the wait for what was agreed is taken for one for the next of that name",
        (
            "collectives/health/wait_for_graph.py",
            "            return [] if self.ranks[position] in ranks else list(ranks)\n",
            "            return list(ranks)\n",
        ),
        kinds=("named", "calls"),
    ),
    plant(
        "who has left is said though a rank stands still",
        (
            "collectives/health/shutdown_barrier.py",
            " and (yield from self._reach_all()):",
            ":",
        ),
        kinds=("named", "calls", "torch", "training"),
    ),
    plant(
        "only threads that have asked for something can ask for more",
        ("collectives/controller/tensor_queue.py", "{*self._threads, *system.lasting_threads()}", "self._threads"),
        kinds=("threads",),
    ),
    plant(
        "the rank whose join is heard of last counts, though it has missed steps",
        ("collectives/api/barrier_join.py", "[-1 if missed else priority,", "[priority,"),
        kinds=("join",),
    ),
    plant(
        "a receive from any rank ends with the first rank that leaves",
        ("torch_distributed/point_to_point.py", "if self.ranks[position] not in in_order]", "]"),
        kinds=("torch",),
    ),
    plant(
        "who advances a counter looks for sleepers before all see it",
        (
            "backends/shared_memory/region.py",
            "        with self.fence.barrier:\n            pass\n        for bell in self.sleepers:\n",
            "        for bell in self.sleepers:\n",
        ),
        kinds=("bells",),
    ),
    plant(
        "a rank that departs wakes nobody",
        (
            SYNC,
            "        region.mine.words[DEPARTED] = number\n        region.notify_if_sleeping()\n",
            "        region.mine.words[DEPARTED] = number\n",
        ),
        kinds=("bells",),
    ),
    plant(
        "who is told to hurry offers what it has passed",
        (BOARD, "        return self.mine[_COUNT] <= index and all(", "        return all("),
        kinds=("inline", "calls"),
    ),
    plant(
        "what a rank has passed is free where it follows at once",
        (BOARD, "            self.following = -1\n", ""),
        kinds=("inline", "calls"),
    ),
    plant(
        "a driver leaves while something runs, and wakes nobody",
        (LOOP, "if again or self._inbox or self._tasks:", "if again:"),
        kinds=("prompt",),
    ),
    plant(
        "who has heard that the session of RPC is over takes who has left for vanished",
        (
            "rpc/agent/shutdown.py",
            "agent.vanished if self._vanished is None else self._vanished\n",
            "agent.vanished\n",
        ),
        kinds=("rpc", "leavers"),
    ),
    plant(
        "a member that has made the call that others wait for counts as behind",
        (
            "collectives/health/wait_for_graph.py",
            "other.calls.get(name, number) < number]",
            "other.calls.get(name, number) <= number]",
        ),
        kinds=("torch", "crossed"),
    ),
    plant(
        "the loop does not look for the next job of a queue when one has ended",
        (
            "backends/op_queue.py",
            "        self._turn.release()\n        self._look()\n",
            "        self._turn.release()\n",
        ),
    ),
]

RARE = [
    plant(
        "the end of a job waits for what was sent to a lost rank",
        ("collectives/health/shutdown_barrier.py", " or self._lost or (self._all_left", " or (self._all_left"),
        kinds=("elastic",),
    ),
    plant(
        "a set that is made later does not know who has left",
        (
            "collectives/session/process_set_state.py",
            "            self.set_states[number].lose(self._departures.errors)\n",
            "",
        ),
        kinds=("lost",),
    ),
    plant(
        "a message that is incomplete holds up those of others",
        (
            "transport/messages/channel.py",
            "        received = self._complete_incoming() if self._incoming else False\n",
            "        received = self._complete_incoming() if self._incoming else False\n"
            "        if self._incoming:\n            return received\n",
        ),
        kinds=("elastic",),
    ),
    plant(
        "who passes an operation does not tell those that wait for it",
        (
            AGREEMENT,
            "                    self._pass(value + 1)\n            self._send(rank, PASS, value)\n",
            "                    self._pass(value + 1)\n",
        ),
        kinds=("prompt", "inline"),
    ),
    plant(
        "who has joined passes nothing in the epoch that begins meanwhile",
        (AGREEMENT, "self._queue.next_epoch if self._away else self._queue.entered", "self._queue.entered"),
        kinds=("join",),
    ),
    plant(
        "others hear of a join before there is what stands in for this rank",
        (
            "collectives/api/barrier_join.py",
            "    current().fabric.loop.post(lambda: proxies.begin(planned), wake=False)\n"
            "    return submit_join(set_state, JOIN_KEY, request, wake=False)\n",
            "    handle = submit_join(set_state, JOIN_KEY, request, wake=False)\n"
            "    current().fabric.loop.post(lambda: proxies.begin(planned), wake=False)\n"
            "    return handle\n",
        ),
    ),
]
"""2 000 jobs do not find these. Tests of their own do: of found faults, of simulated jobs, of interleavings, of the
agreement of inline operations.
"""
