"""How this process keeps its memory: few pools, no pages that come and go with every message, and little to look over.

By default glibc gives back to the system, and takes anew, whatever is larger than 128 KiB: for each message of a
transfer a few hundred pages, which costs more than its encryption. And each of gRPC's threads gets a pool of its own,
from which nobody else takes what is free.
"""

from __future__ import annotations

import ctypes
import gc

#: Of ``malloc.h``.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
#: Pools; they are locked while memory is taken.
_POOLS = 2
#: Blocks below this come from a pool, and at most so much of a pool's end stays here free.
_BLOCK_BYTES, _SPARE_BYTES = 1 << 22, 1 << 22


def tune() -> None:
    """For a process that moves snapshots; call it before there are other threads. Nothing happens without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _POOLS)
        mallopt(_M_MMAP_THRESHOLD, _BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _SPARE_BYTES)


def settle() -> None:
    """Leave what is here now, modules above all, out of all later searches for cycles."""
    gc.collect()
    gc.freeze()
