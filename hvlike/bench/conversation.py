"""Questions and answers between a benchmark and processes beside it: JSON objects, one a line, on a socket."""

from __future__ import annotations

import json
import socket
from typing import Any

Message = dict[str, Any]


class Conversation:
    """One end of a connected socket. Whoever waits sleeps."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lines = connected.makefile("r")

    def say(self, message: Message) -> None:
        """Send one message. Raises: OSError when the other end is gone."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> Message | None:
        """Return the next message, or None when the other end has closed. Raises: OSError."""
        line = self._lines.readline()
        if not line:
            return None
        message: Message = json.loads(line)
        return message

    def close(self) -> None:
        """Close this end."""
        self._lines.close()
        self._socket.close()
