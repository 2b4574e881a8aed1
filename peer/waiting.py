"""Waiting that neither loses a cancellation nor leaves work behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def within(seconds: float, work: Coroutine[Any, Any, T], sign_of_life: Callable[[], float] | None = None) -> T:
    """Wait for ``work``, at most so long; counted anew from ``sign_of_life()``, a time of the loop, if that is later.

    For use in place of ``asyncio.wait_for``, which before Python 3.12 returns the result, and drops the cancellation,
    when its task is cancelled just as the work ends; a task that must end would then go on for ever.

    Raises:
        TimeoutError: the time is over; ``work`` has been cancelled.
    """
    clock = asyncio.get_running_loop().time
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=seconds)
        while sign_of_life and not task.done() and (left := sign_of_life() + seconds - clock()) > 0:
            await asyncio.wait([task], timeout=left)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
        elif not task.cancelled():
            task.exception()  # seen, even if a cancellation comes first


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Wait for ``work`` to its end even if cancelled; the cancellation follows then.

    For work in a thread, which goes on whatever happens to the task that waits for it.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
