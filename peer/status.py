"""What this peer is doing, for Watch: kept in one place, sent on change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from peer._proto.crad.v1 import peer_pb2

#: Seconds between two messages of one watcher: progress is for eyes, and rounds are never skipped, only states.
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
                version = self._version
                state = peer_pb2.PeerState.FromString(self.state.SerializeToString())
                yield state
                if state.leaving:
                    return
                await asyncio.sleep(_MIN_INTERVAL)
                try:
                    async with asyncio.timeout(_HEARTBEAT), self._changed:
                        await self._changed.wait_for(lambda seen=version: self._version != seen)  # type: ignore[misc]
                except TimeoutError:
                    pass
        finally:
            self._watchers -= 1
            async with self._changed:
                self._changed.notify_all()

    async def drained(self) -> None:
        """Wait until no watcher is left."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._watchers == 0)
