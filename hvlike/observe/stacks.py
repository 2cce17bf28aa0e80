"""Where the main thread of this process is, for reports of ranks that keep others waiting."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from types import FrameType

_FRAMES = 8
_WAIT = os.path.join("hvlike", "transport", "loop", "loop.py")


def main_stack() -> str:
    """Return the innermost calls of the main thread like a traceback, or "" while it waits inside hvlike: 50 us."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    if innermost is None or threading.current_thread() is threading.main_thread() or _waits(innermost):
        return ""
    return "".join(traceback.format_stack(innermost, _FRAMES)).rstrip("\n")


def _waits(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "wait" and frame.f_code.co_filename.endswith(_WAIT):
            return True
        frame = frame.f_back
    return False
