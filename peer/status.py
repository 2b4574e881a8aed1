"""What this peer is doing, for Watch: kept in one place, sent on change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from peer._proto.crad.v1 import peer_pb2

#: Seconds between two messages that only report progress.
_MIN_INTERVAL = 0.1
#: Seconds after which an unchanged state is sent again.
_HEARTBEAT = 10.0


class Status:
    """The current :class:`PeerState`."""

    def __init__(self) -> None:
        self.state = peer_pb2.PeerState(round=-1, collected=-1, phase="start")
        self._version = 0
        self._changed = asyncio.Condition()
        self._watchers = 0

    async def update(self, **fields: Any) -> None:
        """Set fields and wake the watchers."""
        before = self.state.SerializeToString()
        for name, value in fields.items():
            if value is None:
                self.state.ClearField(name)
            else:
                setattr(self.state, name, value)
        if self.state.SerializeToString() != before:
            async with self._changed:
                self._version += 1
                self._changed.notify_all()

    async def watch(self) -> AsyncIterator[peer_pb2.PeerState]:
        """The state now and after every change; ends after the state with ``leaving`` set."""
        self._watchers += 1
        try:
            while True:
                version, state = self._version, peer_pb2.PeerState()
                state.CopyFrom(self.state)
                yield state
                if state.leaving:
                    return
                await self._change(version, _steering(state))
        finally:
            self._watchers -= 1
            async with self._changed:
                self._changed.notify_all()

    async def _change(self, version: int, steering: tuple[int, int, bool]) -> None:
        """Wait for news: what others wait for comes at once, mere progress not too often."""
        await self._wait(lambda: _steering(self.state) != steering, _MIN_INTERVAL)
        await self._wait(lambda: self._version != version, _HEARTBEAT)

    async def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Until the condition holds, or the time is over."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            pass

    async def drained(self) -> None:
        """Wait until no watcher is left."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._watchers == 0)


def _steering(state: peer_pb2.PeerState) -> tuple[int, int, bool]:
    return state.round, state.collected, state.leaving
