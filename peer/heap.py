"""How this process keeps its memory: few pools, no pages that come and go with every message, and little to look over.

By default glibc gives back to the system, and takes anew, whatever is larger than 128 KiB: for each message of a
transfer a few hundred pages, which costs more than its encryption. And each of gRPC's threads gets a pool of its own,
from which nobody else takes what is free.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from typing import Any, NoReturn

#: Of ``malloc.h``.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
#: Pools; they are locked while memory is taken.
_POOLS = 1
#: Blocks below this come from a pool, and at most so much of a pool's end stays here free.
_BLOCK_BYTES, _SPARE_BYTES = 1 << 22, 1 << 22
#: Seconds between two looks whether there is something to give back.
_LOOK = 2.0


def tune() -> None:
    """For a process that moves snapshots; call it before there are other threads. Nothing happens without glibc."""
    if (mallopt := _of_libc("mallopt")) is not None:
        mallopt(_M_ARENA_MAX, _POOLS)
        mallopt(_M_MMAP_THRESHOLD, _BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _SPARE_BYTES)


async def keep_small(moved: Callable[[], int]) -> NoReturn:
    """Give back what transfers leave behind: free pages between blocks in use, of which glibc gives none back itself.

    Args:
        moved: bytes of snapshots so far; while they stay the same there is nothing new to give back.
    """
    before = moved()
    while True:
        await asyncio.sleep(_LOOK)
        now = moved()
        if now != before:
            before = now
            await asyncio.to_thread(trim)


def trim() -> None:
    """Give all free pages back; takes milliseconds, in which other threads wait when they want memory."""
    if (malloc_trim := _of_libc("malloc_trim")) is not None:
        malloc_trim(ctypes.c_size_t(0))


def _of_libc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None)


def settle() -> None:
    """Leave what is here now, modules above all, out of all later searches for cycles."""
    gc.collect()
    gc.freeze()
