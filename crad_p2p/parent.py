"""Ending with the process that started this one, however that ends; where the system offers it, which is Linux."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1
_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent(number: signal.Signals) -> None:
    """Let the system send this process a signal when its parent has ended."""
    if _LIBRARY is not None:
        _LIBRARY.prctl(_PR_SET_PDEATHSIG, number)
