"""Processes of a benchmark: helpers that answer, the last output that names a failure."""

import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from hvlike.bench.harness.processes import Helpers
from hvlike.errors import LaunchError

ECHO = """
import sys
from multiprocessing.connection import Connection
from hvlike.bench.harness.processes import requests
end = Connection(int(sys.argv[1]))
for request in requests(end):
    end.send({"seen": request})
"""
DIES = "print('out of cake')"


def start(helpers: Helpers, program: str) -> Connection:
    ours, theirs = Pipe()
    with theirs:
        helpers.start([sys.executable, "-c", program, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    helpers.ends.append(ours)
    return ours


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
