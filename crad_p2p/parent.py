"""Ending with the process that started this one, however that ends; where the system offers it, which is Linux."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1
#: Looked up here: in a process that has just been forked it could wait for a lock that nobody holds any more.
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def end_with_parent(number: signal.Signals) -> None:
    """Let the system send this process a signal when its parent has ended."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, number)
