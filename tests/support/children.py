"""Forked children, for tests."""

import os
from collections.abc import Callable


def raised_in_child(call: Callable[[], object]) -> str:
    """What the call raises in a forked child, as "Type: text"; empty for nothing."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        # Without its exit handlers: they belong to the parent.
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    os.waitpid(child, 0)
    return said
