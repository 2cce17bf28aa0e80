"""Processes of a benchmark: JSON over sockets, helpers whose last output names a failure, jobs outside of jobs only."""

import socket
import sys

import pytest

from hvlike.bench.harness.processes import Helpers, JsonSocket, refuse_inside_a_job
from hvlike.errors import LaunchError, UsageError

ECHO = """
import socket, sys
from hvlike.bench.harness.processes import JsonSocket
end = JsonSocket(socket.socket(fileno=int(sys.argv[1])))
while (request := end.receive()) is not None:
    end.send({"seen": request})
"""
DIES = "print('out of cake')"


def start(helpers: Helpers, program: str) -> JsonSocket:
    ours, theirs = socket.socketpair()
    with theirs:
        helpers.start([sys.executable, "-c", program, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    return helpers.connect(ours)


def test_messages_come_as_they_were_sent() -> None:
    one, other = map(JsonSocket, socket.socketpair())
    one.send({"a": [1, None, "x"]})
    one.send({})
    assert other.receive() == {"a": [1, None, "x"]}
    assert other.receive() == {}
    one.close()
    assert other.receive() is None
    other.close()


def test_a_helper_answers_until_it_is_closed() -> None:
    helpers = Helpers("the echo")
    end = start(helpers, ECHO)
    assert helpers.ask(end, {"n": 1}) == {"seen": {"n": 1}}
    helpers.close()
    assert [process.returncode for process in helpers.processes] == [0]


def test_a_helper_that_dies_is_named_with_its_last_output() -> None:
    helpers = Helpers("the echo")
    end = start(helpers, DIES)
    with pytest.raises(LaunchError, match=r"the echo: .*; the last output:\nout of cake"):
        helpers.ask(end)
    helpers.close()


def test_ranks_of_a_job_start_no_jobs() -> None:
    refuse_inside_a_job({}, "scaling")
    with pytest.raises(UsageError, match="without mpirun"):
        refuse_inside_a_job({"PMI_SIZE": "2"}, "scaling")
