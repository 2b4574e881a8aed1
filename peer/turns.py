"""Who may transfer now: of one peer the newest round first, and of all peers a few at a time, unless they are slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """One at a time, and of those that wait the highest round first: a slow line is not shared with older rounds."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: dict[asyncio.Future[None], int] = {}

    @asynccontextmanager
    async def take(self, number: int) -> AsyncIterator[None]:
        """The turn of one who wants this round, once it comes."""
        if self._is_taken:
            turn = asyncio.get_running_loop().create_future()
            self._waiting[turn] = number
            try:
                await turn
            except asyncio.CancelledError:
                self._waiting.pop(turn, None)
                if not turn.cancelled():  # it came at the same moment
                    self._pass_on()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        for turn in [turn for turn in self._waiting if turn.done()]:  # cancelled, and its task does not know yet
            del self._waiting[turn]
        self._is_taken = bool(self._waiting)
        if self._waiting:
            turn = max(self._waiting, key=self._waiting.__getitem__)
            del self._waiting[turn]
            turn.set_result(None)


class Slots:
    """At most ``count`` at a time; but who takes longer than ``seconds`` goes on without a slot, also the next time.

    Transfers of a few peers with thin lines take minutes, and leave room on the line here: they must not keep those of
    all others from being begun.

    Args:
        slow: how many of those without a slot may begin at a time; None for any number.
    """

    def __init__(self, count: int, seconds: float, slow: int | None = None) -> None:
        self._free = asyncio.Semaphore(count)
        self._seconds = seconds
        self._slow: set[int] = set()
        self._slow_lane = None if slow is None else asyncio.Semaphore(slow)

    @asynccontextmanager
    async def take(self, peer: int) -> AsyncIterator[None]:
        """A slot for this peer, once one is free; none if it was slow the last time."""
        if peer in self._slow and self._slow_lane is not None:
            async with self._slow_lane, self._held(peer, holds=False):
                yield
            return
        holds = peer not in self._slow
        if holds:
            await self._free.acquire()
        async with self._held(peer, holds=holds):
            yield

    @asynccontextmanager
    async def _held(self, peer: int, *, holds: bool) -> AsyncIterator[None]:
        """While it runs, with or without a slot, which is given back when it turns out to be slow."""

        def is_slow() -> None:
            nonlocal holds
            self._slow.add(peer)
            if holds:
                holds = False
                self._free.release()

        loop = asyncio.get_running_loop()
        start = loop.time()
        timer = loop.call_later(self._seconds, is_slow)
        try:
            yield
            if loop.time() - start < self._seconds:
                self._slow.discard(peer)
        finally:
            timer.cancel()
            if holds:
                self._free.release()
