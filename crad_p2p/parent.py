"""Ending with the process that started this one, however that ends; where the system offers it, which is Linux.

A child asks for it itself: code that runs between fork and exec is unsafe where the parent has threads, as gRPC's.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys

_PR_SET_PDEATHSIG = 1
_NAME = "CRAD_PARENT"
_ENTRY = re.compile(rf"(\d+) ({signal.SIGKILL:d}|{signal.SIGTERM:d})")


def end_with_parent(number: signal.Signals) -> None:
    """Let the system send this process a signal when its parent has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def parent_entry(number: signal.Signals) -> dict[str, str]:
    """For the environment of a child that calls :func:`end_with_named_parent`: it is to get this signal."""
    return {_NAME: f"{os.getpid()} {number:d}"}


def end_with_named_parent() -> None:
    """Do as the environment says, if it says anything of that form; children do not inherit it."""
    if found := _ENTRY.fullmatch(os.environ.pop(_NAME, "")):
        parent, number = map(int, found.groups())
        end_with_parent(signal.Signals(number))
        if os.getppid() != parent:  # it ended before this process could ask
            os.kill(os.getpid(), number)


#: Of a process that a fork server made, which is its parent only to the system.
_acts_for: int | None = None


def act_for(pid: int) -> None:
    """From now on this process works for that one."""
    global _acts_for
    _acts_for = pid


def employer() -> int:
    """The process for which this one works: the one that started it, or asked a fork server for it."""
    return os.getppid() if _acts_for is None else _acts_for
